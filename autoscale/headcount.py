"""Counts of replicas by role: desired, running, withdrawn and ending (pure).

A withdrawn replica gets no more requests, but may return. A victim must stop.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from autoscale.types import ControllerState, PoolKey, PoolStats
from kvtransfer.topology import Role


def desired_replicas(desired: Mapping[PoolKey, int]) -> dict[Role, int]:
    """Desired replicas of each role over all groups."""
    return {role: sum(count for key, count in desired.items() if key.role is role) for role in Role}


def count_among(pool: PoolStats, names: Collection[str]) -> int:
    """Number of a pool's running replicas with these names."""
    return sum(replica.replica_id in names for replica in pool.replicas) if names else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Replica counts of each role over all groups, at one instant.

    Attributes:
        desired: replicas that should serve.
        running: running replicas, with withdrawn ones but without victims.
        withdrawn: running replicas that get no more requests, but may return.
        ending: victims that still hold their GPUs, whether they still run or have left routing.
    """

    desired: Mapping[Role, int]
    running: Mapping[Role, int]
    withdrawn: Mapping[Role, int]
    ending: Mapping[Role, int]

    @classmethod
    def of(cls, pools: Iterable[PoolStats], state: ControllerState) -> Self:
        """The counts of these pools."""
        running, withdrawn, ending = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
        victims = set(state.victims)
        for pool in pools:
            role, running_victims = pool.key.role, count_among(pool, victims)
            running[role] += len(pool.replicas) - running_victims
            withdrawn[role] += count_among(pool, state.withdrawn)
            ending[role] += len(pool.draining) + running_victims
        return cls(desired=desired_replicas(state.desired), running=running, withdrawn=withdrawn, ending=ending)
