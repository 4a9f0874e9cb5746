"""What policies have in common: how they are built, and the configuration of those that size by profiles (pure)."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from pydantic import Field

from autoscale.engines.profile import ProfileRef
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, ReplicaStats, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

C = TypeVar("C", bound=StrictConfig)


class Policy(ABC, Generic[C]):
    """A rule that sizes prefill and decode together; ``C`` is the class of its configuration."""

    def __init__(self, config: C, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config
        self._ratio = ratio
        self._slo = slo

    @abstractmethod
    def decide(self, snapshot: Snapshot) -> Decision:
        """The replicas of each role that the policy wants for this snapshot; ``wanted`` is None to keep the counts."""


def replicas_of(snapshot: Snapshot, role: Role) -> list[ReplicaStats]:
    """The running replicas of a role, over all groups."""
    return [replica for pool in snapshot.pools if pool.key.role is role for replica in pool.replicas]


def has_shown_what_it_did(snapshot: Snapshot) -> bool:
    """Whether latencies show the effect of all wanted replicas, or withdrawn replicas can be brought back at once."""
    state = snapshot.state
    is_lost_since = state.lost_s is not None and state.lost_s > (state.scaled_out_s or 0.0)
    # A replica in place of a lost one was not added because of a latency.
    if not is_lost_since and any(len(pool.replicas) < state.desired.get(pool.key, 0) for pool in snapshot.pools):
        return False
    # Requests with their first token now arrived a TTFT ago, perhaps before the last replicas served.
    sent_s = snapshot.now_s - (snapshot.latency.ttft_s or 0.0)
    is_settled = state.settled_s is None or sent_s >= state.settled_s
    return bool(state.withdrawn) or (is_settled and not _are_entering(snapshot))


def _are_entering(snapshot: Snapshot) -> bool:
    """Whether a replica runs that did not run a tick ago."""
    state = snapshot.state
    known = {*state.admitted, *state.held, *state.withdrawn, *state.victims}
    return bool(state.admitted) and any(
        replica.replica_id not in known for pool in snapshot.pools for replica in pool.replicas
    )


class ProfiledConfig(StrictConfig):
    """The engines of both roles, and how long they take to start."""

    prefill: ProfileRef = Field(description="The profile of one prefill replica, or the path of its file.")
    decode: ProfileRef = Field(description="The profile of one decode replica, or the path of its file.")
    prefill_start_s: float | None = Field(None, ge=0.0)
    """Seconds from the request for a replica until it is ready; left out: as in the profile."""
    decode_start_s: float | None = Field(None, ge=0.0)
    """Seconds from the request for a replica until it is ready; left out: as in the profile."""

    def start_s(self, role: Role) -> float:
        """Seconds from the request for a replica of a role until it is ready."""
        is_prefill = role is Role.PREFILL
        own, profile = (self.prefill_start_s, self.prefill) if is_prefill else (self.decode_start_s, self.decode)
        return profile.start_s if own is None else own
