"""Factories of snapshots and configurations."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.engines.profile import EngineProfile
from autoscale.types import PoolKey, PoolLimits, PoolStats, ReplicaStats, Snapshot
from kvtransfer.topology import Role

MakeSnapshot = Callable[..., Snapshot]
MakeConfig = Callable[..., AutoscaleConfig]
MakeProfile = Callable[..., EngineProfile]


@pytest.fixture(scope="session")
def make_snapshot() -> MakeSnapshot:
    """One group of running replicas p0, p1, ... and d0, d1, ..., which all have just reported."""

    def make(
        prefill: int = 1,
        decode: int = 1,
        *,
        now_s: float = 1000.0,
        targets: tuple[int, int] | None = None,
        bounds: tuple[int, int] = (1, 32),
        gpus: int = 1,
        stats: Mapping[Role, Mapping[str, Any]] | None = None,
        group: str = "g0",
        **fields: Any,
    ) -> Snapshot:
        pools = []
        for role, count, target in zip(Role, (prefill, decode), targets or (prefill, decode), strict=True):
            shown: dict[str, Any] = {"observed_s": now_s, **(stats or {}).get(role, {})}
            replicas = tuple(ReplicaStats(replica_id=f"{role[0]}{i}", **shown) for i in range(count))
            pools.append(
                PoolStats(
                    key=PoolKey(group, role),
                    replicas=replicas,
                    target_replicas=target,
                    limits=PoolLimits(lowest_replicas=bounds[0], highest_replicas=bounds[1], gpus_per_replica=gpus),
                )
            )
        return Snapshot(now_s=now_s, pools=tuple(pools), **fields)

    return make
