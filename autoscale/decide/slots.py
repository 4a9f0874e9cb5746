"""Free GPUs and CPUs of nodes, and the choice of nodes for a replica (pure).

HeteroScale section 3.4, virtual allocation: room that is taken is gone for the rest of the cycle. Room of leaving
replicas is free in the next cycle, which builds its slots anew.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoscale.types import Demand, PoolStats
from kvtransfer.topology import Node, NodeSet, Topology, indices

# Tolerance for rounding errors of GPUs and CPUs.
_EPSILON = 1e-6
# Room that was taken: for each node its index, GPUs and CPUs.
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
        """An independent copy of the free room, for a trial."""
        copied = object.__new__(type(self))
        copied.topology = self.topology
        copied._gpus, copied._cpus, copied._by_gpus = self._gpus[:], self._cpus[:], self._by_gpus.copy()
        return copied

    def vacate(self, demand: Demand, names: Iterable[str]) -> None:
        """Free the room of a replica on these nodes."""
        on = [index for name in names if (index := self.topology.index.get(name)) is not None]
        parts = demand.parts or (demand,)
        cpus = math.fsum(part.workers * part.cpus_per_worker + part.cpus_per_replica for part in parts)
        self.give_back([(index, demand.gpus / len(on), cpus / len(on)) for index in on])

    def candidates(self, demand: Demand) -> NodeSet:
        """The nodes that a replica may be on, whether they have room or not."""
        if demand.parts:
            return self.candidates_of_any(demand.parts)
        nodes = self.topology.selected(demand.selector)
        return nodes if demand.gpu_type is None else nodes & self.topology.of_type.get(demand.gpu_type, 0)

    def candidates_of_any(self, demands: Iterable[Demand | None]) -> NodeSet:
        """The nodes that any of these replicas may be on; a demand that is ``None`` has no nodes."""
        nodes: NodeSet = 0
        for demand in demands:
            nodes |= 0 if demand is None else self.candidates(demand)
        return nodes

    def take(self, demand: Demand) -> Taken | None:
        """Take room for one replica: on the least scarce nodes, and of these on the one with the least room to spare.

        ``None``: there is no room.
        """
        return self._take_parts(demand) if demand.parts else self._take(demand, self.candidates(demand))

    def free(self) -> tuple[list[float], list[float]]:
        """Free GPUs and CPUs of each node."""
        return self._gpus[:], self._cpus[:]

    def nodes(self, demands: Iterable[Demand | None], free: tuple[list[float], list[float]]) -> tuple[Node, ...]:
        """The nodes that any of these replicas may be on, with this ``free`` room."""
        chosen = self.candidates_of_any(demands)
        return tuple(
            node
            if (node.free_gpus, node.free_cpus) == (gpus, cpus)  # unchanged, as most are
            else replace(node, free_gpus=gpus, free_cpus=cpus)
            for index, (node, gpus, cpus) in enumerate(zip(self.topology.nodes, *free, strict=True))
            if chosen >> index & 1
        )

    def give_back(self, taken: Taken) -> None:
        """Free room that was taken."""
        for index, gpus, cpus in taken:
            self._set(index, self._gpus[index] + gpus, self._cpus[index] + cpus)

    def free_gpus(self, nodes: NodeSet) -> float:
        """Free GPUs on these nodes."""
        return math.fsum(free * (self._by_gpus[free] & nodes).bit_count() for free in self._by_gpus)

    def fragmented_frac(self, units: Iterable[Sequence[Demand]]) -> float | None:
        """Share of the free GPUs on nodes where no ``unit`` of any group fits; ``None``: no GPU is free."""
        useful = 0
        for unit in units:
            trial = self.copy()
            if all(trial.take(demand) is not None for demand in unit):
                useful |= self.candidates_of_any(unit)
        free = self.free_gpus(self.topology.everywhere)
        return 1.0 - self.free_gpus(useful) / free if free else None

    def _take_parts(self, demand: Demand) -> Taken | None:
        # The least scarce switch, and of those the fullest, so that empty ones stay empty.
        below = self.topology.domains[demand.within].values()
        ranked = sorted(below, key=lambda nodes: (self.topology.priority(nodes), self.free_gpus(nodes)))
        for nodes in ranked:
            taken: Taken = []
            for part in demand.parts:
                room = self._take(part, self.candidates(part) & nodes)
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
            narrow = among & nodes & self.topology.usable
            wider |= narrow
            if not narrow:
                continue
            if demand.strategy in ("PACK", "STRICT_PACK") or demand.workers == 1:
                index = self._best_fit(demand, narrow)
                if index is not None:
                    return self._occupy([(index, demand.workers)], demand)
            if demand.strategy != "STRICT_PACK" and demand.workers > 1:
                spread = self._scattered(demand, wider)
                if spread is not None:
                    return self._occupy(spread, demand)
        return None

    def _best_fit(self, demand: Demand, among: NodeSet) -> int | None:
        """The node that has room for the whole replica and the fewest free GPUs."""
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
        """Nodes and the number of workers on each; the first node also gives the CPUs of the replica itself."""
        rooms = [
            (self._workers(index, demand, 0.0), index)
            for free, nodes in self._by_gpus.items()
            if free >= demand.gpus_per_worker - _EPSILON
            for index in indices(nodes & among)
        ]
        rooms.sort(key=lambda room: (-room[0], room[1]))
        most = 1 if demand.strategy in ("SPREAD", "STRICT_SPREAD") else demand.workers
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
            most += 1  # SPREAD puts more workers on a node only if it must

    def _workers(self, index: int, demand: Demand, own_cpus: float) -> int:
        """Number of workers that a node has room for, beside ``own_cpus`` of the replica itself."""
        rooms = [demand.workers]
        if demand.gpus_per_worker:
            rooms.append(int((self._gpus[index] + _EPSILON) / demand.gpus_per_worker))
        if demand.cpus_per_worker:
            rooms.append(int((self._cpus[index] - own_cpus + _EPSILON) / demand.cpus_per_worker))
        return max(0, min(rooms)) if self._cpus[index] >= own_cpus - _EPSILON else 0

    def _occupy(self, chosen: Sequence[tuple[int, int]], demand: Demand) -> Taken:
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
    """Free GPUs as a key without the rounding errors of fractions."""
    return round(gpus, 4)


def least_units(pools: Iterable[PoolStats]) -> list[list[Demand]]:
    """The smallest unit of each group: one replica of each role that it has."""
    groups: dict[str, list[Demand]] = {}
    for pool in pools:
        if pool.demand is not None:
            groups.setdefault(pool.key.group, []).append(pool.demand)
    return list(groups.values())
