"""The controller's state brought in line with which replicas really run, and since when (pure)."""

import math
from dataclasses import replace

from autoscale.config import AutoscaleConfig
from autoscale.headcount import count_among
from autoscale.sleep import is_idle
from autoscale.types import ControllerState, PoolKey, Snapshot
from kvtransfer.topology import Role

# A tick this many intervals after the last one does not follow from it.
_STALL_INTERVALS = 10
_BACKLOG_POINTS = 64
# What a more important service claims is left to it for so long after it has last said so.
_YIELD_S = 30.0


def is_after_a_gap(snapshot: Snapshot, config: AutoscaleConfig) -> bool:
    """Whether the last tick is so long ago, or so far ahead, that this one does not follow from it."""
    ticked_s = snapshot.state.ticked_s
    most_s = _STALL_INTERVALS * config.interval_s
    return ticked_s is not None and not 0 <= snapshot.now_s - ticked_s <= most_s


def reconciled(snapshot: Snapshot, config: AutoscaleConfig) -> ControllerState:
    """The state before this tick decides anything."""
    state, now_s = snapshot.state, snapshot.now_s
    running = {replica.replica_id for pool in snapshot.pools for replica in pool.replicas}
    withdrawn = {name: min(since, now_s) for name, since in state.withdrawn.items() if name in running}
    if is_after_a_gap(snapshot, config):  # in which nobody watched: what is timed starts anew
        withdrawn = dict.fromkeys(withdrawn, now_s)
        state = replace(state, missing_since_s={}, unplaced_since_s={}, capped={}, settled_s=None)
    # Who has stopped running but not gone is kept: Serve's next controller would take it for running again.
    here = running.union(*(pool.draining for pool in snapshot.pools))
    victims = [name for name in state.victims if name in here]
    is_lost = not here.issuperset(state.admitted)
    desired: dict[PoolKey, int] = {}
    progress: dict[PoolKey, tuple[float, int]] = {}
    unplaced: dict[PoolKey, tuple[float, int]] = {}
    capped = {key: cap for key, cap in state.capped.items() if now_s < cap[0]}
    for pool in snapshot.pools:
        key, count = pool.key, len(pool.replicas)
        known = None if config.is_observing else state.desired.get(key)
        desired[key] = pool.target_replicas if known is None else known
        if victims:
            own = {replica.replica_id for replica in pool.replicas}
            asked_for = desired[key] + state.warm.get(key, 0)
            if count <= pool.target_replicas == asked_for + len(own & withdrawn.keys()):
                # Serve has stopped as many as it should, but others: without the hook the choice is its own.
                victims = [name for name in victims if name not in own]
        if pool.held_replicas is not None and pool.held_replicas < pool.target_replicas:
            unplaced[key] = _since(state.unplaced_since_s.get(key), pool.held_replicas, now_s)
        if count < pool.target_replicas:
            progress[key] = _since(state.missing_since_s.get(key), count, now_s)
            if now_s - progress[key][0] > config.no_room_s and key not in capped:
                capped[key] = (now_s + config.no_room_retry_s, 0)
        if key in capped:  # at the most that has found room, whatever is lost or withdrawn later
            found = count - count_among(pool, victims)
            capped[key] = (capped[key][0], max(capped[key][1], found))
    prefill = [replica for pool in snapshot.pools if pool.key.role is Role.PREFILL for replica in pool.replicas]
    backlog = (now_s, math.fsum([replica.queued_prefill_tokens or 0.0 for replica in prefill]))
    oldest_s = now_s - config.window_s
    return replace(
        state,
        desired=desired,
        admitted=tuple([name for name in state.admitted if name in running]),
        withdrawn={} if config.is_observing else withdrawn,
        victims=() if config.is_observing else tuple(victims),
        backlog=(*(point for point in state.backlog[-_BACKLOG_POINTS:] if oldest_s <= point[0] < now_s), backlog),
        missing_since_s=progress,
        unplaced_since_s=unplaced,
        capped=capped,
        yielding={
            **{key: most for key, most in state.yielding.items() if now_s < most[0]},
            **{key: (now_s + _YIELD_S, most) for key, most in snapshot.claims.items()},
        },
        idle_since_s=_not_after(state.idle_since_s, now_s) or now_s if is_idle(snapshot) else None,
        lost_s=now_s if is_lost else _not_after(state.lost_s, now_s),
        scaled_out_s=_not_after(state.scaled_out_s, now_s),
        scaled_in_s=_not_after(state.scaled_in_s, now_s),
    )


def _since(before: tuple[float, int] | None, count: int, now_s: float) -> tuple[float, int]:
    """Since when a count has not risen, and the count."""
    since_s, seen = before or (now_s, count)
    return now_s if count > seen else min(since_s, now_s), count


def _not_after(at_s: float | None, now_s: float) -> float | None:
    return None if at_s is None else min(at_s, now_s)
