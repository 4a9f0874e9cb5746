"""Limits on a decision: hysteresis, cooldown, damping, largest change per tick, bounds, budget, ratio (pure).

A leader is a replica of the ratio's larger role (decode if both are equal); a follower is a replica of the other role.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace

from autoscale.decide.draft import Draft
from autoscale.policies.policy import is_latency_settled
from autoscale.ratio import PdRatio, pd_text
from autoscale.room import Room, joint_counts
from autoscale.types import Decision, Note, NoteKind
from kvtransfer.topology import Role

# Tolerance for rounding errors of a distance from the ratio, replicas. Such errors are about 1e-16 of a count; a much
# larger value would pass counts outside band_replicas.
_EPSILON = 1e-9
# Most doublings of cooldown_in_s. 2**4 = 16 cooldowns (docs/decisions/scaling.md 54) are about half an hour at the
# default 120 s. More would delay a scale-in that would now be right; fewer would repeat a harmful one more often.
_MOST_DOUBLINGS = 4


def guard(draft: Draft) -> None:
    """A stage: turn the decision into whole replicas of both roles; a service that falls asleep has no limits."""
    draft.decision = _with_possible_ratio(draft.decision, draft.room)
    if draft.falls_asleep:
        verdict = Verdict(counts=dict.fromkeys(Role, 0))
    elif draft.config.override is not None and draft.decision.wanted is not None:
        verdict = Guard(draft).judge_override(draft.decision.wanted)
    else:
        verdict = Guard(draft).judge(draft.decision)
    draft.notes += verdict.notes
    if verdict.ratio is not None:
        draft.decision = replace(draft.decision, ratio=verdict.ratio)
    if draft.config.is_observing and verdict.counts != draft.current:
        draft.notes.append(Note(NoteKind.OBSERVING, f"only observing: would be {pd_text(verdict.counts)}"))
        verdict = Verdict(counts=draft.current)
    draft.wanted, draft.final_counts = verdict.counts, verdict.final_counts or verdict.counts


def _with_possible_ratio(decision: Decision, room: Room) -> Decision:
    """The decision with the ratio of the counts that the bounds leave, if it has a ratio of its own.

    Otherwise the bound of one role would cut the other role, which has room for all that it wants.
    """
    if decision.ratio is None or decision.wanted is None:
        return decision
    possible = {role: min(count, room.highest[role]) for role, count in decision.wanted.items()}
    return decision if possible == decision.wanted else replace(decision, ratio=PdRatio.of(possible, room.step))


def exchange(draft: Draft) -> None:
    """A stage: while a latency misses its objective no replica leaves, except in an exchange.

    In an exchange one role gives GPUs to the other. Replicas are still added, as far as the budget allows. A replica
    that starts is capacity that is coming. If it were given up, users would wait for another whole start, so only
    limits, such as a pool without room, take it away. It stays even if ``may_leave`` holds because the present TTFT is
    from the time before the last replica entered (``Draft.may_give_up``).
    """
    draft.is_exchange = not draft.may_leave and _is_exchange(draft)
    if draft.is_exchange or draft.may_give_up:
        return
    if not draft.may_leave and (counts := _one_exchanged(draft)) is not None:
        draft.is_exchange, draft.final_counts = True, counts
        # Its GPUs are free only when the replica has left.
        draft.wanted = {role: min(counts[role], draft.current[role]) for role in Role}
        draft.decision = replace(draft.decision, ratio=PdRatio.of(draft.wanted, draft.room.step))
        return
    current, census, highest = draft.current, draft.census, draft.room.highest
    counts = dict(draft.final_counts)
    for role in Role:
        running = census.running[role] - census.withdrawn[role]
        if not draft.may_leave or running < current[role] - _EPSILON:
            counts[role] = max(counts[role], min(current[role], max(running, highest[role])))
    if counts != draft.wanted:
        draft.wanted = _inside_budget(draft, counts)
        if draft.decision.ratio is not None:  # else placement would take away what is too much for the policy's ratio
            draft.decision = replace(draft.decision, ratio=PdRatio.of(draft.wanted, draft.room.step))
        text = "no replica leaves while a latency is outside its objective"
        draft.notes.append(Note(NoteKind.LATENCY_MISSED, text))


def _is_exchange(draft: Draft) -> bool:
    """Whether one role must shrink because the budget has no room for the growth of the other.

    Requests wait for the role that the policy wants to grow. If no replica of the other role left, they would wait for
    ever.
    """
    wanted, current, ending = draft.decision.wanted, draft.current, draft.census.ending
    if wanted is None:
        return False
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        is_shift_wanted = wanted[role] < current[role] and wanted[other] > current[other]
        if is_shift_wanted and draft.wanted[role] < current[role]:
            one_more = {role: current[role], other: current[other] + draft.room.step[other]}
            return current[other] < draft.room.highest[other] and draft.room.is_over_budget(one_more, ending)
    return False


def _one_exchanged(draft: Draft) -> dict[Role, float] | None:
    """The counts after one role has given GPUs of one replica to the other; ``None``: this is not to be done.

    For a policy that sizes each role by itself and wants more than the budget holds. In an overload the queue is before
    one role, so the policy may give nearly all GPUs to that role, and then the other one has the queue. Here the split
    changes by one replica: towards the counts that the guard makes of the policy's wish, or from a role that wants no
    more to one that does. It waits until all replicas run and their effect shows, and for the cooldown of a scale-in.
    """
    wanted, current, final, room = draft.decision.wanted, draft.current, draft.final_counts, draft.room
    census, since_change_s = draft.census, Guard(draft).since_change_s
    is_running = all(census.running[role] - census.withdrawn[role] >= current[role] - _EPSILON for role in Role)
    if wanted is None or draft.decision.ratio is None or not is_running or not is_latency_settled(draft.snapshot):
        return None
    if since_change_s is not None and since_change_s < draft.config.guard.cooldown_in_s:
        return None
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        is_given = final[role] < current[role] and final[other] > current[other]
        is_shift = wanted[other] > current[other] and (is_given or wanted[role] <= current[role])
        one_more = {role: current[role], other: current[other] + room.step[other]}
        if is_shift and room.is_over_budget(one_more, census.ending):
            counts = {role: current[role] - room.fewer[role], other: one_more[other]}
            return counts if room.holds(counts) else None
    return None


def _inside_budget(draft: Draft, counts: dict[Role, float]) -> dict[Role, float]:
    """The counts, without added replicas for which the budget has no room beside those that leave."""
    current, census = draft.current, draft.census

    def is_over_budget() -> bool:
        holding = {role: max(counts[role], current[role] + census.withdrawn[role]) for role in Role}
        return draft.room.is_over_budget(holding, census.ending)

    while is_over_budget():
        most_grown = max(Role, key=lambda role: counts[role] - current[role])
        if counts[most_grown] <= current[most_grown]:
            break
        counts[most_grown] = max(current[most_grown], counts[most_grown] - draft.room.step[most_grown])
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Counts of both roles that all limits of the guard allow.

    Attributes:
        counts: standard replicas of each role that should serve from this tick on.
        notes: the limits that changed the decision.
        final_counts: standard replicas of each role that should serve once leaving replicas have freed their GPUs;
            ``None``: the same as ``counts``.
        ratio: the ratio of these counts, if it is not that of the decision; ``None``: it is.
    """

    counts: Mapping[Role, float]
    notes: tuple[Note, ...] = ()
    final_counts: Mapping[Role, float] | None = None
    ratio: PdRatio | None = None


