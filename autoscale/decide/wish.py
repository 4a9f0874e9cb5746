"""The policy's wish, and what replaces it before the guard: holds, counts by hand, sleep, missed latency (pure).

A hold: the policy's wish is ignored in this tick. The counts stay, but withdrawn replicas that are missed come back.
"""

from collections.abc import Mapping
from dataclasses import replace

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.containment import contained
from autoscale.decide.draft import Draft
from autoscale.decide.limits import bounded, overdue_pools, room_of
from autoscale.decide.reconcile import is_after_a_gap
from autoscale.headcount import EPSILON_REPLICAS, Census, count_among, standard_replicas
from autoscale.policies.policy import is_backlog_growing
from autoscale.ratio import PdRatio
from autoscale.types import Decision, Latency, PoolKey, Snapshot
from kvtransfer.topology import Role

_ASLEEP = Decision(wanted=None, reason="it sleeps until a request waits for it")


def hold(draft: Draft) -> None:
    """A stage: decide whether the policy's wish is ignored in this tick, and whether replicas may leave.

    No replica leaves while a latency misses its objective, unless people have set counts or limits, or a more important
    service claims room.
    """
    draft.hold = _hold_reason(draft.snapshot, draft.config)
    slo = draft.config.slo
    is_wanted = draft.config.override is not None or bool(draft.state.yielding)  # by people, or by claims
    draft.may_leave = is_wanted or slo.is_met(_latency_now(draft)) or _is_beyond_limits(draft)
    # Traffic that was observed in part may hide refusals.
    draft.may_give_up = is_wanted or (draft.snapshot.traffic.is_whole and slo.is_met(draft.snapshot.latency))
    draft.is_missed = bool(draft.state.withdrawn) and not draft.may_leave
    if draft.is_missed:
        draft.hold = "a latency is outside its objective: withdrawn replicas come back"


def _hold_reason(snapshot: Snapshot, config: AutoscaleConfig) -> str | None:
    """Why the policy's wish is ignored in this tick; ``None``: it is followed."""
    if config.is_paused:
        return "paused by hand"
    if is_after_a_gap(snapshot, config):
        gap_s = snapshot.now_s - (snapshot.state.ticked_s or 0.0)
        return f"the last tick was {gap_s:.1f} s ago: the clock jumped, or the controller stood still"
    if config.override is not None:
        return None  # counts set by hand need no signal
    return _silent_role(snapshot, config) or _silent_replica(snapshot, config)


def _silent_role(snapshot: Snapshot, config: AutoscaleConfig) -> str | None:
    """A message if no replica does the work of a role although some should.

    Overdue pools, which lack a node, do not count.
    """
    overdue = overdue_pools(snapshot.state, snapshot.now_s, config.no_node_s)
    awake = [pool for pool in snapshot.pools if pool.target_replicas and pool.key not in overdue]
    for role in Role:
        pools = [pool for pool in awake if pool.key.role is role]
        # The replicas of aggregated groups do the work of both roles.
        if pools and not any(pool.replicas for pool in awake if pool.capacity_in(role)):
            return f"no {role} replica of group {' or '.join(pool.key.group for pool in pools)} is running"
    return None


def _silent_replica(snapshot: Snapshot, config: AutoscaleConfig) -> str | None:
    """A message if the last report of a replica, or of a replica of the endpoint, is too old."""
    oldest_s = snapshot.now_s - config.stale_s
    # Its requests would count for ever, although other replicas of the endpoint have got them.
    if (quietest := snapshot.traffic.quietest) is not None and quietest[1] < oldest_s:
        return f"replica {quietest[0]} of the endpoint has been silent for {snapshot.now_s - quietest[1]:.1f} s"
    for pool in snapshot.pools:
        for replica in pool.replicas:
            if replica.observed_s < oldest_s:
                age_s = snapshot.now_s - replica.observed_s
                return f"replica {replica.replica_id} of {pool.key} has been silent for {age_s:.1f} s"
    return None


def _latency_now(draft: Draft) -> Latency:
    """The latency, without a TTFT that is longer than the time since the last replica entered.

    Requests with such a TTFT arrived before that replica entered. They say nothing about the present replicas. After an
    overload they may wait for minutes in the queues of older replicas (docs/decisions/scaling.md 92). Whether the
    overload is over shows one window after the entry: then no more prompts wait than at the window's begin.
    """
    latency, settled_s = draft.snapshot.latency, draft.state.settled_s
    if settled_s is None or latency.ttft_s is None:
        return latency
    # ``draft.emit`` and ``bring_back`` set settled_s to one window after a replica enters.
    entered_s = settled_s - draft.config.window_s
    is_from_before = latency.ttft_s > draft.now_s - entered_s
    is_over = draft.now_s >= settled_s and not is_backlog_growing(draft.state.backlog)
    return replace(latency, ttft_s=None) if is_from_before and is_over else latency


