"""Common parts of policies that size each role by itself, as other systems' autoscalers do (pure)."""

from collections.abc import Mapping

from autoscale.headcount import desired_replicas
from autoscale.policies.policy import replicas_of
from autoscale.ratio import PdRatio
from autoscale.types import Decision, ReplicaStats, Shown, Snapshot
from kvtransfer.topology import Role

# A policy's memory: series of numbers by name.
Memory = Mapping[str, tuple[float, ...]]

# Tolerance for rounding errors of an interval, seconds.
_EPSILON_S = 1e-6
# Tolerance for rounding errors of a metric or a number of replicas.
EPSILON = 1e-9
# Name of the series with the last wanted count of each role.
_WANTED = "wanted"


def serving_replicas(snapshot: Snapshot) -> dict[Role, list[ReplicaStats]]:
    """Running replicas of each role, without withdrawn ones and victims: other systems would have ended them."""
    leaving = {*snapshot.state.withdrawn, *snapshot.state.victims}
    return {role: [r for r in replicas_of(snapshot, role) if r.replica_id not in leaving] for role in Role}


def is_due(snapshot: Snapshot, memory: Memory, name: str, interval_s: float) -> bool:
    """Whether an interval has passed since the time in the series ``name``, or the clock was set back since then."""
    then_s = memory[name][0]
    return not 0.0 <= snapshot.now_s - then_s < interval_s - _EPSILON_S


def summed(memory: Memory, values: Mapping[str, float | None]) -> dict[str, tuple[float, ...]]:
    """Series of (sum, count), each with the observation of one tick added; ``None``: not observed."""
    sums: dict[str, tuple[float, ...]] = {}
    for name, value in values.items():
        total, count = memory.get(name, (0.0, 0.0))
        sums[name] = (total, count) if value is None else (total + value, count + 1.0)
    return sums


def mean(memory: Memory, name: str) -> float | None:
    """The mean of a series of (sum, count); ``None``: no observation."""
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
    """A decision with the ratio of its own counts, so that no role changes the count of the other.

    ``wanted``: ``None`` to keep the counts. ``memory``: the policy's memory for the next tick; the wanted counts are
    added to it.
    """
    if wanted is not None:
        memory = {**memory, _WANTED: tuple(wanted[role] for role in Role)}
    # If the decision had no ratio, the gate would use the configured one, and hold back replicas that start.
    ratio = PdRatio.of(wanted or desired_replicas(snapshot.state.desired))
    return Decision(wanted=wanted, reason=reason, ratio=ratio, is_step=True, shown=shown, memory=memory)


def standing(snapshot: Snapshot, reason: str, *, memory: Memory) -> Decision:
    """A decision for the last wanted counts: the cluster works towards them until the policy wants others."""
    last = memory.get(_WANTED)
    return decided(snapshot, None if last is None else dict(zip(Role, last, strict=True)), reason, memory=memory)


def decided_by(snapshot: Snapshot, wanted: Mapping[Role, float], shown: list[Shown], *, memory: Memory) -> Decision:
    """A decision whose reason is the text of its signals."""
    reason = ", ".join(f"{signal.name} {signal.value:.4g} for {signal.target:.4g}" for signal in shown)
    return decided(snapshot, wanted, reason, memory=memory, shown=tuple(shown))
