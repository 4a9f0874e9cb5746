"""Ray's nodes and placement groups -> nodes with what nobody holds, and who holds what; made anew for each cycle."""

from collections.abc import Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util import placement_group_table

from autoscale.types import PoolKey
from kvtransfer.topology import Node, TopologyConfig

# Of each replica that has its room: its pool, and the nodes that it is on.
Places = Mapping[str, tuple[PoolKey, tuple[str, ...]]]
_REPLICA = "SERVE_REPLICA::"
_TYPE_LABEL, _TYPE_RESOURCE = "ray.io/accelerator-type", "accelerator_type:"


def read_nodes(config: TopologyConfig, cordoned: frozenset[str] = frozenset()) -> list[Node]:
    """The nodes that are alive. Blocks for a few milliseconds.

    Args:
        config: what labels and resources mean.
        cordoned: names of nodes and of switches that take nothing new.
    """
    free = available_resources_per_node()
    return [_node(raw, free.get(raw["NodeID"], {}), config, cordoned) for raw in ray.nodes() if raw.get("Alive")]


def _node(raw: Mapping[str, Any], free: Mapping[str, float], config: TopologyConfig, cordoned: frozenset[str]) -> Node:
    total, labels = raw["Resources"], dict(raw.get("Labels") or {})
    kind, resource, contradiction = _gpus(total, labels, config)
    host = raw.get("NodeManagerHostname", "")
    under = config.under(labels, (host, raw.get("NodeManagerAddress", ""), raw["NodeID"]))
    return Node(
        name=raw["NodeID"],
        labels=labels,
        under=under,
        gpu_type=kind,
        gpus=total.get(resource, 0.0),
        free_gpus=free.get(resource, 0.0),
        cpus=total.get("CPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        is_cordoned=bool(cordoned & {raw["NodeID"], host, *under}),
        host=host,
        contradiction=contradiction,
    )


def _gpus(total: Mapping[str, float], labels: Mapping[str, str], config: TopologyConfig) -> tuple[str | None, str, str]:
    """The type of a node's GPUs, the resource that counts them, and what contradicts it."""
    said = {kind: resource for kind, resource in config.gpu_resources.items() if total.get(resource)}
    if total.get("GPU"):
        of_resource = [name.removeprefix(_TYPE_RESOURCE) for name in total if name.startswith(_TYPE_RESOURCE)]
        label = labels.get(_TYPE_LABEL)
        said |= dict.fromkeys([*of_resource, *([label] if label else [])], "GPU")
        said = said or {"GPU": "GPU"}
    if not said:
        return None, "GPU", ""
    first, *others = said
    contradiction = f"it has GPUs of type {first} and of {', '.join(others)}, and counts as {first}" if others else ""
    return first, said[first], contradiction


def read_places(app: str) -> Places:
    """Who of an application's replicas is where. Blocks likewise."""
    places: dict[str, tuple[PoolKey, tuple[str, ...]]] = {}
    prefix = f"{_REPLICA}{app}#"
    for group in placement_group_table().values():
        name = group["name"]
        if group["state"] != "CREATED" or not name.startswith(prefix):
            continue
        deployment, _, replica_id = name.removeprefix(prefix).rpartition("#")
        try:
            key = PoolKey.parse(deployment)
        except ValueError:
            continue  # the endpoint's
        places[replica_id] = key, tuple(dict.fromkeys(group["bundles_to_node_id"].values()))
    return places
