"""How a configuration changes while its service runs, and the check that the service's pools can follow it (pure)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import RootModel

from autoscale.decide.config import AutoscaleConfig
from autoscale.extension import DEFERRED
from autoscale.floors import FloorPeriodConfig
from autoscale.policies.periodic import PeriodConfig, PeriodicConfig
from autoscale.ratio import PdRatio, pd_text
from autoscale.room import PoolRoom, Room, joint_counts
from autoscale.types import PoolKey, PoolLimits
from kvtransfer.topology import Role


class Pools(RootModel[dict[PoolKey, PoolLimits]]):
    """The limits of each pool of one service, as deployed."""


def tuned(
    base: AutoscaleConfig, changes: Mapping[str, Any], pools: Pools, *, is_checked: bool = False
) -> AutoscaleConfig:
    """The deployed configuration with changes put over it; ``changes`` is nested like a configuration.

    ``is_checked``: the changes were accepted before, so a policy of one's own is not loaded again.

    Raises:
        ValueError: a field or a value is wrong, values contradict each other, or the pools cannot follow them.
    """
    context = DEFERRED if is_checked else None
    config = AutoscaleConfig.model_validate(merged(base.model_dump(mode="json"), changes), context=context)
    config.check_reports(base.report_s)  # only a redeploy changes how often replicas report
    check_fits(config, pools)
    return config


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` put over it, level by level; a policy of another kind replaces the whole policy."""
    if "kind" in changes and changes["kind"] != base.get("kind"):
        return dict(changes)
    result = dict(base)
    for name, value in changes.items():
        base_value = base.get(name)
        if isinstance(base_value, Mapping) and isinstance(value, Mapping):
            value = merged(base_value, value)
        result[name] = value
    return result


