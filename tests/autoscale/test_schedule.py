"""Times of cron expressions, also around both changes of the clocks."""

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from autoscale.schedule import Cron, TimeZone, is_in_skipped_hour, last_time, next_time

BERLIN = ZoneInfo("Europe/Berlin")
# In 2026 Berlin skips 2:00 to 3:00 on 29 March, and repeats 2:00 to 3:00 on 25 October.
FORWARD, BACK = "2026-03-29", "2026-10-25"


def at(text: str, *, fold: int = 0) -> float:
    """An instant of Berlin; ``fold`` 1: in the second pass of an hour that comes twice."""
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN, fold=fold).timestamp()


@pytest.mark.parametrize(
    ("cron", "now_s", "last_s"),
    [
        ("0 8 * * mon-fri", at("2026-11-20 08:00:00"), at("2026-11-20 08:00:00")),
        ("0 8 * * mon-fri", at("2026-11-20 07:59:59.999"), at("2026-11-19 08:00:00")),
        ("0 8 * * mon-fri", at("2026-11-22 12:00:00"), at("2026-11-20 08:00:00")),
        # The skipped hour: 2:30 comes at its end.
        ("30 2 * * *", at(f"{FORWARD} 01:59:59"), at("2026-03-28 02:30:00")),
        ("30 2 * * *", at(f"{FORWARD} 03:00:00"), at(f"{FORWARD} 03:00:00")),
        ("30 2 * * *", at(f"{FORWARD} 23:00:00"), at(f"{FORWARD} 03:00:00")),
        # The repeated hour: 2:30 comes in the first pass, and not again in the second.
        ("30 2 * * *", at(f"{BACK} 02:29:59"), at("2026-10-24 02:30:00")),
        ("30 2 * * *", at(f"{BACK} 02:30:00"), at(f"{BACK} 02:30:00")),
        ("30 2 * * *", at(f"{BACK} 02:10:00", fold=1), at(f"{BACK} 02:30:00")),
        ("30 2 * * *", at(f"{BACK} 02:30:00", fold=1), at(f"{BACK} 02:30:00")),
        ("30 2 * * *", at(f"{BACK} 03:00:00"), at(f"{BACK} 02:30:00")),
        # An expression for every hour comes in both passes.
        ("30 * * * *", at(f"{BACK} 02:10:00", fold=1), at(f"{BACK} 02:30:00")),
        ("30 * * * *", at(f"{BACK} 02:31:00", fold=1), at(f"{BACK} 02:30:00", fold=1)),
    ],
)
def test_the_last_time_of_an_expression(cron: str, now_s: float, last_s: float) -> None:
    assert last_time(cron, now_s, BERLIN) == last_s


@pytest.mark.parametrize(
    ("cron", "now_s", "next_s"),
    [
        ("0 8 * * mon-fri", at("2026-11-20 08:00:00"), at("2026-11-23 08:00:00")),
        ("30 2 * * *", at(f"{FORWARD} 01:59:59"), at(f"{FORWARD} 03:00:00")),
        ("30 2 * * *", at(f"{FORWARD} 03:00:00"), at("2026-03-30 02:30:00")),
        ("30 2 * * *", at(f"{BACK} 02:10:00", fold=1), at("2026-10-26 02:30:00")),
    ],
)
def test_the_next_time_of_an_expression(cron: str, now_s: float, next_s: float) -> None:
    assert next_time(cron, now_s, BERLIN) == next_s


@given(
    cron=st.sampled_from(["30 2 * * *", "0 3 * * sun", "*/20 * * * *", "10 */2 * * *", "59 1 * * *", "0 0 1 * *"]),
    day=st.sampled_from([FORWARD, BACK]),
    offset_s=st.floats(-3 * 3600.0, 6 * 3600.0),
)
def test_last_and_next_time_enclose_now_and_agree(cron: str, day: str, offset_s: float) -> None:
    now_s = at(f"{day} 00:00:00") + offset_s
    last_s, next_s = last_time(cron, now_s, BERLIN), next_time(cron, now_s, BERLIN)
    assert last_s <= now_s < next_s
    assert next_time(cron, last_s, BERLIN) == next_s
    assert last_time(cron, next_s, BERLIN) == next_s


@pytest.mark.parametrize("day", [FORWARD, BACK])
def test_the_last_time_never_goes_back_while_the_clock_runs(day: str) -> None:
    start = datetime.fromisoformat(day).replace(tzinfo=BERLIN) - timedelta(hours=1)
    lasts = [last_time("30 2 * * *", start.timestamp() + 60.0 * minute, BERLIN) for minute in range(6 * 60)]
    assert lasts == sorted(lasts)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0 8 * *", "'0 8 \\* \\*' is no cron expression .* give minute hour day month weekday"),
        ("99 8 * * *", "no cron expression"),
        ("0 0 30 2 *", "no cron expression|never comes"),
        ("9" * 5000 + " 8 * * *", "integer string conversion"),
        ("", "no cron expression"),
    ],
)
def test_text_that_is_no_cron_expression_is_refused(value: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Cron).validate_python(value)


@pytest.mark.parametrize("value", ["Mars/Olympus", "../etc/passwd", "", "\0"])
def test_an_unknown_time_zone_is_refused(value: str) -> None:
    with pytest.raises(ValidationError, match="is no time zone: give one such as 'Europe/Berlin'"):
        TypeAdapter(TimeZone).validate_python(value)


@pytest.mark.parametrize(
    ("begins", "ends", "day", "is_skipped"),
    [
        ("0 2 * * *", "0 3 * * *", "2026-03-29", True),
        ("15 2 * * *", "45 2 * * *", "2026-03-29", True),
        ("15 2 * * *", "45 2 * * *", "2026-03-28", False),
        ("30 2 * * *", "30 3 * * *", "2026-03-29", False),
        ("30 2 * * *", "15 2 * * *", "2026-03-29", False),  # most of a day
        ("0 3 * * *", "30 2 * * *", "2026-03-29", False),
    ],
)
def test_a_time_within_the_hour_that_clocks_skip_is_known(begins: str, ends: str, day: str, is_skipped: bool) -> None:
    midnight_s = datetime.fromisoformat(day).replace(tzinfo=BERLIN).timestamp()
    assert is_in_skipped_hour(begins, ends, next_time(begins, midnight_s, BERLIN), BERLIN) is is_skipped
