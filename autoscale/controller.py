"""Controller.tick: decide, guard, place, gate; the only place where their order is written (pure)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoscale.config import AutoscaleConfig
from autoscale.gate import admit, choose_victims
from autoscale.guard import Verdict, after_leaving, guard
from autoscale.headcount import (
    among,
    count_among,
    desired_replicas,
    ending_replicas,
    running_replicas,
    withdrawn_replicas,
)
from autoscale.placement import Placed, held_gpus
from autoscale.policies import POLICIES
from autoscale.ratio import PdRatio, Room, pd_text
from autoscale.reconciliation import is_after_a_gap, reconciled
from autoscale.sleep import NOBODY, asleep, can_sleep, is_asleep, woken
from autoscale.slots import Slots
from autoscale.types import ControllerState, Decision, Latency, Plan, PoolKey, PoolStats, Snapshot
from autoscale.warm import asked, place_both, with_warm
from kvtransfer.topology import Role, Topology


class Controller:
    """The control plane of one application: the same for a live cluster, a replayed log and a simulation.

    It keeps nothing between two ticks; what it must remember is in the snapshot's state, and goes on in the plan's.
    """

    def __init__(self, config: AutoscaleConfig) -> None:
        self.config = config
        self._policy = POLICIES[config.policy.kind](config.policy, ratio=config.pd_ratio, slo=config.slo)

    def tick(self, snapshot: Snapshot, slots: Slots | None = None) -> Plan:
        """The plan of one instant.

        Args:
            snapshot: what is known.
            slots: of the snapshot's nodes, where they are there already; what is placed is taken from them.
        """
        if snapshot.is_recovering:
            return _unchanged(snapshot, "Serve's controller is recovering its replicas")
        if slots is None and snapshot.nodes is not None:
            slots = Slots(Topology(snapshot.nodes))
        was_withdrawn = snapshot.state.withdrawn
        hold = self._reason_to_hold(snapshot)
        snapshot = replace(snapshot, state=reconciled(snapshot, self.config))
        # Nobody leaves while users wait too long, unless people have set counts or limits.
        may_leave = (
            self.config.override is not None
            or bool(snapshot.state.yielding)
            or self.config.slo.is_met(self._latency_now(snapshot))
            or self._is_beyond_limits(snapshot)
        )
        are_missed = bool(snapshot.state.withdrawn) and not may_leave
        if are_missed:
            hold = "a latency is outside its objective: who was withdrawn comes back"
        decision = self._decide(snapshot, hold)
        if can_sleep(snapshot) and is_asleep(snapshot) and not self.is_frozen and self.config.override is None:
            decision = woken(self.config.pd_ratio) if snapshot.is_awaited else asleep()
        if decision.memory is not None:
            snapshot = replace(snapshot, state=replace(snapshot.state, memory=decision.memory))
        ratio = decision.ratio or self.config.pd_ratio
        limited = self.limited(snapshot.pools, snapshot.state)
        room = self._room(limited)
        if are_missed:
            snapshot = replace(snapshot, state=self._all_back(snapshot, room, ratio))
        state = snapshot.state
        overdue = self._overdue(state, snapshot.now_s)
        stuck = _stuck(limited, state, overdue)
        current = desired_replicas(state.desired)
        # What is stuck is had elsewhere, and would be again in every cycle.
        current = {role: max(count - stuck[role], min(count, room.lowest[role])) for role, count in current.items()}
        goes_to_sleep = hold is None and self._may_sleep(snapshot)
        if goes_to_sleep:
            decision = replace(decision, wanted=dict.fromkeys(Role, 0.0), reason="nobody has asked for long")
        verdict = (
            Verdict(counts=NOBODY, held_back=())
            if goes_to_sleep
            else self._verdict(decision, current, room, snapshot, ratio)
        )
        is_exchange = not may_leave and _is_exchange(decision, verdict, current, room, ending_replicas(snapshot))
        if not may_leave and not is_exchange:
            verdict = _nobody_leaves(verdict, current, snapshot, room)
        placed = Placed(counts=state.desired)
        is_beyond = any(state.desired[pool.key] > pool.highest_replicas for pool in limited)
        kept_ratio = PdRatio.of(verdict.counts) if self._is_off_ratio_by_hand(ratio) else ratio
        warm = self.config.warm_replicas if snapshot.warm_replicas is None else snapshot.warm_replicas
        both = with_warm(
            verdict.counts, 0 if verdict.counts == NOBODY else warm, kept_ratio, room, ending_replicas(snapshot)
        )
        is_other = overdue or is_beyond or both != desired_replicas(asked(state))
        if verdict.counts != current or (is_other and not self.is_frozen):
            found = place_both(
                verdict.counts,
                both,
                state,
                limited,
                kept_ratio,
                slots=slots,
                limits=(dict(snapshot.gpus_left), self.quota_left(snapshot)),
                overdue=overdue,
                spare_followers=_spare_followers(both, kept_ratio, room, snapshot),
            )
            placed, state = found.placed, replace(state, warm=found.warm)
            verdict = _with_woken(verdict, placed, kept_ratio, stuck)
        desired = placed.counts
        if desired != state.desired:
            grows = sum(desired.values()) >= sum(state.desired.values())
            falls = any(count < state.desired[key] for key, count in desired.items())
            state = replace(
                state,
                desired=desired,
                desired_before=(state.desired_before or state.desired) if falls else state.desired_before,
                tried=decision.leaders(ratio) if falls else state.tried,
                scaled_out_s=snapshot.now_s if grows else state.scaled_out_s,
                scaled_in_s=state.scaled_in_s if grows else snapshot.now_s,
            )
        return self._gated(
            replace(snapshot, state=state),
            was_withdrawn,
            decision,
            verdict.held_back,
            ratio,
            placed,
            slots,
            may_leave=may_leave or is_exchange,
            leave_at_once=is_exchange or goes_to_sleep,
            is_proven=hold is None and may_leave,
        )

    def _is_beyond_limits(self, snapshot: Snapshot) -> bool:
        """Whether more replicas run than bounds or budget allow, as after a tuning, without those that already go."""
        room = self._room(self.bounded(snapshot.pools))
        counts = running_replicas(snapshot, without=set(snapshot.state.victims))
        return room.is_over_budget(counts) or any(counts[role] > room.highest[role] for role in Role)

    def _room(self, pools: Sequence[PoolStats]) -> Room:
        limits = ((p.key.role, p.lowest_replicas, p.highest_replicas, p.gpus_per_replica) for p in pools)
        room = Room.of(limits, self.config.guard.budget_gpus)
        # No policy takes the last one: sleep is decided elsewhere.
        return replace(
            room, lowest={role: max(min(1, room.highest[role]), count) for role, count in room.lowest.items()}
        )

    def _may_sleep(self, snapshot: Snapshot) -> bool:
        """Whether the last replicas may go."""
        since_s, idle_s = snapshot.state.idle_since_s, self.config.idle_to_zero_s
        if idle_s is None or since_s is None or self.is_frozen or self.config.override is not None:
            return False
        return can_sleep(snapshot) and not is_asleep(snapshot) and snapshot.now_s - since_s >= idle_s

    def _all_back(self, snapshot: Snapshot, room: Room, ratio: PdRatio) -> ControllerState:
        """The state as if nobody had left since before those under observation were withdrawn.

        Where that has no room any more, or was off the ratio, just as if those had not been.
        """
        state, ending = snapshot.state, ending_replicas(snapshot)
        desired = {key: max(count, state.desired_before.get(key, 0)) for key, count in state.desired.items()}
        before = desired_replicas(desired)
        is_inside = room.holds(before) and not room.is_over_budget({role: before[role] + ending[role] for role in Role})
        if not is_inside or ratio.deviation(before[Role.PREFILL], before[Role.DECODE]) > self.config.gate.band_replicas:
            away = {pool.key: count_among(pool, state.withdrawn) for pool in snapshot.pools}
            desired = {key: count + away[key] for key, count in state.desired.items()}
        missed = state.missed
        if state.tried is not None:
            missed = (state.tried, 1 if missed is None else missed[1] + 1)
        return replace(
            state,
            desired=desired,
            desired_before={},
            # They have served, so the gate has nothing to say; it would hold those who leave for another ratio.
            admitted=(*state.admitted, *state.withdrawn),
            withdrawn={},
            scaled_out_s=snapshot.now_s,
            settled_s=snapshot.now_s + self.config.window_s,
            missed=missed,
        )

    def _is_off_ratio_by_hand(self, ratio: PdRatio) -> bool:
        """Whether a person has set counts that the gate would never let in as they are."""
        override, band = self.config.override, self.config.gate.band_replicas
        return override is not None and ratio.deviation(override.prefill, override.decode) > band

    def _reason_to_hold(self, snapshot: Snapshot) -> str | None:
        if self.config.is_paused:
            return "paused by hand"
        if is_after_a_gap(snapshot, self.config):
            gap_s = snapshot.now_s - (snapshot.state.ticked_s or 0.0)
            return f"the last tick was {gap_s:.1f} s ago: the clock jumped, or nobody ticked"
        if self.config.override is not None:
            return None  # counts set by hand need no signal
        oldest_s = snapshot.now_s - self.config.stale_s
        overdue = self._overdue(snapshot.state, snapshot.now_s)
        for role in Role:
            awake = (pool for pool in snapshot.pools if pool.target_replicas and pool.key not in overdue)
            pools = [pool for pool in awake if pool.key.role is role]
            if pools and not any(pool.replicas for pool in pools):
                groups = " or ".join(pool.key.group for pool in pools)
                return f"no {role} replica of group {groups} is running"
        for pool in snapshot.pools:
            for replica in pool.replicas:
                if replica.observed_s < oldest_s:
                    age_s = snapshot.now_s - replica.observed_s
                    return f"replica {replica.replica_id} of {pool.key} has been silent for {age_s:.1f} s"
        return None

    def bounded(self, pools: Sequence[PoolStats]) -> list[PoolStats]:
        """Pools inside the configured bounds."""
        return [self._bounded(pool) for pool in pools]

    def limited(self, pools: Sequence[PoolStats], state: ControllerState) -> list[PoolStats]:
        """Pools inside the configured bounds, and for a while inside what has found room or is not claimed."""
        return [self._limited(pool, state) for pool in pools]

    def kept_ratio(self, decision: Decision) -> PdRatio:
        """The ratio that groups keep: a policy's, the configured one, or that of counts set by hand."""
        ratio, override = decision.ratio or self.config.pd_ratio, self.config.override
        if override is None or not self._is_off_ratio_by_hand(ratio):
            return ratio
        return PdRatio.of({Role.PREFILL: override.prefill, Role.DECODE: override.decode})

    def _bounded(self, pool: PoolStats) -> PoolStats:
        if pool.key.role not in self.config.bounds:
            return pool
        lowest, highest = self.config.bounds_of(pool.key.role, pool.lowest_replicas, pool.highest_replicas)
        return replace(
            pool,
            lowest_replicas=max(pool.lowest_replicas, lowest),
            highest_replicas=min(pool.highest_replicas, highest),
        )

    def _limited(self, pool: PoolStats, state: ControllerState) -> PoolStats:
        pool = self._bounded(pool)
        for most in (state.capped.get(pool.key), state.yielding.get(pool.key)):
            if most is not None:
                highest = min(pool.highest_replicas, max(most[1], pool.lowest_replicas))
                pool = replace(pool, highest_replicas=highest)
        return pool

    def _overdue(self, state: ControllerState, now_s: float) -> frozenset[PoolKey]:
        """Pools of which replicas have been on no node for so long that others may have them."""
        waiting = state.unplaced_since_s.items()
        return frozenset(key for key, (since_s, _) in waiting if now_s - since_s > self.config.no_node_s)

    @property
    def is_frozen(self) -> bool:
        """Whether it changes no count, whatever is asked of it."""
        return self.config.is_paused or self.config.is_observing

    def quota_left(self, snapshot: Snapshot) -> dict[str, float]:
        """GPUs by type that the service may still add."""
        held = held_gpus(snapshot.pools, asked(snapshot.state))
        return {kind: quota - held.get(kind, 0.0) for kind, quota in self.config.quota_gpus.items()}

    def _decide(self, snapshot: Snapshot, hold: str | None) -> Decision:
        decision = self._policy.decide(snapshot)
        if self.config.pd_ratio.is_aggregated:  # there is no pair of counts that could be at another
            wanted = None if decision.wanted is None else {**decision.wanted, Role.PREFILL: 0.0}
            decision = replace(decision, wanted=wanted, ratio=None)
        if hold is not None:  # its ratio is kept, and its signal is shown, all the same
            return replace(decision, wanted=None, reason=hold)
        if (override := self.config.override) is not None:
            by_hand = {Role.PREFILL: float(override.prefill), Role.DECODE: float(override.decode)}
            return replace(decision, wanted=by_hand, reason="set by hand", is_step=True, is_urgent=True)
        if decision.wanted is not None and not all(0 <= count < math.inf for count in decision.wanted.values()):
            reason = f"the policy wants {dict(decision.wanted)}, which are no counts"
            return replace(decision, wanted=None, reason=reason)
        return decision

    def _latency_now(self, snapshot: Snapshot) -> Latency:
        """Without a TTFT of requests that were sent before the last replica entered: it says nothing of who serves now.

        After an overload they may wait for minutes in queues of the replicas that were there then.
        """
        settled_s, waited_s = snapshot.state.settled_s, snapshot.latency.ttft_s
        if settled_s is None or waited_s is None or waited_s <= snapshot.now_s - (settled_s - self.config.window_s):
            return snapshot.latency
        return replace(snapshot.latency, ttft_s=None)

    def _verdict(
        self,
        decision: Decision,
        current: Mapping[Role, int],
        room: Room,
        snapshot: Snapshot,
        ratio: PdRatio,
    ) -> Verdict:
        if self.config.override is not None and decision.wanted is not None:
            by_hand = room.clamp(decision.wanted)
            if room.is_over_budget(by_hand):
                verdict = Verdict(counts=current, held_back=("the counts set by hand are over the GPU budget",))
            else:
                verdict = after_leaving(by_hand, current, withdrawn_replicas(snapshot), ending_replicas(snapshot), room)
        else:
            state = snapshot.state
            changes = [at for at in (state.scaled_out_s, state.scaled_in_s) if at is not None]
            verdict = guard(
                decision,
                current,
                ratio=ratio,
                room=room,
                config=self.config.guard,
                since_change_s=snapshot.now_s - max(changes) if changes else None,
                is_loss_fresh=state.lost_s is not None and 0 <= snapshot.now_s - state.lost_s < self.config.window_s,
                missed=state.missed,
                withdrawn=withdrawn_replicas(snapshot),
                ending=ending_replicas(snapshot),
            )
        if self.config.is_observing and verdict.counts != current:
            would = f"only observing: would be {pd_text(verdict.counts)}"
            return Verdict(counts=current, held_back=(*verdict.held_back, would))
        return verdict

    def _gated(
        self,
        snapshot: Snapshot,
        was_withdrawn: Mapping[str, float],
        decision: Decision,
        held_back: tuple[str, ...],
        ratio: PdRatio,
        placed: Placed,
        slots: Slots | None,
        *,
        may_leave: bool,
        leave_at_once: bool,
        is_proven: bool,
    ) -> Plan:
        """Who serves, who waits at the door, who leaves.

        ``leave_at_once``: without observation. ``is_proven``: nobody misses those withdrawn by then.
        """
        state, now_s, gate = snapshot.state, snapshot.now_s, self.config.gate
        withdrawn, victims = dict(state.withdrawn), set(state.victims)
        before = frozenset(state.admitted)
        proven_s = now_s - gate.observation_s if is_proven else -math.inf
        is_missed_no_more = False
        ready: dict[str, dict[Role, list[str]]] = {
            pool.key.group: {Role.PREFILL: [], Role.DECODE: []} for pool in snapshot.pools
        }
        counts: dict[PoolKey, int] = {}
        held: list[str] = []
        for pool in snapshot.pools:
            wanted, warm = state.desired[pool.key], state.warm.get(pool.key, 0)
            names = [replica.replica_id for replica in pool.replicas]
            away = among(names, withdrawn)
            surplus = len(names) - len(away) - len(among(names, victims)) - wanted - warm
            if surplus < 0:
                away.sort(key=withdrawn.__getitem__)  # who left last comes back first
                for name in away[max(0, len(away) + surplus) :]:
                    del withdrawn[name]
            elif surplus > 0 and not self.config.is_observing and may_leave:
                serving = [r for r in pool.replicas if r.replica_id not in withdrawn and r.replica_id not in victims]
                for name in choose_victims(serving, before, surplus, _scarcity(pool, slots), snapshot.claimed):
                    if name in before and not leave_at_once:
                        withdrawn[name] = now_s
                    else:  # who has never served is missed by nobody
                        victims.add(name)
            for name in away:
                if withdrawn.get(name, math.inf) <= proven_s:
                    del withdrawn[name]
                    victims.add(name)
                    is_missed_no_more = True
            stays = [name for name in names if name not in withdrawn and name not in victims]
            serve_counts = max(wanted + warm, len(stays)) + len(among(names, withdrawn))
            counts[pool.key] = wanted if self.config.is_observing else serve_counts
            if warm and len(stays) > wanted:
                staying = [replica for replica in pool.replicas if replica.replica_id in stays]
                unlisted = choose_victims(staying, before, len(stays) - wanted, _scarcity(pool, slots))
                held += unlisted
                stays = [name for name in stays if name not in unlisted]
            ready[pool.key.group][pool.key.role] = stays
        is_gated = gate.is_enabled and not self.config.is_observing and not self._is_off_ratio_by_hand(ratio)
        admitted: list[str] = []
        for group in ready.values():
            names = [*group[Role.PREFILL], *group[Role.DECODE]]
            enter = admit(group, before, ratio=ratio, band_replicas=gate.band_replicas) if is_gated else names
            admitted += enter
            if len(enter) < len(names):
                held += [name for name in names if name not in enter]
        serving_now = frozenset(admitted)
        state = replace(
            state,
            ticked_s=now_s,
            admitted=tuple(admitted),
            held=tuple(held),
            settled_s=now_s + self.config.window_s if serving_now - before else state.settled_s,
            withdrawn=withdrawn,
            victims=tuple(sorted(victims)),
            desired_before=state.desired_before if withdrawn else {},
            missed=None if is_missed_no_more and not withdrawn else state.missed,
        )
        return Plan(
            counts=counts,
            admitted=state.admitted,
            withdrawn=tuple(withdrawn),
            reinstated=tuple(name for name in was_withdrawn if name in serving_now),
            victims=state.victims,
            decision=decision,
            held_back=held_back,
            state=state,
            pending=placed.pending if any(placed.pending.values()) else {},
            passed_over=placed.passed_over,
            nodes=placed.nodes,
        )


