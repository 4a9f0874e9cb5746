"""How many replicas of each role should serve, run, are withdrawn, or end (pure)."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from autoscale.types import ControllerState, PoolKey, PoolStats
from kvtransfer.topology import Role


def desired_replicas(desired: Mapping[PoolKey, int]) -> dict[Role, int]:
    """Replicas of each role over all groups."""
    return {role: sum(count for key, count in desired.items() if key.role is role) for role in Role}


def count_among(pool: PoolStats, names: Collection[str]) -> int:
    """How many of a pool's running replicas are among these."""
    return sum(replica.replica_id in names for replica in pool.replicas) if names else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Replicas of each role at one instant, over all groups.

    Attributes:
        desired: should serve.
        running: run, without those that were told to stop.
        withdrawn: of those that run, out of routing and able to come back.
        ending: were told to stop, and still hold their GPUs.
    """

    desired: Mapping[Role, int]
    running: Mapping[Role, int]
    withdrawn: Mapping[Role, int]
    ending: Mapping[Role, int]

    @classmethod
    def of(cls, pools: Iterable[PoolStats], state: ControllerState) -> Self:
        """Count the replicas of all pools once."""
        running, withdrawn, ending = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
        victims = set(state.victims)
        for pool in pools:
            role, stopping = pool.key.role, count_among(pool, victims)
            running[role] += len(pool.replicas) - stopping
            withdrawn[role] += count_among(pool, state.withdrawn)
            ending[role] += len(pool.draining) + stopping
        return cls(desired=desired_replicas(state.desired), running=running, withdrawn=withdrawn, ending=ending)
