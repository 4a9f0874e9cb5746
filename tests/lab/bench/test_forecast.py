"""The bench's steps of a trace, and its errors, by hand."""

import pytest

from autoscale.forecast.config import LoadForecastConfig
from autoscale.load_forecast import Load
from autoscale.traces.trace import TraceRequest
from tests.lab.bench.forecast import Case, loads_of, replay


def test_a_step_is_the_mean_of_its_requests_and_an_empty_one_has_the_lengths_before() -> None:
    trace = [
        TraceRequest(at_s=at_s, input_tokens=inputs, output_tokens=outputs)
        for at_s, inputs, outputs in ((1.0, 100, 10), (9.0, 300, 30), (25.0, 50, 5), (31.0, 1, 1))
    ]
    assert loads_of(trace, 10.0) == [Load(0.2, 200.0, 20.0), Load(0.0, 200.0, 20.0), Load(0.1, 50.0, 5.0)]


def test_the_errors_of_the_last_value_by_hand() -> None:
    loads = [Load(rate, 900.0, 200.0) for rate in (1.0, 2.0, 4.0, 3.0)]
    config = LoadForecastConfig.model_validate(
        {"method": {"kind": "last_value"}, "correction": {"weight_frac": 0.0}, "step_s": 60.0}
    )
    errors, seconds = replay(Case(name="c", step_s=60.0, loads=loads), config)
    row = errors["requests_per_s"].row()
    # Three steps end while the loads are shown. The second and the third were forecast: 1 for 2, and 2 for 4.
    assert row["forecasts"] == 2
    assert row["mape_frac"] == row["last_mape_frac"] == pytest.approx(0.5)
    assert row["error_frac"] == row["used_error_frac"] == pytest.approx(1.5 / 3.0)
    assert row["near_frac"] == 0.5  # 200 tokens of 0.05 s: 10 and 20 in flight
    assert row["coverage_frac"] is None
    assert len(seconds) == 3
