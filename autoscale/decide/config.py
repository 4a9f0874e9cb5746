"""AutoscaleConfig: how the prefill and decode replicas of a service are sized (pure)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from autoscale.decide.auto_ratio import AutoRatioConfig
from autoscale.extension import DEFERRED, Extensible, Extension
from autoscale.floors import FloorsConfig
from autoscale.forecast.config import LoadForecastConfig
from autoscale.observe.collectors import CollectorConfig, RayCollectorConfig
from autoscale.policies import OWN_POLICIES, POLICIES, SIMULATED_ONLY, PolicyConfig
from autoscale.policies.policy import Policy, ProfiledConfig
from autoscale.ratio import PdRatio, RatioSetting
from autoscale.slo import SloConfig
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# Shortest time between two reports of a replica, seconds: each report costs the replica and Serve's controller 1 ms of
# a core.
_LEAST_REPORT_S = 1.0
# Longest time between two reports of a replica, seconds.
_MOST_REPORT_S = 10.0


class BoundsConfig(StrictConfig):
    """Bounds of one role in each group; a bound that is left out is as deployed."""

    lowest_replicas: int | None = Field(None, ge=1)
    highest_replicas: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.lowest_replicas and self.highest_replicas and self.lowest_replicas > self.highest_replicas:
            raise ValueError(
                f"lowest_replicas ({self.lowest_replicas}) is more than highest_replicas ({self.highest_replicas})"
            )
        return self


class OverrideConfig(StrictConfig):
    """Counts set by hand, of all groups together, in replicas of the first group."""

    prefill: int = Field(ge=0)
    decode: int = Field(ge=1)

    @property
    def counts(self) -> dict[Role, int]:
        """Replicas of each role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}


class GuardConfig(StrictConfig):
    """Limits on how the counts may move (HeteroScale section 3.6)."""

    cooldown_out_s: float = Field(15.0, ge=0.0)
    """Least time from any change of the counts to the next scale-out."""
    cooldown_in_s: float = Field(120.0, ge=0.0)
    """Least time from any change of the counts to the next scale-in. It doubles, to at most 16 times this, with each
    scale-in in a row after which a latency missed its objective."""
    hysteresis_out_frac: float = Field(0.05, ge=0.0, le=10.0)
    """Share of the present count by which the wanted count must exceed it for a scale-out (theta_out)."""
    hysteresis_in_frac: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of the present count by which the wanted count must be below it for a scale-in (theta_in)."""
    damping_out_frac: float = Field(1.0, gt=0.0, le=1.0)
    """Share of a wanted growth that one plan takes."""
    damping_in_frac: float = Field(0.5, gt=0.0, le=1.0)
    """Share of a wanted shrinkage that one plan takes."""
    step_out_replicas: int = Field(8, ge=1)
    """Most replicas that one plan adds to the larger role, or to each role if the counts are off the ratio."""
    step_in_replicas: int = Field(2, ge=1)
    """Most replicas that one plan takes from the larger role, or from each role if the counts are off the ratio."""
    budget_gpus: int | None = Field(None, ge=1)
    """Most GPUs that both roles together may hold."""
    band_replicas: float = Field(1.0, ge=0.5, le=16.0)
    """Largest distance of the counts from the ratio, in replicas of the smaller role."""
    shortfall_replicas: float = Field(0.0, ge=0.0, le=0.5)
    """Largest distance below the ratio at which rounding may leave the smaller role, in replicas: 0 rounds up, 0.5
    rounds to the nearest."""


class GateConfig(StrictConfig):
    """How new replicas enter and old ones leave (HeteroScale sections 3.4 and 3.6)."""

    is_enabled: bool = True
    """Hold a role's new replicas while the other role has too few for the ratio."""
    band_replicas: float = Field(1.0, ge=0.5, le=16.0)
    """Largest distance of the serving replicas from the ratio, in replicas of the smaller role."""
    observation_s: float = Field(30.0, ge=0.0)
    """Time that a replica stays out of routing, ready to come back, before it stops."""


