"""Places the wanted and the warm replicas of a service, and writes the change into the state (pure).

A leader is a replica of the ratio's larger role (decode if both are equal); a follower is a replica of the other role.
Warm replicas run as a reserve without requests, so they need no start to serve. Serving and warm replicas are placed
together, and the serving ones are then chosen among all. So warm replicas are in the groups where the service grows.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from autoscale.decide import placement
from autoscale.decide.draft import Draft
from autoscale.decide.limits import kept_ratio, quota_left
from autoscale.decide.placement import Placed
from autoscale.decide.possible import accepted
from autoscale.decide.supply import Supply
from autoscale.headcount import EPSILON_REPLICAS, count_among, standard_replicas
from autoscale.ratio import PdRatio, pd_text
from autoscale.room import Room
from autoscale.types import ControllerState, Note, NoteKind, PoolKey
from kvtransfer.topology import Offer, Role


def place(draft: Draft) -> None:
    """A stage: spread the wanted replicas over the groups if any count or place is to change."""
    draft.placed = Placed(counts=draft.state.desired)
    ratio = kept_ratio(draft.config, draft.ratio, draft.wanted, draft.snapshot.pools)
    assigned_warm = draft.snapshot.warm_replicas
    warm_replicas = draft.config.warm_replicas if assigned_warm is None else assigned_warm
    counts_with_warm = with_warm(draft.wanted, warm_replicas, ratio, draft.room, draft.census.ending)
    if not _is_change(draft, counts_with_warm):
        _reserve_possible(draft)
        return
    draft.placed = _place_all(draft, counts_with_warm, ratio)
    offers = {} if draft.slots is None else accepted(draft.placed.nodes, draft.slots.topology.offer_of)
    draft.state = replace(_with_offers(draft, offers), warm=draft.placed.warm)
    _note_woken_groups(draft, ratio)
    _remember_change(draft)


def _with_offers(draft: Draft, offers: Mapping[PoolKey, Offer]) -> ControllerState:
    """The state in which pools wait for these ``offers``; the wait for a new one begins now."""
    state = draft.state
    held = {pool.key: pool.held_replicas or 0 for pool in draft.pools}
    new = {key for key, offer in offers.items() if state.offers.get(key) != offer}
    since_s = {key: (draft.now_s, held[key]) for key in new if key in state.unplaced_since_s}
    return replace(
        state,
        offers={**state.offers, **offers},
        unplaced_since_s={**state.unplaced_since_s, **since_s},
        again_s={key: at_s for key, at_s in state.again_s.items() if key not in new},
    )


def _reserve_possible(draft: Draft) -> None:
    """Take the room for which replicas wait, if some wait for possible nodes, so that nothing else counts on it too."""
    if draft.slots is None or not draft.state.offers:
        return
    supply, wanted = Supply((), draft.slots, (), draft.state.offers), draft.state.desired_and_warm
    for pool in draft.pools:
        for _ in range(wanted.get(pool.key, 0) - (pool.held_replicas or 0)):
            supply.reserve(pool)


def with_warm(
    counts: Mapping[Role, float], warm: int, ratio: PdRatio, room: Room, ending: Mapping[Role, float]
) -> dict[Role, float]:
    """Counts with ``warm`` more leaders and the followers that the ratio requires with them, as far as they fit.

    A service that sleeps gets no warm replica.
    """
    for more in range(warm if any(counts.values()) else 0, 0, -1):
        leaders = counts[ratio.leader] + more
        followers = room.whole(ratio.follower, leaders * ratio.follower_share)
        total = {ratio.leader: leaders, ratio.follower: max(counts[ratio.follower], followers)}
        is_inside = all(total[role] <= max(room.highest[role], counts[role]) for role in Role)
        if is_inside and not room.is_over_budget(total, ending):
            return total
    return dict(counts)


def _place_all(draft: Draft, counts_with_warm: Mapping[Role, float], ratio: PdRatio) -> Placed:
    """Place serving and warm replicas, and choose the pools of the serving ones."""
    counts, state = draft.wanted, draft.state
    spare_followers = _spare_followers(draft, counts_with_warm, ratio)
    placed = placement.place(
        counts_with_warm,
        state.desired_and_warm,
        draft.pools,
        ratio,
        slots=draft.slots,
        limits=(dict(draft.snapshot.gpus_left), quota_left(draft.config, draft.snapshot.pools, state)),
        overdue=draft.overdue,
        spare_followers=spare_followers,
        offers=state.offers,
    )
    placed = _within_budget(draft, placed, counts_with_warm)
    if counts_with_warm == counts and not state.warm:
        return placed
    # Serving replicas are placed again, with the placed replicas of each pool as its highest count. They need no slots,
    # since all placed replicas have taken their room above.
    most = placed.counts
    inside = [pool.bounded(min(pool.limits.lowest_replicas, most[pool.key]), most[pool.key]) for pool in draft.pools]
    serving = placement.place(
        counts, state.desired, inside, ratio, overdue=draft.overdue, spare_followers=spare_followers
    )
    warm = {key: count - serving.counts[key] for key, count in placed.counts.items() if count > serving.counts[key]}
    return replace(placed, counts=serving.counts, warm=warm, pending=serving.pending)


def _within_budget(draft: Draft, placed: Placed, wanted: Mapping[Role, float]) -> Placed:
    """The placement without new replicas for which ``guard.budget_gpus`` has no room.

    Groups of unequal capacity may need more followers than the guard has counted: each of them has whole replicas, and
    may be off the ratio by one of its own, not by one of the largest.
    """
    budget_gpus, state, counts = draft.config.guard.budget_gpus, draft.state, dict(placed.counts)
    if budget_gpus is None:
        return placed
    before = state.desired_and_warm
    # Withdrawn replicas hold their GPUs until they have left.
    held = {pool.key: before.get(pool.key, 0) + count_among(pool, state.withdrawn) for pool in draft.pools}

    def gpus(of: Mapping[PoolKey, int]) -> float:
        return math.fsum(max(of[pool.key], held[pool.key]) * pool.limits.gpus_per_replica for pool in draft.pools)

    most_gpus = max(budget_gpus, gpus(held)) + EPSILON_REPLICAS
    while gpus(counts) > most_gpus:
        beyond = {role: count - wanted[role] for role, count in standard_replicas(counts, draft.pools).items()}
        new = [pool for pool in draft.pools if counts[pool.key] > max(held[pool.key], 1)]
        if not new:
            break
        counts[max(new, key=lambda pool: beyond[pool.key.role]).key] -= 1
    if counts == placed.counts:
        return placed
    missing = {role: wanted[role] - count for role, count in standard_replicas(counts, draft.pools).items()}
    pending = {role: max(placed.pending[role], count) for role, count in missing.items()}
    return replace(
        placed,
        counts=counts,
        pending={role: count if count > EPSILON_REPLICAS else 0.0 for role, count in pending.items()},
    )


def _is_change(draft: Draft, counts_with_warm: Mapping[Role, float]) -> bool:
    """Whether other counts are wanted, or the same counts in other groups."""
    if draft.wanted != draft.current:
        return True
    if draft.config.is_frozen:
        return False
    is_beyond_limits = any(draft.state.desired[pool.key] > pool.limits.highest_replicas for pool in draft.pools)
    is_warm_changed = counts_with_warm != standard_replicas(draft.state.desired_and_warm, draft.pools)
    return bool(draft.overdue) or is_beyond_limits or is_warm_changed


def _spare_followers(draft: Draft, counts: Mapping[Role, float], ratio: PdRatio) -> int:
    """Number of followers beyond ``counts`` that bounds and budget allow, at most one for each group but one.

    With as many leaders as groups, the ratio may require a single follower, but each group that serves needs one.
    """
    follower, groups = ratio.follower, {pool.key.group for pool in draft.snapshot.pools}
    for more in range(len(groups) - 1, 0, -1):
        with_more = {**counts, follower: counts[follower] + more}
        is_inside = with_more[follower] <= draft.room.highest[follower]
        if is_inside and not draft.room.is_over_budget(with_more, draft.census.ending):
            return more
    return 0


def _note_woken_groups(draft: Draft, ratio: PdRatio) -> None:
    """Add a note if groups that begin to serve need more followers than were wanted."""
    leader, follower, wanted = ratio.leader, ratio.follower, draft.wanted
    standard = standard_replicas(draft.placed.counts, draft.pools)
    placed = {role: count - draft.stuck[role] for role, count in standard.items()}
    # A large replica may be worth more than the followers that were missing.
    most_by_rounding = draft.room.largest[follower] - draft.room.step[follower]
    if placed[follower] > wanted[follower] + most_by_rounding + EPSILON_REPLICAS and placed[leader] >= wanted[leader]:
        became = pd_text({**wanted, follower: placed[follower]})
        text = f"each group that serves has one {follower} replica: {pd_text(wanted)} became {became}"
        draft.notes.append(Note(NoteKind.WOKEN_GROUP, text))


def _remember_change(draft: Draft) -> None:
    """Write the new counts into the state, with the time of the change and the counts before a removal.

    If replicas are still withdrawn from an earlier removal, the counts before that one stay. If the counts then grow
    again, the removal was harmful, although no latency missed its objective.
    """
    desired, state = draft.placed.counts, draft.state
    if desired == state.desired:
        return
    before, after = (math.fsum(standard_replicas(each, draft.pools).values()) for each in (state.desired, desired))
    is_growth = after >= before - EPSILON_REPLICAS
    is_removal = any(count < state.desired[key] for key, count in desired.items())
    is_undone = is_growth and not is_removal and bool(state.withdrawn)
    draft.state = replace(
        state,
        desired=desired,
        missed=state.missed_once_more if is_undone else state.missed,
        desired_before=(state.desired_before or state.desired) if is_removal else state.desired_before,
        tried=draft.decision.leaders(draft.ratio) if is_removal else state.tried,
        scaled_out_s=draft.now_s if is_growth else state.scaled_out_s,
        scaled_in_s=state.scaled_in_s if is_growth else draft.now_s,
    )
