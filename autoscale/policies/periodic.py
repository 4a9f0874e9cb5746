"""Counts by the time of day and of the week (HeteroScale section 3.3.1)."""

from datetime import datetime
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, Snapshot
from kvtransfer.topology import Role


class PeriodConfig(BaseModel):
    """What holds from the times of a cron expression until another period begins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    begins: str = Field(description="A cron expression of five fields: '0 8 * * mon-fri' is 8:00 on working days.")
    prefill: int | None = Field(None, ge=1, description="Prefill replicas; left out, as decode's and the ratio say.")
    decode: int | None = Field(None, ge=1, description="Decode replicas; left out, as prefill's and the ratio say.")
    pd_ratio: PdRatio | None = Field(None, description="The ratio of this period, if it is another.")

    @field_validator("begins")
    @classmethod
    def _check_cron(cls, value: str) -> str:
        try:
            next(CronSim(value, datetime(2024, 1, 1), reverse=True))
        except CronSimError as error:
            raise ValueError(f"{value!r} is no cron expression ({error}): give minute hour day month weekday") from None
        except StopIteration:
            raise ValueError(f"{value!r} never comes: check its day and month") from None
        return value

    @model_validator(mode="after")
    def _check_counts(self) -> "PeriodConfig":
        if self.prefill is None and self.decode is None:
            raise ValueError(f"the period that begins at {self.begins!r} has no counts: give prefill, decode or both")
        if self.prefill is not None and self.decode is not None:
            PdRatio.parse(f"{self.prefill}:{self.decode}")  # an impossible one is refused
        if self.pd_ratio is not None and self.pd_ratio.is_aggregated:
            raise ValueError(
                f"the period that begins at {self.begins!r} has no prefill: give it a pd_ratio from 1:5 on"
            )
        return self

    @property
    def ratio(self) -> PdRatio | None:
        """What is kept while it holds, where that is the period's own: that of its counts where it gives both."""
        if self.prefill is not None and self.decode is not None:
            return PdRatio.parse(f"{self.prefill}:{self.decode}")
        return self.pd_ratio

    def wanted(self) -> dict[Role, float]:
        """Replicas of each role; 0 where the ratio says how many."""
        return {Role.PREFILL: float(self.prefill or 0), Role.DECODE: float(self.decode or 0)}


class PeriodicConfig(BaseModel):
    """A schedule. At any time the period that began last holds; of two that begin together, the later in the list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["periodic"] = "periodic"
    time_zone: str = Field("UTC", description="Of the cron expressions, such as Europe/Berlin.")
    periods: tuple[PeriodConfig, ...] = Field(min_length=1)

    @field_validator("time_zone")
    @classmethod
    def _check_zone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"{value!r} is no time zone: give one such as 'Europe/Berlin' or 'UTC'") from None
        return value


class Periodic:
    """The policy; see ``decide``."""

    def __init__(self, config: PeriodicConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config
        self._ratio = ratio
        self._zone = ZoneInfo(config.time_zone)
        self._minute: int | None = None
        self._period = config.periods[0]

    def decide(self, snapshot: Snapshot) -> Decision:
        """The counts of the period that holds."""
        minute = int(snapshot.now_s // 60)
        if minute != self._minute:  # a period begins on a minute, and looking back over years takes a millisecond
            self._minute, self._period = minute, self._holding(60.0 * minute)
        period = self._period
        ratio = period.ratio or self._ratio
        reason = f"the period that begins at {period.begins!r}"
        return Decision(wanted=period.wanted(), reason=reason, ratio=ratio, is_step=True)

    def _holding(self, minute_s: float) -> PeriodConfig:
        # CronSim looks for times before the one given, and a period holds from its first second on.
        now = datetime.fromtimestamp(minute_s + 1.0, self._zone)
        began = [(next(CronSim(p.begins, now, reverse=True)), index) for index, p in enumerate(self._config.periods)]
        return self._config.periods[max(began)[1]]
