"""Where GPUs are and what is above them: nodes, switches, how far apart two nodes are, how scarce a switch is (pure).

Sets of nodes are whole numbers, a bit for each node, so that a cluster of thousands is searched in microseconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

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
    """A level by its name."""
    if not isinstance(value, str):
        return value
    if value.upper() not in LinkTier.__members__:
        raise ValueError(f"{value!r} is no level: give {', '.join(tier.name.lower() for tier in LinkTier)}")
    return LinkTier[value.upper()]


# Written as the level's name.
Affinity = Annotated[
    LinkTier,
    BeforeValidator(_named_affinity),
    PlainSerializer(lambda tier: tier.name.lower(), return_type=str),
]


class SubgroupPriority(IntEnum):
    """How scarce the switch is that a node is under: RDMA subgroups, from low to high (HeteroScale section 3.4)."""

    S2_HOMOGENEOUS = 0
    S2_HETEROGENEOUS = 1
    S1_HETEROGENEOUS = 2


class TopologyLabels(BaseModel):
    """The node labels that say what a node is under, and what its GPUs are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    s0: str = Field("tandem.io/s0", min_length=1, description="Rack switch.")
    s1: str = Field("tandem.io/s1", min_length=1, description="Minipod switch.")
    s2: str = Field("tandem.io/s2", min_length=1, description="Bigpod switch.")
    cluster: str = Field("tandem.io/cluster", min_length=1)
    data_centre: str = Field("tandem.io/dc", min_length=1)

    @model_validator(mode="after")
    def _check_differ(self) -> "TopologyLabels":
        twice = [key for key, count in Counter(self.of(tier) for tier in TIERS).items() if count > 1]
        if twice:
            raise ValueError(f"the label {twice[0]!r} stands for two levels: each level needs its own")
        return self

    def of(self, tier: LinkTier) -> str:
        """The key of a level's label."""
        return str(getattr(self, tier.name.lower()))

    def under(self, labels: Mapping[str, str]) -> "Path":
        """What a node with these labels is under."""
        return tuple(labels.get(self.of(tier), "") for tier in TIERS)


Level = Literal["s0", "s1", "s2", "cluster", "data_centre"]
# From the top down.
TIERS = (LinkTier.DATA_CENTRE, LinkTier.CLUSTER, LinkTier.S2, LinkTier.S1, LinkTier.S0)
DEFAULT_LABELS = TopologyLabels()
# Names from the data centre down to a level; switches of two minipods may have one name.
Path = tuple[str, ...]


