"""A service's forecasts from tick to tick: when one is due, bad input, a stored state, and a day's history."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from autoscale.forecast.config import LoadForecastConfig
from autoscale.forecast.forecaster import FitTask, Forecaster, ForecastState, fit
from autoscale.forecast.history import Point
from autoscale.load_forecast import LoadForecast
from autoscale.types import Traffic

STEP_S, DAY_S = 60.0, 86400.0


def forecaster(**changes: object) -> Forecaster:
    return Forecaster(config=LoadForecastConfig.model_validate({"step_s": STEP_S, **changes}), tpot_s=0.05)


def chat(rate: float, inputs: float = 900.0, outputs: float = 200.0) -> Traffic:
    return Traffic(requests_per_s=rate, input_tokens_mean=inputs, output_tokens_mean=outputs)


def run(
    own: Forecaster,
    rate: Callable[[int], float],
    steps: int,
    *,
    start_s: float = 45.0,
    begin: int = 0,
) -> list[LoadForecast]:
    """Two ticks in each step; the forecast after each step. Before the very first step there is none."""
    forecasts = []
    for step in range(begin, begin + steps):
        for tick_s in (5.0, 35.0):
            now_s = STEP_S * step + tick_s
            task = own.observe(chat(rate(step)), now_s, start_s)
            assert (task is not None) == (tick_s == 5.0 and step > 0)  # once in a step, after it has ended
            if task is not None:
                own.take(task, fit(task))
                forecast = own.forecast(now_s)
                assert forecast is not None
                forecasts.append(forecast)
    return forecasts


def test_a_forecast_is_for_one_start_in_whole_steps_and_falls_due_when_a_step_ends() -> None:
    for start_s, horizon_s in ((0.0, 60.0), (45.0, 60.0), (60.0, 60.0), (61.0, 120.0), (150.0, 180.0)):
        (forecast,) = run(forecaster(), lambda step: 3.0, 2, start_s=start_s)
        assert (forecast.issued_s, forecast.horizon_s) == (60.0, horizon_s)


def test_a_load_that_rises_evenly_is_forecast_ahead_of_the_last_value() -> None:
    rising = run(forecaster(method={"kind": "arima", "orders": [[1, 1, 1]]}), lambda step: 10.0 + step, 40)
    rate = rising[-1].requests_per_s
    assert rate.last == 48.0
    assert rate.value == pytest.approx(49.0, abs=0.5)
    assert rate.is_proven
    accuracy = rate.accuracy
    assert accuracy is not None and accuracy.error_ratio < 0.8


def test_the_first_forecasts_and_constant_input_are_the_last_value_and_say_why() -> None:
    forecasts = run(forecaster(), lambda step: 3.0, 8)
    assert forecasts[0].requests_per_s.fallback == "1 values, ARIMA needs 3"
    assert forecasts[-1].requests_per_s.fallback == "the series is constant"
    assert forecasts[-1].requests_per_s.value == 3.0
    assert len(forecasts[-1].fallbacks) == 3


def test_a_diverging_model_is_the_last_value_and_says_why() -> None:
    # Growth by half in each step, and twenty steps ahead: the models are out of bounds long before.
    grown = [0.01 * 1.5**step for step in range(30)]
    points = tuple(Point(STEP_S * (step + 1), rate, 900.0, 200.0) for step, rate in enumerate(grown))
    config = LoadForecastConfig.model_validate({"method": {"kind": "arima", "orders": [[1, 2, 0]]}})
    rate, _, _ = fit(FitTask(config=config, points=points, horizon_s=20 * STEP_S))
    assert rate.fallback is not None and rate.fallback.startswith("ARIMA(1, 2, 0) diverges: it forecasts ")
    assert rate.value == grown[-1]


def test_forecasts_that_do_not_come_are_the_last_value_and_say_why() -> None:
    own = forecaster()
    assert own.observe(chat(5.0), 5.0, 0.0) is None
    task = own.observe(chat(6.0), 65.0, 0.0)
    assert task is not None
    assert own.forecast(66.0) is None  # it is being made
    own.give_up(task, "a forecast took longer than 4 s")
    forecast = own.forecast(66.0)
    assert forecast is not None
    assert forecast.requests_per_s.value == 5.0
    assert forecast.fallbacks[0] == "requests_per_s: a forecast took longer than 4 s"


def test_the_forecast_stays_until_the_next_and_an_old_one_does_not_count() -> None:
    own = forecaster()
    run(own, lambda step: 3.0, 2)  # issued at 60 s for 120 s
    assert own.observe(Traffic(), 125.0, 0.0) is not None
    assert own.forecast(180.0) is not None
    assert own.forecast(181.0) is None


@pytest.mark.parametrize("back_steps", [3, 25])  # some points are of the future, or all
def test_a_clock_that_is_set_back_ends_forecasts_of_the_future(back_steps: int) -> None:
    own = forecaster(method={"kind": "last_value"})
    run(own, lambda step: 3.0, 25)
    now_s = STEP_S * (25 - back_steps)
    assert own.observe(chat(3.0), now_s, 45.0) is None
    assert own.forecast(now_s) is None
    assert not any(record.pending for record in own.state.records)


def test_requests_are_near_by_their_number_in_flight() -> None:
    # 200 tokens at 0.05 s: each request is in flight for 10 s, so 1 request/s is 10 in flight.
    errors = {0.9: 1.0, 1.1: 0.0}
    for error, near in errors.items():
        own = forecaster(method={"kind": "last_value"})
        last = run(own, lambda step, error=error: 5.0 + error * (step % 2), 30)[-1]  # type: ignore[misc]
        assert last.requests_per_s.accuracy is not None
        assert last.requests_per_s.accuracy.near_frac == near


def test_a_worse_model_steps_back_and_the_reason_is_told() -> None:
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.normal(size=80)) + 50.0
    own = forecaster(method={"kind": "arima", "orders": [[0, 0, 0]]}, season_s=None)  # a mean, of a load without one
    rate = run(own, lambda step: float(walk[step]), 60)[-1].requests_per_s
    assert rate.value == rate.last
    assert rate.fallback is not None and "times those of the last value, over 50 forecasts" in rate.fallback
    assert not rate.is_proven


def test_the_day_before_is_followed() -> None:
    config = {"step_s": 600.0, "fit_points": 30}

    def rate(at_s: float) -> float:
        return 20.0 - 10.0 * math.cos(2.0 * math.pi * at_s / DAY_S)

    points = tuple(Point(600.0 * n, rate(600.0 * n), 900.0, 200.0) for n in range(1, 200))
    ahead_s = points[-1].at_s + 7200.0
    errors = {}
    for season_s in (DAY_S, None):
        task = FitTask(
            config=LoadForecastConfig.model_validate({**config, "season_s": season_s}), points=points, horizon_s=7200.0
        )
        forecast = fit(task)[0]
        assert forecast.model.endswith("and the period before") == (season_s is not None)
        errors[season_s] = abs(forecast.value - rate(ahead_s))
    # Two hours later the load is 6 higher, and the course of the day before is known but for its smoothing.
    assert errors[DAY_S] < 0.3
    assert errors[None] > 2 * errors[DAY_S]


def test_a_stored_state_goes_on_where_it_ended() -> None:
    adapter = TypeAdapter(ForecastState)
    own, other = forecaster(), forecaster()
    run(own, lambda step: 10.0 + step % 7, 30)
    other.resume(adapter.validate_json(adapter.dump_json(own.state)))
    assert other.state == own.state
    assert run(own, lambda step: 12.0, 3, begin=30) == run(other, lambda step: 12.0, 3, begin=30)
    longer = forecaster(step_s=120.0)
    longer.resume(own.state)
    assert longer.state.history.points == own.state.history.points
    assert longer.state.forecast is None


def test_the_published_forecast_is_small_whatever_is_remembered() -> None:
    own = forecaster()
    run(own, lambda step: 10.0 + step % 7, 100)
    document = TypeAdapter(LoadForecast).dump_json(own.state.forecast)
    assert len(document) < 2000  # it is in each line of the decision log
    assert json.loads(document)["requests_per_s"]["accuracy"]["forecasts"] == 50


def test_a_clock_that_was_set_back_forgets_what_it_judged() -> None:
    own = forecaster()
    run(own, lambda step: 10.0 + step % 7, 30)
    assert own.observe(chat(3.0), 605.0, 0.0) is None
    assert own.forecast(605.0) is None
    assert own.observe(chat(3.0), 665.0, 0.0) is not None


LOADS = st.lists(
    st.tuples(st.none() | st.floats(0, 1e6), st.none() | st.floats(1, 1e5), st.none() | st.floats(1, 1e4)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=25)
@given(loads=LOADS, start_s=st.floats(0, 1e4))
def test_no_load_raises_and_all_numbers_are_finite(
    loads: list[tuple[float | None, float | None, float | None]], start_s: float
) -> None:
    own = forecaster(fit_points=8)
    for number, (rate, inputs, outputs) in enumerate(loads):
        traffic = Traffic(requests_per_s=rate, input_tokens_mean=inputs, output_tokens_mean=outputs)
        if (task := own.observe(traffic, STEP_S * number, start_s)) is not None:
            assert fit(task) == fit(task)
            own.take(task, fit(task))
        if (forecast := own.forecast(STEP_S * number)) is not None:
            for series in forecast.series.values():
                numbers = [series.value, series.last, series.low, series.high]
                assert all(number is None or (math.isfinite(number) and number >= 0.0) for number in numbers)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"method": {"kind": "prophet"}}, "does not match any of the expected tags"),
        ({"fit_points": 3}, "greater than or equal to 4"),
        ({"step_s": 20.0}, "needs 4370 points, at most 3000 are remembered: choose a longer step_s, or null"),
        ({"season_s": 604800.0}, "needs 10130 points"),
        ({"wheels": 4}, "Extra inputs"),
    ],
)
def test_an_invalid_configuration_is_refused(document: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LoadForecastConfig.model_validate(document)
    assert LoadForecastConfig(season_s=604800.0, step_s=300.0).remembered_points == 2066  # a week fits
