"""How many replicas of each role should serve, run, are under observation, or are on their way out (pure)."""

from collections.abc import Collection, Mapping, Sequence

from autoscale.types import PoolKey, PoolStats, Snapshot
from kvtransfer.topology import Role


def desired_replicas(desired: Mapping[PoolKey, int]) -> dict[Role, int]:
    """Replicas of each role over all groups."""
    return {role: sum(count for key, count in desired.items() if key.role is role) for role in Role}


def among(names: Sequence[str], others: Collection[str]) -> list[str]:
    """The names that are among others, in their order."""
    return [name for name in names if name in others] if others else []


def count_among(pool: PoolStats, names: Collection[str]) -> int:
    """How many of a pool's running replicas are among these."""
    return sum(replica.replica_id in names for replica in pool.replicas) if names else 0


def running_replicas(snapshot: Snapshot, *, without: Collection[str]) -> dict[Role, int]:
    """Running replicas of each role but for some."""
    running = dict.fromkeys(Role, 0)
    for pool in snapshot.pools:
        running[pool.key.role] += len(pool.replicas) - count_among(pool, without)
    return running


def withdrawn_replicas(snapshot: Snapshot) -> dict[Role, int]:
    """Replicas of each role under observation."""
    away = dict.fromkeys(Role, 0)
    for pool in snapshot.pools:
        away[pool.key.role] += count_among(pool, snapshot.state.withdrawn)
    return away


def ending_replicas(snapshot: Snapshot) -> dict[Role, int]:
    """Replicas of each role that were told to stop and still hold their GPUs."""
    victims, ending = set(snapshot.state.victims), dict.fromkeys(Role, 0)
    for pool in snapshot.pools:
        ending[pool.key.role] += len(pool.draining) + count_among(pool, victims)
    return ending