def _is_exchange(
    decision: Decision,
    verdict: Verdict,
    current: Mapping[Role, int],
    room: Room,
    ending: Mapping[Role, int],
) -> bool:
    """Whether one role is to leave for the other, for which the budget has no room otherwise.

    While users wait too long nobody leaves, since nobody knows who they wait for; but the policy says so here, and to
    keep both as they are would let them wait for ever.
    """
    if decision.wanted is None:
        return False
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        one_more = {role: current[role] + ending[role], other: current[other] + ending[other] + 1}
        is_wanted = decision.wanted[role] < current[role] and decision.wanted[other] > current[other]
        if is_wanted and verdict.counts[role] < current[role]:
            return current[other] < room.highest[other] and room.is_over_budget(one_more)
    return False


def _scarcity(pool: PoolStats, slots: Slots | None) -> dict[str, int]:
    """Of each replica, how scarce the scarcest of its nodes is."""
    if slots is None:
        return {}
    topology = slots.topology
    return {
        replica: int(topology.priority(sum(1 << topology.index[name] for name in nodes if name in topology.index)))
        for replica, nodes in pool.on.items()
    }


def _spare_followers(counts: Mapping[Role, int], ratio: PdRatio, room: Room, snapshot: Snapshot) -> int:
    """How many followers more bounds and budget allow, one for each group but the first."""
    most, ending = len({pool.key.group for pool in snapshot.pools}) - 1, ending_replicas(snapshot)
    for more in range(most, 0, -1):
        with_more = {**counts, ratio.follower: counts[ratio.follower] + more}
        is_inside = with_more[ratio.follower] <= room.highest[ratio.follower]
        if is_inside and not room.is_over_budget({role: with_more[role] + ending[role] for role in Role}):
            return more
    return 0


