"""How much a replica of each group is worth, beside those of the service's first group (pure, but reads profiles).

Replicas of the first group are the standard (``autoscale.headcount``). What others are worth is typed, or follows from
the profiles of the engines; without any of them, all replicas of a role are alike.
"""

from collections.abc import Sequence

from autoscale.engines import variants
from autoscale.engines.profile import EngineProfile
from autoscale.engines.variants import TypicalLengthsConfig, Worth, aggregated_worth_at
from autoscale.ratio import PdRatio
from autoscale.types import PoolKey
from deployments.pool_config import GroupConfig
from deployments.profile_match import check_parallelism


def check_known(groups: Sequence[GroupConfig]) -> None:
    """Refuse groups of which it is known for some, but not for all, how fast their engines are.

    Raises:
        ValueError: names the pool that lacks a profile or a capacity, or that has a capacity in the first group.
    """
    first, *others = groups
    for key, pool in first.pools().items():
        if pool.capacity is not None:
            raise ValueError(
                f"capacity of {key} is {pool.capacity:g}, but replicas of the first group are the standard: leave it "
                "out there, and give the capacity of the other groups"
            )
    pools = {key: pool for group in others for key, pool in group.pools().items()}
    known = [key for key, pool in {**pools, **first.pools()}.items() if pool.capacity or pool.profile_path]
    for key, pool in pools.items() if known else ():
        if pool.capacity is None and pool.profile_path is None:
            raise ValueError(
                f"{key} has neither a profile nor a capacity, and {known[0]} has one: give {key} its profile "
                "(`tandem profile`), or its capacity in replicas of the first group"
            )
    by_profile = [key for key, pool in pools.items() if pool.capacity is None and pool.profile_path]
    for key, pool in first.pools().items() if by_profile else ():
        if pool.profile_path is None:
            raise ValueError(
                f"{by_profile[0]} has a profile, and {key} of the first group has none to compare it with: give {key} "
                f"its profile (`tandem profile`), or give {by_profile[0]} a capacity"
            )


def worths(
    groups: Sequence[GroupConfig], ratio: PdRatio, lengths: TypicalLengthsConfig, tpot_s: float
) -> dict[PoolKey, Worth]:
    """The worth of a replica of each pool; ``tpot_s``: the objective, seconds.

    Raises:
        ValueError: a profile cannot be read, or is of an engine with another number of GPUs.
    """
    first, pools = groups[0], {key: pool for group in groups for key, pool in group.pools().items()}
    result = dict[PoolKey, Worth]()
    for group in groups:
        is_beside_pairs = group.prefill is None and first.prefill is not None
        for key, pool in group.pools().items():
            if is_beside_pairs:
                result[key] = aggregated_worth_at(ratio, pool.capacity)
            else:
                result[key] = Worth(own=pool.capacity or 1.0)
    by_profile = {key for key, pool in pools.items() if key.group != first.name and pool.capacity is None}
    paths = {key: path for key, pool in pools.items() if (path := pool.profile_path) is not None}
    if by_profile & paths.keys():  # else no profile is needed
        loaded = {path: EngineProfile.load(path) for path in set(paths.values())}
        for key, path in paths.items():
            if pools[key].profile is not None:
                check_parallelism(key, pools[key], loaded[path])
        profiles = {key: loaded[path].at_speed(pools[key].speed) for key, path in paths.items()}
        aggregated = {group.name for group in groups if group.prefill is None}
        known = variants.worths(profiles, aggregated, first.name, lengths, tpot_s)
        result |= {key: worth for key, worth in known.items() if key in by_profile}
    return result
