"""What nobody holds yet: a cycle's virtual allocation of GPUs on nodes, and of GPUs that budgets leave (pure).

What is taken is gone for the rest of the cycle; what somebody gives up is there in the next one only, when all of this
is made anew (HeteroScale section 3.4, virtual allocation).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from kvtransfer.topology import LinkTier, Node, NodeSet, Topology

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one replica takes.

    Attributes:
        selector: the labels of the nodes that it may be on.
        gpu_type: of its GPUs; ``None`` where it has none.
        workers: of its engine, each a bundle.
        gpus_per_worker: may be a fraction.
        cpus_per_worker: of each bundle.
        cpus_per_replica: beside those, with the first worker.
        strategy: how the bundles lie.
        parts: what it consists of instead, such as attention and FFN instances in their ratio; all under one switch of
            ``within`` (HeteroScale section 3.4, disaggregated MoE).
    """

    selector: Mapping[str, str] = field(default_factory=dict)
    gpu_type: str | None = None
    workers: int = 1
    gpus_per_worker: float = 0.0
    cpus_per_worker: float = 0.0
    cpus_per_replica: float = 0.0
    strategy: Strategy = "STRICT_PACK"
    parts: tuple["Demand", ...] = ()
    within: LinkTier = LinkTier.S1

    @property
    def gpus(self) -> float:
        """GPUs of one replica."""
        return math.fsum(part.gpus for part in self.parts) if self.parts else self.workers * self.gpus_per_worker

    def gpus_by_type(self) -> dict[str, float]:
        """GPUs of one replica, by type."""
        found: dict[str, float] = {}
        for part in self.parts or (self,):
            if part.gpu_type is not None:
                found[part.gpu_type] = found.get(part.gpu_type, 0.0) + part.gpus
        return found


# What was taken of which node: its index, GPUs and CPUs.
Taken = list[tuple[int, float, float]]


