"""What of a configuration may change while it runs, and what contradicts itself or the pools it is for (pure)."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, RootModel

from autoscale.config import AutoscaleConfig
from autoscale.policies.periodic import PeriodConfig, PeriodicConfig
from autoscale.ratio import BOUNDLESS, Room, joint_counts, pd_text
from autoscale.slots import Demand
from autoscale.types import PoolKey
from kvtransfer.topology import LinkTier, Role


class PoolLimits(BaseModel):
    """What a pool was deployed with, which only a redeploy changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lowest_replicas: int = Field(ge=0)
    highest_replicas: int = Field(ge=1)
    gpus_per_replica: float = Field(0, ge=0)
    link_tier: LinkTier = LinkTier.S2
    demand: Demand | None = None
    cost: float = Field(0.0, ge=0.0)
    preference: int = Field(0, ge=0)
    affinity: LinkTier = LinkTier.NONE
    is_preemptible: bool = False


class Pools(RootModel[dict[PoolKey, PoolLimits]]):
    """The limits of every pool of an application."""


def tuned(base: AutoscaleConfig, changes: Mapping[str, Any], pools: Pools) -> AutoscaleConfig:
    """The deployed configuration with what was changed since.

    Args:
        base: as deployed.
        changes: nested as the configuration; a policy of another kind replaces the whole policy.
        pools: what the result must fit.

    Raises:
        ValueError: a field or a value is wrong, or they contradict each other.
    """
    config = AutoscaleConfig.model_validate(merged(base.model_dump(mode="json"), changes))
    config.check_reports(base.report_s)
    check_fits(config, pools)
    return config


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` put over it, level by level."""
    if "kind" in changes and changes["kind"] != base.get("kind"):
        return dict(changes)
    result = dict(base)
    for name, value in changes.items():
        below = result.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[name] = merged(below, value)
        else:
            result[name] = value
    return result


def differing(changes: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``changes`` is not so in ``base`` anyway."""
    result = {}
    for name, value in changes.items():
        below = base.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value, below = differing(value, below), {}
        if value != below:
            result[name] = value
    return result


def check_fits(config: AutoscaleConfig, pools: Pools) -> None:
    """Refuse a configuration that these pools cannot follow.

    Raises:
        ValueError: bounds outside what was deployed, a budget or a ratio that no counts satisfy, an override that is
            outside either.
    """
    for key, limits in pools.root.items():
        lowest, highest = config.bounds_of(key.role, limits.lowest_replicas, limits.highest_replicas)
        if lowest < limits.lowest_replicas or highest > limits.highest_replicas:
            raise ValueError(
                f"bounds.{key.role} ({lowest} to {highest}) reach beyond what {key} "
                f"was deployed with ({limits.lowest_replicas} to {limits.highest_replicas}): change replicas and "
                "max_replicas of the group and deploy again"
            )
    for role, bounds in config.bounds.items():
        awake = any(key.role is role and limits.lowest_replicas for key, limits in pools.root.items())
        if bounds.lowest_replicas and not awake:
            raise ValueError(
                f"bounds.{role}.lowest_replicas ({bounds.lowest_replicas}) does nothing, since every group may sleep: "
                "give one more replicas and deploy again"
            )
    if config.guard.budget_gpus is not None and not any(pool.gpus_per_replica for pool in pools.root.values()):
        raise ValueError(
            f"guard.budget_gpus ({config.guard.budget_gpus}) limits nothing, since no replica here has a GPU: leave it "
            "out, and set bounds"
        )
    room = _room(config, pools)
    if config.guard.joint_counts(0.0, config.pd_ratio, room) is None:
        raise ValueError(
            f"no counts between {pd_text(room.lowest)} and {pd_text(room.highest)} are at the ratio {config.pd_ratio}"
            + (f" within {room.budget_gpus} GPUs" if room.budget_gpus is not None else "")
            + ": change the bounds, the budget or the ratio"
        )
    if isinstance(config.policy, PeriodicConfig):
        for period in config.policy.periods:
            _check_period(period, config, room)
    if config.override is not None:
        counts = {Role.PREFILL: config.override.prefill, Role.DECODE: config.override.decode}
        if not room.holds(counts):
            raise ValueError(
                f"{pd_text(counts)} lies outside {pd_text(room.lowest)} to {pd_text(room.highest)}"
                + (f" or takes more than {room.budget_gpus} GPUs" if room.budget_gpus is not None else "")
                + ": set counts inside, or change the bounds or the budget first"
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
            f"the period that begins at {period.begins!r} wants {pd_text(wanted)}, which lies outside "
            f"{pd_text(room.lowest)} to {pd_text(room.highest)}"
            + (f" or takes more than {room.budget_gpus} GPUs" if room.budget_gpus is not None else "")
            + ": change its counts, the bounds or the budget"
        )


def _room(config: AutoscaleConfig, pools: Pools) -> Room:
    limits = []
    for key, pool in pools.root.items():
        bounds = config.bounds_of(key.role, pool.lowest_replicas, pool.highest_replicas)
        limits.append((key.role, *bounds, pool.gpus_per_replica))
    return Room.of(limits, config.guard.budget_gpus)
