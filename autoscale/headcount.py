"""Counts of replicas by role: desired, running, withdrawn and ending (pure).

Counts of a role are in *standard replicas*: a replica of the service's first group is one, and a replica of another
group is as many as its pool's ``capacity`` says. So variants of unequal speed add up. If all groups are alike, standard
replicas are replicas. A withdrawn replica gets no more requests, but may return. A victim must stop.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from autoscale.types import ControllerState, PoolKey, PoolLimits, PoolStats
from kvtransfer.topology import Role

# Tolerance for rounding errors of standard replicas.
EPSILON_REPLICAS = 1e-9


def desired_replicas(desired: Mapping[PoolKey, int]) -> dict[Role, int]:
    """Number of desired replicas of each role over all groups, whatever their capacity."""
    return {role: sum(count for key, count in desired.items() if key.role is role) for role in Role}


def standard_replicas(counts: Mapping[PoolKey, int], pools: Iterable[PoolStats]) -> dict[Role, float]:
    """Standard replicas of each role, for a number of replicas of each pool; a pool that is left out has none."""
    standard = dict.fromkeys(Role, 0.0)
    for pool in pools:
        if count := counts.get(pool.key):
            _add(standard, pool.key, pool.limits, count)
    return standard


def standard_of(counts: Mapping[PoolKey, int], limits: Mapping[PoolKey, PoolLimits]) -> dict[Role, float]:
    """As ``standard_replicas``, from the limits of the pools alone."""
    standard = dict.fromkeys(Role, 0.0)
    for key, own in limits.items():
        _add(standard, key, own, counts.get(key, 0))
    return standard


def smallest_replicas(pools: Iterable[PoolStats]) -> dict[Role, float]:
    """Standard replicas that the smallest replica of each role is worth; 1 for a role without replicas and room."""
    by_role: dict[Role, list[float]] = {role: [] for role in Role}
    for pool in pools:
        if pool.limits.highest_replicas or pool.replicas:
            by_role[pool.key.role].append(pool.limits.capacity)
    return {role: min(capacities, default=1.0) for role, capacities in by_role.items()}


def add_replicas(standard: dict[Role, float], pool: PoolStats, replicas: int) -> None:
    """Add replicas of a pool to the standard replicas of each role."""
    _add(standard, pool.key, pool.limits, replicas)


def _add(standard: dict[Role, float], key: PoolKey, limits: PoolLimits, replicas: int) -> None:
    """Add replicas of a pool with these limits; those of an aggregated group do the work of both roles."""
    standard[key.role] += replicas * limits.capacity
    standard[Role.PREFILL] += replicas * limits.prompt_capacity


def count_among(pool: PoolStats, names: Collection[str]) -> int:
    """Number of a pool's running replicas with these names."""
    return len([True for replica in pool.replicas if replica.replica_id in names]) if names else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Standard replicas of each role over all groups, at one instant.

    Attributes:
        desired: replicas that should serve.
        running: running replicas, with withdrawn ones but without victims.
        withdrawn: running replicas that get no more requests, but may return.
        ending: victims that still hold their GPUs, whether they still run or have left routing.
    """

    desired: Mapping[Role, float]
    running: Mapping[Role, float]
    withdrawn: Mapping[Role, float]
    ending: Mapping[Role, float]

    @classmethod
    def of(cls, pools: Sequence[PoolStats], state: ControllerState) -> Self:
        """The counts of these pools."""
        running, withdrawn, ending = (dict.fromkeys(Role, 0.0) for _ in range(3))
        victims = set(state.victims)
        for pool in pools:
            running_victims = count_among(pool, victims)
            add_replicas(running, pool, len(pool.replicas) - running_victims)
            add_replicas(withdrawn, pool, count_among(pool, state.withdrawn))
            add_replicas(ending, pool, len(pool.draining) + running_victims)
        return cls(desired=standard_replicas(state.desired, pools), running=running, withdrawn=withdrawn, ending=ending)
