"""Free GPUs and CPUs of nodes, and the choice of nodes for a replica (pure).

HeteroScale section 3.4, virtual allocation: room that is taken is gone for the rest of the cycle. Room of leaving
replicas becomes free once they are gone, since each cycle builds its slots anew from the nodes.
A ``NodeSet`` is an integer with one bit per node: ``&`` is what two sets share, ``|`` their union.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from autoscale.types import Demand, PoolStats
from kvtransfer.topology import Node, NodeSet, Offer, Topology, indices

# Tolerance for rounding errors of GPUs and CPUs.
_EPSILON = 1e-6
# Room that was taken: index of the node, GPUs and CPUs. A node may occur twice.
Taken = list[tuple[int, float, float]]


def nodes_of(taken: Iterable[Taken]) -> NodeSet:
    """The nodes on which room was taken. Two parts of a replica may share a node."""
    return sum({1 << index for room in taken for index, _, _ in room})


class Slots:
    """Free GPUs and CPUs of the nodes of a topology, in one cycle."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._gpus = [node.free_gpus for node in topology.nodes]
        self._cpus = [node.free_cpus for node in topology.nodes]
        # Nodes by their free GPUs, so that a search looks at a few numbers instead of thousands of nodes.
        self._by_gpus = defaultdict[float, NodeSet](int)
        for index, free in enumerate(self._gpus):
            self._by_gpus[_rounded(free)] |= 1 << index
        self._usable = topology.usable
        # A replica is on nodes of one step: on existing ones, or on possible ones of one type, the cheap types first.
        self._steps = [topology.existing, *topology.offers.values()]
        # The step of each node, so that a search visits the steps of its nodes alone.
        self._step_of = [0] * len(topology.nodes)
        for number, step in enumerate(self._steps[1:], start=1):
            for index in indices(step):
                self._step_of[index] = number
        # Nodes as ``nodes`` last returned them: the next service mostly sees the same, and a copy takes time.
        self._shown = list(topology.nodes)

    def copy(self) -> "Slots":
        """An independent copy of the free room, for a trial."""
        copied = object.__new__(type(self))  # without __init__, which would start from the nodes again
        copied.topology = self.topology
        copied._gpus, copied._cpus, copied._by_gpus = self._gpus[:], self._cpus[:], self._by_gpus.copy()
        copied._usable, copied._steps, copied._step_of = self._usable, self._steps, self._step_of
        copied._shown = self._shown[:]
        return copied

    def vacate(self, demand: Demand, names: Iterable[str]) -> None:
        """Free the room of a replica on these nodes, in equal parts: which worker is on which node is not known."""
        own = [index for name in names if (index := self.topology.index.get(name)) is not None]
        parts = demand.parts or (demand,)
        cpus = math.fsum(part.workers * part.cpus_per_worker + part.cpus_per_replica for part in parts)
        self.give_back([(index, demand.gpus / len(own), cpus / len(own)) for index in own])

    def starts_together(self, nodes: NodeSet) -> bool:
        """Whether one label selector leads replicas to all of these nodes.

        Replicas that wait for a possible node are led by the labels of its type.
        """
        topology = self.topology
        possible = list(topology.listed(nodes & ~topology.existing))
        if not possible:
            return True
        types = {node.offer.node_type for node in possible if node.offer is not None}
        return len(types) == 1 and not nodes & topology.existing & ~topology.selected(possible[0].labels)

    def refuse(self, node_types: Collection[str]) -> None:
        """Take no more possible nodes of these types in this cycle."""
        for offer, nodes in self.topology.offers.items():
            if offer.node_type in node_types:
                self._usable &= ~nodes

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

    def take(self, demand: Demand, among: NodeSet | None = None) -> Taken | None:
        """Take room for one replica: on the least scarce nodes, and of these on the one with the least room to spare.

        Nodes that exist come first, then possible ones from cheap to expensive. ``among``: nodes that the replica may
        be on; left out: all that its demand allows. ``None``: there is no room.
        """
        if among is None:
            among = self.topology.everywhere
        return self._take_parts(demand, among) if demand.parts else self._take(demand, self.candidates(demand) & among)

    def nodes_of_offer(self, offer: Offer | None) -> NodeSet:
        """Nodes on which a replica may be that waits for a type: existing ones with its labels, and possible ones.

        ``None``: it waits for room on existing nodes.
        """
        topology = self.topology
        if offer is None:
            return topology.existing
        possible = sum(nodes for other, nodes in topology.offers.items() if other.node_type == offer.node_type)
        return possible | topology.existing & topology.selected(dict(offer.labels))

    def free(self) -> tuple[list[float], list[float]]:
        """Free GPUs and CPUs of each node, in the order of the topology's nodes."""
        return self._gpus[:], self._cpus[:]

    def nodes(self, demands: Iterable[Demand | None], free: tuple[list[float], list[float]]) -> tuple[Node, ...]:
        """The nodes that any of these replicas may be on, with the room that ``free()`` returned earlier."""
        all_gpus, all_cpus = free
        nodes = []
        # Possible nodes of a type that is given up are left out, so that a log replays without the service that did it.
        among, shown = self.topology.existing | self._usable, self._shown
        for index in indices(self.candidates_of_any(demands) & among):
            node, gpus, cpus = shown[index], all_gpus[index], all_cpus[index]
            if node.free_gpus != gpus or node.free_cpus != cpus:
                node = shown[index] = replace(node, free_gpus=gpus, free_cpus=cpus)
            nodes.append(node)
        return tuple(nodes)

    def give_back(self, taken: Taken) -> None:
        """Free room that was taken."""
        for index, gpus, cpus in taken:
            self._set(index, self._gpus[index] + gpus, self._cpus[index] + cpus)

    def free_gpus(self, nodes: NodeSet) -> float:
        """Free GPUs on these nodes."""
        return math.fsum(free * (self._by_gpus[free] & nodes).bit_count() for free in self._by_gpus)

    def used_gpus(self, nodes: NodeSet) -> float:
        """GPUs in use on these nodes."""
        return math.fsum(self.topology.nodes[index].gpus - self._gpus[index] for index in indices(nodes))

    def fragmented_frac(self, units: Iterable[Sequence[Demand]]) -> float | None:
        """Share of the free GPUs that no group can use, since no unit that fits may be there; ``None``: no GPU is free.

        ``units``: the demands of the replicas of each group's smallest unit (``least_units``). The nodes of a unit are
        all nodes that its replicas may be on.
        """
        useful = 0
        for unit in units:
            trial = self.copy()
            if all(trial.take(demand) is not None for demand in unit):
                useful |= self.candidates_of_any(unit)
        free = self.free_gpus(self.topology.everywhere)
        return 1.0 - self.free_gpus(useful) / free if free else None

    def _take_parts(self, demand: Demand, among: NodeSet) -> Taken | None:
        """Take room for all parts of a replica below one switch.

        The switch is the least scarce, and of equally scarce ones that with the fewest free GPUs, so that empty ones
        stay empty.
        """
        below = self.topology.domains[demand.within].values()  # the nodes below each switch of this level
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
        """Take room ``among`` these nodes: on those that exist if they have it, else on the cheapest possible ones."""
        # Most nodes of a nearly full cluster are left out here at once.
        among &= self._usable & self._with(demand.gpus if demand.strategy == "STRICT_PACK" else demand.gpus_per_worker)
        for step in self._steps_of(among):
            if (taken := self._take_least_scarce(demand, among & step)) is not None:
                return taken
        return None

    def _with(self, gpus: float) -> NodeSet:
        """The nodes that have at least this number of free GPUs."""
        found: NodeSet = 0
        for free, nodes in self._by_gpus.items():
            if free >= gpus - _EPSILON:
                found |= nodes
        return found

    def _steps_of(self, nodes: NodeSet) -> Iterator[NodeSet]:
        """The steps that have some of these nodes, in order."""
        existing = self._steps[0]
        if nodes & existing:
            yield existing
        possible = nodes & ~existing
        numbers = []
        while possible:
            number = self._step_of[(possible & -possible).bit_length() - 1]  # that of the lowest node
            numbers.append(number)
            possible &= ~self._steps[number]
        yield from (self._steps[number] for number in sorted(numbers))

    def _take_least_scarce(self, demand: Demand, among: NodeSet) -> Taken | None:
        """Take room ``among`` these nodes, on the least scarce that have it, as the replica's strategy requires.

        A replica on one node needs nodes of one scarcity alone: less scarce nodes were tried before. A replica on
        several nodes may use less scarce nodes too.
        """
        # The least scarce nodes come first: those that offer what many others offer too.
        up_to_here: NodeSet = 0  # nodes of this scarcity and of all lower ones
        for subgroup in self.topology.subgroups.values():
            of_this_scarcity = among & subgroup
            up_to_here |= of_this_scarcity
            if not of_this_scarcity:
                continue
            if demand.strategy in ("PACK", "STRICT_PACK") or demand.workers == 1:
                index = self._best_fit(demand, of_this_scarcity)
                if index is not None:
                    return self._occupy([(index, demand.workers)], demand)
            if demand.strategy != "STRICT_PACK" and demand.workers > 1:
                spread = self._scattered(demand, up_to_here)
                if spread is not None:
                    return self._occupy(spread, demand)
        return None

    def _best_fit(self, demand: Demand, among: NodeSet) -> int | None:
        """The node with the fewest free GPUs that has room for the whole replica."""
        gpus = demand.gpus
        cpus = demand.workers * demand.cpus_per_worker + demand.cpus_per_replica
        for free in sorted(self._by_gpus):
            if free < gpus - _EPSILON or not (nodes := self._by_gpus[free] & among):
                continue
            for index in indices(nodes):
                if self._cpus[index] >= cpus - _EPSILON:
                    return index
        return None

    def _scattered(self, demand: Demand, among: NodeSet) -> list[tuple[int, int]] | None:
        """Nodes and the number of workers on each, the nodes with room for most workers first; ``None``: no room.

        The first node also gives the CPUs of the replica itself.
        """
        rooms = [
            (self._workers(index, demand, 0.0), index)
            for free, nodes in self._by_gpus.items()
            if free >= demand.gpus_per_worker - _EPSILON
            for index in indices(nodes & among)
        ]
        rooms.sort(key=lambda room: (-room[0], room[1]))
        most_on_node = 1 if demand.strategy in ("SPREAD", "STRICT_SPREAD") else demand.workers
        while True:
            chosen, missing = list[tuple[int, int]](), demand.workers
            for workers, index in rooms:
                if not chosen and demand.cpus_per_replica:
                    workers = self._workers(index, demand, demand.cpus_per_replica)
                count = min(missing, most_on_node, workers)
                if count > 0:
                    chosen.append((index, count))
                    missing -= count
                if not missing:
                    return chosen
            if demand.strategy != "SPREAD" or most_on_node >= demand.workers:
                return None
            most_on_node += 1  # SPREAD puts more workers on a node only if it must

    def _workers(self, index: int, demand: Demand, own_cpus: float) -> int:
        """Number of workers that a node has room for, beside ``own_cpus`` of the replica itself."""
        if self._cpus[index] < own_cpus - _EPSILON:
            return 0
        limits = [demand.workers]
        if demand.gpus_per_worker:
            limits.append(int((self._gpus[index] + _EPSILON) / demand.gpus_per_worker))
        if demand.cpus_per_worker:
            limits.append(int((self._cpus[index] - own_cpus + _EPSILON) / demand.cpus_per_worker))
        return max(0, min(limits))

    def _occupy(self, chosen: Sequence[tuple[int, int]], demand: Demand) -> Taken:
        """Take the room of a replica; ``chosen``: nodes and the number of workers on each."""
        taken = []
        for number, (index, workers) in enumerate(chosen):
            gpus = workers * demand.gpus_per_worker
            cpus = workers * demand.cpus_per_worker + (0.0 if number else demand.cpus_per_replica)
            self._set(index, self._gpus[index] - gpus, self._cpus[index] - cpus)
            taken.append((index, gpus, cpus))
        return taken

    def _set(self, index: int, gpus: float, cpus: float) -> None:
        """Set the free GPUs and CPUs of a node, and its place in ``_by_gpus``."""
        bit = 1 << index
        self._by_gpus[_rounded(self._gpus[index])] &= ~bit
        self._gpus[index], self._cpus[index] = gpus, cpus
        self._by_gpus[_rounded(gpus)] |= bit


def _rounded(gpus: float) -> float:
    """Free GPUs as a key of a dict, without the rounding errors of fractions."""
    return round(gpus, 4)


def least_units(pools: Iterable[PoolStats]) -> list[list[Demand]]:
    """The smallest unit of each group: one replica of each role that it has."""
    groups: dict[str, list[Demand]] = {}
    for pool in pools:
        if pool.demand is not None:
            groups.setdefault(pool.key.group, []).append(pool.demand)
    return list(groups.values())
