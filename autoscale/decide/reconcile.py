"""What a tick starts from: the last tick's state brought up to date, a count of replicas, and their limits (pure)."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.draft import Draft
from autoscale.decide.floor import lead_s
from autoscale.decide.limits import asked_s, limited, overdue_pools, room_of
from autoscale.decide.links import with_window
from autoscale.decide.possible import with_refusals
from autoscale.decide.starts import with_ended_starts, with_unknown_begins
from autoscale.decide.steps import with_steps
from autoscale.headcount import Census, count_among
from autoscale.types import ControllerState, Note, NoteKind, PoolKey, PoolStats, Snapshot
from kvtransfer.topology import Offer, Role

# Longest gap between two ticks over which timers go on, as a multiple of ``interval_s``. A smaller number would restart
# timers after a slow tick. A larger one would count time that no tick has observed.
_STALL_INTERVALS = 10
# Most points of the backlog (prompt tokens that waited for prefill): they are part of the state in each line of the
# decision log. At the default interval of 5 s the default window of 20 s has 5 points.
_BACKLOG_POINTS = 64
# Time for which a claim of a more important service holds after the tick that made it, seconds
# (docs/decisions/placement.md 163).
_YIELD_S = 30.0

# By pool: an instant in seconds (of the past or of the future), and a count of replicas.
TimedCounts = Mapping[PoolKey, tuple[float, int]]


def reconcile(draft: Draft) -> None:
    """A stage: bring the last tick's state up to date, count the replicas, and find the limits of their counts."""
    config, pools = draft.config, draft.snapshot.pools
    draft.state = reconciled(draft.snapshot, config)
    draft.census = Census.of(pools, draft.state)
    draft.pools = limited(config, pools, draft.state)
    draft.room = room_of(config, draft.pools, draft.state.desired)
    draft.overdue = overdue_pools(draft.state, draft.now_s, config.no_node_s)
    _give_up_offers(draft)
    draft.floors = config.floors.at(draft.now_s, lead_s(config, draft.state))
    if draft.floors:  # idle time counts from the end of the last floor
        draft.state = replace(draft.state, idle_since_s=None)


def _give_up_offers(draft: Draft) -> None:
    """Give up the node types of which no node has come in time; nothing in this cycle uses them."""
    offers, refused = with_refusals(draft.state, draft.now_s, draft.config.no_node_s)
    for kind in sorted(refused.keys() - draft.snapshot.state.refused.keys()):
        ends_s = refused[kind] - draft.now_s
        text = f"no node of type {kind} has come in time as declared: none is requested for {ends_s:.0f} s"
        draft.notes.append(Note(NoteKind.NO_NODE, text))
    if draft.slots is not None:
        draft.slots.refuse(refused)
    state = draft.state
    given_up = {key: asked_s(state, key) for key in state.offers if key not in offers}
    draft.state = replace(state, offers=offers, refused=refused, again_s={**state.again_s, **given_up})


def is_after_a_gap(snapshot: Snapshot, config: AutoscaleConfig) -> bool:
    """Whether the time since the last tick is too long for timers to go on, or negative because the clock went back."""
    ticked_s = snapshot.state.ticked_s
    longest_gap_s = _STALL_INTERVALS * config.interval_s
    return ticked_s is not None and not 0 <= snapshot.now_s - ticked_s <= longest_gap_s


