"""Common parts of policies: the base class, questions about a snapshot, a configuration with engine profiles (pure)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

from pydantic import Field

from autoscale.engines.profile import ProfileRef
from autoscale.headcount import desired_replicas
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, ReplicaStats, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

C = TypeVar("C", bound=StrictConfig)  # configuration class of a policy


class Policy(ABC, Generic[C]):
    """A rule that sizes prefill and decode together.

    Attributes:
        config_class: class of the settings of a policy of one's own; the built-in ones are in ``PolicyConfig``.
        is_fit_for_aggregated: whether it sizes decode from its own load alone, so that it also fits groups without
            prefill (``pd_ratio`` 0:1).
    """

    config_class: ClassVar[type[StrictConfig]]
    is_fit_for_aggregated: ClassVar[bool] = False

    def __init__(self, config: C, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config
        self._ratio = ratio
        self._slo = slo

    @abstractmethod
    def decide(self, snapshot: Snapshot) -> Decision:
        """The replicas of each role that the policy wants; ``wanted`` is ``None`` if the counts should stay."""


def replicas_of(snapshot: Snapshot, role: Role) -> list[ReplicaStats]:
    """The running replicas of a role, over all groups."""
    return [replica for pool in snapshot.pools if pool.key.role is role for replica in pool.replicas]


def admitted_replicas(snapshot: Snapshot, role: Role) -> list[ReplicaStats]:
    """The running replicas of a role that get requests; before the first admission, all running ones."""
    admitted = frozenset(snapshot.state.admitted)
    return [each for each in replicas_of(snapshot, role) if not admitted or each.replica_id in admitted]


def without_blind_removal(wanted: Mapping[Role, float], snapshot: Snapshot) -> dict[Role, float]:
    """The wanted replicas; at least the present ones if a part of the traffic may not have been observed."""
    least = dict.fromkeys(Role, 0) if snapshot.traffic.is_whole else desired_replicas(snapshot.state.desired)
    return {role: max(wanted[role], float(least[role])) for role in Role}


def is_latency_current(snapshot: Snapshot) -> bool:
    """Whether a policy may add replicas because of the present latencies.

    It may if the latencies show the effect of all replicas that it wanted before. It may also if withdrawn replicas can
    return at once.
    """
    state = snapshot.state
    # Whether a replica was lost after the last scale-out.
    has_lost_since = state.lost_s is not None and state.lost_s > (state.scaled_out_s or 0.0)
    # A replica that starts in place of a lost one is not waited for: no latency was the reason for it.
    if not has_lost_since and any(len(pool.replicas) < state.desired.get(pool.key, 0) for pool in snapshot.pools):
        return False
    # A request that gets its first token now has arrived a TTFT ago, perhaps before the last replica served.
    arrived_s = snapshot.now_s - (snapshot.latency.ttft_s or 0.0)
    is_settled = state.settled_s is None or arrived_s >= state.settled_s
    return bool(state.withdrawn) or (is_settled and not _has_new_replica(snapshot))


def _has_new_replica(snapshot: Snapshot) -> bool:
    """Whether a replica runs that did not run at the last tick."""
    state = snapshot.state
    earlier_ids = {*state.admitted, *state.held, *state.withdrawn, *state.victims}
    return bool(state.admitted) and any(
        replica.replica_id not in earlier_ids for pool in snapshot.pools for replica in pool.replicas
    )


class ProfiledConfig(StrictConfig):
    """The engines of both roles, and the time that they take to start."""

    prefill: ProfileRef = Field(description="The profile of one prefill replica, or the path of its file.")
    decode: ProfileRef = Field(description="The profile of one decode replica, or the path of its file.")
    prefill_start_s: float | None = Field(None, ge=0.0)
    """Time from the request for a prefill replica until it is ready, seconds; left out: as in its profile."""
    decode_start_s: float | None = Field(None, ge=0.0)
    """Time from the request for a decode replica until it is ready, seconds; left out: as in its profile."""

    def start_s(self, role: Role) -> float:
        """Seconds from the request for a replica of a role until it is ready."""
        if role is Role.PREFILL:
            return self.prefill.start_s if self.prefill_start_s is None else self.prefill_start_s
        return self.decode.start_s if self.decode_start_s is None else self.decode_start_s
