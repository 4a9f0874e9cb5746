"""Counts by the time of day and of the week (HeteroScale section 3.3.1)."""

from datetime import datetime
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import Field, field_validator, model_validator

from autoscale.policies.policy import Policy
from autoscale.ratio import PdRatio
from autoscale.types import Decision, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role


class PeriodConfig(StrictConfig):
    """Counts that hold from the times of a cron expression until another period begins."""

    begins: str = Field(description="A cron expression of five fields: '0 8 * * mon-fri' is 8:00 on working days.")
    prefill: int | None = Field(None, ge=1, description="Prefill replicas; left out: by decode's count and the ratio.")
    decode: int | None = Field(None, ge=1, description="Decode replicas; left out: by prefill's count and the ratio.")
    pd_ratio: PdRatio | None = Field(None, description="The P/D ratio of this period; left out: the configured one.")

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
        _ = self.ratio  # a ValueError if two counts have an impossible ratio
        if self.pd_ratio is not None and self.pd_ratio.is_aggregated:
            raise ValueError(
                f"the period that begins at {self.begins!r} has no prefill: give it a pd_ratio from 1:5 on"
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
    """A schedule: the period that began last holds; of two that begin together, the later one in the list."""

    kind: Literal["periodic"] = "periodic"
    time_zone: str = Field("UTC", description="Time zone of the cron expressions, such as Europe/Berlin.")
    periods: tuple[PeriodConfig, ...] = Field(min_length=1)

    @field_validator("time_zone")
    @classmethod
    def _check_zone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"{value!r} is no time zone: give one such as 'Europe/Berlin' or 'UTC'") from None
        return value


class Periodic(Policy[PeriodicConfig]):
    """Replicas of both roles by the time of the day and the week."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """The counts of the period that holds now."""
        config = self._config
        # CronSim returns times before the given one, and a period holds from the first second of its minute on.
        now = datetime.fromtimestamp(snapshot.now_s // 60 * 60 + 1.0, ZoneInfo(config.time_zone))
        began = [(next(CronSim(each.begins, now, reverse=True)), index) for index, each in enumerate(config.periods)]
        period = config.periods[max(began)[1]]
        reason = f"the period that begins at {period.begins!r}"
        return Decision(wanted=period.wanted(), reason=reason, ratio=period.ratio or self._ratio, is_step=True)