class Slots:
    """Free GPUs and CPUs of one cycle.

    Args:
        topology: the nodes.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._gpus = [node.free_gpus for node in topology.nodes]
        self._cpus = [node.free_cpus for node in topology.nodes]
        self._by_gpus: dict[float, NodeSet] = {}
        for index, free in enumerate(self._gpus):
            self._by_gpus[_rounded(free)] = self._by_gpus.get(_rounded(free), 0) | 1 << index

    def copy(self) -> "Slots":
        """The same room, to try something in."""
        made = object.__new__(type(self))
        made.topology = self.topology
        made._gpus, made._cpus, made._by_gpus = self._gpus[:], self._cpus[:], dict(self._by_gpus)
        return made

    def vacate(self, demand: Demand, names: Iterable[str]) -> None:
        """A replica that is on these nodes leaves them."""
        indices = [index for name in names if (index := self.topology.index.get(name)) is not None]
        parts = demand.parts or (demand,)
        cpus = math.fsum(part.workers * part.cpus_per_worker + part.cpus_per_replica for part in parts)
        self.give_back([(index, demand.gpus / len(indices), cpus / len(indices)) for index in indices])

    def candidates(self, demand: Demand) -> NodeSet:
        """The nodes that a replica may be on, whether they have room or not."""
        if demand.parts:
            found = 0
            for part in demand.parts:
                found |= self.candidates(part)
            return found
        nodes = self.topology.selected(demand.selector)
        return nodes if demand.gpu_type is None else nodes & self.topology.of_type.get(demand.gpu_type, 0)

    def take(self, demand: Demand) -> Taken | None:
        """Room for one replica where nodes are least scarce, and there where least is left over.

        Returns:
            What was taken, to be given back if the rest of its unit has no room; ``None``: there is none.
        """
        if demand.parts:
            return self._take_parts(demand, self.topology.usable)
        return self._take(demand, self.candidates(demand) & self.topology.usable)

    def left(self) -> tuple[list[float], list[float]]:
        """GPUs and CPUs that each node has left now."""
        return self._gpus[:], self._cpus[:]

    def nodes(self, demands: Iterable[Demand | None], left: tuple[list[float], list[float]]) -> tuple[Node, ...]:
        """The nodes that any of these may be on, with what was left of them."""
        found = 0
        for demand in demands:
            found |= 0 if demand is None else self.candidates(demand)
        return tuple(
            node
            if (node.free_gpus, node.free_cpus) == (gpus, cpus)  # most are as they were
            else replace(node, free_gpus=gpus, free_cpus=cpus)
            for index, (node, gpus, cpus) in enumerate(zip(self.topology.nodes, *left, strict=True))
            if found >> index & 1
        )

    def give_back(self, taken: Taken) -> None:
        """What a unit had taken that has no room as a whole."""
        for index, gpus, cpus in taken:
            self._set(index, self._gpus[index] + gpus, self._cpus[index] + cpus)

    def free_gpus(self, nodes: NodeSet) -> float:
        """GPUs that nobody holds there."""
        return math.fsum(free * (self._by_gpus[free] & nodes).bit_count() for free in self._by_gpus)

    def fragmented_frac(self, units: Iterable[Sequence[Demand]]) -> float | None:
        """The share of free GPUs that lie in domains where no unit of any group fits; ``None``: none is free.

        Args:
            units: of each group, what is placed together at least.
        """
        useful = 0
        for unit in units:
            if self._fits(unit):
                useful |= self._domain(unit)
        free = self.free_gpus(self.topology.everywhere)
        return 1.0 - self.free_gpus(useful) / free if free else None

    def unusable_frac(self, units: Iterable[Sequence[Demand]]) -> float | None:
        """The share of the free GPUs of groups' domains that lie where the group's own unit does not fit.

        Each domain counts once for each group that it is of; ``None``: none is free.
        """
        all_gpus = unusable_gpus = 0.0
        for unit in units:
            free = self.free_gpus(self._domain(unit))
            all_gpus += free
            unusable_gpus += 0.0 if self._fits(unit) else free
        return unusable_gpus / all_gpus if all_gpus else None

    def _domain(self, unit: Sequence[Demand]) -> NodeSet:
        nodes = 0
        for demand in unit:
            nodes |= self.candidates(demand)
        return nodes

    def _fits(self, unit: Sequence[Demand]) -> bool:
        taken: list[Taken] = []
        for demand in unit:
            found = self.take(demand)
            if found is None:
                break
            taken.append(found)
        for found in taken:
            self.give_back(found)
        return len(taken) == len(unit)

    def _take_parts(self, demand: Demand, among: NodeSet) -> Taken | None:
        # The least scarce switch, and of those the fullest: what is left of an empty one is left whole.
        below = self.topology.domains[demand.within].values()
        ranked = sorted(below, key=lambda nodes: (self.topology.priority(nodes), self.free_gpus(nodes)))
        for nodes in ranked:
            taken: Taken = []
            for part in demand.parts:
                found = self._take(part, self.candidates(part) & nodes & among)
                if found is None:
                    self.give_back(taken)
                    break
                taken += found
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
        """The node on which least is left over once the whole replica is there."""
        gpus = demand.gpus
        cpus = demand.workers * demand.cpus_per_worker + demand.cpus_per_replica
        for free in sorted(self._by_gpus):
            if free < gpus - _EPSILON:
                continue
            hit = self._by_gpus[free] & among
            while hit:
                lowest = hit & -hit
                index = lowest.bit_length() - 1
                if self._cpus[index] >= cpus - _EPSILON:
                    return index
                hit ^= lowest
        return None

    def _scattered(self, demand: Demand, among: NodeSet) -> list[tuple[int, int]] | None:
        """Nodes and how many workers each takes; the first has the replica's own CPUs too."""
        rooms = []
        for free, nodes in self._by_gpus.items():
            hit = nodes & among if free >= demand.gpus_per_worker - _EPSILON else 0
            while hit:
                lowest = hit & -hit
                index = lowest.bit_length() - 1
                hit ^= lowest
                rooms.append((self._workers(index, demand, 0.0), index))
        rooms.sort(key=lambda room: (-room[0], room[1]))
        most = {"STRICT_SPREAD": 1, "SPREAD": 1}.get(demand.strategy, demand.workers)
        while True:
            chosen, left = list[tuple[int, int]](), demand.workers
            for room, index in rooms:
                own = demand.cpus_per_replica if not chosen else 0.0
                count = min(left, most, room if not own else self._workers(index, demand, own))
                if count > 0:
                    chosen.append((index, count))
                    left -= count
                if not left:
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
        self._by_gpus[_rounded(gpus)] = self._by_gpus.get(_rounded(gpus), 0) | bit


def _rounded(gpus: float) -> float:
    """Fractions of a GPU as keys."""
    return round(gpus, 4)
