"""Replicas of a service -> replicas of each pool (pure)."""

import math
from collections.abc import Mapping, Sequence

from autoscale.ratio import PdRatio
from autoscale.types import PoolKey, PoolStats
from kvtransfer.topology import Role


def place(
    counts: Mapping[Role, int], current: Mapping[PoolKey, int], pools: Sequence[PoolStats], ratio: PdRatio
) -> dict[PoolKey, int]:
    """Spread a service's replicas over its groups, each at the ratio, moving as few as possible; totals are kept.

    Leaders are added where KV travels least, and among such groups where there are fewest; they are taken where it
    travels furthest, and there where there are most. Followers go where they are furthest below the ratio, since KV
    moves only inside a group.

    Raises:
        ValueError: the groups' bounds do not hold the counts.
    """
    placed: dict[PoolKey, int] = {}
    for role in (ratio.leader, ratio.follower):
        own = {pool.key: pool for pool in pools if pool.key.role is role}
        for key, pool in own.items():
            placed[key] = min(max(current[key], pool.lowest_replicas), pool.highest_replicas)
        while (missing := counts[role] - sum(placed[key] for key in own)) != 0:
            step = int(math.copysign(1, missing))
            movable = [
                key for key, pool in own.items() if pool.lowest_replicas <= placed[key] + step <= pool.highest_replicas
            ]
            if not movable:
                raise ValueError(f"{counts[role]} {role} replicas do not fit the bounds of {len(own)} groups")

            def surplus(key: PoolKey, role: Role = role, own: Mapping[PoolKey, PoolStats] = own) -> tuple[int, float]:
                if role is ratio.leader:
                    return own[key].link_tier, placed[key]
                return 0, placed[key] - placed[PoolKey(key.group, ratio.leader)] * ratio.follower_share

            chosen = min(movable, key=surplus) if step > 0 else max(movable, key=surplus)
            placed[chosen] += step
    return placed
