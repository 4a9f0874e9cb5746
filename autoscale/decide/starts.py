"""How long replicas of each pool take to start: learned from the plans that asked for them (pure).

A start begins with the plan that asks for the replica, and ends when the replica runs. It includes the time until a
node has room, and the download of a model.
"""

from dataclasses import replace
from itertools import takewhile

from autoscale.decide.draft import Draft
from autoscale.headcount import count_among
from autoscale.types import ControllerState, PoolKey, Snapshot

# Number of the last starts of a pool that are remembered. A change of the start time, such as weights that are staged
# now, is the median after half of them. Fewer follow single slow starts.
_REMEMBERED_STARTS = 9
# In place of the begin of a start that is not known: an instant that does not come.
_UNKNOWN_S = 1e12


def with_ended_starts(state: ControllerState, snapshot: Snapshot) -> ControllerState:
    """The state with the starts that have ended since the last tick.

    ``state``: that of the last tick. Starts end in the order in which they began.
    """
    if not state.asked_s:
        return state
    known = {*state.admitted, *state.held, *state.withdrawn, *state.victims}
    asked_s, starts_s = dict(state.asked_s), dict(state.starts_s)
    for pool in snapshot.pools:
        if (began_s := asked_s.pop(pool.key, None)) is None:
            continue
        youngest = takewhile(lambda replica: replica.replica_id not in known, reversed(pool.replicas))
        ended = min(len(began_s), sum(1 for _ in youngest))
        # A start in the future began before the clock was set, so its duration is not known.
        durations_s = [snapshot.now_s - at_s for at_s in began_s[:ended] if at_s <= snapshot.now_s]
        if durations_s:
            starts_s[pool.key] = (*starts_s.get(pool.key, ()), *durations_s)[-_REMEMBERED_STARTS:]
        if ended < len(began_s):
            asked_s[pool.key] = began_s[ended:]
    return replace(state, asked_s=asked_s, starts_s=starts_s)


def with_unknown_begins(state: ControllerState) -> ControllerState:
    """The state after a gap between ticks: a set clock would make starts too long, so those that go on do not count."""
    return replace(state, asked_s={key: (_UNKNOWN_S,) * len(began_s) for key, began_s in state.asked_s.items()})


def note_starts(draft: Draft) -> None:
    """A stage: remember when the plan asks for replicas that do not run yet."""
    state, asked_s = draft.state, dict[PoolKey, tuple[float, ...]]()
    for pool in draft.snapshot.pools:
        missing = draft.counts[pool.key] - len(pool.replicas)
        if state.victims:  # they run, but not for long
            missing += count_among(pool, state.victims)
        if missing > 0:
            # Of the replicas that start, Serve gives up the youngest first.
            began_s = state.asked_s.get(pool.key, ())[:missing]
            asked_s[pool.key] = (*began_s, *[draft.now_s] * (missing - len(began_s)))
    if asked_s or state.asked_s:
        draft.state = replace(state, asked_s=asked_s)