class AutoscaleConfig(StrictConfig):
    """How prefill and decode are sized together."""

    # Policies that ``policy`` may name, beside those of one's own.
    policies: ClassVar[Mapping[str, type[Policy[Any]]]] = POLICIES
    # Policies of other systems, for the simulator only.
    refused_policies: ClassVar[tuple[str, ...]] = SIMULATED_ONLY

    pd_ratio: RatioSetting = Field(PdRatio(1, 1), validate_default=True)
    """Prefill replicas to decode replicas, as '1:3', or a number; '0:1' where groups have no prefill; 'auto': the ratio
    follows the lengths of the requests (auto_ratio)."""
    auto_ratio: AutoRatioConfig | None = None
    """The engines' profiles, the limits and the rate of a ratio that follows the requests. It has an effect only if
    pd_ratio is auto."""
    policy: Annotated[PolicyConfig | Extension, Extensible(OWN_POLICIES)]
    """How many replicas of each role are wanted: a kind of policy, or one of your own (docs/extending.md)."""
    policy_timeout_s: float = Field(1.0, ge=0.05, le=10.0)
    """Time in which a policy of your own must decide. While it computes for longer, the counts of its service stay, and
    the other services of the application are decided. Built-in policies need no limit."""
    slo: SloConfig = SloConfig()
    forecast: LoadForecastConfig | None = None
    """How the load one start ahead is forecast. Left out: with the defaults if the policy uses forecasts, as dopd does;
    otherwise the load is not forecast."""
    bounds: dict[Role, BoundsConfig] = Field(default_factory=dict)
    """Bounds of each role, inside the replicas and max_replicas of the deployed groups."""
    floors: FloorsConfig = FloorsConfig()
    guard: GuardConfig = GuardConfig()
    gate: GateConfig = GateConfig()
    interval_s: float = Field(5.0, ge=0.2, le=60.0)
    """Time between two decisions. Replicas report twice in this time, but at least 1 s and at most 10 s apart. Only a
    new deployment changes how often they report."""
    window_s: float = Field(20.0, gt=0.0, le=600.0)
    """Time over which rates and quantiles are taken."""
    stale_s: float = Field(15.0, gt=0.0)
    """Age of a replica's last report above which all counts stay."""
    no_room_s: float = Field(900.0, gt=0.0)
    """Time after which a replica that is not ready is given up for no_room_retry_s. Replicas of the other role that the
    ratio requires with it are then given up too. Choose more than the longest start takes, with a new node and the
    model's download."""
    no_room_retry_s: float = Field(300.0, gt=0.0)
    """Time after which a replica that was given up for lack of room is tried again."""
    no_node_s: float = Field(30.0, gt=0.0)
    """Time after which a replica goes to another group because no node of its own group has room."""
    idle_to_zero_s: float | None = Field(None, gt=0.0)
    """Time without a request after which all replicas stop. It needs replicas: 0 in every group. The next request then
    waits until a replica has started. Left out: the last replica of each role stays."""
    priority: int = Field(0, ge=-1000, le=1000)
    """Services of an application with a higher priority are placed first."""
    gpu_types: dict[Role, tuple[str, ...]] = Field(default_factory=dict)
    """GPU types that a role takes, the preferred one first. Left out: it takes all types and prefers none."""
    quota_gpus: dict[str, Annotated[float, Field(ge=0.0)]] = Field(default_factory=dict)
    """Most GPUs of each type that the service may hold."""
    warm_replicas: int = Field(0, ge=0, le=64)
    """Replicas of the ratio's larger role that run without requests until the service grows, and then serve at once.
    The replicas of the other role that the ratio requires with them run too."""
    collector: CollectorConfig = RayCollectorConfig()
    """Where figures come from: ray (from the replicas themselves), prometheus, file, or a collector of your own
    (docs/extending.md)."""
    is_paused: bool = False
    """Keep all counts. New replicas still enter, and withdrawn ones still come back."""
    is_observing: bool = False
    """Decide and log, but change nothing."""
    override: OverrideConfig | None = None
    """Counts set by hand, which need not be at the ratio."""

    @field_validator("policy", mode="before")
    @classmethod
    def _refuse_simulated_policies(cls, value: Any) -> Any:
        kind = value.get("kind") if isinstance(value, Mapping) else None
        if kind in cls.refused_policies:
            raise ValueError(
                f"{kind!r} is another system's policy, for the simulator only (`tandem simulate --policy {kind}`): "
                f"choose one of {', '.join(cls.policies)}"
            )
        return value

    @model_validator(mode="after")
    def _check_together(self, info: ValidationInfo) -> Self:
        if self.is_observing and self.override is not None:
            raise ValueError(
                "counts set by hand are not acted on while is_observing: set is_observing to false, or run "
                "`tandem scale --resume` first"
            )
        self.check_reports(self.report_s)
        self._check_auto_ratio(is_deferred=info.context == DEFERRED)
        if info.context != DEFERRED:
            self._check_aggregated()
        if self.gate.is_enabled and self.gate.band_replicas < self.guard.band_replicas:
            raise ValueError(
                f"gate.band_replicas ({self.gate.band_replicas:g}) is narrower than guard.band_replicas "
                f"({self.guard.band_replicas:g}): counts that the guard allows would never be let in; raise the first "
                "or lower the second"
            )
        return self

    def _check_auto_ratio(self, *, is_deferred: bool) -> None:
        """Refuse a ratio that should follow the requests without profiles, or under a policy that keeps no ratio."""
        if self.pd_ratio != "auto":
            return
        if not is_deferred and self.policy_settings()[0].has_own_ratio:
            raise ValueError(
                f"pd_ratio is auto, and policy {self.policy.kind!r} sizes each role by itself: leave pd_ratio out, or "
                "take a policy that keeps a ratio, such as heteroscale or queue_depth"
            )
        if self.auto_ratio is None:
            raise ValueError(
                "pd_ratio is auto, and auto_ratio is missing: give the profiles of both engines as auto_ratio: "
                "{prefill: FILE, decode: FILE} (`tandem profile` measures them), or a ratio such as '1:3'"
            )
        self.auto_ratio.start_ratio(self.slo.tpot_s)  # raises a ValueError if a profile is wrong

    @property
    def followed_by(self) -> AutoRatioConfig | None:
        """By what the ratio follows the requests; ``None``: it is fixed."""
        return self.auto_ratio if self.pd_ratio == "auto" else None

    @property
    def ratio(self) -> PdRatio:
        """The configured ratio, or the first one of a ratio that follows the requests."""
        if isinstance(self.pd_ratio, PdRatio):
            return self.pd_ratio
        assert self.auto_ratio is not None  # by validation
        return self.auto_ratio.start_ratio(self.slo.tpot_s)

    def at_ratio(self, ratio: PdRatio) -> Self:
        """The configuration with a fixed ratio, which may be one that no file may have."""
        return self.model_copy(update={"pd_ratio": ratio})

    def _check_aggregated(self) -> None:
        """Refuse other prefill counts than 0 at the ratio 0:1, and a prefill count of 0 at any other ratio."""
        if self.ratio.is_aggregated and not self.policy_settings()[0].is_fit_for_aggregated:
            fit = ", ".join(kind for kind, policy in self.policies.items() if policy.is_fit_for_aggregated)
            raise ValueError(
                f"pd_ratio is {self.pd_ratio}, and policy {self.policy.kind!r} sizes prefill and decode together: for "
                f"groups without prefill take one of {fit}, or set is_fit_for_aggregated in a policy of your own"
            )
        built_in = None if isinstance(self.policy, Extension) else self.policy
        for name, counts in (("override", self.override), ("policy", built_in)):
            prefill = getattr(counts, "prefill", None)
            has_prefill = not self.ratio.is_aggregated
            if isinstance(prefill, int) and (prefill > 0) != has_prefill:
                raise ValueError(
                    f"{name} has {prefill} prefill replicas, and pd_ratio is {self.pd_ratio}: give 0 with 0:1, and 1 "
                    "or more with any other ratio"
                )
        for number, period in enumerate(self.floors.periods):
            if period.prefill is not None and self.ratio.is_aggregated:
                raise ValueError(
                    f"floors.periods.{number}.prefill is {period.prefill}, and pd_ratio is 0:1, so the groups have no "
                    "prefill: leave it out"
                )

    def policy_settings(self) -> tuple[type[Policy[Any]], StrictConfig]:
        """The class of the policy, and its settings; a ValueError as in ``ExtensionPoint.settings``."""
        if isinstance(self.policy, Extension):
            return OWN_POLICIES.settings(self.policy)
        return self.policies[self.policy.kind], self.policy

    @property
    def load_forecast(self) -> LoadForecastConfig | None:
        """How the load is forecast; ``None``: the policy uses no forecast, and none was asked for."""
        uses_forecast = isinstance(self.policy, ProfiledConfig) and self.policy.uses_forecast
        return self.forecast or (LoadForecastConfig() if uses_forecast else None)

    def bounds_of(self, role: Role, lowest: int, highest: int) -> tuple[int, int]:
        """Lowest and highest count of a role in a group; ``lowest`` and ``highest``: the deployed ones.

        A deployed lowest count of 0 stays 0, so that the group may still sleep.
        """
        bounds = self.bounds.get(role)
        if bounds is None:
            return lowest, highest
        new_lowest = (bounds.lowest_replicas or lowest) if lowest else 0
        return new_lowest, bounds.highest_replicas or highest

    @property
    def is_frozen(self) -> bool:
        """Whether all counts stay, whatever the policy wants."""
        return self.is_paused or self.is_observing

    @property
    def report_s(self) -> float:
        """Time between two reports of a replica that is deployed with this configuration: half of ``interval_s``."""
        return min(max(_LEAST_REPORT_S, self.interval_s / 2), _MOST_REPORT_S)

    def check_reports(self, report_s: float) -> None:
        """Check ``stale_s`` and ``window_s`` against the time between reports; ValueError if one is too short."""
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
