"""Periods of the day and the week, also when clocks change."""

from collections.abc import Callable
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.decide.controller import Controller
from autoscale.policies.periodic import Periodic, PeriodicConfig
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import PoolKey, Snapshot
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
WORKDAYS = {
    "kind": "periodic",
    "time_zone": "Europe/Berlin",
    "periods": [
        {"begins": "0 8 * * mon-fri", "decode": 9},
        {"begins": "0 20 * * *", "decode": 3},
        {"begins": "0 2 * * sun", "prefill": 4, "decode": 2, "pd_ratio": "2:1"},
    ],
}


def at(text: str, zone: str = "Europe/Berlin") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("when", "decode"),
    [
        ("2026-11-20 07:59:59", 3),  # a Friday
        ("2026-11-20 07:59:59.500", 3),
        ("2026-11-20 08:00:00", 9),
        ("2026-11-20 19:59:59", 9),
        ("2026-11-20 20:00:00", 3),
        ("2026-11-21 12:00:00", 3),  # Saturday: the evening's still holds
        ("2026-11-22 02:00:00", 2),  # Sunday
        ("2026-11-23 07:00:00", 3),
        ("2026-11-23 08:00:00", 9),
        ("2026-03-30 08:00:00", 9),  # the Monday after the clocks went forward
        ("2026-10-26 07:59:00", 3),  # the Monday after they went back
    ],
)
def test_the_period_that_began_last_holds(make_snapshot: Callable[..., Snapshot], when: str, decode: int) -> None:
    policy = Periodic(PeriodicConfig.model_validate(WORKDAYS), ratio=PdRatio(1, 3), slo=SloConfig())
    decision = policy.decide(make_snapshot(now_s=at(when)))
    assert decision.wanted is not None
    assert decision.wanted[D] == decode
    assert decision.ratio == (PdRatio(2, 1) if decode == 2 else PdRatio(1, 3))


def test_the_time_zone_decides_when_a_period_begins(make_snapshot: Callable[..., Snapshot]) -> None:
    utc = Periodic(
        PeriodicConfig.model_validate({**WORKDAYS, "time_zone": "UTC"}), ratio=PdRatio(1, 3), slo=SloConfig()
    )
    assert utc.decide(make_snapshot(now_s=at("2026-11-20 08:30:00"))).wanted[D] == 3  # 7:30 in UTC


def test_of_two_periods_that_begin_together_the_later_in_the_list_holds(make_snapshot: Callable[..., Snapshot]) -> None:
    periods = [{"begins": "0 8 * * *", "decode": 2}, {"begins": "0 8 * * fri", "decode": 5}]
    policy = Periodic(PeriodicConfig.model_validate({"periods": periods}), ratio=PdRatio(1, 1), slo=SloConfig())
    assert policy.decide(make_snapshot(now_s=at("2026-11-20 08:00:00", "UTC"))).wanted[D] == 5
    assert policy.decide(make_snapshot(now_s=at("2026-11-21 08:00:00", "UTC"))).wanted[D] == 2


def test_counts_and_ratio_of_a_period_reach_the_plan(
    make_autoscale: Callable[..., Any], make_snapshot: Callable[..., Snapshot]
) -> None:
    controller = Controller(make_autoscale(pd_ratio="1:3", policy=WORKDAYS))
    key = {role: PoolKey("g0", role) for role in Role}
    day = controller.tick(make_snapshot(1, 3, now_s=at("2026-11-20 09:00:00")))
    assert (day.counts[key[P]], day.counts[key[D]]) == (3, 9)
    sunday = controller.tick(make_snapshot(1, 3, now_s=at("2026-11-22 09:00:00")))
    assert (sunday.state.desired[key[P]], sunday.state.desired[key[D]]) == (4, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time_zone": "Mars/Olympus"}, "no time zone: give one such as"),
        ({"time_zone": "../etc/passwd"}, "no time zone"),
        ({"periods": []}, "at least 1 item"),
        ({"periods": [{"begins": "0 8 * *", "decode": 1}]}, "no cron expression"),
        ({"periods": [{"begins": "99 8 * * *", "decode": 1}]}, "no cron expression"),
        ({"periods": [{"begins": "0 0 30 2 *", "decode": 1}]}, "no cron expression|never comes"),
        ({"periods": [{"begins": "0 8 * * *"}]}, "has no counts"),
        ({"periods": [{"begins": "0 8 * * *", "decode": 0}]}, "greater than or equal to 1"),
        ({"periods": [{"begins": "0 8 * * *", "decode": 1, "pd_ratio": "1:9"}]}, "between 1:5 and 9:1"),
        ({"periods": [{"begins": "0 8 * * *", "prefill": 1, "decode": 6}]}, "ratio of 1:6 is impossible"),
    ],
)
def test_a_schedule_without_periods_or_with_invalid_ones_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PeriodicConfig.model_validate({**WORKDAYS, **change})


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (2, 5)])
def test_two_counts_stay_as_configured_though_others_are_nearer_to_the_ratio(
    make_autoscale: Callable[..., Any], make_snapshot: Callable[..., Snapshot], prefill: int, decode: int
) -> None:
    periods = [{"begins": "* * * * *", "prefill": prefill, "decode": decode}]
    config = make_autoscale(pd_ratio="1:3", policy={"kind": "periodic", "periods": periods})
    state = Controller(config).tick(make_snapshot(1, 3, now_s=1e9)).state
    assert (state.desired[PoolKey("g0", P)], state.desired[PoolKey("g0", D)]) == (prefill, decode)


@given(now_s=st.floats(1.7e9, 1.9e9), before_s=st.floats(0.0, 90.0))
def test_the_decision_depends_on_the_time_alone_and_is_one_of_the_periods(
    make_snapshot: Callable[..., Snapshot], now_s: float, before_s: float
) -> None:
    config = PeriodicConfig.model_validate(WORKDAYS)
    policy, fresh = (Periodic(config, ratio=PdRatio(1, 3), slo=SloConfig()) for _ in range(2))
    policy.decide(make_snapshot(now_s=now_s - before_s))
    decision = policy.decide(make_snapshot(now_s=now_s))
    assert decision == fresh.decide(make_snapshot(now_s=now_s))
    assert decision.wanted in [period.wanted() for period in config.periods]


def test_a_period_that_began_in_a_repeated_hour_holds_in_its_second_pass(
    make_snapshot: Callable[..., Snapshot],
) -> None:
    periods = [{"begins": "0 0 * * *", "decode": 2}, {"begins": "30 2 * * *", "decode": 5}]
    config = PeriodicConfig.model_validate({"time_zone": "Europe/Berlin", "periods": periods})
    policy = Periodic(config, ratio=PdRatio(1, 1), slo=SloConfig())
    began_s = at("2026-10-25 02:30:00")
    decode = [policy.decide(make_snapshot(now_s=began_s + 60.0 * minute)).wanted[D] for minute in range(-5, 120)]
    assert decode == [2.0] * 5 + [5.0] * 120
