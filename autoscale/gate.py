"""Which ready replicas may serve: the readiness gate and the soft scale-in, as sets in the plan (pure).

The sets are worked out per group: KV moves only inside one.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field

from autoscale.ratio import PdRatio
from autoscale.types import ReplicaStats
from kvtransfer.topology import Role

_EPSILON = 1e-9


class GateConfig(BaseModel):
    """How new replicas enter and old ones leave (HeteroScale sections 3.4 and 3.6)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    is_enabled: bool = Field(True, description="Hold a role's new replicas while the other has too few for the ratio.")
    band_replicas: float = Field(
        1.0, ge=0.5, le=16.0, description="How far ready replicas may be from the ratio, replicas of the smaller role."
    )
    observation_s: float = Field(
        30.0,
        ge=0.0,
        description="How long a replica stays out of routing, ready to come back, before it is terminated.",
    )


def admit(
    ready: Mapping[Role, Sequence[str]], before: frozenset[str], *, ratio: PdRatio, band_replicas: float
) -> list[str]:
    """The ready replicas of one group that may serve.

    Who was admitted stays. Of the others, oldest first, as many as keep the ready counts at the ratio (HeteroScale
    section 3.4: service discovery of the larger role is suspended until the other has caught up); of each role at
    least one.

    Args:
        ready: running replicas of each role that are not on their way out, oldest first.
        before: replicas admitted until now.
        ratio: the P/D ratio.
        band_replicas: how far from it the counts may be, replicas of the smaller role.
    """
    new = {role: [name for name in ready[role] if name not in before] for role in Role}
    if not any(new.values()):
        return [name for role in Role for name in ready[role]]
    old = {role: [name for name in ready[role] if name in before] for role in Role}
    counts = _admissible(
        {role: max(len(old[role]), min(1, len(ready[role]))) for role in Role},
        {role: len(ready[role]) for role in Role},
        ratio,
        band_replicas,
    )
    return [name for role in Role for name in [*old[role], *new[role][: counts[role] - len(old[role])]]]


def _admissible(
    least: Mapping[Role, int], most: Mapping[Role, int], ratio: PdRatio, band_replicas: float
) -> dict[Role, int]:
    """The largest counts between ``least`` and ``most`` inside the band, or those that come nearest to it."""
    leader, follower, share = ratio.leader, ratio.follower, ratio.follower_share
    for leaders in range(most[leader], least[leader] - 1, -1):
        followers = min(most[follower], int(leaders * share + band_replicas + _EPSILON))
        if followers >= least[follower] and leaders * share - followers <= band_replicas + _EPSILON:
            return {leader: leaders, follower: followers}
    if most[follower] < least[leader] * share:  # too few followers, all of them needed
        return {leader: least[leader], follower: most[follower]}
    return {leader: most[leader], follower: least[follower]}


def choose_victims(
    replicas: Sequence[ReplicaStats],
    admitted: frozenset[str],
    number: int,
    scarcity: Mapping[str, int] = MappingProxyType({}),
    claimed: Collection[str] = (),
) -> list[str]:
    """Who leaves first: a replica that is held, one on the scarcest node, the one with the least work; the youngest.

    ``scarcity``: of the nodes of replicas, where it is known; ``claimed``: who is in somebody's way, before all.
    """
    if number <= 0:
        return []

    def cost(entry: tuple[int, ReplicaStats]) -> tuple[bool, bool, int, float, float, int]:
        index, replica = entry
        return (
            replica.replica_id not in claimed,
            replica.replica_id in admitted,
            -scarcity.get(replica.replica_id, 0),
            (replica.running_requests or 0.0) + (replica.waiting_requests or 0.0) + (replica.deferred_requests or 0.0),
            replica.queued_prefill_tokens or 0.0,
            -index,
        )

    return [replica.replica_id for _, replica in sorted(enumerate(replicas), key=cost)[:number]]
