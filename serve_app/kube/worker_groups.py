"""Pools -> worker groups: one group of equal Kubernetes pods for each kind of node that the pools need (pure).

A pod is one Ray node. An engine has one or more workers (``RoleConfig.workers``), and each worker has a bundle of a
Ray placement group. Pools that need the same kind of node share a worker group.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoscale.types import PoolKey
from deployments.pool_config import RoleConfig
from kvtransfer.selectors import is_plain_label
from serve_app.checks.yaml_checks import ConfigError
from serve_app.config import AppConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """The kind of node of a worker group.

    ``accelerator_type``: GPU type; ``None``: the pods have no GPU. ``node_labels``: label and value, sorted, so that
    equal labels make equal shapes.
    """

    accelerator_type: str | None
    gpus: int
    node_labels: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """Equal pods, each with room for one engine, or for one worker of an engine that spreads over nodes.

    ``pods``: number of pods for the pools' ``replicas``. ``most_pods``: number of pods for their ``max_replicas``.
    ``engine_cpus``: CPUs of a pod for its engine and the engine's Serve replica.
    """

    name: str
    shape: NodeShape
    pools: tuple[PoolKey, ...]
    pods: int
    most_pods: int
    engine_cpus: float


def worker_groups(config: AppConfig) -> tuple[WorkerGroup, ...]:
    """The worker groups that a configuration's pools need. Raises ConfigError: a node label is an expression."""
    shapes: dict[NodeShape, dict[PoolKey, RoleConfig]] = {}  # the pools of each shape
    for group in config.groups:
        for key, pool in group.pools().items():
            gpu = pool.placement.accelerator_type
            # A whole GPU for each worker of a pod, even if a worker takes a fraction of one.
            shape = NodeShape(
                accelerator_type=gpu, gpus=_pod_workers(pool) if gpu else 0, node_labels=_plain_labels(key, pool)
            )
            shapes.setdefault(shape, {})[key] = pool
    return tuple(
        WorkerGroup(
            name=name,
            shape=shape,
            pools=tuple(pools),
            pods=sum(_pods(pool, pool.replicas) for pool in pools.values()),
            most_pods=sum(_pods(pool, pool.max_replicas or pool.replicas) for pool in pools.values()),
            # The highest of the pools, since the pods are equal.
            engine_cpus=max(
                pool.placement.cpus_per_replica + pool.placement.cpus_per_worker * _pod_workers(pool)
                for pool in pools.values()
            ),
        )
        for name, (shape, pools) in zip(_group_names(shapes), shapes.items(), strict=True)
    )


def _pods(pool: RoleConfig, replicas: int) -> int:
    """Number of pods for ``replicas`` replicas of a pool; the division leaves no rest."""
    return replicas * pool.workers // _pod_workers(pool)


def _pod_workers(pool: RoleConfig) -> int:
    """Engine workers in one pod: one if a replica's bundles spread over nodes, otherwise all workers of the replica."""
    return 1 if "SPREAD" in pool.placement.strategy else pool.workers


def _plain_labels(key: PoolKey, pool: RoleConfig) -> tuple[tuple[str, str], ...]:
    """The labels that the Ray nodes of a pool must have, without labels under ray.io/, which Ray sets itself."""
    labels = {label: value for label, value in pool.placement.node_labels.items() if not label.startswith("ray.io/")}
    for label, value in labels.items():
        if not is_plain_label(value):
            raise ConfigError(
                f"groups.{key.group}.{key.role.value}.placement.node_labels: {label} is {value!r}, and the nodes of a "
                "worker group carry one plain value: declare one group for each value"
            )
    return tuple(sorted(labels.items()))


def _group_names(shapes: Iterable[NodeShape]) -> Iterator[str]:
    """A name for each shape, such as h100-2gpu; further shapes of that name are h100-2gpu-2 and so on."""
    names: Counter[str] = Counter()
    for shape in shapes:
        kind = re.sub(r"[^a-z0-9]+", "-", (shape.accelerator_type or "cpu").lower())
        name = f"{kind}-{shape.gpus}gpu" if shape.gpus else kind
        names[name] += 1
        yield name if names[name] == 1 else f"{name}-{names[name]}"