class TopologyConfig(BaseModel):
    """How the nodes of a cluster are read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    labels: TopologyLabels = TopologyLabels()
    gpu_resources: dict[str, str] = Field(
        default_factory=dict,
        description="GPU types that Ray counts by a resource of their own instead of GPU, and its name.",
    )
    inventory: dict[str, dict[Level, str]] = Field(
        default_factory=dict,
        description="What nodes are under whose labels do not say: by host name, address or id of Ray's, "
        "{s0, s1, s2, cluster, data_centre: name}; or the whole path of a YAML file of that, where it is deployed.",
    )
    budget_gpus: dict[str, Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=dict, description="The most GPUs of each type that all services together may hold."
    )
    cost_per_gpu_hour: dict[str, Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=dict, description="Of each type, in any currency: cheaper variants grow first."
    )
    warm_replicas: int = Field(
        0,
        ge=0,
        le=1024,
        description="Replicas (as autoscale.warm_replicas) that all services share: run, and get no request until a "
        "service grows.",
    )

    def under(self, labels: Mapping[str, str], names: Iterable[str]) -> Path:
        """What a node of these labels and names is under; labels come first."""
        known = next((self.inventory[name] for name in names if name in self.inventory), {})
        return tuple(
            label or known.get(tier.name.lower(), "")  # type: ignore[call-overload]
            for tier, label in zip(TIERS, self.labels.under(labels), strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, and what of it nobody holds at this instant.

    ``name``: Ray's id of it; ``host``: what people call it, which several nodes on one machine share. ``scarcity``: of
    what it is under, once somebody has seen all nodes of its cluster; ``None``: it follows from those beside it.
    ``under``: the names of its data centre, cluster, S2, S1 and S0; empty where nobody knows. ``gpu_type`` is ``None``
    where it has no GPU. One that is cordoned takes nothing new. ``contradiction``: what it says of itself that cannot
    all be so.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    under: Path = ("",) * len(TIERS)
    gpu_type: str | None = None
    gpus: float = 0.0
    free_gpus: float = 0.0
    cpus: float = 0.0
    free_cpus: float = 0.0
    is_cordoned: bool = False
    host: str = ""
    scarcity: SubgroupPriority | None = None
    contradiction: str = ""


def path(node: Node, tier: LinkTier) -> Path | None:
    """What a node is under, from the top down to a level; ``None`` where nobody knows at that level."""
    names = node.under[: TIERS.index(tier) + 1]
    return names if names[-1] else None


class Topology:
    """The nodes of one instant, by what they are under; built anew for each cycle (HeteroScale section 3.4).

    Args:
        nodes: in any order.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: Sequence[Node] = sorted(nodes, key=lambda node: node.name)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Of each node, by name, its place in ``nodes``."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def everywhere(self) -> NodeSet:
        """All nodes."""
        return (1 << len(self.nodes)) - 1

    @cached_property
    def usable(self) -> NodeSet:
        """The nodes that are not cordoned."""
        return self._by(lambda node: node.is_cordoned).get(False, 0)

    @cached_property
    def of_type(self) -> Mapping[str | None, NodeSet]:
        """The nodes with each type of GPU; those without one under ``None``."""
        return self._by(lambda node: node.gpu_type)

    @cached_property
    def domains(self) -> Mapping[LinkTier, Mapping[Path, NodeSet]]:
        """The nodes below each switch, cluster and data centre."""
        found = {}
        for tier in TIERS:
            below = self._by(lambda node, tier=tier: path(node, tier))
            found[tier] = {names: nodes for names, nodes in below.items() if names is not None}
        return found

    @cached_property
    def subgroups(self) -> Mapping[SubgroupPriority, NodeSet]:
        """The nodes by how scarce what they are under is, from common to scarce.

        An S1 with several types of GPU is the scarcest; then the rest of an S2 with several types. All others are the
        most common: nodes without a GPU too, and those of which nobody knows the switches.
        """
        told = self._by(lambda node: node.scarcity)
        if None not in told:
            return {priority: told.get(priority, 0) for priority in SubgroupPriority}
        gpus = self.everywhere & ~self.of_type.get(None, 0)
        s1, s2 = self._mixed(LinkTier.S1) & gpus, self._mixed(LinkTier.S2) & gpus
        return {
            SubgroupPriority.S2_HOMOGENEOUS: self.everywhere & ~s1 & ~s2,
            SubgroupPriority.S2_HETEROGENEOUS: s2 & ~s1,
            SubgroupPriority.S1_HETEROGENEOUS: s1,
        }

    def told(self) -> "Topology":
        """The same nodes, of which each knows how scarce it is, so that some of them alone are as scarce as all."""
        of = {index: priority for priority, nodes in self.subgroups.items() for index in _bits(nodes)}
        return Topology(replace(node, scarcity=of[index]) for index, node in enumerate(self.nodes))

    def _mixed(self, tier: LinkTier) -> NodeSet:
        mixed = 0
        for below in self.domains[tier].values():
            types = sum(1 for kind, nodes in self.of_type.items() if kind is not None and nodes & below)
            mixed |= below if types > 1 else 0
        return mixed

    def priority(self, nodes: NodeSet) -> SubgroupPriority:
        """The scarcest subgroup that any of these is in."""
        scarce = (priority for priority in reversed(SubgroupPriority) if self.subgroups[priority] & nodes)
        return next(scarce, SubgroupPriority.S2_HOMOGENEOUS)

    def selected(self, selector: Mapping[str, str]) -> NodeSet:
        """The nodes that a label selector demands, as Ray reads it."""
        found = self.everywhere
        for label in selector.items():
            if label not in self._selected:
                self._selected[label] = self._demanded(*label)
            found &= self._selected[label]
        return found

    def _demanded(self, key: str, wanted: str) -> NodeSet:
        if key not in self._labelled:
            self._labelled[key] = self._by(lambda node: node.labels.get(key))
        found = 0
        for value, nodes in self._labelled[key].items():
            found |= nodes if matches(value, wanted) else 0
        return found

    @cached_property
    def _selected(self) -> dict[tuple[str, str], NodeSet]:
        return {}

    @cached_property
    def _labelled(self) -> dict[str, dict[str | None, NodeSet]]:
        return {}

    def tier(self, nodes: NodeSet) -> LinkTier:
        """The lowest level that all of these are under together; ``NONE`` where labels do not say so."""
        for tier in reversed(TIERS):
            first = next((below for below in self.domains[tier].values() if below & nodes), None)
            if first is not None and nodes & ~first == 0:
                return tier
        return LinkTier.NONE

    def listed(self, nodes: NodeSet) -> Iterator[Node]:
        """The nodes of a set, in order."""
        return (self.nodes[index] for index in _bits(nodes))

    def _by(self, key: Any) -> dict[Any, NodeSet]:
        bits: dict[Any, NodeSet] = {}
        for index, node in enumerate(self.nodes):
            of = key(node)
            bits[of] = bits.get(of, 0) | 1 << index
        return bits


def _bits(nodes: NodeSet) -> Iterator[int]:
    while nodes:
        lowest = nodes & -nodes
        yield lowest.bit_length() - 1
        nodes ^= lowest


def link_tier(
    prefill: Mapping[str, str], decode: Mapping[str, str], labels: TopologyLabels = DEFAULT_LABELS
) -> LinkTier:
    """How far KV travels between two pools, from the node labels that they demand; ``S2`` where these do not say."""
    same, apart = _shared(prefill, decode, labels)
    least = LinkTier.S2 if same is None else min(same, LinkTier.S2)
    return least if apart is None else max(least, LinkTier(apart + 1))


def named_tier(
    prefill: Mapping[str, str], decode: Mapping[str, str], labels: TopologyLabels = DEFAULT_LABELS
) -> LinkTier:
    """The lowest level that two pools are both pinned to by the node labels that they demand; ``NONE``: to none."""
    same, _ = _shared(prefill, decode, labels)
    return LinkTier.NONE if same is None else same


def _shared(
    prefill: Mapping[str, str], decode: Mapping[str, str], labels: TopologyLabels
) -> tuple[LinkTier | None, LinkTier | None]:
    """The lowest level at which both demand the same, with no different ones above it; and where they differ first."""
    same = None
    for level in TIERS:
        one, other = (_named(selector.get(labels.of(level), "")) for selector in (prefill, decode))
        if one and other and one != other:
            return same, level
        if one and one == other:
            same = level
    return same, None


def _named(selector: str) -> str:
    """The switch that a label selector names; nothing where it is an expression such as ``!a`` or ``in(a,b)``."""
    return "" if selector.startswith(("!", "in(")) else selector
