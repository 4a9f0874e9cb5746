"""Puts the figures of a collector into a snapshot, in place of the replicas' own (pure).

Its gauges are no case of this file: they join the replicas' reports, so that they are averaged in the same way. A
collector never changes which replicas there are, nor when they reported.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from autoscale.observe.collected import Collected
from autoscale.types import PoolStats, ReplicaStats, Snapshot

_RATES = ("decode_tokens_per_s", "prefill_tokens_per_s")
_LATENCIES = ("ttft_s", "tpot_s")
_ARRIVALS = ("requests_per_s", "input_tokens_mean", "output_tokens_mean")


def with_collected(snapshot: Snapshot, collected: Collected) -> Snapshot:
    """The snapshot with the collected rates of replicas, latencies and arrivals of the service."""
    if not collected.replicas and not collected.service:
        return snapshot
    service: Mapping[str, Any] = collected.service
    return replace(
        snapshot,
        pools=tuple(_pool(pool, collected) for pool in snapshot.pools),
        latency=replace(snapshot.latency, **{name: service[name] for name in _LATENCIES if name in service}),
        traffic=replace(snapshot.traffic, **{name: service[name] for name in _ARRIVALS if name in service}),
    )


def strangers(collected: Collected, running: AbstractSet[str]) -> str | None:
    """A message if there are figures of replicas, but none of a running one: then ids or label are wrong."""
    if not running or not collected.replicas or not running.isdisjoint(collected.replicas):
        return None
    return f"no figure is of a running replica: it names {min(collected.replicas):.80}, and {min(running)} runs"


def _pool(pool: PoolStats, collected: Collected) -> PoolStats:
    return replace(pool, replicas=tuple(_replica(replica, collected) for replica in pool.replicas))


def _replica(replica: ReplicaStats, collected: Collected) -> ReplicaStats:
    figures: Mapping[str, Any] = collected.replicas.get(replica.replica_id, {})
    return replace(replica, **{name: figures[name] for name in _RATES if name in figures})
