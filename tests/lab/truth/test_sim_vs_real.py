"""Laws of the comparison with real engines."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoscale.engines.profile import EngineProfile
from router.config import RouterConfig
from tests.lab.truth.load_fit import Fit
from tests.lab.truth.sim_vs_real import Measured, comparison, trace_slice

BASE = EngineProfile.load(Path(__file__).parents[3] / "configs" / "profiles" / "cpu_tiny.json")


def test_measurements_are_stored_whole(tmp_path: Path) -> None:
    one, two = (Fit().simulated(BASE, trace_slice(0.0, 5.0), RouterConfig(), seed) for seed in range(2))
    failed = [replace(one[0], first_token_s=None, last_token_s=None, error="cut off"), *one[1:]]
    measured = Measured(profile=BASE, fitted=[[one, two], [two]], foretold=[failed])
    measured.write(tmp_path / "kept.json.gz")
    assert Measured.load(tmp_path / "kept.json.gz") == measured


def test_an_error_may_be_half_of_the_difference_between_real_replays() -> None:
    found = comparison([{"ttft_p50_s": seconds} for seconds in (0.8, 1.0, 1.2)], {"ttft_p50_s": 1.19})["ttft_p50_s"]
    assert found["real_median"] == 1.0
    assert found["error_frac"] == pytest.approx(0.19)
    assert found["allowed_frac"] == pytest.approx(0.2)
    assert found["is_within"]
    close = comparison([{"ttft_p50_s": seconds} for seconds in (0.99, 1.0, 1.01)], {"ttft_p50_s": 1.19})["ttft_p50_s"]
    assert close["allowed_frac"] == 0.15
    assert not close["is_within"]
