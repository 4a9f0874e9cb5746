"""Laws of a live pressure test: which steps it takes, and what it makes of them."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.policies.heteroscale import Signal
from autoscale.pressure.live_test import Limits, PressureTest, with_target
from autoscale.pressure.rate_search import PressurePoint
from autoscale.pressure.steps import Step
from tests.autoscale.pressure.factories import counts, result, room

STEP_S = 100.0
LIMITS = Limits(most_requests_per_s=100.0, most_s=1e6, most_gpus=math.inf, most_errors=10)


def whole_test(
    knees: dict[str, float],
    *,
    first: float = 1.0,
    limits: Limits = LIMITS,
    missed_at: Callable[[Step], int] | None = None,
) -> PressureTest:
    """A test of counts with these knees by name; a decode replica makes 100 tokens/s for each request per second."""
    pairs = [counts(*map(int, name.removesuffix("D").split("P"))) for name in knees]
    test = PressureTest(
        pairs, room=room(), limits=limits, quantile_frac=0.95, first_requests_per_s=first, tolerance_frac=0.05
    )
    elapsed_s = 0.0
    while (step := test.next_step(elapsed_s, lambda rate: STEP_S)) is not None:
        elapsed_s += STEP_S
        knee = knees[f"{step.prefill}P{step.decode}D"]
        missed = (0 if step.requests_per_s <= knee else 400) if missed_at is None else missed_at(step)
        signals = {Signal.DECODE_TPS: 100.0 * step.requests_per_s / step.decode}
        test.add(result(step, missed=missed, signals=signals))
    return test


@given(knee=st.floats(0.5, 90.0))
def test_a_known_knee_is_found_within_the_tolerance(knee: float) -> None:
    (point,) = whole_test({"1P2D": knee}).points
    assert 0.95 * knee * 0.97 <= point.requests_per_s <= knee  # 0.97: four bisections may end just before the tolerance
    assert point.signals[Signal.DECODE_TPS] == pytest.approx(50.0 * point.requests_per_s)


def test_the_ratio_with_the_most_requests_per_gpu_is_the_best() -> None:
    test = whole_test({"1P1D": 4.0, "1P2D": 9.0, "2P2D": 10.0})
    assert test.best is not None and test.best.name == "1P2D"
    assert [point.name for point in test.points] == ["1P1D", "1P2D", "2P2D"]


@given(knee=st.floats(0.01, 1000.0), most=st.floats(1.0, 60.0), most_s=st.floats(0.0, 3000.0))
def test_no_step_exceeds_a_limit(knee: float, most: float, most_s: float) -> None:
    limits = Limits(most_requests_per_s=most, most_s=most_s, most_gpus=math.inf, most_errors=0)
    test = whole_test({"1P1D": knee, "1P2D": knee}, limits=limits)
    assert all(each.step.requests_per_s <= most for each in test.results)
    assert len(test.results) * STEP_S <= max(most_s, 0.0)
    growth = math.ceil(math.log(max(1.0, most), 1.25)) + 2
    assert len(test.results) <= 2 * 2 * (growth + 4)  # two counts, each step at most twice


def test_a_test_whose_time_is_over_has_the_point_of_the_steps_until_then() -> None:
    limits = Limits(most_requests_per_s=100.0, most_s=3.5 * STEP_S, most_gpus=math.inf, most_errors=0)
    test = whole_test({"1P1D": 50.0, "1P2D": 50.0}, limits=limits)
    assert test.is_out_of_time
    (point,) = test.points
    assert (point.name, point.requests_per_s) == ("1P1D", 1.5**2)


def test_counts_that_keep_the_objectives_at_the_highest_allowed_rate_are_marked() -> None:
    limits = Limits(most_requests_per_s=3.0, most_s=1e6, most_gpus=math.inf, most_errors=0)
    test = whole_test({"1P1D": 50.0, "1P2D": 2.0}, limits=limits)
    assert test.capped == ["1P1D"]
    assert test.points[0].requests_per_s == 3.0


def test_without_a_good_rate_there_is_no_best_and_the_next_counts_are_tried() -> None:
    test = whole_test({"1P1D": 0.0, "1P2D": 0.0})
    assert test.best is None
    assert [point.requests_per_s for point in test.points] == [0.0, 0.0]


def test_an_unclear_step_is_repeated_once_and_judged_by_all_its_requests() -> None:
    # 94.5 % of 400 is within one standard error (1.1 points) of 95 %.
    test = whole_test({"1P1D": 0.0}, missed_at=lambda step: 22)
    assert [each.step.run for each in test.results[:3]] == [1, 2, 1]
    assert test.results[0].step.requests_per_s == test.results[1].step.requests_per_s
    test = whole_test({"1P1D": 0.0}, missed_at=lambda step: 22 if step.run == 1 else 0, limits=LIMITS)
    assert test.points[0].requests_per_s == LIMITS.most_requests_per_s


def test_a_noisy_knee_is_found_near_the_true_one() -> None:
    rng = random.Random(7)

    def missed_at(step: Step) -> int:  # the share that misses rises from 1 % to 30 % around 10 requests/s
        frac = min(0.3, max(0.01, 0.05 + 0.1 * (step.requests_per_s - 10.0)))
        return sum(rng.random() < frac for _ in range(400))

    found = [whole_test({"1P1D": 0.0}, missed_at=missed_at).points[0].requests_per_s for _ in range(20)]
    assert all(9.0 < rate < 11.0 for rate in found)


def test_a_target_is_a_share_of_the_policys_own_signal() -> None:
    signals = {Signal.DECODE_TPS: 500.0, Signal.PREFILL_TPS: 3000.0, Signal.TTFT: 0.5}
    point = PressurePoint(prefill=1, decode=2, requests_per_s=5.0, attainment_frac=1.0, signals=signals)
    assert with_target({"kind": "heteroscale", "signal": "decode_tps"}, point, 0.8) == {"target": 400.0}
    assert with_target({"kind": "heteroscale", "signal": "prefill_tps"}, point, 0.5) == {"target": 1500.0}
    assert with_target({"kind": "heteroscale", "signal": "ttft"}, point, 0.8) == {}
    assert with_target({"kind": "heteroscale", "signal": "decode_sm_activity"}, point, 0.8) == {}
    assert with_target({"kind": "wva"}, point, 0.8) == {}
