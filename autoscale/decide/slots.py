"""Free GPUs and CPUs of nodes, and which of them a replica takes (pure).

HeteroScale section 3.4, virtual allocation: what is taken is gone for the rest of the cycle; what is given up is there
in the next cycle, for which all of this is made anew.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoscale.types import Demand, PoolStats
from kvtransfer.topology import Node, NodeSet, Topology, indices

_EPSILON = 1e-6
# What was taken: of each node its index, GPUs and CPUs.
Taken = list[tuple[int, float, float]]


class Slots:
    """Free GPUs and CPUs of the nodes of a topology, in one cycle."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._gpus = [node.free_gpus for node in topology.nodes]
        self._cpus = [node.free_cpus for node in topology.nodes]
        self._by_gpus = defaultdict[float, NodeSet](int)
        for index, free in enumerate(self._gpus):
            self._by_gpus[_rounded(free)] |= 1 << index

    def copy(self) -> "Slots":
        """The same room, to try something out in."""
        made = object.__new__(type(self))
        made.topology = self.topology
        made._gpus, made._cpus, made._by_gpus = self._gpus[:], self._cpus[:], self._by_gpus.copy()
        return made

    def vacate(self, demand: Demand, names: Iterable[str]) -> None:
        """Give back what a replica on these nodes takes."""
        indices = [index for name in names if (index := self.topology.index.get(name)) is not None]
        parts = demand.parts or (demand,)
        cpus = math.fsum(part.workers * part.cpus_per_worker + part.cpus_per_replica for part in parts)
        self.give_back([(index, demand.gpus / len(indices), cpus / len(indices)) for index in indices])

    def candidates(self, demand: Demand) -> NodeSet:
        """The nodes that a replica may be on, whether they have room or not."""
        if demand.parts:
            return self._union(demand.parts)
        nodes = self.topology.selected(demand.selector)
        return nodes if demand.gpu_type is None else nodes & self.topology.of_type.get(demand.gpu_type, 0)

    def take(self, demand: Demand) -> Taken | None:
        """Take room for one replica: on the least scarce nodes, and of these on the one with the least left over.

        ``None``: there is no room. What was taken can be given back, if the rest of its unit has no room.
        """
        if demand.parts:
            return self._take_parts(demand, self.topology.usable)
        return self._take(demand, self.candidates(demand) & self.topology.usable)

    def left(self) -> tuple[list[float], list[float]]:
        """GPUs and CPUs that each node has left now."""
        return self._gpus[:], self._cpus[:]

    def nodes(self, demands: Iterable[Demand | None], left: tuple[list[float], list[float]]) -> tuple[Node, ...]:
        """The nodes that any of these replicas may be on, with ``left`` as what is free there."""
        chosen = self._union(demand for demand in demands if demand is not None)
        return tuple(
            node
            if (node.free_gpus, node.free_cpus) == (gpus, cpus)  # most are as they were
            else replace(node, free_gpus=gpus, free_cpus=cpus)
            for index, (node, gpus, cpus) in enumerate(zip(self.topology.nodes, *left, strict=True))
            if chosen >> index & 1
        )

    def give_back(self, taken: Taken) -> None:
        """Make room free again that was taken."""
        for index, gpus, cpus in taken:
            self._set(index, self._gpus[index] + gpus, self._cpus[index] + cpus)

    def free_gpus(self, nodes: NodeSet) -> float:
        """Free GPUs on these nodes."""
        return math.fsum(free * (self._by_gpus[free] & nodes).bit_count() for free in self._by_gpus)

    def fragmented_frac(self, units: Iterable[Sequence[Demand]]) -> float | None:
        """Share of the free GPUs that lie in domains where no ``unit`` of any group fits; ``None``: no GPU is free."""
        useful = 0
        for unit in units:
            if self._fits(unit):
                useful |= self._union(unit)
        free = self.free_gpus(self.topology.everywhere)
        return 1.0 - self.free_gpus(useful) / free if free else None

    def _union(self, demands: Iterable[Demand]) -> NodeSet:
        nodes: NodeSet = 0
        for demand in demands:
            nodes |= self.candidates(demand)
        return nodes

    def _fits(self, unit: Sequence[Demand]) -> bool:
        trial = self.copy()
        return all(trial.take(demand) is not None for demand in unit)

    def _take_parts(self, demand: Demand, among: NodeSet) -> Taken | None:
        # The least scarce switch, and of those the fullest, so that empty ones stay whole.
        below = self.topology.domains[demand.within].values()
        ranked = sorted(below, key=lambda nodes: (self.topology.priority(nodes), self.free_gpus(nodes)))
        for nodes in ranked:
            taken: Taken = []
            for part in demand.parts:
                room = self._take(part, self.candidates(part) & nodes & among)
                if room is None:
                    self.give_back(taken)
                    break
                taken += room
            else:
                return taken
        return None

    def _take(self, demand: Demand, among: NodeSet) -> Taken | None:
        wider = 0
        for nodes in self.topology.subgroups.values():
            narrow = among & nodes
            wider |= narrow
            if not narrow:
                continue
            if demand.strategy in ("PACK", "STRICT_PACK") or demand.workers == 1:
                index = self._best_fit(demand, narrow)
                if index is not None:
                    return self._taken([(index, demand.workers)], demand)
            if demand.strategy != "STRICT_PACK" and demand.workers > 1:
                spread = self._scattered(demand, wider)
                if spread is not None:
                    return self._taken(spread, demand)
        return None

    def _best_fit(self, demand: Demand, among: NodeSet) -> int | None:
        """The node with the least left over once the whole replica is on it."""
        gpus = demand.gpus
        cpus = demand.workers * demand.cpus_per_worker + demand.cpus_per_replica
        for free in sorted(self._by_gpus):
            if free < gpus - _EPSILON:
                continue
            for index in indices(self._by_gpus[free] & among):
                if self._cpus[index] >= cpus - _EPSILON:
                    return index
        return None

    def _scattered(self, demand: Demand, among: NodeSet) -> list[tuple[int, int]] | None:
        """Nodes and the workers that each takes; the first node takes the replica's own CPUs too."""
        rooms = [
            (self._workers(index, demand, 0.0), index)
            for free, nodes in self._by_gpus.items()
            if free >= demand.gpus_per_worker - _EPSILON
            for index in indices(nodes & among)
        ]
        rooms.sort(key=lambda room: (-room[0], room[1]))
        most = {"STRICT_SPREAD": 1, "SPREAD": 1}.get(demand.strategy, demand.workers)
        while True:
            chosen, missing = list[tuple[int, int]](), demand.workers
            for room, index in rooms:
                own = demand.cpus_per_replica if not chosen else 0.0
                count = min(missing, most, room if not own else self._workers(index, demand, own))
                if count > 0:
                    chosen.append((index, count))
                    missing -= count
                if not missing:
                    return chosen
            if demand.strategy != "SPREAD" or most >= demand.workers:
                return None
            most += 1  # as evenly as there is room

    def _workers(self, index: int, demand: Demand, own_cpus: float) -> int:
        """How many workers a node has room for."""
        rooms = [demand.workers]
        if demand.gpus_per_worker:
            rooms.append(int((self._gpus[index] + _EPSILON) / demand.gpus_per_worker))
        if demand.cpus_per_worker:
            rooms.append(int((self._cpus[index] - own_cpus + _EPSILON) / demand.cpus_per_worker))
        return max(0, min(rooms)) if self._cpus[index] >= own_cpus - _EPSILON else 0

    def _taken(self, chosen: Sequence[tuple[int, int]], demand: Demand) -> Taken:
        taken = []
        for number, (index, workers) in enumerate(chosen):
            gpus = workers * demand.gpus_per_worker
            cpus = workers * demand.cpus_per_worker + (0.0 if number else demand.cpus_per_replica)
            self._set(index, self._gpus[index] - gpus, self._cpus[index] - cpus)
            taken.append((index, gpus, cpus))
        return taken

    def _set(self, index: int, gpus: float, cpus: float) -> None:
        bit = 1 << index
        self._by_gpus[_rounded(self._gpus[index])] &= ~bit
        self._gpus[index], self._cpus[index] = gpus, cpus
        self._by_gpus[_rounded(gpus)] |= bit


def _rounded(gpus: float) -> float:
    """Free GPUs as a key, so that rounding errors of fractions make no difference."""
    return round(gpus, 4)


def least_units(pools: Iterable[PoolStats]) -> list[list[Demand]]:
    """What each group begins with: one replica of each role that it has."""
    groups: dict[str, list[Demand]] = {}
    for pool in pools:
        if pool.demand is not None:
            groups.setdefault(pool.key.group, []).append(pool.demand)
    return list(groups.values())
