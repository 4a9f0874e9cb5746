"""Fixed counts, with which other policies are compared."""

from typing import Literal

from pydantic import Field

from autoscale.policies.policy import Policy, ratio_of
from autoscale.types import Decision, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role


class StaticConfig(StrictConfig):
    """The fixed counts."""

    kind: Literal["static"] = "static"
    prefill: int = Field(
        ge=0, description="Prefill replicas of all groups, in those of the first one; 0: no group has prefill."
    )
    decode: int = Field(ge=1, description="Decode replicas of all groups, in those of the first one.")


class Static(Policy[StaticConfig]):
    """The configured replicas of both roles, at any load."""

    is_fit_for_aggregated = True
    is_fit_for_pooling = True
    has_own_ratio = True

    def decide(self, snapshot: Snapshot) -> Decision:
        """The configured counts."""
        wanted = {Role.PREFILL: float(self._config.prefill), Role.DECODE: float(self._config.decode)}
        # The ratio is that of the counts: with the configured one the guard would change the counts.
        return Decision(wanted=wanted, reason="fixed counts", ratio=ratio_of(wanted, snapshot), is_step=True)
