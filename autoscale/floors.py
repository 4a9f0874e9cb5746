"""Floors: times of the day and the week in which a service has at least given counts, whatever its policy (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Self
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from autoscale.schedule import Cron, TimeZone, is_in_skipped_hour, last_time, next_time
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# Number of ends of a floor that are checked for a gap after them. An expression that comes every minute has as many in
# a week, after which most schedules repeat; with fewer, a gap on Sunday alone would be missed.
_CHECKED_ENDS = 7 * 24 * 60
# Instants between which these ends are checked, seconds since 1970: Monday, 1 January 2024, and 28 years later, after
# which the calendar repeats.
_CHECKED_FROM_S = 1_704_067_200.0
_CHECKED_UNTIL_S = _CHECKED_FROM_S + 28 * 365.25 * 24 * 3600.0
# Longest time of a floor, and longest time before it, seconds: a week, and a day. A longer one is probably a mistake.
_MOST_LASTS_S = 7 * 24 * 3600.0
_MOST_PREWARM_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """One time in which a service has at least ``counts``; a role with 0 has no floor of its own.

    It holds from ``begins_s`` until before ``ends_s``, seconds since 1970 in UTC.
    """

    counts: Mapping[Role, int]
    begins_s: float
    ends_s: float
    time_zone: str

    def text(self, now_s: float) -> str:
        """The floor for people: its counts, and when it began or begins, and ends."""
        counts = " and ".join(f"{count} {role}" for role, count in self.counts.items() if count)
        counts += " replica" if sum(self.counts.values()) == 1 else " replicas"
        begins, ends = (
            f"{datetime.fromtimestamp(at_s, ZoneInfo(self.time_zone)):%a %d %b %H:%M}"
            for at_s in (self.begins_s, self.ends_s)
        )
        times = f"from {begins} until" if now_s < self.begins_s else f"since {begins}, until"
        return f"floor of {counts} {times} {ends} ({self.time_zone})"


class FloorPeriodConfig(StrictConfig):
    """Least counts from the times of one cron expression on, until those of another, or for a fixed time."""

    begins: Cron = Field(description="When it begins, as a cron expression: '0 6 * * mon-fri' is 6:00 on working days.")
    ends: Cron | None = Field(None, description="When it ends, as a cron expression. Left out: give lasts_s.")
    lasts_s: float | None = Field(None, ge=60.0, le=_MOST_LASTS_S)
    """Time from its begin to its end, seconds, also when clocks change. Left out: give ends."""
    prefill: int | None = Field(None, ge=1)
    """Least prefill replicas of all groups, in those of the first one. Left out, decode and the ratio give them."""
    decode: int | None = Field(None, ge=1)
    """Least decode replicas of all groups, in those of the first one. Left out, prefill and the ratio give them."""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.prefill is None and self.decode is None:
            raise ValueError(f"the floor that begins at {self.begins!r} has no counts: give prefill, decode or both")
        if (self.ends is None) == (self.lasts_s is None):
            raise ValueError(
                f"the floor that begins at {self.begins!r} needs one end: give either ends, such as '0 10 * * *', or "
                "lasts_s"
            )
        if not self._has_gap():
            end = f"ends at {self.ends!r}" if self.lasts_s is None else f"lasts {self.lasts_s:g} s"
            raise ValueError(
                f"the floor that begins at {self.begins!r} and {end} always begins again before it has ended: change "
                "its times, or raise the replicas of the groups if it shall always hold"
            )
        return self

    @property
    def counts(self) -> dict[Role, int]:
        """Least replicas of each role; 0 for a count that is left out."""
        return {Role.PREFILL: self.prefill or 0, Role.DECODE: self.decode or 0}

    def floor(self, now_s: float, lead_s: float, time_zone: str) -> Floor | None:
        """The floor if it is in force, or begins within ``lead_s`` seconds; the one in force comes first."""
        zone = ZoneInfo(time_zone)
        if self._is_in_force(now_s, zone):
            return self._floor(last_time(self.begins, now_s, zone), time_zone)
        # At the end of the lead the last begin is in the future if any begin is within the lead.
        if last_time(self.begins, now_s + lead_s, zone) > now_s:
            return self.next_floor(now_s, time_zone)
        return None

    def next_floor(self, now_s: float, time_zone: str) -> Floor:
        """The floor with the first begin after ``now_s``."""
        return self._floor(next_time(self.begins, now_s, ZoneInfo(time_zone)), time_zone)

    def _floor(self, begins_s: float, time_zone: str) -> Floor:
        ends_s = self._end_after(begins_s, ZoneInfo(time_zone))
        return Floor(counts=self.counts, begins_s=begins_s, ends_s=ends_s, time_zone=time_zone)

    def _is_in_force(self, now_s: float, zone: ZoneInfo) -> bool:
        """Whether it holds at an instant, which alone decides. An end at the instant of a begin has no effect."""
        began_s = last_time(self.begins, now_s, zone)
        return now_s < self._end_after(began_s, zone)

    def _end_after(self, begins_s: float, zone: ZoneInfo) -> float:
        """The first end after a begin."""
        if self.ends is None:
            return begins_s + (self.lasts_s or 0.0)
        is_skipped = is_in_skipped_hour(self.begins, self.ends, begins_s, zone)
        return begins_s if is_skipped else next_time(self.ends, begins_s, zone)

    def _has_gap(self) -> bool:
        """Whether it is ever not in force: no begin comes from one of its begins until the end after that."""
        zone = ZoneInfo("UTC")
        begins_s = next_time(self.begins, _CHECKED_FROM_S, zone)
        for _ in range(_CHECKED_ENDS):
            last_begin_s = last_time(self.begins, self._end_after(begins_s, zone), zone)
            if last_begin_s == begins_s:
                return True
            begins_s = last_begin_s
            if begins_s > _CHECKED_UNTIL_S:
                break
        return False


class FloorsConfig(StrictConfig):
    """Floors of a service, which hold with any policy. Of several at once, the largest count of each role holds."""

    time_zone: TimeZone = Field("UTC", description="Time zone of the cron expressions, such as Europe/Berlin.")
    prewarm_s: float | None = Field(None, ge=0.0, le=_MOST_PREWARM_S)
    """Time before the begin of a floor at which its replicas are requested, seconds. Left out: the longest start of the
    policy's profiles; for a policy without profiles no_room_s, the longest time that a start may take."""
    periods: tuple[FloorPeriodConfig, ...] = ()

    def at(self, now_s: float, lead_s: float) -> tuple[Floor, ...]:
        """The floors that are in force at an instant, or begin within ``lead_s`` seconds."""
        floors = (period.floor(now_s, lead_s, self.time_zone) for period in self.periods)
        return tuple(floor for floor in floors if floor is not None)

    def following(self, now_s: float) -> Floor | None:
        """The floor that begins next; ``None``: there are no floors."""
        floors = [period.next_floor(now_s, self.time_zone) for period in self.periods]
        return min(floors, key=lambda floor: floor.begins_s, default=None)


def largest(floors: tuple[Floor, ...]) -> dict[Role, int]:
    """The largest count of each role among floors; 0: no floor has the role."""
    return {role: max((floor.counts[role] for floor in floors), default=0) for role in Role}
