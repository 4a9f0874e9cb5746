"""Replicas of a service -> replicas of each pool (pure)."""

import math
from collections.abc import Callable, Mapping, Sequence

from autoscale.ratio import PdRatio
from autoscale.types import PoolKey, PoolStats
from kvtransfer.topology import Role

# How far a group may be from the ratio, replicas of the smaller role: what the gate lets serve by default.
_BAND_REPLICAS = 1.0
_EPSILON = 1e-9


def place(
    counts: Mapping[Role, int], current: Mapping[PoolKey, int], pools: Sequence[PoolStats], ratio: PdRatio
) -> dict[PoolKey, int]:
    """Spread a service's replicas over its groups, each near the ratio, moving as few as possible; totals are kept.

    Leaders are added where they and their followers cost least, so that a dearer variant grows only when all cheaper
    ones are full (WVA section V-C); among such groups where KV travels least, and then where there are fewest. They are
    taken where they cost most, then where KV travels furthest, and there where there are most. But no group keeps more
    of them than followers can be had for: each other group ties up its lowest number of those. Followers go where they
    are furthest below the ratio, since KV moves only inside a group. Replicas of a role count alike, whatever they are.

    Raises:
        ValueError: the groups' bounds do not hold the counts.
    """
    share = ratio.follower_share
    known = {pool.key: pool for pool in pools}
    placed = {key: min(max(current[key], p.lowest_replicas), p.highest_replicas) for key, p in known.items()}
    leaders = [key for key in known if key.role is ratio.leader]
    followers = [key for key in known if key.role is ratio.follower]

    def movable(keys: Sequence[PoolKey], step: int) -> list[PoolKey]:
        limits = ((key, known[key]) for key in keys)
        return [key for key, p in limits if p.lowest_replicas <= placed[key] + step <= p.highest_replicas]

    def rank(key: PoolKey) -> tuple[float, ...]:
        """The lower, the sooner a group's leaders come and the later they go."""
        cost = known[key].cost + share * known[PoolKey(key.group, ratio.follower)].cost
        return cost, known[key].link_tier, placed[key]

    def fit(keys: Sequence[PoolKey], role: Role, order: Callable[[PoolKey, int], tuple[float, ...]]) -> None:
        missing = counts[role] - sum(placed[key] for key in keys)
        step = 1 if missing > 0 else -1
        for _ in range(abs(missing)):
            if not (candidates := movable(keys, step)):
                raise ValueError(f"{counts[role]} {role} replicas do not fit the bounds of {len(keys)} groups")
            placed[min(candidates, key=lambda key: order(key, step))] += step

    def tied_up(key: PoolKey) -> int:
        """The fewest followers that a group may have."""
        return known[PoolKey(key.group, ratio.follower)].lowest_replicas

    def needed(key: PoolKey, step: int = 0) -> int:
        """The fewest followers with which all leaders of a group may serve."""
        return max(tied_up(key), math.ceil((placed[key] + step) * share - _BAND_REPLICAS - _EPSILON))

    def until_relieved(key: PoolKey) -> int:
        """How many leaders must leave a group before it needs a follower less."""
        return placed[key] - math.floor((needed(key) - 1 + _BAND_REPLICAS) / share + _EPSILON)

    fit(leaders, ratio.leader, lambda key, step: tuple(step * of for of in rank(key)))
    for _ in range(counts[ratio.leader]):
        if sum(needed(key) for key in leaders) <= counts[ratio.follower]:
            break
        crowded = [key for key in movable(leaders, -1) if needed(key) > tied_up(key)]
        donor = min(crowded, key=until_relieved, default=None)
        takers = [key for key in movable(leaders, 1) if key != donor and needed(key, 1) == needed(key)]
        if donor is None or not takers:
            break
        placed[donor] -= 1
        placed[min(takers, key=rank)] += 1
    fit(
        followers,
        ratio.follower,
        lambda key, step: (step * (placed[key] - placed[PoolKey(key.group, ratio.leader)] * share),),
    )
    return placed
