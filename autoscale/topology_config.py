"""TopologyConfig: where nodes are, and the limits that all services of an application share (pure)."""

from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvtransfer.labels import TopologyLabels
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import TIERS, Path

Level = Literal["s0", "s1", "s2", "cluster", "data_centre"]


# Ray shows a node's GPU type as this label, and as a resource with this beginning.
TYPE_LABEL, _TYPE_RESOURCE = "ray.io/accelerator-type", "accelerator_type:"
# Stands for the type of GPUs if neither shows it.
UNKNOWN_GPU = "GPU"


class NodeTypeConfig(StrictConfig):
    """Nodes that Ray's autoscaler adds when replicas wait for them: one of its node types (KubeRay: worker groups)."""

    labels: dict[str, str] = Field(min_length=1)
    """Labels that all nodes of this type have, and no node of another type. Replicas that wait for a node of the type
    require them."""
    gpu_type: str | None = None
    """Type of the nodes' GPUs. Left out: they have none."""
    gpus: float = Field(0.0, ge=0.0)
    """GPUs of a node."""
    cpus: float = Field(gt=0.0)
    """CPUs of a node."""
    max_nodes: int = Field(ge=1, le=4096)
    """Most nodes of the type."""
    start_s: float = Field(600.0, gt=0.0)
    """Longest wait for a node. After it, the replicas go where the next best room is. It must be less than
    autoscale.no_room_s of every service."""
    retry_s: float = Field(900.0, gt=0.0)
    """Time without requests of the type after a node did not come in time."""
    cost_per_gpu_hour: float | None = Field(None, ge=0.0)
    """Cost of a GPU hour, in the currency of topology.cost_per_gpu_hour, for instance of a spot node. Left out: that of
    the GPU type. The cheapest nodes are requested first, also between groups on different GPU types."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.gpu_type is None) != (self.gpus == 0.0):
            raise ValueError(f"gpus is {self.gpus:g} and gpu_type is {self.gpu_type}: give both or neither")
        return self


class TopologyConfig(StrictConfig):
    """Labels and switches of a cluster's nodes, and limits that all services share."""

    labels: TopologyLabels = TopologyLabels()
    gpu_resources: dict[str, str] = Field(default_factory=dict)
    """Ray resource by GPU type, for types that Ray counts as a resource of their own instead of GPU."""
    inventory: dict[str, dict[Level, str]] = Field(default_factory=dict)
    """Switches above nodes whose labels do not name them, by host name, address or Ray's node id: {s0, s1, s2, cluster,
    data_centre: name}. Or the whole path of a YAML file with the same content, on the machine that builds the
    application. Labels win."""
    node_types_file: str = ""
    """Whole path of a configuration of Ray's cluster launcher or of KubeRay, on the machine that builds the
    application. Its types with labels are read; node_types adds fields to them, such as a price, and other types."""
    node_types: dict[str, NodeTypeConfig] = Field(default_factory=dict)
    """Nodes that Ray's autoscaler may add, by the name of their type. Placement requests one if no node has room. Left
    out: replicas are placed on nodes that exist."""
    budget_gpus: dict[str, Annotated[float, Field(ge=0.0)]] = Field(default_factory=dict)
    """Most GPUs of each type that all services together may hold. A type that is left out has no limit."""
    cost_per_gpu_hour: dict[str, Annotated[float, Field(ge=0.0)]] = Field(default_factory=dict)
    """Cost of a GPU hour by type, in any currency; cheaper variants grow first. Left out: costs are ignored."""
    warm_replicas: int = Field(0, ge=0, le=1024)
    """Warm replicas that all services share, counted like autoscale.warm_replicas. A warm replica runs and gets no
    request until its service grows."""

    @model_validator(mode="after")
    def _check_node_types(self) -> Self:
        """Refuse types whose nodes cannot be told apart, and types without a price beside types that have one."""
        own_prices = any(kind.cost_per_gpu_hour is not None for kind in self.node_types.values())
        has_prices = bool(self.cost_per_gpu_hour) or own_prices
        for name, kind in self.node_types.items():
            if "#" in name:
                raise ValueError(f"node_types: {name!r} contains '#', which separates a type from a number: rename it")
            is_priced = kind.gpu_type is None or kind.gpu_type in self.cost_per_gpu_hour
            if has_prices and kind.cost_per_gpu_hour is None and not is_priced:
                raise ValueError(
                    f"node_types: {name} has no price, and other GPUs have one: give cost_per_gpu_hour for the type or "
                    f"for {kind.gpu_type}"
                )
        for (name, kind), (other, wider) in permutations(self.node_types.items(), 2):
            is_same_gpu = kind.gpu_type == wider.gpu_type  # otherwise replicas tell the nodes apart by their GPUs
            if kind.labels == wider.labels or (is_same_gpu and kind.labels.items() <= wider.labels.items()):
                raise ValueError(
                    f"node_types: {other} has all labels of {name}, so replicas that wait for {name} may get a node of "
                    f"{other}: give each type a label of its own"
                )
        return self

    def cost_of(self, kind: NodeTypeConfig) -> float:
        """Cost of a GPU hour on a node of a type; 0 if none is configured."""
        if kind.cost_per_gpu_hour is not None:
            return kind.cost_per_gpu_hour
        return self.cost_per_gpu_hour.get(kind.gpu_type or "", 0.0)

    def under(self, labels: Mapping[str, str], names: Iterable[str]) -> Path:
        """Names of the switches above a node with these labels and names; a label wins over the inventory."""
        listed = next((self.inventory[name] for name in names if name in self.inventory), {})
        return tuple(
            label or listed.get(tier.name.lower(), "")  # type: ignore[call-overload]
            for tier, label in zip(TIERS, self.labels.under(labels), strict=True)
        )


def stated_gpus(
    resources: Mapping[str, float], labels: Mapping[str, str], gpu_resources: Mapping[str, str]
) -> tuple[str | None, str, str]:
    """The type of a node's GPUs, the resource that counts them, and a contradiction between its types.

    Args:
        resources: Ray's resources of the node.
        labels: Ray's labels of the node.
        gpu_resources: as in ``TopologyConfig``.

    Returns:
        The type (``None``: no GPU; ``UNKNOWN_GPU``: GPUs of a type that is not stated), the resource, and a text, which
        is empty if there is no contradiction.
    """
    # The resource that counts the GPUs, by each type that the node has: first types with a resource of their own.
    found = {kind: resource for kind, resource in gpu_resources.items() if resources.get(resource)}
    if resources.get("GPU"):
        kinds = [name.removeprefix(_TYPE_RESOURCE) for name in resources if name.startswith(_TYPE_RESOURCE)]
        if label := labels.get(TYPE_LABEL):
            kinds.append(label)
        found |= dict.fromkeys(kinds, "GPU")
        found = found or {UNKNOWN_GPU: "GPU"}
    if not found:
        return None, "GPU", ""
    first, *others = found
    contradiction = f"it has GPUs of type {first} and of {', '.join(others)}, and counts as {first}" if others else ""
    return first, found[first], contradiction
