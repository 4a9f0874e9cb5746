"""Which services have forecasts, how far ahead, and that the simulator's forecasts are in the log."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.decision_log import replay
from autoscale.decide.forecasting import forecaster_of, start_ahead_s
from autoscale.forecast.config import LoadForecastConfig
from autoscale.sim.config import SimAutoscaleConfig
from autoscale.types import ControllerState, PoolKey
from kvtransfer.topology import Role
from tests.autoscale.recording import PROFILE, simulated

P, D = PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE)
PROFILES = {"prefill": str(PROFILE), "decode": str(PROFILE)}


@pytest.mark.parametrize(
    ("policy", "forecast", "is_forecast"),
    [
        ({"kind": "dopd", **PROFILES}, None, True),
        ({"kind": "default", **PROFILES}, None, False),
        ({"kind": "default", "starts_by_forecast": True, **PROFILES}, None, True),
        ({"kind": "heteroscale", "target": 100.0}, None, False),
        ({"kind": "heteroscale", "target": 100.0}, {"step_s": 120.0}, True),
    ],
)
def test_the_load_is_forecast_for_a_policy_that_uses_it_or_if_it_is_asked_for(
    policy: dict[str, Any], forecast: dict[str, Any] | None, is_forecast: bool
) -> None:
    config = AutoscaleConfig.model_validate({"policy": policy, "forecast": forecast, "slo": {"tpot_s": 0.04}})
    own = forecaster_of(config)
    assert (own is not None) == is_forecast
    if own is not None:
        assert own.config == LoadForecastConfig.model_validate(forecast or {})
        assert own.tpot_s == 0.04


def test_the_load_is_forecast_for_the_longest_start_observed_or_configured(
    make_autoscale: Callable[..., AutoscaleConfig],
) -> None:
    observed = ControllerState(starts_s={P: (30.0, 50.0, 40.0), D: (90.0,)})
    profiled = AutoscaleConfig.model_validate({"policy": {"kind": "dopd", "prefill_start_s": 70.0, **PROFILES}})
    assert start_ahead_s(profiled, ControllerState()) == 70.0  # decode starts in 45 s by its profile
    assert start_ahead_s(profiled, observed) == 90.0
    assert start_ahead_s(make_autoscale(), observed) == 90.0
    assert start_ahead_s(make_autoscale(), ControllerState()) == 0.0


def test_forecasts_are_in_the_log_and_their_plans_are_computed_again() -> None:
    config = SimAutoscaleConfig.model_validate(
        {
            "policy": {"kind": "dopd", "interval_s": 20.0, **PROFILES},
            "forecast": {"step_s": 10.0, "season_s": None},
            "gate": {"observation_s": 10.0},
        }
    )
    lines = simulated(config)
    assert all(difference is None for difference in replay(lines))
    snapshots = [record["snapshot"] for record in map(json.loads, lines) if "snapshot" in record]
    forecasts = [snapshot["forecast"] for snapshot in snapshots if snapshot["forecast"] is not None]
    assert forecasts
    assert all(len(json.dumps(forecast)) < 3000 for forecast in forecasts)
    # Another forecast is another plan: the log holds what the plan followed from.
    record = next(json.loads(line) for line in reversed(lines) if '"forecast": {' in line)
    record["snapshot"]["forecast"]["requests_per_s"]["value"] *= 50.0
    record["snapshot"]["state"]["memory"]["dopd_began_s"] = [0.0]
    assert list(replay([lines[0], json.dumps(record)])) != [None]
