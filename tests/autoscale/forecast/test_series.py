"""Forecasters by hand, on series from which nothing can be learned, and on invalid ones."""

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from autoscale.forecast.series import ArimaConfig, CorrectionConfig, EwmaConfig, ForecastConfig, LastValueConfig

SERIES = st.lists(st.floats(0, 1e12), min_size=1, max_size=40)
FORECASTERS = (
    LastValueConfig(),
    EwmaConfig(),
    EwmaConfig(trend_s=60.0),
    ArimaConfig(),
    ArimaConfig(orders=((2, 0, 1),)),
)


def regular(values: Sequence[float], step_s: float = 100.0) -> list[float]:
    return [1e9 + step_s * number for number in range(len(values))]


def ahead(config: ForecastConfig, times_s: Sequence[float], values: Sequence[float], horizon_s: float) -> float:
    return config.forecast(times_s, values, horizon_s).value


def test_the_last_value_stays() -> None:
    assert ahead(LastValueConfig(), [0.0, 7.0], [3.0, 5.0], 100.0) == 5.0


def test_a_level_forgets_by_time_and_not_by_values() -> None:
    config = EwmaConfig(level_s=10.0)
    # 0, and after 10 s a 10: 1/e of the level is still the old one.
    assert ahead(config, [0.0, 10.0], [0.0, 10.0], 50.0) == pytest.approx(10.0 * (1 - math.exp(-1)))
    # After 20 s more at 10 it is 1/e^3, whether it was read in between or not.
    expected = pytest.approx(10.0 * (1 - math.exp(-3)))
    assert ahead(config, [0.0, 10.0, 30.0], [0.0, 10.0, 10.0], 0.0) == expected
    assert ahead(config, [0.0, 10.0, 13.0, 30.0], [0.0, 10.0, 10.0, 10.0], 0.0) == expected


def test_a_trend_fades() -> None:
    # Level and slope follow at once: 2 more each second. Faded to 1/e after 50 s, 100 s are worth 50 (1 - 1/e^2).
    config = EwmaConfig(level_s=1e-3, trend_s=1e-3, damping_s=50.0)
    found = ahead(config, [0.0, 1.0, 3.0], [10.0, 12.0, 16.0], 100.0)
    assert found == pytest.approx(16.0 + 2.0 * 50.0 * (1 - math.exp(-2)))
    assert ahead(config, [0.0, 1.0], [10.0, 1.0], 100.0) == 0.0  # a fall ends at nothing


def test_arima_without_terms_is_the_mean() -> None:
    values = [5.0, 4.0, 6.0, 5.0, 7.0, 3.0, 6.0, 4.0]
    # X = mu + sum phi X + sum theta eps (Algorithm 2, line 27) without phi and theta: mu.
    assert ahead(ArimaConfig(orders=((0, 0, 0),)), regular(values), values, 100.0) == pytest.approx(5.0, abs=1e-3)


def test_arima_finds_a_moving_average() -> None:
    # One difference and theta = -1 + a is an exponentially weighted mean of weight a, here 0.3.
    rng, level, values = np.random.default_rng(5), 50.0, list[float]()
    for noise in rng.normal(size=400):
        values.append(level + float(noise))
        level += 0.3 * float(noise)
    found = ahead(ArimaConfig(orders=((0, 1, 1),)), regular(values), values, 100.0)
    assert found == pytest.approx(level, abs=0.3)  # theta is known to 0.05, the last noises are about 1


def test_arima_finds_an_autoregression() -> None:
    # X = 10 + 0.8 (X - 10) + eps: from 20 on, one step later 18 is expected and two later 16.4.
    rng, values = np.random.default_rng(7), [10.0]
    while len(values) < 400:
        values.append(10.0 + 0.8 * (values[-1] - 10.0) + float(rng.normal()))
    values.append(20.0)
    config = ArimaConfig(orders=((1, 0, 0),))
    # 0.045 is the standard error of phi at 400 values, and 10 away from the mean it counts ten times.
    assert ahead(config, regular(values), values, 100.0) == pytest.approx(18.0, abs=0.9)
    assert ahead(config, regular(values), values, 200.0) == pytest.approx(16.4, abs=1.4)
    one, two = (ahead(config, regular(values), values, horizon_s) for horizon_s in (100.0, 200.0))
    assert ahead(config, regular(values), values, 150.0) == pytest.approx((one + two) / 2)


def test_a_gap_is_filled_by_the_line_across_it() -> None:
    values = [1.0, 2.0, 1.5, 2.5, 2.0, 3.0, 2.5, 3.5, 3.0, 4.0, 3.5]
    times = regular(values)
    whole = ahead(ArimaConfig(), times, values, 100.0)
    # The line across the gap replaces 2.5 by 1.75, which changes the forecast little.
    without = ahead(ArimaConfig(), [*times[:4], *times[5:]], [*values[:4], *values[5:]], 100.0)
    assert without == pytest.approx(whole, rel=0.2)


