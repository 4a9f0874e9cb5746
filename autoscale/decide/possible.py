"""Possible nodes of a cycle: those that Ray's autoscaler would add, and the types that did not come in time (pure)."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autoscale.decide.limits import late_offers
from autoscale.topology_config import NodeTypeConfig, TopologyConfig
from autoscale.types import ControllerState, PoolKey
from kvtransfer.topology import Node, Offer


def possible_nodes(config: TopologyConfig, nodes: Sequence[Node], refused: Collection[str]) -> list[Node]:
    """The nodes of each type that may still be added to ``nodes``, all of them empty.

    A node counts as one of a type if it has all labels of the type and GPUs of the same kind. ``refused``: types of
    which none is requested now.
    """
    present = Counter(name for types in _types_of(config, nodes) for name in types)
    possible = []
    for name, kind in config.node_types.items():
        if name not in refused:
            offer = Offer(
                node_type=name,
                start_s=kind.start_s,
                retry_s=kind.retry_s,
                cost_per_gpu_hour=config.cost_of(kind),
                labels=tuple(sorted(kind.labels.items())),
            )
            possible += [_node(config, kind, offer, number) for number in range(1, kind.max_nodes - present[name] + 1)]
    return possible


def with_savings(config: TopologyConfig, nodes: Sequence[Node]) -> list[Node]:
    """The nodes, each with what is saved when it leaves: Ray's autoscaler removes empty nodes of its types."""
    costs = {name: config.cost_of(kind) for name, kind in config.node_types.items()}
    return [
        replace(node, saves_per_gpu_hour=costs[types[0]]) if types else node
        for node, types in zip(nodes, _types_of(config, nodes), strict=True)
    ]


def _types_of(config: TopologyConfig, nodes: Sequence[Node]) -> list[list[str]]:
    """The node types of each node; a cluster may have thousands of nodes and hundreds of types."""
    # By the labels that types name: the types by the GPU type and the values of these labels.
    kinds: dict[tuple[str, ...], dict[tuple[str | None, ...], list[str]]] = {}
    for name, kind in config.node_types.items():
        labels = tuple(sorted(kind.labels))
        values = kind.gpu_type, *(kind.labels[label] for label in labels)
        kinds.setdefault(labels, {}).setdefault(values, []).append(name)
    return [
        [
            name
            for labels, types in kinds.items()
            for name in types.get((node.gpu_type, *(node.labels.get(label) for label in labels)), ())
        ]
        for node in nodes
    ]


def _node(config: TopologyConfig, kind: NodeTypeConfig, offer: Offer, number: int) -> Node:
    return Node(
        name=f"{offer.node_type}#{number}",
        labels=kind.labels,
        under=config.under(kind.labels, ()),
        gpu_type=kind.gpu_type,
        gpus=kind.gpus,
        free_gpus=kind.gpus,
        cpus=kind.cpus,
        free_cpus=kind.cpus,
        offer=offer,
    )


def refused_types(state: ControllerState, now_s: float) -> frozenset[str]:
    """Node types that a service does not request now, since a node of the type did not come in time."""
    return frozenset(kind for kind, until_s in state.refused.items() if now_s < until_s)


def with_refusals(
    state: ControllerState, now_s: float, no_node_s: float
) -> tuple[dict[PoolKey, Offer], dict[str, float]]:
    """The offers for which pools still wait, and the refused types with the end of each refusal.

    An offer whose time is over refuses its type for ``retry_s``.
    """
    refused = {kind: until_s for kind, until_s in state.refused.items() if now_s < until_s}
    late = late_offers(state, now_s, no_node_s)
    for key in late:
        offer = state.offers[key]
        refused[offer.node_type] = max(refused.get(offer.node_type, 0.0), now_s + offer.retry_s)
    return {key: offer for key, offer in state.offers.items() if key not in late}, refused


def accepted(nodes: Mapping[PoolKey, tuple[str, ...]], offers: Mapping[str, Offer]) -> dict[PoolKey, Offer]:
    """The offer for which each pool waits, if its new replicas start on a possible node.

    ``nodes``: names of the nodes for new replicas of each pool. ``offers``: those of possible nodes, by name.
    """
    return {key: offers[names[0]] for key, names in nodes.items() if names and names[0] in offers}
