"""AutoscaleConfig: everything a user may say about how an application is sized (pure)."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autoscale.collectors import CollectorConfig, RayCollectorConfig
from autoscale.gate import GateConfig
from autoscale.guard import GuardConfig
from autoscale.policies import PolicyConfig
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from kvtransfer.topology import Role

# A report costs a replica and Serve's controller about a millisecond of a core each.
_LEAST_REPORT_S, _MOST_REPORT_S = 1.0, 10.0
# Policies that size decode by itself, for pools that prefill too.
_AGGREGATED = ("static", "wva", "hpa", "queue_depth", "ray_baseline")


class BoundsConfig(BaseModel):
    """Replicas of one role in each group; ``None``: as deployed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lowest_replicas: int | None = Field(None, ge=1)
    highest_replicas: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.lowest_replicas and self.highest_replicas and self.lowest_replicas > self.highest_replicas:
            raise ValueError(
                f"lowest_replicas ({self.lowest_replicas}) is more than highest_replicas ({self.highest_replicas})"
            )
        return self


class OverrideConfig(BaseModel):
    """Counts that a person has set by hand."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill: int = Field(ge=0)
    decode: int = Field(ge=1)


class AutoscaleConfig(BaseModel):
    """How prefill and decode are sized together."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    pd_ratio: PdRatio = Field(
        PdRatio(1, 1),
        validate_default=True,
        description="Prefill replicas to decode replicas, as '1:3', or a number; '0:1' where groups have no prefill.",
    )
    policy: PolicyConfig = Field(discriminator="kind")
    slo: SloConfig = SloConfig()
    bounds: dict[Role, BoundsConfig] = Field(
        default_factory=dict,
        description="Narrower than replicas and max_replicas of the groups, which are what was deployed.",
    )
    guard: GuardConfig = GuardConfig()
    gate: GateConfig = GateConfig()
    interval_s: float = Field(
        5.0,
        ge=0.2,
        le=60.0,
        description="Time between two decisions. Replicas report twice in what was deployed, every 1 to 10 s.",
    )
    window_s: float = Field(20.0, gt=0.0, le=600.0, description="What rates and quantiles are taken over.")
    stale_s: float = Field(15.0, gt=0.0, description="Statistics older than this are not acted on.")
    no_room_s: float = Field(
        900.0,
        gt=0.0,
        description="A replica that has not become ready by then is given up for no_room_retry_s, and the other role "
        "with it. Choose more than a start takes, a new node and the model's download included.",
    )
    no_room_retry_s: float = Field(300.0, gt=0.0, description="Then it is tried again.")
    no_node_s: float = Field(
        30.0, gt=0.0, description="A replica for which no node of its group has had room for so long goes to another."
    )
    idle_to_zero_s: float | None = Field(
        None,
        gt=0.0,
        description="After so long without any request no replica stays, where all groups have replicas: 0; a request "
        "waits until one has started. Left out, the last one stays.",
    )
    priority: int = Field(
        0, ge=-1000, le=1000, description="Among the services of an application: who has more is placed first."
    )
    gpu_types: dict[Role, tuple[str, ...]] = Field(
        default_factory=dict, description="The types that a role takes, the preferred one first; left out: all alike."
    )
    quota_gpus: dict[str, Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=dict, description="The most GPUs of each type that the service may hold."
    )
    warm_replicas: int = Field(
        0,
        ge=0,
        le=64,
        description="Replicas of the ratio's larger role, and of the other those that are due with them, that run "
        "and get no request until the service grows: then at once.",
    )
    collector: CollectorConfig = Field(
        RayCollectorConfig(), description="Who else says what replicas' gauges are: ray (nobody), prometheus or file."
    )
    is_paused: bool = Field(
        False, description="Decide nothing; new replicas still enter, and withdrawn ones still come back."
    )
    is_observing: bool = Field(False, description="Decide and log, but change nothing.")
    override: OverrideConfig | None = Field(None, description="Counts set by hand; the ratio does not hold for them.")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.is_observing and self.override is not None:
            raise ValueError(
                "counts set by hand are not acted on while is_observing: set is_observing to false, or run "
                "`tandem scale --resume` first"
            )
        self.check_reports(self.report_s)
        self._check_aggregated()
        if self.gate.is_enabled and self.gate.band_replicas < self.guard.band_replicas:
            raise ValueError(
                f"gate.band_replicas ({self.gate.band_replicas:g}) is narrower than guard.band_replicas "
                f"({self.guard.band_replicas:g}): counts that the guard allows would never be let in; raise the first "
                "or lower the second"
            )
        return self

    def _check_aggregated(self) -> None:
        """Whether what is said of prefill fits a ratio of 0:1, and the other way round."""
        if self.pd_ratio.is_aggregated and self.policy.kind not in _AGGREGATED:
            raise ValueError(
                f"pd_ratio is {self.pd_ratio}, and policy {self.policy.kind!r} sizes prefill and decode together: for "
                f"groups without prefill take one of {', '.join(_AGGREGATED)}"
            )
        for name, counts in (("override", self.override), ("policy", self.policy)):
            prefill = getattr(counts, "prefill", None)
            if isinstance(prefill, int) and bool(prefill) == self.pd_ratio.is_aggregated:
                raise ValueError(
                    f"{name} has {prefill} prefill replicas, and pd_ratio is {self.pd_ratio}: 0 of them go with 0:1, "
                    "and with it alone"
                )

    def bounds_of(self, role: Role, lowest: int, highest: int) -> tuple[int, int]:
        """The fewest and the most replicas of a role in a group that was deployed with these; 0 stays 0."""
        bounds = self.bounds.get(role, BoundsConfig())
        return (bounds.lowest_replicas or lowest) if lowest else 0, bounds.highest_replicas or highest

    @property
    def report_s(self) -> float:
        """How often replicas report that are deployed with this: twice between two decisions."""
        return min(max(_LEAST_REPORT_S, self.interval_s / 2), _MOST_REPORT_S)

    def check_reports(self, report_s: float) -> None:
        """Refuse what replicas that report so often can never satisfy.

        Raises:
            ValueError: statistics would be stale at every tick, or rates have nothing to be differences of.
        """
        slower_s = max(self.interval_s, report_s)
        for name, value, harm in (
            ("stale_s", self.stale_s, "every tick would hold"),
            ("window_s", self.window_s, "there would be no rates"),
        ):
            if value < 2 * slower_s:
                raise ValueError(
                    f"{name} ({value:g}) must be at least twice the time between decisions ({self.interval_s:g} s) and "
                    f"between reports, which is set when the application is deployed ({report_s:g} s): else {harm}"
                )
