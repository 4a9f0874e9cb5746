"""Everything that softens or vetoes a decision: hysteresis, cooldown, damping, step, bounds, budget, ratio (pure)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from autoscale.ratio import BOUNDLESS, PdRatio, Room, joint_counts, pd_text
from autoscale.types import Decision
from kvtransfer.topology import Role

_EPSILON = 1e-9
# Of the cooldown after scale-ins that users have missed: half an hour by default.
_MOST_DOUBLINGS = 4


class GuardConfig(BaseModel):
    """Limits on how the counts may move (HeteroScale section 3.6)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    cooldown_out_s: float = Field(15.0, ge=0.0, description="Least time from any change to the next scale-out.")
    cooldown_in_s: float = Field(
        120.0,
        ge=0.0,
        description="Least time from any change to the next scale-in; twice that, up to 16 times, after one that users "
        "missed.",
    )
    hysteresis_out_frac: float = Field(
        0.05, ge=0.0, le=10.0, description="Scale out only beyond this share above the present count (theta_out)."
    )
    hysteresis_in_frac: float = Field(
        0.1, ge=0.0, lt=1.0, description="Scale in only beyond this share below the present count (theta_in)."
    )
    damping_out_frac: float = Field(1.0, gt=0.0, le=1.0, description="Share of a wanted growth that one plan takes.")
    damping_in_frac: float = Field(0.5, gt=0.0, le=1.0, description="Share of a wanted shrinkage that one plan takes.")
    step_out_replicas: int = Field(
        8, ge=1, description="Most replicas that one plan adds to the larger role; off the ratio, to each."
    )
    step_in_replicas: int = Field(
        2, ge=1, description="Most replicas that one plan takes from the larger role; off the ratio, from each."
    )
    budget_gpus: int | None = Field(None, ge=1, description="GPUs that both roles together may hold.")
    band_replicas: float = Field(
        1.0, ge=0.5, le=16.0, description="How far from the ratio counts may be, replicas of the smaller role."
    )
    shortfall_replicas: float = Field(
        0.0,
        ge=0.0,
        le=0.5,
        description="How far below the ratio rounding may leave the smaller role: 0 rounds it up, 0.5 to the nearest.",
    )

    def joint_counts(self, leaders: float, ratio: PdRatio, room: Room) -> dict[Role, int] | None:
        """So many replicas of the larger role, whole and with those of the other, inside a room."""
        return joint_counts(
            {ratio.leader: leaders, ratio.follower: 0.0},
            ratio,
            room,
            band_replicas=self.band_replicas,
            shortfall_replicas=self.shortfall_replicas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Counts of both roles after the guard, and what it held back and why.

    ``aimed``: those that are aimed at, once who leaves has gone; ``None`` where they are the counts.
    """

    counts: Mapping[Role, int]
    held_back: tuple[str, ...]
    aimed: Mapping[Role, int] | None = None


def guard(
    decision: Decision,
    current: Mapping[Role, int],
    *,
    ratio: PdRatio,
    room: Room,
    config: GuardConfig,
    since_change_s: float | None,
    is_loss_fresh: bool,
    missed: tuple[float, int] | None,
    withdrawn: Mapping[Role, int],
    ending: Mapping[Role, int],
) -> Verdict:
    """Turn what a policy wants into whole replicas that may be acted on.

    Args:
        decision: the policy's.
        current: replicas of each role that should serve now.
        ratio: the P/D ratio to keep.
        room: bounds and budget.
        config: the limits.
        since_change_s: time since the counts last changed; ``None`` where they never did.
        is_loss_fresh: whether a replica has died inside the window that rates are taken over.
        missed: how many leaders scale-ins were asked for that users have missed, and how many in a row.
        withdrawn: replicas of each role under observation, which a growth brings back first.
        ending: replicas of each role that were told to stop and still hold their GPUs.
    """
    leader, asked = ratio.leader, decision.leaders(ratio)
    if asked is None:
        return Verdict(counts=current, held_back=())
    now, notes = current[leader], list[str]()
    is_sound = _is_sound(current, ratio, room, config)
    is_short = _is_follower_short(decision, ratio, current, config)
    if not decision.is_step and not _is_beyond_hysteresis(asked, now, config):
        if is_sound and not is_short:
            return Verdict(counts=current, held_back=())
        asked = now
    if asked < now and (objection := _why_stay(decision, asked, config, since_change_s, is_loss_fresh, missed)):
        if is_sound and not is_short:
            return Verdict(counts=current, held_back=(objection,))
        notes.append(objection)
        asked = now  # to the ratio with as many leaders
    free = config.joint_counts(asked, ratio, BOUNDLESS)
    if is_sound and free == current:
        return Verdict(counts=current, held_back=())
    is_in = asked < now and is_sound
    if not decision.is_urgent:
        asked = _damped(asked, now, config)
        free = config.joint_counts(asked, ratio, BOUNDLESS)
    counts = config.joint_counts(asked, ratio, room)
    if counts is None:
        return Verdict(
            counts=current, held_back=(f"bounds, budget and room hold no counts at the ratio {ratio}: both stay",)
        )
    if counts != free:
        notes.append(f"bounds, budget or room: {pd_text(free) if free else 'nothing'} became {pd_text(counts)}")
    stepped = {
        role: min(max(counts[role], current[role] - config.step_in_replicas), current[role] + config.step_out_replicas)
        for role in Role
    }
    # Bounds are not approached step by step: what lies beyond them has no place to be.
    stepped = {role: min(max(stepped[role], room.lowest[role]), room.highest[role]) for role in Role}
    if stepped != counts:
        if is_sound:
            stepped = config.joint_counts(stepped[leader], ratio, room) or dict(current)
        notes.append(f"step: {pd_text(counts)} became {pd_text(stepped)}")
    if not is_in:
        # A return to the ratio may take replicas away too; beyond bounds and budget they go all the same.
        falls = any(stepped[role] < current[role] for role in Role) and room.holds(current)
        cooldown_s = config.cooldown_out_s * (_patience(decision.leaders(ratio), missed, config) if falls else 1.0)
        if (left_s := _cooldown_left_s(decision, cooldown_s, since_change_s)) > 0.0:
            return Verdict(counts=current, held_back=(f"cooldown: {left_s:.1f} s left",))
    verdict = after_leaving(stepped, current, withdrawn, ending, room)
    return Verdict(counts=verdict.counts, held_back=(*notes, *verdict.held_back), aimed=stepped)


def after_leaving(
    counts: Mapping[Role, int],
    current: Mapping[Role, int],
    withdrawn: Mapping[Role, int],
    ending: Mapping[Role, int],
    room: Room,
) -> Verdict:
    """Counts that may be acted on while others still hold their GPUs: nothing is added that the budget lacks."""
    held = {role: max(counts[role], current[role] + withdrawn[role]) + ending[role] for role in Role}
    if not any(counts[role] > current[role] for role in Role) or not room.is_over_budget(held):
        return Verdict(counts=counts, held_back=())
    return Verdict(
        counts={role: max(min(counts[role], current[role]), room.lowest[role]) for role in Role},
        held_back=("budget: what leaves must be gone before anything is added",),
    )


def _is_sound(current: Mapping[Role, int], ratio: PdRatio, room: Room, config: GuardConfig) -> bool:
    """Whether counts are as near to the ratio as rounding leaves them, or as the room lets them be."""
    # Less than a whole replica off is what rounding leaves; the band may be narrower.
    most = min(1.0 - 2 * _EPSILON, config.band_replicas) + _EPSILON
    if room.holds(current) and ratio.deviation(current[Role.PREFILL], current[Role.DECODE]) <= most:
        return True
    return config.joint_counts(current[ratio.leader], ratio, room) == current


def _why_stay(
    decision: Decision,
    asked: float,
    config: GuardConfig,
    since_change_s: float | None,
    is_loss_fresh: bool,
    missed: tuple[float, int] | None,
) -> str | None:
    """What speaks against a scale-in."""
    if is_loss_fresh and not decision.is_step:
        return "a replica was lost: what the others show is not all of the load"
    patience = _patience(asked, missed, config)
    left_s = _cooldown_left_s(decision, config.cooldown_in_s * patience, since_change_s)
    why = " after scale-ins that users missed" if patience > 1.0 else ""
    return f"cooldown: {left_s:.1f} s left{why}" if left_s > 0.0 else None


def _patience(asked: float | None, missed: tuple[float, int] | None, config: GuardConfig) -> float:
    """How many cooldowns: what users have just missed they would miss again while about as much is asked for."""
    if asked is None or missed is None or abs(asked - missed[0]) > missed[0] * config.hysteresis_in_frac:
        return 1.0
    return 2.0 ** min(missed[1], _MOST_DOUBLINGS)


def _cooldown_left_s(decision: Decision, cooldown_s: float, since_change_s: float | None) -> float:
    return 0.0 if decision.is_urgent or since_change_s is None else cooldown_s - since_change_s


def _is_beyond_hysteresis(asked: float, now: int, config: GuardConfig) -> bool:
    return not now * (1 - config.hysteresis_in_frac) <= asked <= now * (1 + config.hysteresis_out_frac)


def _is_follower_short(decision: Decision, ratio: PdRatio, current: Mapping[Role, int], config: GuardConfig) -> bool:
    """Whether the smaller role has fewer than a policy wants that sizes it by itself, and not by a ratio that it keeps.

    Less than a whole replica is what rounding leaves beside a given ratio; of two or three replicas it is a third.
    """
    follower = ratio.follower
    if decision.ratio is None or decision.wanted is None:
        return False
    return math.ceil(decision.wanted[follower] - _EPSILON) > current[follower] * (1 + config.hysteresis_out_frac)


def _damped(asked: float, now: int, config: GuardConfig) -> float:
    if asked >= now:
        return now + config.damping_out_frac * (asked - now)
    # A whole replica too many goes, however small the share: rounding up would keep it for ever.
    most = now - 1 if math.ceil(asked) < now else now
    return min(most, now + config.damping_in_frac * (asked - now))
