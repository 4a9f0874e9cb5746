"""The P/D ratio of a tick: the configured one, or with ``pd_ratio: auto`` the one that follows the traffic (pure).

The ratio changes at the end of an interval, by at most a stated share, inside stated limits. The state keeps it and the
sums of the running interval, so that a log replays from any line.
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
    if draft.now_s - followed.since_s >= auto.interval_s and followed.sums.requests >= auto.least_requests:
        followed = _changed(followed, draft, auto)
    followed = replace(followed, ratio=possible(followed.ratio, draft.room))
    draft.state = replace(draft.state, followed=followed)
    draft.config = draft.config.at_ratio(followed.ratio)


def note_ratio(draft: Draft) -> None:
    """A stage: show the ratio in force beside the optimal one, and say in the reason why it has changed."""
    followed = draft.state.followed
    if followed is None or followed.optimal is None:
        return
    shown = Shown(name="pd_ratio", value=followed.ratio.per_decode(), target=followed.optimal)
    reason = draft.decision.reason
    draft.decision = replace(
        draft.decision,
        shown=(*draft.decision.shown, shown),
        reason=reason if draft.ratio_change is None else f"{draft.ratio_change}; {reason}",
    )


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


def _changed(followed: FollowedRatio, draft: Draft, auto: AutoRatioConfig) -> FollowedRatio:
    """The ratio after the interval that ends now, and the begin of the next one."""
    best = ratio_of_sums(followed.sums, auto, draft.state, draft.config.slo.tpot_s)
    before, sums = followed.ratio.per_decode(), followed.sums
    ratio = auto.next_ratio(before, best.prefill_per_decode)
    if ratio.per_decode() != before:
        draft.ratio_change = (
            f"pd_ratio {before:.3g} -> {ratio.per_decode():.3g}: {best.prefill_per_decode:.3g} is optimal for "
            f"{sums.requests:.0f} requests in {draft.now_s - followed.since_s:.0f} s, "
            f"{best.request.input_tokens:.0f} + {best.request.output_tokens:.0f} tokens, "
            f"{best.request.prefill_s:.3g} s of prefill each; decode is limited by the {best.decode_limit}"
        )
    return FollowedRatio(ratio=ratio, since_s=draft.now_s, optimal=best.prefill_per_decode)


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