def _stuck(pools: Sequence[PoolStats], state: ControllerState, overdue: frozenset[PoolKey]) -> dict[Role, int]:
    """Replicas of each role that lowest counts keep asking for, and that have been on no node for too long."""
    found = dict.fromkeys(Role, 0)
    for pool in pools:
        if pool.key in overdue and pool.held_replicas is not None:
            found[pool.key.role] += max(
                0, min(pool.lowest_replicas, asked(state).get(pool.key, 0)) - pool.held_replicas
            )
    return found


def _with_woken(verdict: Verdict, placed: Placed, ratio: PdRatio, stuck: Mapping[Role, int]) -> Verdict:
    """The verdict as it was placed, where groups that woke have a follower more each."""
    there = {role: count - stuck[role] for role, count in desired_replicas(placed.counts).items()}
    more = there[ratio.follower] - verdict.counts[ratio.follower]
    if more <= 0 or there[ratio.leader] < verdict.counts[ratio.leader]:
        return verdict
    counts = {**verdict.counts, ratio.follower: there[ratio.follower]}
    note = (
        f"each group that serves has one {ratio.follower} replica: {pd_text(verdict.counts)} became {pd_text(counts)}"
    )
    return replace(verdict, counts=counts, held_back=(*verdict.held_back, note))


