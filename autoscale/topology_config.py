"""TopologyConfig: how nodes are read, and what all services of an application may take of them (pure)."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field

from kvtransfer.labels import TopologyLabels
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import TIERS, Path

Level = Literal["s0", "s1", "s2", "cluster", "data_centre"]


class TopologyConfig(StrictConfig):
    """How the nodes of a cluster are read, and the limits that all services share."""

    labels: TopologyLabels = TopologyLabels()
    gpu_resources: dict[str, str] = Field(
        default_factory=dict,
        description="Ray resource by GPU type, for types that Ray counts by a resource of their own instead of GPU.",
    )
    inventory: dict[str, dict[Level, str]] = Field(
        default_factory=dict,
        description="Switches above nodes whose labels do not name them, by host name, address or Ray's node id: {s0, "
        "s1, s2, cluster, data_centre: name}. Or the whole path of a YAML file with the same content, on the machine "
        "that builds the application. Labels win.",
    )
    budget_gpus: dict[str, Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=dict,
        description="Highest number of GPUs by type that all services together may hold. A type that is left out has "
        "no limit.",
    )
    cost_per_gpu_hour: dict[str, Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=dict,
        description="Cost of a GPU hour by type, in any currency; cheaper variants grow first. Left out, costs play no"
        " part.",
    )
    warm_replicas: int = Field(
        0,
        ge=0,
        le=1024,
        description="Warm replicas that all services share, counted as autoscale.warm_replicas: they run and get no "
        "request until a service grows.",
    )

    def under(self, labels: Mapping[str, str], names: Iterable[str]) -> Path:
        """Names of the switches above a node with these labels and names; labels win over the inventory."""
        listed = next((self.inventory[name] for name in names if name in self.inventory), {})
        return tuple(
            label or listed.get(tier.name.lower(), "")  # type: ignore[call-overload]
            for tier, label in zip(TIERS, self.labels.under(labels), strict=True)
        )
