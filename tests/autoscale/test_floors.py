"""Which floors hold at an instant: by the clock alone, also when clocks change."""

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.floors import FloorPeriodConfig, FloorsConfig, largest
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
MORNING = {"begins": "0 6 * * mon-fri", "ends": "0 10 * * mon-fri", "decode": 8}
FLOORS = FloorsConfig.model_validate({"time_zone": "Europe/Berlin", "periods": [MORNING]})


def at(text: str, *, fold: int = 0) -> float:
    """An instant of Berlin; ``fold`` 1: in the second pass of an hour that comes twice."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("Europe/Berlin"), fold=fold).timestamp()


def decode_floor(floors: FloorsConfig, now_s: float, lead_s: float = 0.0) -> int:
    return largest(floors.at(now_s, lead_s))[D]


def berlin(*periods: dict[str, Any]) -> FloorsConfig:
    return FloorsConfig.model_validate({"time_zone": "Europe/Berlin", "periods": periods})


@pytest.mark.parametrize(
    ("when", "decode"),
    [
        ("2026-11-20 05:54:59", 0),  # a Friday
        ("2026-11-20 05:55:00", 8),  # the prewarm of 300 s
        ("2026-11-20 06:00:00", 8),
        ("2026-11-20 09:59:59.9", 8),
        ("2026-11-20 10:00:00", 0),
        ("2026-11-21 08:00:00", 0),  # Saturday
        ("2026-11-23 06:00:00", 8),
        ("2026-03-30 05:55:00", 8),  # the Monday after the clocks went forward
        ("2026-03-30 05:54:59", 0),
        ("2026-10-26 05:55:00", 8),  # the Monday after they went back
        ("2026-10-26 05:54:59", 0),
    ],
)
def test_a_floor_holds_from_its_prewarm_until_its_end(when: str, decode: int) -> None:
    assert decode_floor(FLOORS, at(when), 300.0) == decode


@pytest.mark.parametrize(
    ("period", "begins_s", "ends_s"),
    [
        # Over the skipped hour, 1:00 to 4:00 takes two hours; a fixed time stays as long as it is.
        ({"begins": "0 1 * * *", "ends": "0 4 * * *"}, at("2026-03-29 01:00"), at("2026-03-29 04:00")),
        ({"begins": "0 1 * * *", "lasts_s": 10800.0}, at("2026-03-29 01:00"), at("2026-03-29 05:00")),
        ({"begins": "30 2 * * *", "ends": "0 4 * * *"}, at("2026-03-29 03:00"), at("2026-03-29 04:00")),
        # Over the repeated hour, it takes four.
        ({"begins": "0 1 * * *", "ends": "0 4 * * *"}, at("2026-10-25 01:00"), at("2026-10-25 04:00")),
        ({"begins": "0 1 * * *", "lasts_s": 10800.0}, at("2026-10-25 01:00"), at("2026-10-25 03:00")),
        ({"begins": "30 2 * * *", "ends": "30 3 * * *"}, at("2026-10-25 02:30"), at("2026-10-25 03:30")),
        ({"begins": "15 2 * * *", "ends": "30 2 * * *"}, at("2026-10-25 02:15"), at("2026-10-25 02:30")),
    ],
)
def test_a_floor_holds_once_and_without_a_gap_when_clocks_change(
    period: dict[str, Any], begins_s: float, ends_s: float
) -> None:
    floors = berlin({**period, "decode": 8})
    start_s = begins_s - 2 * 3600.0
    held = [start_s + 60.0 * minute for minute in range(9 * 60) if decode_floor(floors, start_s + 60.0 * minute)]
    assert held == [begins_s + 60.0 * minute for minute in range(int((ends_s - begins_s) // 60))]
    (floor,) = floors.at(begins_s, 0.0)
    assert (floor.begins_s, floor.ends_s) == (begins_s, ends_s)


def test_a_floor_within_the_hour_that_clocks_skip_does_not_last_until_the_next_day() -> None:
    night = FloorsConfig.model_validate(
        {"time_zone": "Europe/Berlin", "periods": [{"begins": "0 2 * * *", "ends": "0 3 * * *", "decode": 8}]}
    )
    days = [night.at(at(f"2026-03-{day} {hour}"), 0.0) for day, hour in ((28, "02:30"), (29, "04:00"), (30, "02:30"))]
    assert [len(floors) for floors in days] == [1, 0, 1]


def test_a_floor_may_end_on_the_next_day() -> None:
    night = berlin({"begins": "0 22 * * *", "ends": "0 6 * * *", "decode": 3})
    held = [decode_floor(night, at(f"2026-11-20 {hour:02}:00:00")) for hour in range(24)]
    assert held == [3] * 6 + [0] * 16 + [3] * 2


def test_of_floors_at_once_the_largest_count_of_each_role_holds() -> None:
    floors = berlin(
        {"begins": "0 6 * * *", "ends": "0 12 * * *", "decode": 8},
        {"begins": "0 9 * * *", "lasts_s": 7200.0, "prefill": 3, "decode": 5},
    )
    assert largest(floors.at(at("2026-11-20 08:00"), 0.0)) == {P: 0, D: 8}
    assert largest(floors.at(at("2026-11-20 09:00"), 0.0)) == {P: 3, D: 8}
    assert largest(floors.at(at("2026-11-20 11:00"), 0.0)) == {P: 0, D: 8}
    assert largest(()) == {P: 0, D: 0}


def test_an_end_at_the_instant_of_a_begin_has_no_effect() -> None:
    floors = berlin({"begins": "0 8 * * mon-fri", "ends": "0 8 * * *", "decode": 4})
    assert decode_floor(floors, at("2026-11-20 08:00")) == 4  # Friday: Thursday's ends, and the next begins
    assert decode_floor(floors, at("2026-11-21 07:59")) == 4
    assert decode_floor(floors, at("2026-11-21 08:00")) == 0


def test_the_text_says_when_a_floor_began_or_begins_and_when_it_ends() -> None:
    before_s, within_s = at("2026-11-20 05:57"), at("2026-11-20 07:00")
    (later,), (in_force,) = FLOORS.at(before_s, 300.0), FLOORS.at(within_s, 300.0)
    assert later.text(before_s) == (
        "floor of 8 decode replicas from Fri 20 Nov 06:00 until Fri 20 Nov 10:00 (Europe/Berlin)"
    )
    assert in_force.text(within_s) == (
        "floor of 8 decode replicas since Fri 20 Nov 06:00, until Fri 20 Nov 10:00 (Europe/Berlin)"
    )
    one = berlin({**MORNING, "decode": 1}).at(within_s, 0.0)[0]
    assert one.text(within_s).startswith("floor of 1 decode replica since")


def test_the_following_floor_is_the_one_that_begins_next() -> None:
    assert FloorsConfig().following(at("2026-11-20 05:00")) is None
    following = FLOORS.following(at("2026-11-20 06:00"))
    assert following is not None
    assert following.begins_s == at("2026-11-23 06:00")


@given(now_s=st.floats(1.7e9, 1.9e9), before_s=st.floats(-1e7, 1e7), lead_s=st.floats(0.0, 86400.0))
def test_only_the_clock_decides_and_a_longer_lead_only_adds(now_s: float, before_s: float, lead_s: float) -> None:
    first = FLOORS.at(now_s, lead_s)
    FLOORS.at(now_s + before_s, lead_s)  # a clock that jumps away and back
    assert FLOORS.at(now_s, lead_s) == first
    assert decode_floor(FLOORS, now_s, 0.0) <= decode_floor(FLOORS, now_s, lead_s)
    for floor in first:
        assert now_s < floor.ends_s
        assert floor.begins_s <= now_s + lead_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"begins": "0 6 * *"}, "'0 6 \\* \\*' is no cron expression"),
        ({"ends": "0 0 30 2 *"}, "no cron expression|never comes"),
        ({"begins": None}, "valid string"),
        ({"ends": None}, "needs one end: give either ends, such as '0 10 \\* \\* \\*', or lasts_s"),
        ({"lasts_s": 3600.0}, "needs one end"),
        ({"ends": None, "lasts_s": 59.0}, "greater than or equal to 60"),
        ({"ends": None, "lasts_s": float("inf")}, "finite number|less than or equal"),
        ({"decode": None}, "begins at '0 6 \\* \\* mon-fri' has no counts: give prefill, decode or both"),
        ({"decode": 0}, "greater than or equal to 1"),
        ({"prefill": -1}, "greater than or equal to 1"),
        # An end that a begin always precedes or meets:
        ({"begins": "* * * * *"}, "always begins again before it has ended: change its times, or raise"),
        ({"ends": "0 6 * * mon-fri"}, "begins at '0 6 \\* \\* mon-fri' and ends at .* always begins again"),
        ({"begins": "0 6 * * *", "ends": None, "lasts_s": 86400.0}, "and lasts 86400 s always begins again"),
        ({"begins": "0 0 29 2 *", "ends": "0 0 29 2 *"}, "always begins again"),
    ],
)
def test_a_floor_without_times_or_counts_or_without_a_gap_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FloorPeriodConfig.model_validate({**MORNING, **change})


@pytest.mark.parametrize(
    "times",
    [
        {"begins": "* * * * mon-fri", "lasts_s": 60.0},  # no gap before Saturday, after 7,200 begins
        {"begins": "* 9-23 * * *", "ends": "0 8 * * *"},
        {"begins": "0 0 29 2 *", "lasts_s": 3600.0},
    ],
)
def test_a_gap_is_found_however_late_it_comes(times: dict[str, Any]) -> None:
    FloorPeriodConfig.model_validate({"decode": 1, **times})


def test_an_unknown_time_zone_is_refused() -> None:
    with pytest.raises(ValidationError, match="'Mars/Olympus' is no time zone"):
        FloorsConfig.model_validate({"time_zone": "Mars/Olympus", "periods": [MORNING]})
