"""Ray's nodes with their free resources, and the nodes of each replica; read anew for each cycle."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray.util import placement_group_table

from autoscale.topology_config import TopologyConfig
from autoscale.types import Places, PoolKey
from kvtransfer.topology import Node

# Beginning of the name that Serve gives to the placement group of a replica.
_REPLICA = "SERVE_REPLICA::"
# Ray shows a node's GPU type as a label, and as a resource with this beginning.
_TYPE_LABEL, _TYPE_RESOURCE = "ray.io/accelerator-type", "accelerator_type:"


def read_nodes(config: TopologyConfig, cordoned: frozenset[str]) -> list[Node]:
    """The nodes that are alive; ``cordoned``: names of nodes and switches. Blocks for a few milliseconds.

    Needs: ``ray._private.state.available_resources_per_node``, since Ray's public functions give only the sum of all
    nodes, and ``state.get_draining_nodes``.
    Without it: the policy cannot be loaded, and Serve refuses the application.
    """
    free, leaving = available_resources_per_node(), frozenset(state.get_draining_nodes())
    cordoned |= leaving
    return [
        replace(_node(raw, free.get(raw["NodeID"], {}), config, cordoned), is_leaving=raw["NodeID"] in leaving)
        for raw in ray.nodes()
        if raw.get("Alive")
    ]


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
    """The type of a node's GPUs, the resource that counts them, and a contradiction between its types; empty: none."""
    # The resource that counts the GPUs, by each type that the node has: first types with a resource of their own.
    resources = {kind: resource for kind, resource in config.gpu_resources.items() if total.get(resource)}
    if total.get("GPU"):
        kinds = [name.removeprefix(_TYPE_RESOURCE) for name in total if name.startswith(_TYPE_RESOURCE)]
        if label := labels.get(_TYPE_LABEL):
            kinds.append(label)
        resources |= dict.fromkeys(kinds, "GPU")
        resources = resources or {"GPU": "GPU"}  # no type is known
    if not resources:
        return None, "GPU", ""
    first, *others = resources
    contradiction = f"it has GPUs of type {first} and of {', '.join(others)}, and counts as {first}" if others else ""
    return first, resources[first], contradiction


def read_places(app: str) -> Places:
    """The nodes of each replica of an application. Blocks for a few milliseconds.

    Needs: ``SERVE_REPLICA::app#deployment#replica`` as the name of a replica's placement group.
    Without it: the nodes of replicas are not known, and scale-in does not free the scarcest nodes first.
    """
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
            continue  # a replica of another deployment, such as the endpoint
        nodes = dict.fromkeys(group["bundles_to_node_id"].values())  # each node once, in the order of bundles
        places[replica_id] = key, tuple(nodes)
    return places
