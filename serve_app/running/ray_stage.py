"""Copies the files of an application's models to the nodes on which its replicas may start, before they start."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.selectors import matches
from serve_app.config import AppConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Copy of one model on one node.

    ``folder``: the copy; ``None``: it could not be made. ``seconds``: time of the copy, almost 0 if it was there.
    """

    node: str
    model: str
    folder: str | None
    seconds: float


def stage(config: AppConfig) -> list[Staged]:
    """Copy each model with a ``stage_folder`` to every node whose labels allow one of its pools, all at the same time.

    This process must be connected to the cluster.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    copy = ray.remote(_copy)
    started = []
    for service in config.services:
        if service.model.stage_folder is None:
            continue
        selectors = [pool.placement.node_labels for pool in service.role_configs().values()]
        for node in ray.nodes():
            if node["Alive"] and _matches_any(node["Labels"], selectors):
                on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = copy.options(num_cpus=0, scheduling_strategy=on_node)
                result = task.remote(str(service.model.folder), str(service.model.stage_folder))
                started.append((node["NodeManagerHostname"], service.model.id, result))
    copies = []
    for host, model, result in started:
        folder, seconds = ray.get(result)
        copies.append(Staged(node=host, model=model, folder=folder, seconds=seconds))
    return copies


def _matches_any(labels: Mapping[str, str], selectors: Iterable[Mapping[str, str]]) -> bool:
    return any(all(matches(labels.get(key), value) for key, value in selector.items()) for selector in selectors)


def _copy(source: str, into: str) -> tuple[str | None, float]:
    """Copy a model's folder into another one on this node; returns the copy (``None``: it failed) and the seconds."""
    from deployments.replicas.staging import staged

    started_s = time.monotonic()
    folder = staged(Path(source), Path(into))
    return None if folder == Path(source) else str(folder), time.monotonic() - started_s
