"""Nodes and the switches above them: how far apart two nodes are, and how scarce a switch is (pure).

A set of nodes is an integer with one bit per node: ``&`` intersects two sets, ``|`` joins them, and ``a & ~b`` removes
``b``. So a cluster of thousands of nodes is searched in microseconds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

from kvtransfer.selectors import matches

# A set of nodes of one topology: bit ``i`` is ``Topology.nodes[i]``.
NodeSet = int


class Role(StrEnum):
    """What a replica does for a request (HeteroScale section 2.1)."""

    PREFILL = "prefill"
    DECODE = "decode"


class LinkTier(IntEnum):
    """The lowest level that several nodes share; a smaller number is nearer (HeteroScale section 2.2)."""

    S0 = 0  # rack switch
    S1 = 1  # minipod switch
    S2 = 2  # bigpod switch
    CLUSTER = 3
    DATA_CENTRE = 4
    NONE = 5  # they share no level


def _named_affinity(value: Any) -> Any:
    """Read a level by its name."""
    if not isinstance(value, str):
        return value
    if value.upper() not in LinkTier.__members__:
        raise ValueError(f"{value!r} is no level: give {', '.join(tier.name.lower() for tier in LinkTier)}")
    return LinkTier[value.upper()]


# A level in a configuration, where it is written as its name.
Affinity = Annotated[
    LinkTier,
    BeforeValidator(
        _named_affinity, json_schema_input_type=Literal["s0", "s1", "s2", "cluster", "data_centre", "none"]
    ),
    PlainSerializer(lambda tier: tier.name.lower(), return_type=str),
]


class SubgroupPriority(IntEnum):
    """Scarcity of the switches above a node, from common to scarce: RDMA subgroups (HeteroScale section 3.4).

    Heterogeneous: nodes of several GPU types are below the switch. Few switches have such a mix.
    """

    S2_HOMOGENEOUS = 0
    S2_HETEROGENEOUS = 1
    S1_HETEROGENEOUS = 2


# Levels from the top down.
TIERS = (LinkTier.DATA_CENTRE, LinkTier.CLUSTER, LinkTier.S2, LinkTier.S1, LinkTier.S0)
# Names from the data centre down to a level. One name is not enough, since switches of two minipods may have the same.
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A node that does not exist yet: Ray's autoscaler adds one of its type if replicas wait for it."""

    node_type: str
    start_s: float  # longest wait for such a node, seconds
    retry_s: float  # time without requests of the type after one did not come, seconds
    cost_per_gpu_hour: float = 0.0  # in any currency
    labels: tuple[tuple[str, str], ...] = ()  # of all nodes of the type


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, with its free GPUs and CPUs at this instant; or a possible node, if it has an ``offer``."""

    name: str  # Ray's id of the node; of a possible node, its type and a number
    labels: Mapping[str, str] = field(default_factory=dict)
    under: Path = ("",) * len(TIERS)  # names of its data centre, cluster, S2, S1 and S0 switch; unknown ones are empty
    gpu_type: str | None = None  # ``None``: it has no GPU
    gpus: float = 0.0
    free_gpus: float = 0.0
    cpus: float = 0.0
    free_cpus: float = 0.0
    is_cordoned: bool = False  # whether it takes no new replica
    is_leaving: bool = False  # whether Ray has been told that the node will be taken away; then it is cordoned too
    host: str = ""  # its host name, which several nodes on one machine share
    scarcity: SubgroupPriority | None = None  # ``None``: follows from the other nodes of the topology
    contradiction: str = ""  # text about labels and resources that do not agree; empty: they agree
    offer: Offer | None = None  # ``None``: the node exists
    # Cost of a GPU hour that the cluster saves when it removes the node; ``None``: the node stays.
    saves_per_gpu_hour: float | None = None


def path(node: Node, tier: LinkTier) -> Path | None:
    """Names of the switches above a node, down to a level; ``None``: its switch of that level is unknown."""
    names = node.under[: TIERS.index(tier) + 1]
    return names if names[-1] else None


class Topology:
    """The nodes of one instant by the switches above them; it does not change later (HeteroScale section 3.4)."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: Sequence[Node] = sorted(nodes, key=lambda node: node.name)
        self._selected: dict[tuple[str, str], NodeSet] = {}  # cache: nodes by label key and selector
        self._labelled: dict[str, dict[str | None, NodeSet]] = {}  # cache: nodes by label key and value

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Place of each node in ``nodes``, by name."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def everywhere(self) -> NodeSet:
        """All nodes."""
        return (1 << len(self.nodes)) - 1  # as many bits as nodes

    @cached_property
    def usable(self) -> NodeSet:
        """Nodes that are not cordoned."""
        return self._sets_by(lambda node: node.is_cordoned).get(False, 0)

    @cached_property
    def offers(self) -> Mapping[Offer, NodeSet]:
        """Possible nodes by their offer, from cheap to expensive."""
        sets = {offer: nodes for offer, nodes in self._sets_by(lambda node: node.offer).items() if offer is not None}
        return dict(sorted(sets.items(), key=lambda item: (item[0].cost_per_gpu_hour, item[0].node_type)))

    @cached_property
    def offer_of(self) -> Mapping[str, Offer]:
        """The offer of each possible node, by name."""
        return {node.name: offer for offer, nodes in self.offers.items() for node in self.listed(nodes)}

    @cached_property
    def may_grow(self) -> bool:
        """Whether Ray's autoscaler adds and removes some of the nodes."""
        return any(node.offer is not None or node.saves_per_gpu_hour is not None for node in self.nodes)

    @cached_property
    def existing(self) -> NodeSet:
        """Nodes that exist."""
        return self.everywhere & ~sum(self.offers.values())

    @cached_property
    def of_type(self) -> Mapping[str | None, NodeSet]:
        """Nodes by GPU type; ``None``: nodes without a GPU."""
        return self._sets_by(lambda node: node.gpu_type)

    @cached_property
    def domains(self) -> Mapping[LinkTier, Mapping[Path, NodeSet]]:
        """Nodes below each switch, cluster and data centre: by level, then by the names down to it."""
        domains = {}
        for tier in TIERS:
            below = self._sets_by(lambda node, tier=tier: path(node, tier))
            domains[tier] = {names: nodes for names, nodes in below.items() if names is not None}
        return domains

    @cached_property
    def subgroups(self) -> Mapping[SubgroupPriority, NodeSet]:
        """Nodes by scarcity, from common to scarce.

        Nodes below an S1 switch with several GPU types are the scarcest, then the other nodes below an S2 switch with
        several types. All other nodes are common, also those without a GPU or with unknown switches. If every node has
        a stored scarcity (``with_scarcity``), the stored ones hold.
        """
        stored = self._sets_by(lambda node: node.scarcity)
        if None not in stored:
            return {priority: stored.get(priority, 0) for priority in SubgroupPriority}
        gpu_nodes = self.everywhere & ~self.of_type.get(None, 0)
        s1, s2 = self._mixed(LinkTier.S1) & gpu_nodes, self._mixed(LinkTier.S2) & gpu_nodes
        return {
            SubgroupPriority.S2_HOMOGENEOUS: self.everywhere & ~s1 & ~s2,
            SubgroupPriority.S2_HETEROGENEOUS: s2 & ~s1,
            SubgroupPriority.S1_HETEROGENEOUS: s1,
        }

    def with_scarcity(self) -> "Topology":
        """A copy with each node's scarcity stored, so that a subset of its nodes keeps that of the full cluster."""
        scarcity = {index: priority for priority, nodes in self.subgroups.items() for index in indices(nodes)}
        return Topology(replace(node, scarcity=scarcity[index]) for index, node in enumerate(self.nodes))

    def _mixed(self, tier: LinkTier) -> NodeSet:
        """Nodes below the switches of a level that have several GPU types below them; possible nodes add no type."""
        mixed = 0
        for below in self.domains[tier].values():
            present = below & self.existing
            types = sum(1 for gpu_type, nodes in self.of_type.items() if gpu_type is not None and nodes & present)
            if types > 1:
                mixed |= below
        return mixed

    def priority(self, nodes: NodeSet) -> SubgroupPriority:
        """The scarcity of the scarcest one of these nodes."""
        from_scarce = (priority for priority in reversed(SubgroupPriority) if self.subgroups[priority] & nodes)
        return next(from_scarce, SubgroupPriority.S2_HOMOGENEOUS)

    def selected(self, selector: Mapping[str, str]) -> NodeSet:
        """Nodes that satisfy all parts of a label selector, which is read as Ray does."""
        selected = self.everywhere
        for label in selector.items():
            if label not in self._selected:
                self._selected[label] = self._matching(*label)
            selected &= self._selected[label]
        return selected

    def _matching(self, key: str, wanted: str) -> NodeSet:
        """Nodes whose label ``key`` satisfies the selector ``wanted``."""
        if key not in self._labelled:
            self._labelled[key] = self._sets_by(lambda node: node.labels.get(key))
        matching = 0
        for value, nodes in self._labelled[key].items():
            if matches(value, wanted):
                matching |= nodes
        return matching

    def tier(self, nodes: NodeSet) -> LinkTier:
        """The lowest level that all of these nodes share; ``NONE``: labels show none."""
        for tier in reversed(TIERS):
            # The nodes share the level if the first switch that has one of them below it has all of them below it.
            first = next((below for below in self.domains[tier].values() if below & nodes), None)
            if first is not None and nodes & ~first == 0:
                return tier
        return LinkTier.NONE

    def listed(self, nodes: NodeSet) -> Iterator[Node]:
        """The nodes of a set, by name."""
        return (self.nodes[index] for index in indices(nodes))

    def _sets_by(self, key: Any) -> dict[Any, NodeSet]:
        """Nodes by the value that ``key`` gives for each."""
        bits: dict[Any, NodeSet] = {}
        for index, node in enumerate(self.nodes):
            value = key(node)
            bits[value] = bits.get(value, 0) | 1 << index
        return bits


def indices(nodes: NodeSet) -> Iterator[int]:
    """The indices of the nodes of a set, rising."""
    while nodes:
        lowest = nodes & -nodes  # the lowest bit of the set alone
        yield lowest.bit_length() - 1
        nodes ^= lowest
