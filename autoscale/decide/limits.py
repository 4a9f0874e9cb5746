"""Limits of counts: bounds, lack of room, claims and GPUs; and replicas that wait for a node (pure).

A replica is stuck if its pool's lowest count requires it but no node has had room for it for too long. Pools with
replicas that have waited for a node for too long are overdue.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from autoscale.decide.config import AutoscaleConfig
from autoscale.headcount import add_replicas, smallest_replicas
from autoscale.ratio import PdRatio
from autoscale.room import PoolRoom, Room
from autoscale.types import ControllerState, PoolKey, PoolStats
from kvtransfer.topology import Role


def bounded(config: AutoscaleConfig, pools: Sequence[PoolStats]) -> list[PoolStats]:
    """The pools with the configured bounds applied."""
    result = []
    for pool in pools:
        limits = pool.limits
        lowest, highest = config.bounds_of(pool.key.role, limits.lowest_replicas, limits.highest_replicas)
        result.append(pool.bounded(max(limits.lowest_replicas, lowest), min(limits.highest_replicas, highest)))
    return result


def limited(config: AutoscaleConfig, pools: Sequence[PoolStats], state: ControllerState) -> list[PoolStats]:
    """The pools with all limits applied: configured bounds, and caps of pools that lack room or must yield theirs.

    ``state`` must be reconciled: without caps that have ended.
    """
    result = []
    for pool in bounded(config, pools):
        lowest, highest = pool.limits.lowest_replicas, pool.limits.highest_replicas
        for timed_caps in (state.capped, state.yielding):
            if pool.key in timed_caps:
                _, cap = timed_caps[pool.key]
                highest = min(highest, max(cap, lowest))
        result.append(pool.bounded(lowest, highest))
    return result


def room_of(config: AutoscaleConfig, pools: Sequence[PoolStats], desired: Mapping[PoolKey, int]) -> Room:
    """The room of both roles in these pools: the sums of their bounds, and the GPU budget.

    ``desired``: replicas of each pool that should serve now. At least one replica of each role that has pools stays:
    only sleep takes the last one.
    """
    contributions = (
        PoolRoom(role=pool.key.role, limits=pool.limits, present=desired.get(pool.key, 0)) for pool in pools
    )
    room = Room.of(contributions, config.guard.budget_gpus)
    least = {role: max(min(room.step[role], room.highest[role]), count) for role, count in room.lowest.items()}
    return replace(room, lowest=least)


def is_off_ratio_by_hand(config: AutoscaleConfig, ratio: PdRatio) -> bool:
    """Whether counts set by hand are too far from the ratio for the gate to admit them."""
    override = config.override
    return override is not None and ratio.deviation(override.prefill, override.decode) > config.gate.band_replicas


def kept_ratio(
    config: AutoscaleConfig, ratio: PdRatio, counts: Mapping[Role, float], pools: Iterable[PoolStats]
) -> PdRatio:
    """The ratio that groups keep: normally ``ratio``; if counts set by hand are off it, the ratio of ``counts``."""
    return PdRatio.of(counts, smallest_replicas(pools)) if is_off_ratio_by_hand(config, ratio) else ratio


def held_gpus(pools: Sequence[PoolStats], desired: Mapping[PoolKey, int]) -> dict[str, float]:
    """GPUs by type that a service has or has requested, including those of leaving replicas."""
    total: dict[str, float] = {}
    for pool in pools:
        on_nodes = len(pool.replicas) if pool.held_replicas is None else pool.held_replicas
        # ``pool.on`` includes victims, ``on_nodes`` does not.
        leaving = max(len(pool.draining), len(pool.on) - on_nodes)
        count = max(on_nodes, desired.get(pool.key, 0)) + leaving
        for kind, gpus in pool.gpus_by_type().items():
            total[kind] = total.get(kind, 0.0) + count * gpus
    return total


def quota_left(config: AutoscaleConfig, pools: Sequence[PoolStats], state: ControllerState) -> dict[str, float]:
    """GPUs by type that the service may still add; a type without a quota is left out. Negative: it has too many."""
    if not config.quota_gpus:
        return {}
    gpus = held_gpus(pools, state.desired_and_warm)
    return {kind: quota - gpus.get(kind, 0.0) for kind, quota in config.quota_gpus.items()}


def overdue_pools(state: ControllerState, now_s: float, no_node_s: float) -> frozenset[PoolKey]:
    """Pools with replicas that have waited for a node for too long.

    That is more than ``no_node_s``, and more than the offer's ``start_s`` if they wait for a node that is to be added.
    Replicas that have asked for another node go on being overdue: others stand in for them until they are on nodes.
    """
    return frozenset(
        key
        for key, (since_s, _) in state.unplaced_since_s.items()
        if key in state.again_s
        or now_s - since_s > max(no_node_s, state.offers[key].start_s if key in state.offers else 0.0)
    )


def late_offers(state: ControllerState, now_s: float, no_node_s: float) -> frozenset[PoolKey]:
    """Pools whose offer is to be given up: since it was made, no node has come in time."""
    return frozenset(
        key
        for key, offer in state.offers.items()
        if key in state.unplaced_since_s and now_s - asked_s(state, key) > max(no_node_s, offer.start_s)
    )


def asked_s(state: ControllerState, key: PoolKey) -> float:
    """When the replicas of a pool that wait for a node last asked for one."""
    since_s, _ = state.unplaced_since_s[key]
    return max(since_s, state.again_s.get(key, -math.inf))


def stuck_replicas(pool: PoolStats, wanted_replicas: int) -> int:
    """Number of stuck replicas of an overdue pool: they are on no node, and its lowest count requires them."""
    if pool.held_replicas is None:
        return 0
    return max(0, min(pool.limits.lowest_replicas, wanted_replicas) - pool.held_replicas)


def stuck_in(pools: Iterable[PoolStats], state: ControllerState, overdue: Collection[PoolKey]) -> dict[PoolKey, int]:
    """Number of stuck replicas of each of the ``overdue`` pools."""
    wanted = state.desired_and_warm
    return {pool.key: stuck_replicas(pool, wanted.get(pool.key, 0)) for pool in pools if pool.key in overdue}


def stuck_by_role(
    pools: Sequence[PoolStats], state: ControllerState, overdue: Collection[PoolKey]
) -> dict[Role, float]:
    """Stuck replicas of each role, in standard replicas; ``overdue``: the overdue pools."""
    stuck, by_pool = dict.fromkeys(Role, 0.0), stuck_in(pools, state, overdue)
    for pool in pools:
        add_replicas(stuck, pool, by_pool.get(pool.key, 0))
    return stuck
