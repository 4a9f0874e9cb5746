"""Fixed counts, as what the others are measured against."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, Snapshot
from kvtransfer.topology import Role


class StaticConfig(BaseModel):
    """The counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["static"] = "static"
    prefill: int = Field(ge=0, description="Prefill replicas of the whole service; 0 where it has none.")
    decode: int = Field(ge=1, description="Decode replicas of the whole service.")


class Static:
    """The policy; see ``decide``."""

    def __init__(self, config: StaticConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        wanted = {Role.PREFILL: float(config.prefill), Role.DECODE: float(config.decode)}
        # At the configured ratio the guard would round them to others.
        self._decision = Decision(wanted=wanted, reason="fixed counts", ratio=PdRatio.of(wanted), is_step=True)

    def decide(self, snapshot: Snapshot) -> Decision:
        """The counts, whatever is seen."""
        return self._decision
