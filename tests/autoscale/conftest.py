"""Factories of snapshots and configurations."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from autoscale.config import AutoscaleConfig
from autoscale.profile import EngineProfile
from autoscale.types import PoolKey, PoolStats, ReplicaStats, Snapshot
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
                    lowest_replicas=bounds[0],
                    highest_replicas=bounds[1],
                    gpus_per_replica=gpus,
                )
            )
        return Snapshot(now_s=now_s, pools=tuple(pools), **fields)

    return make


@pytest.fixture(scope="session")
def make_profile() -> MakeProfile:
    """Prefill at 1 ms a token after 10 ms; a decode step of 20 ms plus 1 ms a request."""

    def make(**changes: Any) -> EngineProfile:
        return EngineProfile.model_validate(
            {
                "name": "by hand",
                "model": "none",
                "kv_tokens": 1000,
                "block_tokens": 10,
                "max_batch_tokens": 100,
                "max_running": 8,
                "prefill": {"tokens": [0, 1000], "seconds": [0.01, 1.01]},
                "decode": {"batch": [1, 100], "context_tokens": [100], "step_s": [[0.021], [0.12]]},
                "handoff": {"base_s": 0.01, "kv_bytes_per_token": 1000, "bytes_per_s": 1e6},
                "start_s": 1.0,
                "flops_per_token": 1.0,
                "peak_flops": 1000.0,
                "sources": [{"part": "all", "kind": "assumed", "text": "round numbers"}],
                **changes,
            }
        )

    return make
