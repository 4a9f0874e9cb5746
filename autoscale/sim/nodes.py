"""Virtual nodes: what of them is free, and who is on which, as Ray places a replica where it is asked for (pure)."""

import random
from collections.abc import Collection, Iterable
from dataclasses import replace

from autoscale.slots import Demand
from kvtransfer.selectors import matches
from kvtransfer.topology import Node

_EPSILON = 1e-6


class VirtualNodes:
    """The nodes of a virtual cluster.

    Args:
        nodes: with what others hold already taken off their free GPUs.
        rng: Ray's choice between nodes that are equally full, whose ids are random.
    """

    def __init__(self, nodes: Iterable[Node], rng: random.Random) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._rng = rng

    def now(self) -> tuple[Node, ...]:
        """All of them as they are now."""
        return tuple(self._nodes.values())

    def take(self, demand: Demand, allowed: Collection[str] | None = None) -> Node | None:
        """Room for a replica on one node, the fullest that has any; ``None``: it waits.

        ``allowed``: the names of the nodes that it may be on; ``None``: all that its own labels and type demand.
        """
        fitting = [node for node in self._nodes.values() if _has_room(node, demand)]
        if allowed is not None:
            fitting = [node for node in fitting if node.name in allowed]
        if not fitting:
            return None
        least = min(node.free_gpus for node in fitting)
        node = self._rng.choice([node for node in fitting if node.free_gpus <= least + _EPSILON])
        self._change(node.name, -demand.gpus)
        return node

    def give_back(self, name: str, demand: Demand) -> None:
        """A replica has left its node."""
        self._change(name, demand.gpus)

    def _change(self, name: str, gpus: float) -> None:
        node = self._nodes[name]
        self._nodes[name] = replace(node, free_gpus=node.free_gpus + gpus)


def _has_room(node: Node, demand: Demand) -> bool:
    is_type = demand.gpu_type is None or node.gpu_type == demand.gpu_type
    is_selected = all(matches(node.labels.get(key), wanted) for key, wanted in demand.selector.items())
    return is_type and is_selected and not node.is_cordoned and node.free_gpus >= demand.gpus - _EPSILON
