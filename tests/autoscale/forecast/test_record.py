"""Forecasts against what came, by hand: errors, coverage, correction, and stepping back with hysteresis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.forecast.record import SeriesRecord
from autoscale.forecast.series import CorrectionConfig, Forecast
from autoscale.load_forecast import SeriesForecast

NO_CORRECTION = CorrectionConfig(weight_frac=0.0)


def after(
    outcomes: list[tuple[float, float, float]],
    *,
    record: SeriesRecord | None = None,
    correction: CorrectionConfig = NO_CORRECTION,
    near: float = 10.0,
    begin: int = 0,
) -> SeriesRecord:
    """The record after some (forecast, last value, what came), with an interval of 5 around the forecast."""
    record = record or SeriesRecord()
    for number, (value, last, actual) in enumerate(outcomes, start=begin):
        forecast = Forecast(value=value, low=value - 5.0, high=value + 5.0, model="m")
        record, _ = record.with_forecast(60.0 * (number + 1), last, forecast)
        record = record.observed(60.0 * (number + 1), actual, near=near, correction=correction, worse_frac=0.05)
    return record


def published(record: SeriesRecord, value: float = 7.0, last: float = 4.0) -> SeriesForecast:
    return record.with_forecast(1e9, last, Forecast(value=value, low=5.0, high=9.0, model="m"))[1]


def test_the_figures_by_hand() -> None:
    accuracy = after([(100.0, 80.0, 90.0), (50.0, 50.0, 40.0), (42.0, 20.0, 40.0), (1.0, 0.0, 0.0)]).accuracy()
    assert accuracy is not None
    assert accuracy.forecasts == 4
    assert accuracy.mape_frac == pytest.approx((10 / 90 + 10 / 40 + 2 / 40) / 3)  # not of the zero
    assert accuracy.last_mape_frac == pytest.approx((10 / 90 + 10 / 40 + 20 / 40) / 3)
    assert accuracy.error_ratio == pytest.approx((10 + 10 + 2 + 1) / (10 + 10 + 20 + 0))
    assert accuracy.near_frac == 1.0
    assert accuracy.last_near_frac == 0.75
    assert accuracy.coverage_frac == 0.5  # the last two
    assert SeriesRecord().accuracy() is None


def test_forecasts_that_are_worse_than_the_last_value_are_not_used_until_they_are_better_again() -> None:
    bad = [(13.0, 10.0, 12.0)] * 5 + [(13.0, 11.0, 10.0)] * 4
    before = after(bad)
    assert not before.is_stepped_back  # 9 are too few to tell
    record = after([(13.0, 11.0, 10.0)], record=before, begin=9)
    assert record.is_stepped_back
    shown = published(record)
    assert (shown.value, shown.low, shown.model) == (4.0, None, "m")
    assert shown.fallback is not None
    assert shown.fallback.startswith("the errors of m are 1.33 times those of the last value, over 10 forecasts")
    # As good as the last value is not enough to come back, and not enough to step back either.
    even = [(11.0, 9.0, 10.0)] * 50
    assert after(even, record=record, begin=10).is_stepped_back
    assert not after(even).is_stepped_back
    better = after([(10.0, 9.0, 10.0)] * 50, record=record, begin=10)
    assert not better.is_stepped_back
    assert published(better).value == 7.0
    assert published(better).fallback is None


def test_a_last_value_without_error_is_never_beaten() -> None:
    record = after([(11.0, 10.0, 10.0)] * 10)
    assert record.is_stepped_back
    assert after([(10.0, 10.0, 10.0)] * 10).is_stepped_back is False  # both are right
    accuracy = record.accuracy()
    assert accuracy is not None and accuracy.error_ratio == 1e6


def test_a_lasting_bias_is_divided_out_with_its_interval() -> None:
    record = after([(120.0, 50.0, 100.0)] * 60, correction=CorrectionConfig(weight_frac=0.1))
    assert record.factor == pytest.approx(1.2, rel=0.01)
    shown = published(record, value=12.0)
    assert shown.value == pytest.approx(10.0, rel=0.01)
    assert shown.low == pytest.approx(5.0 / 1.2, rel=0.01)


def test_a_forecast_is_compared_at_its_time_alone() -> None:
    record, _ = SeriesRecord().with_forecast(180.0, 1.0, Forecast(value=2.0))
    early = record.observed(120.0, 9.0, near=1.0, correction=NO_CORRECTION, worse_frac=0.05)
    assert early.outcomes == () and len(early.pending) == 1
    due = early.observed(180.0, 2.0, near=1.0, correction=NO_CORRECTION, worse_frac=0.05)
    assert [each.error for each in due.outcomes] == [0.0] and due.pending == ()
    missed = early.observed(240.0, 2.0, near=1.0, correction=NO_CORRECTION, worse_frac=0.05)
    assert missed.outcomes == () and missed.pending == ()  # its step was not observed


def test_a_fallback_is_the_last_value_whatever_the_factor_is() -> None:
    record = after([(120.0, 100.0, 100.0)] * 30, correction=CorrectionConfig(weight_frac=0.5))
    _, shown = record.with_forecast(1e9, 8.0, Forecast(value=8.0, fallback="the series is constant"))
    assert (shown.value, shown.fallback) == (8.0, "the series is constant")


@given(st.lists(st.tuples(*[st.floats(0.0, 1e6)] * 3), max_size=80))
def test_shares_are_shares_and_little_is_remembered(outcomes: list[tuple[float, float, float]]) -> None:
    record = after(outcomes, correction=CorrectionConfig())
    assert len(record.outcomes) <= 50 and record.pending == ()
    if (accuracy := record.accuracy()) is not None:
        assert 0.0 <= accuracy.near_frac <= 1.0 and 0.0 <= accuracy.last_near_frac <= 1.0
        assert accuracy.coverage_frac is None or 0.0 <= accuracy.coverage_frac <= 1.0
        assert 0.0 <= accuracy.error_ratio <= 1e6