class Guard:
    """Turns the replicas that a policy wants into whole replicas that all limits allow."""

    def __init__(self, draft: Draft) -> None:
        config, state, now_s = draft.config, draft.state, draft.now_s
        self.config, self.ratio, self.room = config.guard, draft.ratio, draft.room
        self.current, self.census, self.missed = draft.current, draft.census, state.missed
        self.floor_counts = draft.floor_counts
        changes = [at_s for at_s in (state.scaled_out_s, state.scaled_in_s) if at_s is not None]
        # None: the counts have never changed.
        self.since_change_s = now_s - max(changes) if changes else None
        # While users wait too long, no wish for more replicas is too small.
        self.hysteresis_out_frac = config.guard.hysteresis_out_frac if draft.may_leave else 0.0
        # A replica was lost less than window_s ago, so rates still lack its share of the load.
        self.is_loss_fresh = state.lost_s is not None and 0 <= now_s - state.lost_s < config.window_s

    def judge(self, decision: Decision) -> Verdict:
        """The counts that follow from a policy's decision."""
        wanted = decision.leaders(self.ratio)
        if wanted is None:
            return self._unchanged()
        is_at_ratio, leader_count = self._is_at_ratio(), self.current[self.ratio.leader]
        # Hysteresis: a wish between these two counts of leaders changes their number only if it is a step.
        smallest_scale_in = leader_count * (1 - self.config.hysteresis_in_frac)
        smallest_scale_out = leader_count * (1 + self.hysteresis_out_frac)
        is_small = not decision.is_step and smallest_scale_in <= wanted <= smallest_scale_out
        objection = self._objection(decision, wanted) if wanted < leader_count and not is_small else None
        do_leaders_stay = is_small or objection is not None
        if do_leaders_stay and is_at_ratio and not self._is_follower_short(decision):
            return self._unchanged(objection)
        if objection is not None and decision.ratio is not None:
            return self._with_present_leaders(decision, objection)
        # If the number of leaders stays, the counts can still return to the ratio.
        leaders = leader_count if do_leaders_stay else wanted
        if is_at_ratio and self._counts_at_ratio(leaders, self.room.boundless()) == self.current:
            return self._unchanged()
        return self._move(decision, leaders, is_at_ratio, [] if objection is None else [objection])

    def _with_present_leaders(self, decision: Decision, objection: Note) -> Verdict:
        """The counts if leaders may not leave yet, and the policy sizes each role by itself.

        The other role gets what the policy wants. The policy's ratio is that of fewer leaders: with the present ones it
        would give more followers than anything needs.
        """
        assert decision.wanted is not None
        ratio = PdRatio.of({role: max(decision.wanted[role], self.current[role]) for role in Role}, self.room.step)
        other = copy(self)
        other.ratio = ratio
        leaders = max(decision.wanted[ratio.leader], self.current[ratio.leader])
        if other._counts_at_ratio(leaders, self.room.boundless()) == self.current:
            return self._unchanged(objection)
        return replace(other._move(decision, leaders, is_at_ratio=True, notes=[objection]), ratio=ratio)

    def judge_override(self, wanted: Mapping[Role, float]) -> Verdict:
        """The counts that follow from counts set by hand, for which only bounds and budget hold."""
        counts = self.room.clamp(wanted)
        if self.room.is_over_budget(counts):
            return self._unchanged(Note(NoteKind.BUDGET, "the counts set by hand are over the GPU budget"))
        return self._after_leaving(counts)

    def _unchanged(self, note: Note | None = None) -> Verdict:
        return Verdict(counts=self.current, notes=() if note is None else (note,))

    def _counts_at_ratio(self, leaders: float, room: Room) -> dict[Role, float] | None:
        """Counts in whole steps of both roles for a number of leaders; ``None``: the room has none at the ratio."""
        ratio, guard = self.ratio, self.config
        wanted = {ratio.leader: leaders, ratio.follower: 0.0}
        return joint_counts(wanted, ratio, room, guard.band_replicas, guard.shortfall_replicas)

    def _move(self, decision: Decision, leaders: float, is_at_ratio: bool, notes: list[Note]) -> Verdict:
        """The counts for a number of leaders, after all limits except hysteresis.

        The order of limits: damping; bounds and budget; largest change; cooldown; GPUs of leaving replicas.
        """
        is_scale_in = leaders < self.current[self.ratio.leader] and is_at_ratio
        if not decision.is_urgent:
            leaders = self._damped(leaders)
        unbounded = self._counts_at_ratio(leaders, self.room.boundless())
        counts = self._counts_at_ratio(leaders, self.room)
        if counts is None:
            text = f"no counts at the ratio {self.ratio} fit bounds, budget and room: the counts of both roles stay"
            return self._unchanged(Note(NoteKind.NO_COUNTS, text))
        if counts != unbounded:
            before = pd_text(unbounded) if unbounded else "nothing"
            notes.append(Note(NoteKind.BOUNDS, f"bounds, budget or room: {before} became {pd_text(counts)}"))
        final_counts = self._within_largest_change(counts)
        if final_counts != counts:
            if is_at_ratio:  # each role was limited alone: both follow the leaders again
                limited_leaders = final_counts[self.ratio.leader]
                final_counts = self._counts_at_ratio(limited_leaders, self.room) or dict(self.current)
            notes.append(Note(NoteKind.STEP, f"step: {pd_text(counts)} became {pd_text(final_counts)}"))
        final_counts = self._without_hasty_removal(decision, final_counts)
        if not is_scale_in:  # ``_objection`` has already checked the cooldown of a scale-in
            if removal := self._cooldown_of_removal(decision, final_counts):
                final_counts = {role: max(final_counts[role], self.current[role]) for role in Role}
                notes.append(removal)
            if final_counts == self.current:
                return Verdict(counts=self.current, notes=tuple(notes))
            if cooldown := self._cooldown(decision, self.config.cooldown_out_s):
                return self._unchanged(cooldown)
        verdict = self._after_leaving(final_counts)
        return Verdict(counts=verdict.counts, notes=(*notes, *verdict.notes), final_counts=final_counts)

    def _within_largest_change(self, counts: Mapping[Role, float]) -> dict[Role, float]:
        """The counts nearest to ``counts`` that one tick may reach, each role limited alone; a floor is in reach."""
        limited = dict[Role, float]()
        for role, count in counts.items():
            # A replica that is worth more than the step may leave too.
            lowest = self.current[role] - max(self.config.step_in_replicas, self.room.fewer[role])
            highest = max(self.current[role] + self.config.step_out_replicas, self.floor_counts[role])
            reached = min(max(count, lowest), highest)
            # A count outside the bounds returns at once, since replicas outside them have no room.
            limited[role] = min(max(reached, self.room.lowest[role]), self.room.highest[role])
        return limited

    def _without_hasty_removal(self, decision: Decision, counts: dict[Role, float]) -> dict[Role, float]:
        """The counts; while floors add replicas at once, others leave only after a cooldown or if the room requires it.

        For the cooldown, an urgent decision is no reason to remove. After it, a role off the ratio must not keep the
        nodes that a floor of the other role needs.
        """
        if not any(self.floor_counts.values()) or self.since_change_s is None:
            return counts
        cooldown_s = self._removal_cooldown_s(decision)
        stay = {role: max(count, self.current[role]) for role, count in counts.items()}
        return stay if self.since_change_s < cooldown_s and self.room.holds(stay) else counts

    def _after_leaving(self, counts: Mapping[Role, float]) -> Verdict:
        """The counts for this tick, on the way to ``counts``: in this tick leaving replicas still hold their GPUs.

        If the budget cannot hold leaving and added replicas together, no replica is added in this tick.
        """
        current, census = self.current, self.census
        counts_with_leaving = {role: max(counts[role], current[role] + census.withdrawn[role]) for role in Role}
        is_growth = any(counts[role] > current[role] for role in Role)
        if not is_growth or not self.room.is_over_budget(counts_with_leaving, census.ending):
            return Verdict(counts=counts)
        text = "budget: replicas that leave must be gone before any replica is added"
        return Verdict(
            counts={role: max(min(counts[role], current[role]), self.room.lowest[role]) for role in Role},
            notes=(Note(NoteKind.BUDGET, text),),
        )

    def _is_at_ratio(self) -> bool:
        """Whether the current counts are as near to the ratio as rounding and the room allow."""
        current = self.current
        # Rounding leaves the counts less than one replica off the ratio. So the largest deviation is just below 1, with
        # the tolerance included, or band_replicas if that is smaller. A large replica is more than a standard one, and
        # a large leader may be more than what was missing.
        follower, leader, room = self.ratio.follower, self.ratio.leader, self.room
        beyond_step = (room.largest[leader] - room.step[leader]) * self.ratio.follower_share
        most_replicas = min(1.0 - 2 * _EPSILON, self.config.band_replicas)
        most_deviation = most_replicas * room.largest[follower] + _EPSILON + beyond_step
        deviation = self.ratio.deviation(current[Role.PREFILL], current[Role.DECODE])
        if self.room.holds(current) and deviation <= most_deviation:
            return True
        return self._counts_at_ratio(current[self.ratio.leader], self.room) == current

    def _objection(self, decision: Decision, leaders: float) -> Note | None:
        """The reason against a scale-in to this number of leaders, if any."""
        if self.is_loss_fresh and not decision.is_step:
            text = "a replica was lost: the signals of the other replicas do not show all of the load"
            return Note(NoteKind.REPLICA_LOST, text)
        factor = self._cooldown_factor(leaders)
        why = " after scale-ins after which a latency missed its objective" if factor > 1.0 else ""
        return self._cooldown(decision, self.config.cooldown_in_s * factor, why)

    def _cooldown_of_removal(self, decision: Decision, counts: Mapping[Role, float]) -> Note | None:
        """The cooldown against the removals of a return to the ratio, if it still runs.

        They wait as long as a scale-in does. Replicas outside bounds and budget must not wait.
        """
        is_removal = any(counts[role] < self.current[role] for role in Role)
        if not is_removal or not self.room.holds(self.current):
            return None
        return self._cooldown(decision, self._removal_cooldown_s(decision))

    def _removal_cooldown_s(self, decision: Decision) -> float:
        """Time since the last change of counts after which a replica may leave without a scale-in, seconds."""
        return self.config.cooldown_in_s * self._cooldown_factor(decision.leaders(self.ratio))

    def _cooldown(self, decision: Decision, cooldown_s: float, why: str = "") -> Note | None:
        """A note if a cooldown still runs; an urgent decision skips it."""
        if decision.is_urgent or self.since_change_s is None:
            return None
        left_s = cooldown_s - self.since_change_s
        return Note(NoteKind.COOLDOWN, f"cooldown: {left_s:.1f} s left{why}") if left_s > 0.0 else None

    def _cooldown_factor(self, leaders: float | None) -> float:
        """Number of cooldowns to wait before a removal; ``leaders``: the number that the policy wants.

        It is 1, and doubles with each scale-in in a row after which a latency missed its objective. It is 1 again once
        the policy wants another number of leaders than at these scale-ins, with a difference above hysteresis.
        """
        if leaders is None or self.missed is None:
            return 1.0
        missed_leaders, scale_ins = self.missed
        if abs(leaders - missed_leaders) > missed_leaders * self.config.hysteresis_in_frac:
            return 1.0
        return 2.0 ** min(scale_ins, _MOST_DOUBLINGS)

    def _is_follower_short(self, decision: Decision) -> bool:
        """Whether a policy that sizes each role by itself wants more followers, by more than hysteresis ignores.

        Such a policy gives its own ratio. At the configured ratio only rounding makes followers short, by less than
        one.
        """
        follower = self.ratio.follower
        if decision.ratio is None or decision.wanted is None:
            return False
        wanted = decision.wanted[follower] - self.config.shortfall_replicas * self.room.step[follower]
        return self.room.whole(follower, wanted) > self.current[follower] * (1 + self.hysteresis_out_frac)

    def _damped(self, leaders: float) -> float:
        """The number of leaders after one plan, which goes only a part of the way to ``leaders``."""
        leader_count, config = self.current[self.ratio.leader], self.config
        if leaders >= leader_count:
            return leader_count + config.damping_out_frac * (leaders - leader_count)
        # A scale-in by a whole leader or more removes at least one; rounding up would keep the surplus for ever.
        fewer = self.room.fewer[self.ratio.leader]
        most = leader_count - fewer if self.room.whole(self.ratio.leader, leaders) < leader_count else leader_count
        return min(most, leader_count + config.damping_in_frac * (leaders - leader_count))
