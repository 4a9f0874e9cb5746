"""The state in line with the replicas that really run, the census, and the limits (pure)."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.draft import Draft
from autoscale.decide.limits import limited, overdue_pools, room_of
from autoscale.headcount import Census, count_among
from autoscale.types import ControllerState, PoolKey, Snapshot
from kvtransfer.topology import Role

# A tick more than this many intervals after the last one does not follow from it.
_STALL_INTERVALS = 10
# Most points of the backlog that the state keeps.
_BACKLOG_POINTS = 64
# How long a claim of a more important service holds after it was last made.
_YIELD_S = 30.0

# By pool: an instant, and a count of replicas.
Timed = dict[PoolKey, tuple[float, int]]


def reconcile(draft: Draft) -> None:
    """A stage: count once what there is, and what it must stay inside."""
    config, pools = draft.config, draft.snapshot.pools
    draft.state = reconciled(draft.snapshot, config)
    draft.census = Census.of(pools, draft.state)
    draft.pools = limited(config, pools, draft.state)
    draft.room = room_of(config, draft.pools)
    draft.overdue = overdue_pools(draft.state, draft.now_s, config.no_node_s)


def is_after_a_gap(snapshot: Snapshot, config: AutoscaleConfig) -> bool:
    """Whether the last tick was too long ago, or too far ahead, for this one to follow from it."""
    ticked_s = snapshot.state.ticked_s
    most_s = _STALL_INTERVALS * config.interval_s
    return ticked_s is not None and not 0 <= snapshot.now_s - ticked_s <= most_s


def reconciled(snapshot: Snapshot, config: AutoscaleConfig) -> ControllerState:
    """The state before this tick decides anything."""
    state, now_s = snapshot.state, snapshot.now_s
    running = {replica.replica_id for pool in snapshot.pools for replica in pool.replicas}
    withdrawn = {name: min(since_s, now_s) for name, since_s in state.withdrawn.items() if name in running}
    if is_after_a_gap(snapshot, config):  # no tick has watched meanwhile: what is timed starts anew
        withdrawn = dict.fromkeys(withdrawn, now_s)
        state = replace(state, missing_since_s={}, unplaced_since_s={}, capped={}, settled_s=None)
    # Victims that have stopped running but not gone are kept: Serve's next controller would take them for running.
    present = running.union(*(pool.draining for pool in snapshot.pools))
    # The counts of the last tick; Serve's own for new pools, and while only observing.
    before = {} if config.is_observing else state.desired
    desired = {pool.key: before.get(pool.key, pool.target_replicas) for pool in snapshot.pools}
    victims = _victims(snapshot, state, desired, withdrawn, present)
    missing, unplaced = _waiting(snapshot, state)
    return replace(
        state,
        desired=desired,
        admitted=tuple([name for name in state.admitted if name in running]),
        withdrawn={} if config.is_observing else withdrawn,
        victims=() if config.is_observing else tuple(victims),
        backlog=_backlog(snapshot, config),
        missing_since_s=missing,
        unplaced_since_s=unplaced,
        capped=_capped(snapshot, state, config, missing, victims),
        yielding={key: most for key, most in state.yielding.items() if now_s < most[0]}
        | {key: (now_s + _YIELD_S, most) for key, most in snapshot.claims.items()},
        idle_since_s=_not_after(state.idle_since_s, now_s) or now_s if _is_idle(snapshot) else None,
        lost_s=_not_after(state.lost_s, now_s) if present.issuperset(state.admitted) else now_s,
        scaled_out_s=_not_after(state.scaled_out_s, now_s),
        scaled_in_s=_not_after(state.scaled_in_s, now_s),
    )


def _victims(
    snapshot: Snapshot,
    state: ControllerState,
    desired: Mapping[PoolKey, int],
    withdrawn: Mapping[str, float],
    present: Collection[str],
) -> list[str]:
    """Victims that are still there.

    Without those of a pool of which Serve has stopped as many replicas as it should, but others: without the hook
    the choice is Serve's own.
    """
    victims = [name for name in state.victims if name in present]
    for pool in snapshot.pools if victims else ():
        own = {replica.replica_id for replica in pool.replicas}
        wanted = desired[pool.key] + state.warm.get(pool.key, 0) + len(own & withdrawn.keys())
        if len(own) <= pool.target_replicas == wanted:
            victims = [name for name in victims if name not in own]
    return victims


def _waiting(snapshot: Snapshot, state: ControllerState) -> tuple[Timed, Timed]:
    """Pools with fewer replicas that run, and fewer on nodes, than Serve works towards: since the count last rose."""
    missing: Timed = {}
    unplaced: Timed = {}
    for pool in snapshot.pools:
        for waiting, before, count in (
            (missing, state.missing_since_s, len(pool.replicas)),
            (unplaced, state.unplaced_since_s, pool.held_replicas),
        ):
            if count is not None and count < pool.target_replicas:
                since_s, last = before.get(pool.key, (snapshot.now_s, count))
                waiting[pool.key] = (snapshot.now_s if count > last else min(since_s, snapshot.now_s)), count
    return missing, unplaced


def _capped(
    snapshot: Snapshot, state: ControllerState, config: AutoscaleConfig, missing: Timed, victims: list[str]
) -> Timed:
    """Pools without room, each at the most that has found room, whatever is lost or withdrawn later."""
    now_s = snapshot.now_s
    capped = {key: cap for key, cap in state.capped.items() if now_s < cap[0]}
    for pool in snapshot.pools:
        key = pool.key
        if key in missing and now_s - missing[key][0] > config.no_room_s and key not in capped:
            capped[key] = (now_s + config.no_room_retry_s, 0)
        if key in capped:
            with_room = len(pool.replicas) - count_among(pool, victims)
            capped[key] = (capped[key][0], max(capped[key][1], with_room))
    return capped


def _backlog(snapshot: Snapshot, config: AutoscaleConfig) -> tuple[tuple[float, float], ...]:
    """Prompt tokens that wait for prefill, over the window."""
    now_s, oldest_s = snapshot.now_s, snapshot.now_s - config.window_s
    prefill = [replica for pool in snapshot.pools if pool.key.role is Role.PREFILL for replica in pool.replicas]
    tokens = math.fsum([replica.queued_prefill_tokens or 0.0 for replica in prefill])
    points = (point for point in snapshot.state.backlog[-_BACKLOG_POINTS:] if oldest_s <= point[0] < now_s)
    return (*points, (now_s, tokens))


def _is_idle(snapshot: Snapshot) -> bool:
    """Whether no request has come or waits, and every replica reports no work; a silent replica is not idle."""
    replicas = [replica for pool in snapshot.pools for replica in pool.replicas]
    is_quiet = all(r.running_requests == r.waiting_requests == (r.deferred_requests or 0.0) == 0.0 for r in replicas)
    return bool(replicas) and is_quiet and snapshot.traffic.requests_per_s == 0.0 and not snapshot.is_awaited


def _not_after(at_s: float | None, now_s: float) -> float | None:
    return None if at_s is None else min(at_s, now_s)