def _nobody_leaves(verdict: Verdict, current: Mapping[Role, int], snapshot: Snapshot, room: Room) -> Verdict:
    """The verdict while users wait too long: who runs stays, and what was to be added is, where there is room."""
    staying = running_replicas(snapshot, without={*snapshot.state.withdrawn, *snapshot.state.victims})
    aimed = verdict.aimed or verdict.counts
    counts = {role: max(aimed[role], min(current[role], staying[role])) for role in Role}
    if counts == verdict.counts:
        return verdict
    ending = ending_replicas(snapshot)
    while room.is_over_budget({role: counts[role] + ending[role] for role in Role}):
        grown = max(Role, key=lambda role: counts[role] - current[role])
        if counts[grown] <= current[grown]:
            counts = dict(current)
            break
        counts[grown] -= 1
    return Verdict(
        counts=counts, held_back=(*verdict.held_back, "nobody leaves while a latency is outside its objective")
    )


def _unchanged(snapshot: Snapshot, reason: str) -> Plan:
    # Nobody has watched meanwhile: what is timed starts anew.
    withdrawn = dict.fromkeys(snapshot.state.withdrawn, snapshot.now_s)
    state = replace(snapshot.state, withdrawn=withdrawn, missing_since_s={}, unplaced_since_s={})
    return Plan(
        counts={pool.key: pool.target_replicas for pool in snapshot.pools},
        admitted=state.admitted,
        withdrawn=tuple(state.withdrawn),
        reinstated=(),
        victims=state.victims,
        decision=Decision(wanted=None, reason=reason),
        held_back=(),
        state=replace(state, ticked_s=snapshot.now_s),
    )
