"""Pools -> worker groups: one group of equal Kubernetes pods per shape of node that the pools need (pure)."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoscale.types import PoolKey
from deployments.config import RoleConfig
from serve_app.config import AppConfig
from serve_app.validate import ConfigError

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """What tells one worker group from another."""

    accelerator_type: str | None
    gpus: int
    node_labels: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """Equal pods, each with room for one engine (or one worker of it) of any of the pools; as many as replicas need."""

    name: str
    shape: NodeShape
    pools: tuple[PoolKey, ...]
    pods: int
    most_pods: int
    engine_cpus: float


def worker_groups(config: AppConfig) -> tuple[WorkerGroup, ...]:
    """The worker groups that hold the replicas declared, in the order in which the pools first need them.

    Raises:
        ConfigError: a node label that is an expression; the nodes of a worker group carry one plain value.
    """
    shapes: dict[NodeShape, dict[PoolKey, RoleConfig]] = {}
    for group in config.groups:
        for key, pool in group.pools().items():
            shapes.setdefault(_shape(key, pool), {})[key] = pool
    return tuple(
        WorkerGroup(
            name=name,
            shape=shape,
            pools=tuple(pools),
            pods=sum(_pods(pool, pool.replicas) for pool in pools.values()),
            most_pods=sum(_pods(pool, pool.max_replicas or pool.replicas) for pool in pools.values()),
            engine_cpus=max(_pod_cpus(pool) for pool in pools.values()),
        )
        for name, (shape, pools) in zip(_group_names(shapes), shapes.items(), strict=True)
    )


def _shape(key: PoolKey, pool: RoleConfig) -> NodeShape:
    return NodeShape(
        accelerator_type=pool.placement.accelerator_type,
        gpus=_pod_workers(pool) if pool.placement.accelerator_type else 0,
        node_labels=_plain_labels(key, pool),
    )


def _pods(pool: RoleConfig, replicas: int) -> int:
    return replicas * pool.workers // _pod_workers(pool)


def _pod_workers(pool: RoleConfig) -> int:
    """Engine workers in one pod: all of a replica where it packs, one where its bundles spread over nodes."""
    return 1 if "SPREAD" in pool.placement.strategy else pool.workers


def _pod_cpus(pool: RoleConfig) -> float:
    return pool.placement.cpus_per_replica + pool.placement.cpus_per_worker * _pod_workers(pool)


def _plain_labels(key: PoolKey, pool: RoleConfig) -> tuple[tuple[str, str], ...]:
    """The labels that Ray's nodes must carry; those under ray.io/ Ray finds by itself."""
    labels = {label: value for label, value in pool.placement.node_labels.items() if not label.startswith("ray.io/")}
    for label, value in labels.items():
        if not is_plain_label(value):
            raise ConfigError(
                f"groups.{key.group}.{key.role.value}.placement.node_labels: {label} is {value!r}, and the nodes of a "
                "worker group carry one plain value: declare one group for each value"
            )
    return tuple(sorted(labels.items()))


def is_plain_label(value: str) -> bool:
    """Whether a label selector's value is a value itself and no expression such as ``!v`` or ``in(a,b)``."""
    return _LABEL_VALUE.fullmatch(value) is not None


def _group_names(shapes: Iterable[NodeShape]) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for shape in shapes:
        kind = re.sub(r"[^a-z0-9]+", "-", (shape.accelerator_type or "cpu").lower())
        name = f"{kind}-{shape.gpus}gpu" if shape.gpus else kind
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"