@pytest.mark.parametrize(
    ("times", "values", "horizon_s", "said"),
    [
        ([1.0], [3.0], 10.0, "1 values, ARIMA needs 3"),
        (regular([0.0] * 2), [1.0, 2.0], 100.0, "2 values"),
        (regular([0.0] * 9), [2.5] * 9, 100.0, "the series is constant"),
        (regular([0.0] * 9), [0.0] * 9, 100.0, "the series is constant"),
        (regular([0.0] * 9), [float(n % 3) for n in range(9)], 1e9, "9 steps of 100 s are too few"),
        # Long steps and then short ones: at the median step, the series has few values.
        ([0.0, 1000.0, 1001.0], [1.0, 2.0, 3.0], 2000.0, "few"),
    ],
)
def test_a_series_that_arima_cannot_fit_keeps_its_last_value_and_the_reason_is_given(
    times: list[float], values: list[float], horizon_s: float, said: str
) -> None:
    found = ArimaConfig().forecast(times, values, horizon_s)
    assert found.value == values[-1]
    assert found.fallback is not None
    assert re.search(said, found.fallback)


@settings(max_examples=40)  # a fit takes 10 to 100 ms
@given(values=SERIES, gaps=st.lists(st.floats(0.01, 1e4), min_size=39, max_size=39), horizon_s=st.floats(0, 1e5))
def test_no_series_raises_or_warns_and_nothing_is_negative(
    values: list[float], gaps: list[float], horizon_s: float
) -> None:
    times = list(np.cumsum([0.0, *gaps])[: len(values)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in FORECASTERS:
            found = ahead(config, times, values, horizon_s)
            assert math.isfinite(found)
            assert found >= 0.0
            assert found == ahead(config, times, values, horizon_s)


@settings(max_examples=30)
@given(value=st.floats(0, 1e12), count=st.integers(1, 40))
def test_a_constant_series_stays(value: float, count: int) -> None:
    for config in FORECASTERS:
        assert ahead(config, regular([value] * count), [value] * count, 300.0) == pytest.approx(value)


@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_the_unit_of_a_series_does_not_matter(factor: float) -> None:
    values = [float(value) for value in np.random.default_rng(3).gamma(4.0, size=30)]
    for config in FORECASTERS:
        one, other = (ahead(config, regular(values), [v * f for v in values], 100.0) for f in (1.0, factor))
        assert other == pytest.approx(one * factor, rel=1e-3)  # the fit rounds other numbers


@pytest.mark.parametrize(
    ("times", "values", "horizon_s", "said"),
    [
        ([], [], 1.0, "0 times for 0 values"),
        ([1.0], [1.0, 2.0], 1.0, "1 times for 2 values"),
        ([1.0, 1.0], [1.0, 2.0], 1.0, "times_s must rise"),
        ([1.0, 2.0], [1.0, math.nan], 1.0, "finite numbers"),
        ([1.0, math.inf], [1.0, 1.0], 1.0, "finite numbers"),
        ([1.0], [1.0], -1.0, "horizon of 0 s or more"),
    ],
)
def test_an_invalid_series_is_refused(times: list[float], values: list[float], horizon_s: float, said: str) -> None:
    for config in FORECASTERS:
        with pytest.raises(ValueError, match=said):
            ahead(config, times, values, horizon_s)


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "oracle"},
        {},
        {"kind": "arima", "orders": [[9, 1, 1]]},
        {"kind": "arima", "orders": [[0, 2, 0]]},
        {"kind": "ewma", "level_s": 0},
    ],
)
def test_an_invalid_forecaster_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ForecastConfig).validate_python(document)


def test_a_kind_names_its_forecaster() -> None:
    for config in FORECASTERS:
        again = TypeAdapter(ForecastConfig).validate_python(config.model_dump(mode="json"))
        assert again == config


def test_only_a_fit_imports_statsmodels(run_python: Callable[..., Any]) -> None:
    script = """
import json, sys
from autoscale.forecast.series import ArimaConfig
ArimaConfig().forecast([0.0], [1.0], 1.0)
before = "statsmodels" in sys.modules
ArimaConfig().forecast(range(9), [1, 2, 1, 3, 1, 2, 1, 3, 1], 1.0)
print(json.dumps([before, "statsmodels" in sys.modules]))
"""
    assert run_python(script) == [False, True]


def test_a_forecast_is_divided_by_predicted_over_observed() -> None:
    latest = CorrectionConfig(weight_frac=1.0, most=2.0)
    factor = latest.updated(1.0, 120.0, 100.0)
    assert factor == pytest.approx(1.2)
    assert 60.0 / factor == pytest.approx(50.0)  # the last forecast was a fifth too high
    assert latest.updated(1.7, 50.0, 100.0) == pytest.approx(0.5)  # only the most recent one counts
    tenth = CorrectionConfig(weight_frac=0.1, most=2.0)
    assert tenth.updated(1.0, 120.0, 100.0) == pytest.approx(1.2**0.1)
    assert CorrectionConfig(weight_frac=0.0).updated(1.0, 120.0, 100.0) == 1.0


def test_a_lasting_bias_is_taken_away() -> None:
    config, factor = CorrectionConfig(), 1.0
    for observed in range(100, 200):
        factor = config.updated(factor, 1.2 * observed, observed)
    assert factor == pytest.approx(1.2, rel=1e-4)  # 0.9^100 of it is left


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1e-3, 1e3), st.floats(0, 1), st.floats(1, 10), st.floats(0, 1e9))
def test_a_factor_is_bounded_and_grows_with_what_was_predicted(
    predicted: float, observed: float, factor: float, weight: float, most: float, more: float
) -> None:
    config = CorrectionConfig(weight_frac=weight, most=most)
    updated = config.updated(factor, predicted, observed)
    assert 1 / most - 1e-9 <= updated <= most + 1e-9
    if observed > 0.0:
        assert config.updated(factor, predicted + more, observed) >= updated - 1e-9
