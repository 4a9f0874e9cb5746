"""Times of a cron expression in a time zone, also when clocks change (pure).

Clocks that go back repeat an hour. A fixed time in it, such as ``30 2 * * *``, comes once, in the first pass. Clocks
that go forward skip an hour. A fixed time in it comes at the hour's end.
"""

import math
from datetime import UTC, datetime, timedelta
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator

# Longest time that clocks go back at once. In the tz database a change to summer time and back is at most two hours.
_LONGEST_REPEAT = timedelta(hours=2)


def _checked_cron(value: str) -> str:
    try:
        next(CronSim(value, datetime(2024, 1, 1), reverse=True))
    except CronSimError as error:
        raise ValueError(f"{value!r} is no cron expression ({error}): give minute hour day month weekday") from None
    except StopIteration:
        raise ValueError(f"{value!r} never comes: check its day and month") from None
    return value


def _checked_zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{value!r} is no time zone: give one such as 'Europe/Berlin' or 'UTC'") from None
    return value


# A cron expression, and the name of a time zone, as configurations have them.
Cron = Annotated[str, AfterValidator(_checked_cron)]
TimeZone = Annotated[str, AfterValidator(_checked_zone)]


def last_time(cron: Cron, now_s: float, zone: ZoneInfo) -> float:
    """The last time at which the expression came, at or before ``now_s``; both in seconds since 1970 in UTC."""
    # CronSim returns only whole seconds before the given one.
    start = datetime.fromtimestamp(math.floor(now_s) + 1.0, zone)
    if start.fold:  # in the second pass of an hour: CronSim would miss the times of the first
        start = (start.astimezone(UTC) + _LONGEST_REPEAT).astimezone(zone)
    return next(at_s for at_s in map(datetime.timestamp, CronSim(cron, start, reverse=True)) if at_s <= now_s)


def next_time(cron: Cron, now_s: float, zone: ZoneInfo) -> float:
    """The first time at which the expression comes after ``now_s``; both in seconds since 1970 in UTC."""
    start = datetime.fromtimestamp(math.floor(now_s), zone)
    # In the second pass of an hour, CronSim also returns times of the first.
    return next(at_s for at_s in map(datetime.timestamp, CronSim(cron, start)) if at_s > now_s)


def is_in_skipped_hour(begins: Cron, ends: Cron, begins_s: float, zone: ZoneInfo) -> bool:
    """Whether clocks go forward at a begin, and both the begin and the next end are in the hour that they skip."""
    # The time that clocks would show at this instant without the change, and the time that they show.
    skipped_from = datetime.fromtimestamp(begins_s - 1.0, zone).replace(tzinfo=None) + timedelta(seconds=1)
    skipped_until = datetime.fromtimestamp(begins_s, zone).replace(tzinfo=None)
    if skipped_from >= skipped_until:
        return False
    begin = next(CronSim(begins, skipped_from - timedelta(seconds=1)))
    return bool(next(CronSim(ends, begin)) <= skipped_until)
