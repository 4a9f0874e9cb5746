"""TopologyConfig: where nodes are, and the limits that all services of an application share (pure)."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field

from kvtransfer.labels import TopologyLabels
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import TIERS, Path

Level = Literal["s0", "s1", "s2", "cluster", "data_centre"]


class TopologyConfig(StrictConfig):
    """Labels and switches of a cluster's nodes, and limits that all services share."""

    labels: TopologyLabels = TopologyLabels()
    gpu_resources: dict[str, str] = Field(default_factory=dict)
    """Ray resource by GPU type, for types that Ray counts as a resource of their own instead of GPU."""
    inventory: dict[str, dict[Level, str]] = Field(default_factory=dict)
    """Switches above nodes whose labels do not name them, by host name, address or Ray's node id: {s0, s1, s2, cluster,
    data_centre: name}. Or the whole path of a YAML file with the same content, on the machine that builds the
    application. Labels win."""
    budget_gpus: dict[str, Annotated[float, Field(ge=0.0)]] = Field(default_factory=dict)
    """Most GPUs of each type that all services together may hold. A type that is left out has no limit."""
    cost_per_gpu_hour: dict[str, Annotated[float, Field(ge=0.0)]] = Field(default_factory=dict)
    """Cost of a GPU hour by type, in any currency; cheaper variants grow first. Left out: costs are ignored."""
    warm_replicas: int = Field(0, ge=0, le=1024)
    """Warm replicas that all services share, counted like autoscale.warm_replicas. A warm replica runs and gets no
    request until its service grows."""

    def under(self, labels: Mapping[str, str], names: Iterable[str]) -> Path:
        """Names of the switches above a node with these labels and names; a label wins over the inventory."""
        listed = next((self.inventory[name] for name in names if name in self.inventory), {})
        return tuple(
            label or listed.get(tier.name.lower(), "")  # type: ignore[call-overload]
            for tier, label in zip(TIERS, self.labels.under(labels), strict=True)
        )
