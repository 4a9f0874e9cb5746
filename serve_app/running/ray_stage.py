"""Copies the files of an application's models to the nodes that its replicas may start on, before any does."""

import time
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
    """Copy on all nodes of the connected cluster at the same time.

    Only models with a ``stage_folder``, and only nodes whose labels allow one of their pools.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    copy = ray.remote(_copy)
    copies = []
    for service in (service for service in config.services if service.model.stage_folder is not None):
        selectors = [pool.placement.node_labels for pool in service.role_configs().values()]
        for node in (node for node in ray.nodes() if node["Alive"]):
            labels = node["Labels"]
            if any(all(matches(labels.get(key), value) for key, value in one.items()) for one in selectors):
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = copy.options(num_cpus=0, scheduling_strategy=there)
                answer = task.remote(str(service.model.folder), str(service.model.stage_folder))
                copies.append((node["NodeManagerHostname"], service.model.id, answer))
    made = ((host, model, *ray.get(answer)) for host, model, answer in copies)
    return [Staged(node=host, model=model, folder=folder, seconds=seconds) for host, model, folder, seconds in made]


def _copy(source: str, into: str) -> tuple[str | None, float]:
    from deployments.replicas.staging import staged

    began_s = time.monotonic()
    folder = staged(Path(source), Path(into))
    return None if folder == Path(source) else str(folder), time.monotonic() - began_s
