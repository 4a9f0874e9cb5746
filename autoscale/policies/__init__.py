"""One policy per file, with its config class: snapshot -> decision; it never clamps and knows no cooldown (pure)."""

from collections.abc import Callable, Mapping
from typing import Protocol

from autoscale.policies.default import Default, DefaultConfig
from autoscale.policies.heteroscale import HeteroScale, HeteroScaleConfig
from autoscale.policies.periodic import Periodic, PeriodicConfig
from autoscale.policies.queue_depth import QueueDepth, QueueDepthConfig
from autoscale.types import Decision, Snapshot

PolicyConfig = DefaultConfig | HeteroScaleConfig | PeriodicConfig | QueueDepthConfig


class Policy(Protocol):
    """What every policy is."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """What it wants at this instant."""


# Built as ``POLICIES[config.kind](config, ratio=..., slo=...)``.
POLICIES: Mapping[str, Callable[..., Policy]] = {
    "default": Default,
    "heteroscale": HeteroScale,
    "periodic": Periodic,
    "queue_depth": QueueDepth,
}
