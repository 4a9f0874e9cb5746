"""Fixed counts by the time of the day and the week (HeteroScale section 3.3.1)."""

from typing import Literal
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from autoscale.policies.policy import Policy
from autoscale.ratio import PdRatio
from autoscale.schedule import Cron, TimeZone, last_time
from autoscale.types import Decision, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role


class PeriodConfig(StrictConfig):
    """Counts that hold from the times of a cron expression until another period begins."""

    begins: Cron = Field(description="When it begins, as a cron expression: '0 8 * * mon-fri' is 8:00 on working days.")
    prefill: int | None = Field(None, ge=1)
    """Prefill replicas of all groups, in those of the first one. Left out, decode and the ratio give them."""
    decode: int | None = Field(None, ge=1)
    """Decode replicas of all groups, in those of the first one. Left out, prefill and the ratio give them."""
    pd_ratio: PdRatio | None = Field(None, description="P/D ratio of this period. Left out, the service's ratio holds.")

    @model_validator(mode="after")
    def _check_counts(self) -> "PeriodConfig":
        if self.prefill is None and self.decode is None:
            raise ValueError(f"the period that begins at {self.begins!r} has no counts: give prefill, decode or both")
        _ = self.ratio  # raises a ValueError if the two counts have an impossible ratio
        if self.pd_ratio is not None and self.pd_ratio.is_aggregated:
            raise ValueError(
                f"the period that begins at {self.begins!r} has no prefill: give it a pd_ratio of 1:5 or more"
            )
        return self

    @property
    def ratio(self) -> PdRatio | None:
        """The ratio of the two counts, else ``pd_ratio``; ``None``: the service's configured ratio holds."""
        if self.prefill is not None and self.decode is not None:
            return PdRatio.parse(f"{self.prefill}:{self.decode}")
        return self.pd_ratio

    def wanted(self) -> dict[Role, float]:
        """Replicas of each role; 0 for a count that is left out: the other count and the ratio give it."""
        return {Role.PREFILL: float(self.prefill or 0), Role.DECODE: float(self.decode or 0)}


class PeriodicConfig(StrictConfig):
    """A schedule: the period that began last holds. If two began together, the later one in the list holds."""

    kind: Literal["periodic"] = "periodic"
    time_zone: TimeZone = Field("UTC", description="Time zone of the cron expressions, such as Europe/Berlin.")
    periods: tuple[PeriodConfig, ...] = Field(min_length=1)


class Periodic(Policy[PeriodicConfig]):
    """Replicas of both roles by the time of the day and the week."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """The counts of the period that holds now."""
        config = self._config
        zone = ZoneInfo(config.time_zone)
        began = [(last_time(each.begins, snapshot.now_s, zone), index) for index, each in enumerate(config.periods)]
        period = config.periods[max(began)[1]]
        reason = f"the period that begins at {period.begins!r}"
        # A step: the guard's hysteresis would skip a small change of the counts.
        return Decision(wanted=period.wanted(), reason=reason, ratio=period.ratio or self._ratio, is_step=True)
