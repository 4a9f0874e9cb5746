"""What policies share that size each role by itself, as other systems' autoscalers do (pure)."""

from collections.abc import Mapping

from autoscale.headcount import desired_replicas
from autoscale.ratio import PdRatio
from autoscale.types import Decision, ReplicaStats, Shown, Snapshot
from kvtransfer.topology import Role

Memory = Mapping[str, tuple[float, ...]]

_EPSILON_S = 1e-6
_WANTED = "wanted"


def serving_replicas(snapshot: Snapshot) -> dict[Role, list[ReplicaStats]]:
    """Running replicas of each role; whom we only withdraw, those systems would have ended at once."""
    state = snapshot.state
    away = {*state.withdrawn, *state.victims}
    return {
        role: [r for p in snapshot.pools if p.key.role is role for r in p.replicas if r.replica_id not in away]
        for role in Role
    }


def is_due(snapshot: Snapshot, memory: Memory, name: str, interval_s: float) -> bool:
    """Whether an interval has passed since the time that a series remembers, or the clock was set back."""
    then_s = memory[name][0]
    return not 0.0 <= snapshot.now_s - then_s < interval_s - _EPSILON_S


def summed(memory: Memory, values: Mapping[str, float | None]) -> dict[str, tuple[float, ...]]:
    """Series of (sum, count), each with what one tick has observed added."""
    sums: dict[str, tuple[float, ...]] = {}
    for name, value in values.items():
        total, count = memory.get(name, (0.0, 0.0))
        sums[name] = (total, count) if value is None else (total + value, count + 1.0)
    return sums


def mean(memory: Memory, name: str) -> float | None:
    """The mean of what such a series has taken in."""
    total, count = memory.get(name, (0.0, 0.0))
    return total / count if count else None


def decided(
    snapshot: Snapshot,
    wanted: Mapping[Role, float] | None,
    reason: str,
    *,
    memory: Memory,
    shown: tuple[Shown, ...] = (),
) -> Decision:
    """Counts at whatever ratio they have, so that neither role moves the other.

    Args:
        snapshot: what was known.
        wanted: replicas of each role; ``None`` leaves them as they are.
        reason: why.
        memory: what the policy will find next time, besides what it wanted.
        shown: what it was decided from.
    """
    if wanted is not None:
        memory = {**memory, _WANTED: tuple(wanted[role] for role in Role)}
    # Also where nothing is wanted: at another ratio the gate would hold back replicas that start.
    ratio = PdRatio.of(wanted or desired_replicas(snapshot.state.desired))
    return Decision(wanted=wanted, reason=reason, ratio=ratio, is_step=True, shown=shown, memory=memory)


def standing(snapshot: Snapshot, reason: str, *, memory: Memory) -> Decision:
    """What was wanted last: a cluster goes on towards counts that were set until others are."""
    last = memory.get(_WANTED)
    return decided(snapshot, None if last is None else dict(zip(Role, last, strict=True)), reason, memory=memory)
