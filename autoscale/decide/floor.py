"""Floors in a tick: they raise the policy's wish, and a note says why one is not met (pure).

A floor is known in advance, so it is urgent and needs no signal. Only a pause and counts set by hand precede it.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.draft import Draft
from autoscale.decide.limits import stuck_by_role
from autoscale.extension import Extension
from autoscale.floors import Floor, largest
from autoscale.headcount import EPSILON_REPLICAS, standard_replicas
from autoscale.policies.policy import ProfiledConfig
from autoscale.ratio import PdRatio, pd_text
from autoscale.room import Room, joint_counts
from autoscale.types import ControllerState, Note, NoteKind
from kvtransfer.topology import Role


def lead_s(config: AutoscaleConfig, state: ControllerState) -> float:
    """Time before the begin of a floor at which its replicas are requested, seconds: the longest start of a role.

    It is the observed one as soon as a start has ended.
    """
    if config.floors.prewarm_s is not None:
        return config.floors.prewarm_s
    if (observed_s := state.longest_start_s) is not None:
        return observed_s
    settings: Any = config.policy
    if isinstance(settings, Extension) and config.floors.periods:
        with suppress(ValueError):  # the call of the policy names the fault
            _, settings = config.policy_settings()
    return max(settings.start_s(role) for role in Role) if isinstance(settings, ProfiledConfig) else config.no_room_s


def raise_to_floors(draft: Draft) -> None:
    """A stage: count the replicas that should serve, and raise the wish to the floors."""
    draft.stuck = stuck_by_role(draft.pools, draft.state, draft.overdue)
    # Stuck replicas (on no node, but required by lowest counts) are not counted, since other groups get replicas in
    # their place. If they counted, more would be added in every tick.
    draft.current = {
        role: max(count - draft.stuck[role], min(count, draft.room.lowest[role]))
        for role, count in draft.census.desired.items()
    }
    draft.floor_counts = dict.fromkeys(Role, 0.0)
    if draft.floors and not draft.config.is_paused and draft.config.override is None:
        _raise_wish(draft)


def _raise_wish(draft: Draft) -> None:
    """Raise the decision to the floors; it is urgent while fewer replicas should serve than they require."""
    decision, current, least = draft.decision, draft.current, largest(draft.floors)
    # Without a wish the counts stay.
    wish = {role: float(current[role]) for role in Role} if decision.wanted is None else decision.wanted
    wanted = {role: max(wish[role], float(least[role])) for role in Role}
    if decision.ratio is not None and all(least.values()) and not _are_met(least, wish, decision.ratio, draft):
        # The policy sizes each role by itself, and so do the floors. At the policy's ratio a role would exceed its
        # floor, or the room would cut the floor of the other.
        wanted = _beside_floors(wanted, least, draft.room)
        decision = replace(decision, ratio=PdRatio.of(wanted, draft.room.step))
    ratio = decision.ratio or draft.config.ratio
    counts = _in_room(least, ratio, draft)
    # A floor that the room cuts is met as well as it can be, so nothing is urgent any more.
    is_short = counts is not None and any(
        current[role] < min(least[role], counts[role]) - EPSILON_REPLICAS for role in Role
    )
    draft.floor_counts = counts if counts is not None and is_short else draft.floor_counts
    if is_short or (wanted != wish and decision.wanted is not None):
        draft.decision = replace(
            decision,
            wanted=wanted,
            reason=f"{_text(draft)}; without it: {decision.reason}",
            is_step=decision.is_step or is_short,
            is_urgent=decision.is_urgent or is_short,
        )


def _are_met(least: Mapping[Role, int], wish: Mapping[Role, float], ratio: PdRatio, draft: Draft) -> bool:
    """Whether the policy wants the floors, and the room has the wanted counts at the policy's ratio."""
    counts = _in_room(wish, ratio, draft)
    return counts is not None and all(min(wish[role], counts[role]) >= least[role] - EPSILON_REPLICAS for role in Role)


def _in_room(wanted: Mapping[Role, float], ratio: PdRatio, draft: Draft) -> dict[Role, float] | None:
    """The counts at the ratio for ``wanted``, rounded as the guard does; ``None``: the room has none."""
    guard = draft.config.guard
    return joint_counts(wanted, ratio, draft.room, guard.band_replicas, guard.shortfall_replicas)


def _beside_floors(wanted: Mapping[Role, float], least: Mapping[Role, int], room: Room) -> dict[Role, float]:
    """The wanted replicas as far as the room holds them; of each role the same share beyond its floor gives way."""
    inside = {role: min(wanted[role], room.highest[role]) for role in Role}
    if room.budget_gpus is None or not room.is_over_budget({role: room.whole(role, inside[role]) for role in Role}):
        return inside
    beyond = {role: max(0.0, inside[role] - least[role]) for role in Role}
    beyond_gpus = math.fsum(beyond[role] * room.most_gpus_per_replica[role] for role in Role)
    left_gpus = room.budget_gpus - math.fsum(least[role] * room.most_gpus_per_replica[role] for role in Role)
    share = max(0.0, left_gpus) / beyond_gpus if beyond_gpus else 0.0
    return {role: float(least[role] + math.floor(share * beyond[role])) for role in Role}


def note_floors(draft: Draft) -> None:
    """A stage: say which floors the counts from now on do not meet, and why."""
    config, least = draft.config, largest(draft.floors)
    desired = standard_replicas(draft.state.desired, draft.snapshot.pools)
    counts = {role: count - draft.stuck[role] for role, count in desired.items()}
    if all(counts[role] >= least[role] - EPSILON_REPLICAS for role in Role):
        return
    if config.is_paused:
        why = "the counts are paused by hand (`tandem scale --resume`)"
    elif config.override is not None:
        why = "the counts are set by hand (`tandem scale --resume`)"
    elif config.is_observing:
        why = "the configuration only observes"
    else:
        why = "bounds, budget, quota or room"
    draft.notes.append(Note(NoteKind.FLOOR, f"{_text(draft)}: not met with {pd_text(counts)}: {why}"))


def _text(draft: Draft) -> str:
    return "; ".join(floor_text(floor, draft.now_s) for floor in draft.floors)


def floor_text(floor: Floor, now_s: float) -> str:
    """Why replicas are wanted: for a floor that is in force, or for one that begins after their start."""
    return f"{'prewarm for the ' if now_s < floor.begins_s else ''}{floor.text(now_s)}"
