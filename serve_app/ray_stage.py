"""Copies the files of an application's models to the nodes that its replicas may start on, before any does."""

import time
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.selectors import matches
from serve_app.config import AppConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What one node has of one model.

    ``folder``: where; ``None`` where it could not be copied. ``seconds``: what that took, next to nothing where it was
    there.
    """

    node: str
    model: str
    folder: str | None
    seconds: float


def stage(config: AppConfig) -> list[Staged]:
    """Copy on every node of the cluster that this process is connected to, all at the same time.

    Only models with a ``stage_folder``, and nodes that a pool of theirs may be on by its labels.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    copy = ray.remote(_copy)
    asked = []
    for service in config.services:
        into = service.model.stage_folder
        for node in ray.nodes() if into is not None else ():
            labels = node["Labels"]
            pools = service.roles().values()
            may_be_on = any(
                all(matches(labels.get(key), wanted) for key, wanted in pool.placement.node_labels.items())
                for pool in pools
            )
            if node["Alive"] and may_be_on:
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = copy.options(num_cpus=0, scheduling_strategy=there)
                asked.append(
                    (node["NodeManagerHostname"], service.model.id, task.remote(str(service.model.folder), str(into)))
                )
    made = []
    for host, model, answer in asked:
        folder, seconds = ray.get(answer)
        made.append(Staged(node=host, model=model, folder=folder, seconds=seconds))
    return made


def _copy(source: str, into: str) -> tuple[str | None, float]:
    from deployments.staging import staged

    began_s = time.monotonic()
    folder = staged(Path(source), Path(into))
    return None if folder == Path(source) else str(folder), time.monotonic() - began_s
