"""Nodes and the switches above them: how far apart two nodes are, and how scarce a switch is (pure).

A set of nodes is an integer with one bit per node, so that a cluster of thousands is searched in microseconds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

from kvtransfer.selectors import matches

# A set of nodes of one topology: bit ``i`` is its node ``i``.
NodeSet = int


class Role(StrEnum):
    """What a replica does for a request (HeteroScale section 2.1)."""

    PREFILL = "prefill"
    DECODE = "decode"


class LinkTier(IntEnum):
    """The lowest level that two nodes share: rack, minipod, bigpod, cluster or site (HeteroScale section 2.2)."""

    S0 = 0
    S1 = 1
    S2 = 2
    CLUSTER = 3
    DATA_CENTRE = 4
    NONE = 5


def _named_affinity(value: Any) -> Any:
    """Read a level by its name."""
    if not isinstance(value, str):
        return value
    if value.upper() not in LinkTier.__members__:
        raise ValueError(f"{value!r} is no level: give {', '.join(tier.name.lower() for tier in LinkTier)}")
    return LinkTier[value.upper()]


# Written as the level's name.
Affinity = Annotated[
    LinkTier,
    BeforeValidator(
        _named_affinity, json_schema_input_type=Literal["s0", "s1", "s2", "cluster", "data_centre", "none"]
    ),
    PlainSerializer(lambda tier: tier.name.lower(), return_type=str),
]


class SubgroupPriority(IntEnum):
    """Scarcity of the switch above a node: RDMA subgroups, from common to scarce (HeteroScale section 3.4)."""

    S2_HOMOGENEOUS = 0
    S2_HETEROGENEOUS = 1
    S1_HETEROGENEOUS = 2


# Levels from the top down.
TIERS = (LinkTier.DATA_CENTRE, LinkTier.CLUSTER, LinkTier.S2, LinkTier.S1, LinkTier.S0)
# Names from the data centre down to a level; switches of two minipods may have one name.
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, with its free GPUs and CPUs at this instant."""

    name: str  # Ray's id of the node
    labels: Mapping[str, str] = field(default_factory=dict)
    under: Path = ("",) * len(TIERS)  # names of its data centre, cluster, S2, S1 and S0 switch; empty if unknown
    gpu_type: str | None = None  # ``None``: it has no GPU
    gpus: float = 0.0
    free_gpus: float = 0.0
    cpus: float = 0.0
    free_cpus: float = 0.0
    is_cordoned: bool = False  # whether it takes no new replica
    host: str = ""  # its host name, which several nodes on one machine share
    scarcity: SubgroupPriority | None = None  # of its switches in the cluster; ``None``: by the nodes beside it
    contradiction: str = ""  # labels and resources that do not agree, in words


def path(node: Node, tier: LinkTier) -> Path | None:
    """Names of the switches above a node, down to a level; ``None``: its switch of that level is unknown."""
    names = node.under[: TIERS.index(tier) + 1]
    return names if names[-1] else None


class Topology:
    """The nodes of one instant by the switches above them; built anew for each cycle (HeteroScale section 3.4)."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: Sequence[Node] = sorted(nodes, key=lambda node: node.name)
        self._selected: dict[tuple[str, str], NodeSet] = {}
        self._labelled: dict[str, dict[str | None, NodeSet]] = {}

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Place of each node in ``nodes``, by name."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def everywhere(self) -> NodeSet:
        """All nodes."""
        return (1 << len(self.nodes)) - 1

    @cached_property
    def usable(self) -> NodeSet:
        """Nodes that are not cordoned."""
        return self._by(lambda node: node.is_cordoned).get(False, 0)

    @cached_property
    def of_type(self) -> Mapping[str | None, NodeSet]:
        """Nodes by GPU type; ``None``: nodes without a GPU."""
        return self._by(lambda node: node.gpu_type)

    @cached_property
    def domains(self) -> Mapping[LinkTier, Mapping[Path, NodeSet]]:
        """Nodes below each switch, cluster and data centre."""
        domains = {}
        for tier in TIERS:
            below = self._by(lambda node, tier=tier: path(node, tier))
            domains[tier] = {names: nodes for names, nodes in below.items() if names is not None}
        return domains

    @cached_property
    def subgroups(self) -> Mapping[SubgroupPriority, NodeSet]:
        """Nodes by scarcity, from common to scarce.

        An S1 switch with several GPU types is the scarcest, then the rest of an S2 switch with several types. All other
        nodes are common, also those without a GPU or with unknown switches.
        """
        marked = self._by(lambda node: node.scarcity)
        if None not in marked:
            return {priority: marked.get(priority, 0) for priority in SubgroupPriority}
        gpus = self.everywhere & ~self.of_type.get(None, 0)
        s1, s2 = self._mixed(LinkTier.S1) & gpus, self._mixed(LinkTier.S2) & gpus
        return {
            SubgroupPriority.S2_HOMOGENEOUS: self.everywhere & ~s1 & ~s2,
            SubgroupPriority.S2_HETEROGENEOUS: s2 & ~s1,
            SubgroupPriority.S1_HETEROGENEOUS: s1,
        }

    def with_scarcity(self) -> "Topology":
        """Copy with each node's scarcity stored, so that a subset keeps the scarcity of the full cluster."""
        scarcity = {index: priority for priority, nodes in self.subgroups.items() for index in indices(nodes)}
        return Topology(replace(node, scarcity=scarcity[index]) for index, node in enumerate(self.nodes))

    def _mixed(self, tier: LinkTier) -> NodeSet:
        mixed = 0
        for below in self.domains[tier].values():
            types = sum(1 for kind, nodes in self.of_type.items() if kind is not None and nodes & below)
            mixed |= below if types > 1 else 0
        return mixed

    def priority(self, nodes: NodeSet) -> SubgroupPriority:
        """The scarcest subgroup of any of these nodes."""
        scarce = (priority for priority in reversed(SubgroupPriority) if self.subgroups[priority] & nodes)
        return next(scarce, SubgroupPriority.S2_HOMOGENEOUS)

    def selected(self, selector: Mapping[str, str]) -> NodeSet:
        """Nodes that satisfy a label selector, as Ray reads it."""
        selected = self.everywhere
        for label in selector.items():
            if label not in self._selected:
                self._selected[label] = self._demanded(*label)
            selected &= self._selected[label]
        return selected

    def _demanded(self, key: str, wanted: str) -> NodeSet:
        if key not in self._labelled:
            self._labelled[key] = self._by(lambda node: node.labels.get(key))
        matching = 0
        for value, nodes in self._labelled[key].items():
            matching |= nodes if matches(value, wanted) else 0
        return matching

    def tier(self, nodes: NodeSet) -> LinkTier:
        """The lowest level that all of these nodes share; ``NONE``: labels show none."""
        for tier in reversed(TIERS):
            first = next((below for below in self.domains[tier].values() if below & nodes), None)
            if first is not None and nodes & ~first == 0:
                return tier
        return LinkTier.NONE

    def listed(self, nodes: NodeSet) -> Iterator[Node]:
        """The nodes of a set, by name."""
        return (self.nodes[index] for index in indices(nodes))

    def _by(self, key: Any) -> dict[Any, NodeSet]:
        bits: dict[Any, NodeSet] = {}
        for index, node in enumerate(self.nodes):
            value = key(node)
            bits[value] = bits.get(value, 0) | 1 << index
        return bits


def indices(nodes: NodeSet) -> Iterator[int]:
    """The indices of the nodes of a set, rising."""
    while nodes:
        lowest = nodes & -nodes
        yield lowest.bit_length() - 1
        nodes ^= lowest