def differing(changes: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``changes`` whose values are not those of ``base``, level by level."""
    result = {}
    for name, value in changes.items():
        base_value = base.get(name)
        if isinstance(base_value, Mapping) and isinstance(value, Mapping):
            value, base_value = differing(value, base_value), {}
        if value != base_value:
            result[name] = value
    return result


def check_fits(config: AutoscaleConfig, pools: Pools) -> None:
    """Refuse a configuration that the pools cannot follow.

    Raises:
        ValueError: the ratio is 0:1 and groups have prefill, or the other way round; bounds reach beyond the deployed
            ones; bounds or a budget have no effect; no counts inside bounds and budget are at the ratio; or the counts
            of a period, a floor or the override lie outside bounds or budget.
    """
    _check_roles(config, pools)
    _check_bounds(config, pools)
    _check_budget(config, pools)
    room = deployed_room(config, pools)
    if config.followed_by is None:  # else every tick takes a ratio for which the room has counts
        _check_ratio(config, room)
    if isinstance(config.policy, PeriodicConfig):
        for period in config.policy.periods:
            _check_period(period, config, room)
    for number, floor in enumerate(config.floors.periods):
        _check_floor(f"floors.periods.{number}", floor, room)
    _check_override(config, room)


def _check_roles(config: AutoscaleConfig, pools: Pools) -> None:
    has_prefill = any(key.role is Role.PREFILL for key in pools.root)
    if has_prefill and config.ratio.is_aggregated:
        raise ValueError(f"pd_ratio is {config.ratio}, and groups have prefill: choose a ratio such as 1:3")
    if not has_prefill and not config.ratio.is_aggregated:
        raise ValueError(f"pd_ratio is {config.ratio}, and no group has prefill: only 0:1 is possible")


def _check_bounds(config: AutoscaleConfig, pools: Pools) -> None:
    for key, limits in pools.root.items():
        lowest, highest = config.bounds_of(key.role, limits.lowest_replicas, limits.highest_replicas)
        if lowest < limits.lowest_replicas or highest > limits.highest_replicas:
            raise ValueError(
                f"bounds.{key.role} ({lowest} to {highest}) reach beyond what {key} "
                f"was deployed with ({limits.lowest_replicas} to {limits.highest_replicas}): change replicas and "
                "max_replicas of the group and deploy again"
            )
    for role, bounds in config.bounds.items():
        has_awake_group = any(key.role is role and limits.lowest_replicas for key, limits in pools.root.items())
        if bounds.lowest_replicas and not has_awake_group:
            raise ValueError(
                f"bounds.{role}.lowest_replicas ({bounds.lowest_replicas}) does nothing, since every group may sleep: "
                "give a group 1 or more replicas and deploy again"
            )


def _check_budget(config: AutoscaleConfig, pools: Pools) -> None:
    budget_gpus = config.guard.budget_gpus
    if budget_gpus is not None and not any(limits.gpus_per_replica for limits in pools.root.values()):
        raise ValueError(
            f"guard.budget_gpus ({budget_gpus}) limits nothing, since no replica here has a GPU: leave it out, and set "
            "bounds"
        )


def deployed_room(config: AutoscaleConfig, pools: Pools) -> Room:
    """The bounds of each role over all groups, and the budget."""
    bounds = []
    for key, limits in pools.root.items():
        lowest, highest = config.bounds_of(key.role, limits.lowest_replicas, limits.highest_replicas)
        own = replace(limits, lowest_replicas=lowest, highest_replicas=highest)
        bounds.append(PoolRoom(role=key.role, limits=own))
    room, ones = Room.of(bounds, config.guard.budget_gpus), dict.fromkeys(Role, 1.0)
    # Counts that people give are whole standard replicas. Only what no choice of variants can hold is refused.
    return replace(
        room,
        lowest={role: float(math.floor(count)) for role, count in room.lowest.items()},
        highest={role: float(math.ceil(count)) for role, count in room.highest.items()},
        step=ones,
        fewer=ones,
        largest=ones,
        counts_least_gpus=True,
    )


def _check_ratio(config: AutoscaleConfig, room: Room) -> None:
    """Refuse a room without counts at the ratio; 0 wanted replicas stand for the smallest counts in the room."""
    if _counts_at_ratio(dict.fromkeys(Role, 0.0), config.ratio, config, room) is None:
        within = "" if room.budget_gpus is None else f" within {room.budget_gpus} GPUs"
        raise ValueError(
            f"no counts between {pd_text(room.lowest)} and {pd_text(room.highest)} are at the ratio {config.ratio}"
            f"{within}: change the bounds, the budget or the ratio"
        )


def _check_period(period: PeriodConfig, config: AutoscaleConfig, room: Room) -> None:
    if period.prefill is not None and period.decode is not None:
        ratio_to_keep = period.pd_ratio or config.ratio
        deviation = ratio_to_keep.deviation(period.prefill, period.decode)
        if deviation > config.guard.band_replicas:
            raise ValueError(
                f"the period that begins at {period.begins!r} wants {period.prefill}P{period.decode}D, {deviation:.2g} "
                f"replicas of the smaller role off the ratio {ratio_to_keep}: give one of the two counts alone, or "
                "give the period its own pd_ratio"
            )
    # Bounds and budget must not change the period's counts, which keep their own ratio if both are given.
    counts_ratio = period.ratio or config.ratio
    wanted = _counts_at_ratio(period.wanted(), counts_ratio, config, room.boundless())
    if wanted is not None and wanted != _counts_at_ratio(period.wanted(), counts_ratio, config, room):
        raise ValueError(
            f"the period that begins at {period.begins!r} wants {pd_text(wanted)}, which lies {_outside_text(room)}: "
            "change its counts, the bounds or the budget"
        )


def _check_floor(name: str, floor: FloorPeriodConfig, room: Room) -> None:
    """Refuse a floor that can never be met. Policies may change the ratio, so only its own counts are checked."""
    for role, count in floor.counts.items():
        if count > room.highest[role]:
            raise ValueError(
                f"{name}.{role} is {count}, but at most {room.highest[role]:g} {role} replicas are allowed: lower it, "
                "or raise the groups' max_replicas or the bounds"
            )
    # A role without a floor of its own has at least its lowest count.
    least = {role: max(count, room.lowest[role], min(1.0, room.highest[role])) for role, count in floor.counts.items()}
    if room.is_over_budget(least):
        gpus = sum(count * room.least_gpus_per_replica[role] for role, count in least.items())
        raise ValueError(
            f"{name} requires {pd_text(least)}, which take {gpus:g} GPUs, and guard.budget_gpus is {room.budget_gpus}: "
            "lower the floor or raise the budget"
        )


def _check_override(config: AutoscaleConfig, room: Room) -> None:
    if config.override is not None and not room.holds(config.override.counts):
        raise ValueError(
            f"{pd_text(config.override.counts)} lies {_outside_text(room)}: set counts inside, or change the bounds or "
            "the budget first"
        )


def _counts_at_ratio(
    wanted: Mapping[Role, float], ratio: PdRatio, config: AutoscaleConfig, room: Room
) -> dict[Role, float] | None:
    """The whole counts at the ratio for ``wanted``, rounded as the guard does; ``None``: the room has none."""
    return joint_counts(wanted, ratio, room, config.guard.band_replicas, config.guard.shortfall_replicas)


def _outside_text(room: Room) -> str:
    budget = "" if room.budget_gpus is None else f" or takes more than {room.budget_gpus} GPUs"
    return f"outside {pd_text(room.lowest)} to {pd_text(room.highest)}{budget}"