def _is_beyond_limits(draft: Draft) -> bool:
    """Whether more replicas run than bounds or budget allow, as after people have lowered them."""
    pools, running = bounded(draft.config, draft.snapshot.pools), draft.census.running
    room = room_of(draft.config, pools, draft.state.desired)
    return room.is_over_budget(running) or any(running[role] > room.highest[role] + EPSILON_REPLICAS for role in Role)


def decide(draft: Draft) -> None:
    """A stage: get the policy's decision; a hold replaces it, or else counts set by hand."""
    # Policies see the counts that placement may reach.
    seen = replace(draft.snapshot, state=draft.state, pools=tuple(draft.pools))
    decision = contained(draft.policy, seen, draft.config)
    if draft.config.ratio.is_aggregated:
        wanted = None if decision.wanted is None else {**decision.wanted, Role.PREFILL: 0.0}
        decision = replace(decision, wanted=wanted, ratio=None)
    draft.decision = _after_hold_and_override(decision, draft)


def _after_hold_and_override(decision: Decision, draft: Draft) -> Decision:
    if draft.hold is not None:  # ratio and signals still come from the policy
        return replace(decision, wanted=None, reason=draft.hold)
    if (override := draft.config.override) is not None:
        return replace(decision, wanted=override.counts, reason="set by hand", is_step=True, is_urgent=True)
    return decision


def sleep(draft: Draft) -> None:
    """A stage: a service without requests gets zero replicas, and wakes with the first request that waits."""
    config, decision = draft.config, draft.decision
    draft.falls_asleep = False
    # A service sleeps only as a whole, so each of its groups must be deployed with a lowest count of 0.
    if (
        config.is_frozen
        or config.override is not None
        or any(pool.limits.lowest_replicas for pool in draft.snapshot.pools)
    ):
        return
    if draft.state.is_asleep:
        draft.decision = _woken(config.ratio) if draft.snapshot.is_awaited else _ASLEEP
    elif draft.hold is None and _is_idle_for_long(draft):
        draft.falls_asleep = True
        wanted = dict.fromkeys(Role, 0.0)
        draft.decision = replace(decision, wanted=wanted, reason="no request has come for a long time")


def _is_idle_for_long(draft: Draft) -> bool:
    """Whether the service has been idle for ``idle_to_zero_s``."""
    since_s, idle_s = draft.state.idle_since_s, draft.config.idle_to_zero_s
    return idle_s is not None and since_s is not None and draft.now_s - since_s >= idle_s


def _woken(ratio: PdRatio) -> Decision:
    """One replica of the ratio's larger role at once; the guard adds those of the other role."""
    wanted = {ratio.leader: 1.0, ratio.follower: 0.0}
    return Decision(wanted=wanted, reason="requests wait for it", is_step=True, is_urgent=True)


def bring_back(draft: Draft) -> None:
    """A stage: if withdrawn replicas are missed, admit them again and remember the harmful scale-in."""
    if not draft.is_missed:
        return
    state = draft.state
    draft.state = replace(
        state,
        desired=_desired_before(draft),
        desired_before={},
        # Replicas that come back skip the gate. It would hold them if they had left for a change of the ratio.
        admitted=(*state.admitted, *state.withdrawn),
        withdrawn={},
        scaled_out_s=draft.now_s,
        settled_s=draft.now_s + draft.config.window_s,
        missed=state.missed_once_more,
    )
    draft.census = Census.of(draft.snapshot.pools, draft.state)


def _desired_before(draft: Draft) -> Mapping[PoolKey, int]:
    """The counts before the scale-in.

    If those counts are outside bounds or budget, or off the ratio: the present counts and the withdrawn replicas.
    """
    state = draft.state
    desired = {key: max(count, state.desired_before.get(key, 0)) for key, count in state.desired.items()}
    before = standard_replicas(desired, draft.snapshot.pools)
    is_inside = draft.room.holds(before) and not draft.room.is_over_budget(before, draft.census.ending)
    off_ratio = draft.ratio.deviation(before[Role.PREFILL], before[Role.DECODE])
    if is_inside and off_ratio <= draft.config.gate.band_replicas * draft.room.largest[draft.ratio.follower]:
        return desired
    withdrawn = {pool.key: count_among(pool, state.withdrawn) for pool in draft.snapshot.pools}
    return {key: count + withdrawn[key] for key, count in state.desired.items()}