def reconciled(snapshot: Snapshot, config: AutoscaleConfig) -> ControllerState:
    """The last tick's state, brought up to date with the replicas and the time of the snapshot."""
    now_s, state = snapshot.now_s, snapshot.state
    if is_after_a_gap(snapshot, config):
        state = with_unknown_begins(_with_new_timers(state, now_s))
    state = with_ended_starts(state, snapshot)
    running = {replica.replica_id for pool in snapshot.pools for replica in pool.replicas}
    present = running.union(*(pool.draining for pool in snapshot.pools))
    withdrawn = {
        replica_id: min(since_s, now_s) for replica_id, since_s in state.withdrawn.items() if replica_id in running
    }
    # A new pool has the count that Serve works towards. So has every pool while the service is only observed.
    last_desired = {} if config.is_observing else state.desired
    desired = {pool.key: last_desired.get(pool.key, pool.target_replicas) for pool in snapshot.pools}
    victims = _victims(snapshot, desired, withdrawn, present)
    missing = _below_target(snapshot, state.missing_since_s, lambda pool: len(pool.replicas))
    unplaced = _below_target(snapshot, state.unplaced_since_s, lambda pool: pool.held_replicas)
    offers = _offers(snapshot)
    return replace(
        state,
        desired=desired,
        admitted=tuple([replica_id for replica_id in state.admitted if replica_id in running]),
        withdrawn={} if config.is_observing else withdrawn,
        victims=() if config.is_observing else tuple(victims),
        backlog=_backlog(snapshot, config.window_s),
        missing_since_s=missing,
        unplaced_since_s=unplaced,
        capped=_capped(snapshot, state.capped, config, missing, victims),
        yielding=_yielding(snapshot),
        idle_since_s=_idle_since_s(snapshot, state.idle_since_s),
        offers=offers,
        existing_tried=tuple(key for key in state.existing_tried if key in offers),
        again_s={key: min(at_s, now_s) for key, at_s in state.again_s.items() if key in unplaced},
        links=with_window(state.links, snapshot, config.window_s),
        steps=with_steps(state.steps, snapshot, config.window_s),
        # A replica that served is lost if it neither runs nor drains now.
        lost_s=_not_after(state.lost_s, now_s) if present.issuperset(state.admitted) else now_s,
        scaled_out_s=_not_after(state.scaled_out_s, now_s),
        scaled_in_s=_not_after(state.scaled_in_s, now_s),
    )


def _offers(snapshot: Snapshot) -> dict[PoolKey, Offer]:
    """The offers of pools that still have fewer replicas on nodes than the last plan wanted."""
    state = snapshot.state
    return {
        pool.key: state.offers[pool.key]
        for pool in snapshot.pools
        if pool.key in state.offers
        and (pool.held_replicas or 0) < state.desired.get(pool.key, 0) + state.warm.get(pool.key, 0)
    }


def _with_new_timers(state: ControllerState, now_s: float) -> ControllerState:
    """The state after a gap: timers that need an observation without a break start anew, and caps end."""
    return replace(
        state,
        withdrawn=dict.fromkeys(state.withdrawn, now_s),
        missing_since_s={},
        unplaced_since_s={},
        refused={},
        again_s=dict.fromkeys(state.again_s, now_s),  # their labels stay
        capped={},
        settled_s=None,
        idle_since_s=None,
    )


def _victims(
    snapshot: Snapshot, desired: Mapping[PoolKey, int], withdrawn: Collection[str], present: Collection[str]
) -> list[str]:
    """Victims that still run or drain, without those that Serve keeps.

    Without the scheduler hook Serve may stop other replicas than the victims. Once a pool has its wanted count, its
    victims that still run go on running, so they are victims no longer. A draining victim stays a victim, since Serve's
    controller takes it for a running replica after a restart.
    """
    state = snapshot.state
    victims = [replica_id for replica_id in state.victims if replica_id in present]
    for pool in snapshot.pools if victims else ():
        running = {replica.replica_id for replica in pool.replicas}
        wanted = desired[pool.key] + state.warm.get(pool.key, 0) + count_among(pool, withdrawn)
        if len(running) <= pool.target_replicas == wanted:
            victims = [replica_id for replica_id in victims if replica_id not in running]
    return victims


