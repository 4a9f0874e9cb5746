"""One policy per file, with its config class: snapshot -> decision; it never clamps and knows no cooldown (pure)."""

from collections.abc import Callable, Mapping
from typing import Protocol

from autoscale.policies.default import Default, DefaultConfig
from autoscale.policies.dopd import Dopd, DopdConfig
from autoscale.policies.dynamo import Dynamo, DynamoConfig
from autoscale.policies.dynamo_load import DynamoLoad, DynamoLoadConfig
from autoscale.policies.dynamo_sla import DynamoSla, DynamoSlaConfig
from autoscale.policies.heteroscale import HeteroScale, HeteroScaleConfig
from autoscale.policies.hpa import Hpa, HpaConfig
from autoscale.policies.llmd_token_aware import LlmdTokenAware, LlmdTokenAwareConfig
from autoscale.policies.periodic import Periodic, PeriodicConfig
from autoscale.policies.queue_depth import QueueDepth, QueueDepthConfig
from autoscale.policies.ray_baseline import RayBaseline, RayBaselineConfig
from autoscale.policies.static import Static, StaticConfig
from autoscale.policies.token_velocity import TokenVelocity, TokenVelocityConfig
from autoscale.policies.wva import Wva, WvaConfig
from autoscale.types import Decision, Snapshot

PolicyConfig = (
    DefaultConfig
    | DopdConfig
    | DynamoConfig
    | DynamoLoadConfig
    | DynamoSlaConfig
    | HeteroScaleConfig
    | HpaConfig
    | LlmdTokenAwareConfig
    | PeriodicConfig
    | QueueDepthConfig
    | RayBaselineConfig
    | StaticConfig
    | TokenVelocityConfig
    | WvaConfig
)


class Policy(Protocol):
    """What every policy is."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """What it wants at this instant."""


# Built as ``POLICIES[config.kind](config, ratio=..., slo=...)``.
POLICIES: Mapping[str, Callable[..., Policy]] = {
    "default": Default,
    "dopd": Dopd,
    "dynamo": Dynamo,
    "dynamo_load": DynamoLoad,
    "dynamo_sla": DynamoSla,
    "heteroscale": HeteroScale,
    "hpa": Hpa,
    "llmd_token_aware": LlmdTokenAware,
    "periodic": Periodic,
    "queue_depth": QueueDepth,
    "ray_baseline": RayBaseline,
    "static": Static,
    "token_velocity": TokenVelocity,
    "wva": Wva,
}
