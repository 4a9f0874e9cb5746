"""The P/D ratio of a tick: the configured one, or with ``pd_ratio: auto`` the one that follows the traffic (pure).

The ratio changes at the end of an interval, by at most a stated share, inside stated limits. If limits, bounds or the
budget do not allow it any more, it changes at once. The state keeps it and the sums of the running interval, so that a
log replays from any line.
"""

import math
from dataclasses import replace

from autoscale.decide.auto_ratio import AutoRatioConfig
from autoscale.decide.draft import Draft
from autoscale.policies.observed_ratio import ratio_of_sums, with_requests
from autoscale.ratio import PdRatio
from autoscale.room import Room
from autoscale.types import FollowedRatio, RequestSums, Shown
from kvtransfer.topology import Role


def follow_ratio(draft: Draft) -> None:
    """A stage: set the ratio of this tick, from which on the configuration has it as ``pd_ratio``."""
    auto = draft.config.followed_by
    draft.ratio_change = None
    if auto is None:
        draft.state = replace(draft.state, followed=None)
        return
    followed = _with_tick(_running(draft, auto), draft, auto)
    before = followed.ratio if draft.state.followed is None else draft.state.followed.ratio
    cause = "the limits of auto_ratio allow no other"
    if draft.now_s - followed.since_s >= auto.interval_s and followed.sums.requests >= auto.least_requests:
        followed, cause = _next(followed, draft, auto)
    wanted = followed.ratio
    followed = replace(followed, ratio=possible(wanted, draft.room))
    if followed.ratio.per_decode() != wanted.per_decode():
        cause = f"the bounds and the budget of the pools do not allow {wanted.per_decode():.3g}"
    if followed.ratio.per_decode() != before.per_decode():
        draft.ratio_change = f"pd_ratio {before.per_decode():.3g} -> {followed.ratio.per_decode():.3g}: {cause}"
    draft.state = replace(draft.state, followed=followed)
    draft.config = draft.config.at_ratio(followed.ratio)


def note_ratio(draft: Draft) -> None:
    """A stage: show the ratio beside the optimal one, and say in the reason why it has changed and what has drifted."""
    followed, auto = draft.state.followed, draft.config.auto_ratio
    if followed is None or auto is None:
        return
    shown, drifts = auto.drifts(draft.state)
    if {each.name for each in shown} & {each.name for each in draft.decision.shown}:
        shown, drifts = [], []  # a policy with profiles of its own has shown them
    if followed.optimal is not None:
        shown.append(Shown(name="pd_ratio", value=followed.ratio.per_decode(), target=followed.optimal))
    reasons = [*([draft.ratio_change] if draft.ratio_change else []), draft.decision.reason, *drifts]
    draft.decision = replace(draft.decision, shown=(*draft.decision.shown, *shown), reason="; ".join(reasons))


def _running(draft: Draft, auto: AutoRatioConfig) -> FollowedRatio:
    """The ratio of the last tick, inside the present limits; at the first tick that of the start.

    An interval that begins in the future begins now: the clock was set back.
    """
    last = draft.state.followed
    if last is None:
        return FollowedRatio(ratio=auto.start_ratio(draft.config.slo.tpot_s), since_s=draft.now_s)
    ratio = auto.limited(last.ratio.per_decode())
    if last.since_s > draft.now_s:
        return replace(last, ratio=ratio, since_s=draft.now_s, sums=RequestSums())
    return replace(last, ratio=ratio)


def _with_tick(followed: FollowedRatio, draft: Draft, auto: AutoRatioConfig) -> FollowedRatio:
    """With the requests since the last tick. Traffic is that of the last window, so a longer time does not count."""
    ticked_s, now_s = draft.state.ticked_s, draft.now_s
    seconds = draft.config.interval_s if ticked_s is None else min(max(0.0, now_s - ticked_s), draft.config.window_s)
    return replace(followed, sums=with_requests(followed.sums, draft.snapshot.traffic, auto, seconds))


def _next(followed: FollowedRatio, draft: Draft, auto: AutoRatioConfig) -> tuple[FollowedRatio, str]:
    """The ratio after the interval that ends now, at the begin of the next one; and why it is this ratio."""
    best = ratio_of_sums(followed.sums, auto, draft.state, draft.config.slo.tpot_s)
    cause = (
        f"{best.prefill_per_decode:.3g} is optimal for "
        f"{followed.sums.requests:.0f} requests in {draft.now_s - followed.since_s:.0f} s, "
        f"{best.request.input_tokens:.0f} + {best.request.output_tokens:.0f} tokens, "
        f"{best.request.prefill_s:.3g} s of prefill each; decode is limited by the {best.decode_limit}"
    )
    ratio = auto.next_ratio(followed.ratio.per_decode(), best.prefill_per_decode)
    return FollowedRatio(ratio=ratio, since_s=draft.now_s, optimal=best.prefill_per_decode), cause


def possible(ratio: PdRatio, room: Room) -> PdRatio:
    """The ratio, as far as there are counts at it: the guard would hold counts that bounds or budget keep off it."""
    lowest, highest = room.lowest, {role: _highest(role, room) for role in Role}
    if not all(highest.values()):
        return ratio
    least = lowest[Role.PREFILL] / highest[Role.DECODE]
    most = highest[Role.PREFILL] / lowest[Role.DECODE] if lowest[Role.DECODE] else math.inf
    inside = min(max(ratio.per_decode(), least), most)
    return ratio if inside == ratio.per_decode() else PdRatio(inside, 1)


def _highest(role: Role, room: Room) -> float:
    """The highest count of a role for which the budget has room beside the lowest count of the other role."""
    counts = {**room.lowest, role: room.highest[role]}
    while counts[role] > room.lowest[role] and room.is_over_budget(counts):
        counts[role] = max(room.lowest[role], counts[role] - room.step[role])
    return counts[role]
