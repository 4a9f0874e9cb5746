"""Ray's nodes with their free resources, and the nodes of each replica; read anew for each cycle."""

from collections.abc import Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray.util import placement_group_table

from autoscale.topology_config import TopologyConfig, stated_gpus
from autoscale.types import Places, PoolKey
from kvtransfer.topology import Node

# Beginning of the name that Serve gives to the placement group of a replica.
_REPLICA = "SERVE_REPLICA::"


def read_nodes(config: TopologyConfig, cordoned: frozenset[str]) -> list[Node]:
    """The nodes that are alive; ``cordoned``: names of nodes and switches. Blocks for a few milliseconds.

    Needs: ``ray._private.state.available_resources_per_node``, since Ray's public functions give only the sum of all
    nodes, and ``state.get_draining_nodes``.
    Without it: the policy cannot be loaded, and Serve refuses the application.
    """
    free, leaving = available_resources_per_node(), frozenset(state.get_draining_nodes())
    return [
        _node(raw, free.get(raw["NodeID"], {}), config, cordoned, is_leaving=raw["NodeID"] in leaving)
        for raw in ray.nodes()
        if raw.get("Alive")
    ]


def _node(
    raw: Mapping[str, Any],
    free: Mapping[str, float],
    config: TopologyConfig,
    cordoned: frozenset[str],
    *,
    is_leaving: bool,
) -> Node:
    total, labels = raw["Resources"], dict(raw.get("Labels") or {})
    kind, resource, contradiction = stated_gpus(total, labels, config.gpu_resources)
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
        is_cordoned=is_leaving or bool(cordoned & {raw["NodeID"], host, *under}),
        is_leaving=is_leaving,
        host=host,
        contradiction=contradiction,
    )


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