def _below_target(
    snapshot: Snapshot, last_timers: TimedCounts, count_of: Callable[[PoolStats], int | None]
) -> TimedCounts:
    """Pools whose count is below Serve's target: when the count last rose or was first too low, and the count.

    ``last_timers``: the result of the last tick. ``count_of``: gives the count of a pool, which is either its running
    replicas or its replicas on nodes; ``None``: not observed.
    """
    now_s = snapshot.now_s
    timers: dict[PoolKey, tuple[float, int]] = {}
    for pool in snapshot.pools:
        count = count_of(pool)
        if count is not None and count < pool.target_replicas:
            since_s, last_count = last_timers.get(pool.key, (now_s, count))
            has_risen = count > last_count
            timers[pool.key] = (now_s if has_risen else min(since_s, now_s), count)
    return timers


def _capped(
    snapshot: Snapshot,
    last_capped: TimedCounts,
    config: AutoscaleConfig,
    missing: TimedCounts,
    victims: Collection[str],
) -> TimedCounts:
    """Pools that lack room for more replicas: until when they get no more, and the number of replicas that have room.

    This number stays when a replica is lost or withdrawn: another one may take its room.
    """
    now_s = snapshot.now_s
    capped = {key: (until_s, count) for key, (until_s, count) in last_capped.items() if now_s < until_s}
    for pool in snapshot.pools:
        key = pool.key
        if key in missing and key not in capped:
            since_s, _ = missing[key]
            if now_s - since_s > config.no_room_s:
                capped[key] = (now_s + config.no_room_retry_s, 0)
        if key in capped:
            until_s, count = capped[key]
            capped[key] = (until_s, max(count, len(pool.replicas) - count_among(pool, victims)))
    return capped


def _yielding(snapshot: Snapshot) -> TimedCounts:
    """Pools whose room a more important service claims: until when, and the most replicas that they may have."""
    now_s, last_yielding = snapshot.now_s, snapshot.state.yielding
    yielding = {key: (until_s, most) for key, (until_s, most) in last_yielding.items() if now_s < until_s}
    return yielding | {key: (now_s + _YIELD_S, most) for key, most in snapshot.claims.items()}


def _backlog(snapshot: Snapshot, window_s: float) -> tuple[tuple[float, float], ...]:
    """Points of the last window, the oldest first: an instant, and the prompt tokens of the requests that waited then.

    They waited at the endpoint, for prefill, or with their KV for room on decode.
    """
    now_s, oldest_s = snapshot.now_s, snapshot.now_s - window_s
    tokens, requests_on_decode = snapshot.traffic.waiting_tokens, 0.0
    for pool in snapshot.pools:
        if pool.key.role is Role.PREFILL:
            tokens += math.fsum([replica.queued_prefill_tokens or 0.0 for replica in pool.replicas])
        else:
            requests_on_decode += math.fsum([replica.waiting_requests or 0.0 for replica in pool.replicas])
    tokens += requests_on_decode * (snapshot.traffic.input_tokens_mean or 0.0)
    earlier = snapshot.state.backlog[-(_BACKLOG_POINTS - 1) :]
    return (*(point for point in earlier if oldest_s <= point[0] < now_s), (now_s, tokens))


def _idle_since_s(snapshot: Snapshot, last_idle_since_s: float | None) -> float | None:
    """When the present idle period began; ``None``: the service is not idle."""
    if not _is_idle(snapshot):
        return None
    return snapshot.now_s if last_idle_since_s is None else min(last_idle_since_s, snapshot.now_s)


def _is_idle(snapshot: Snapshot) -> bool:
    """Whether no request has come in the last window, none waits, and every replica reports that it has none."""
    replicas = [replica for pool in snapshot.pools for replica in pool.replicas]
    is_quiet = all(r.running_requests == r.waiting_requests == (r.deferred_requests or 0.0) == 0.0 for r in replicas)
    has_none = snapshot.traffic.requests_per_s == 0.0 and not snapshot.traffic.waiting_requests
    return bool(replicas) and is_quiet and has_none and not snapshot.is_awaited


def _not_after(at_s: float | None, now_s: float) -> float | None:
    """The instant, or now if it is in the future because the clock went back; ``None`` stays ``None``."""
    return None if at_s is None else min(at_s, now_s)
