"""How a configuration changes while it runs, and which one its pools cannot follow (pure)."""

from collections.abc import Mapping
from typing import Any

from pydantic import RootModel

from autoscale.decide.config import AutoscaleConfig
from autoscale.policies.periodic import PeriodConfig, PeriodicConfig
from autoscale.ratio import BOUNDLESS, Room, joint_counts, pd_text
from autoscale.types import PoolKey, PoolLimits
from kvtransfer.topology import Role


class Pools(RootModel[dict[PoolKey, PoolLimits]]):
    """The limits of every pool of an application."""


def tuned(base: AutoscaleConfig, changes: Mapping[str, Any], pools: Pools) -> AutoscaleConfig:
    """The deployed configuration with later changes, which are nested as the configuration.

    Raises:
        ValueError: a field or a value is wrong, they contradict each other, or the pools cannot follow them.
    """
    config = AutoscaleConfig.model_validate(merged(base.model_dump(mode="json"), changes))
    config.check_reports(base.report_s)
    check_fits(config, pools)
    return config


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` put over it, level by level; a policy of another kind replaces the whole policy."""
    if "kind" in changes and changes["kind"] != base.get("kind"):
        return dict(changes)
    result = dict(base)
    for name, value in changes.items():
        below = result.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        result[name] = value
    return result


def differing(changes: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``changes`` that is not in ``base`` anyway."""
    result = {}
    for name, value in changes.items():
        below = base.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value, below = differing(value, below), {}
        if value != below:
            result[name] = value
    return result


def check_fits(config: AutoscaleConfig, pools: Pools) -> None:
    """Refuse, with a ValueError, a configuration that these pools cannot follow.

    That is bounds outside what was deployed, a budget or a ratio that no counts satisfy, or counts by hand or of a
    period that are outside either.
    """
    _check_bounds(config, pools)
    budget_gpus = config.guard.budget_gpus
    if budget_gpus is not None and not any(pool.gpus_per_replica for pool in pools.root.values()):
        raise ValueError(
            f"guard.budget_gpus ({budget_gpus}) limits nothing, since no replica here has a GPU: leave it out, and set "
            "bounds"
        )
    limits = [
        (key.role, *config.bounds_of(key.role, pool.lowest_replicas, pool.highest_replicas), pool.gpus_per_replica)
        for key, pool in pools.root.items()
    ]
    room = Room.of(limits, budget_gpus)
    guard, nothing = config.guard, dict.fromkeys(Role, 0.0)
    if joint_counts(nothing, config.pd_ratio, room, guard.band_replicas, guard.shortfall_replicas) is None:
        raise ValueError(
            f"no counts between {pd_text(room.lowest)} and {pd_text(room.highest)} are at the ratio {config.pd_ratio}"
            + (f" within {budget_gpus} GPUs" if budget_gpus is not None else "")
            + ": change the bounds, the budget or the ratio"
        )
    if isinstance(config.policy, PeriodicConfig):
        for period in config.policy.periods:
            _check_period(period, config, room)
    if config.override is not None and not room.holds(config.override.counts):
        raise ValueError(
            f"{pd_text(config.override.counts)} lies {_outside(room)}: set counts inside, or change the bounds or the "
            "budget first"
        )


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
        is_awake = any(key.role is role and limits.lowest_replicas for key, limits in pools.root.items())
        if bounds.lowest_replicas and not is_awake:
            raise ValueError(
                f"bounds.{role}.lowest_replicas ({bounds.lowest_replicas}) does nothing, since every group may sleep: "
                "give one more replicas and deploy again"
            )


def _check_period(period: PeriodConfig, config: AutoscaleConfig, room: Room) -> None:
    band = config.guard.band_replicas
    if period.prefill is not None and period.decode is not None:
        ratio = period.pd_ratio or config.pd_ratio
        off = ratio.deviation(period.prefill, period.decode)
        if off > band:
            raise ValueError(
                f"the period that begins at {period.begins!r} wants {period.prefill}P{period.decode}D, {off:.2g} "
                f"replicas of the smaller role off the ratio {ratio}: give one of the two counts, or the period its "
                "own pd_ratio"
            )
    ratio = period.ratio or config.pd_ratio
    wanted = joint_counts(period.wanted(), ratio, BOUNDLESS, band_replicas=band)
    if wanted is not None and wanted != joint_counts(period.wanted(), ratio, room, band_replicas=band):
        raise ValueError(
            f"the period that begins at {period.begins!r} wants {pd_text(wanted)}, which lies {_outside(room)}: change "
            "its counts, the bounds or the budget"
        )


def _outside(room: Room) -> str:
    budget = "" if room.budget_gpus is None else f" or takes more than {room.budget_gpus} GPUs"
    return f"outside {pd_text(room.lowest)} to {pd_text(room.highest)}{budget}"
