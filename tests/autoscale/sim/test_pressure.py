"""Laws of the pressure test."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.policies.heteroscale import Signal
from autoscale.pressure.rate_search import PressurePoint
from autoscale.ratio import PdRatio
from autoscale.sim.checks import impossible_requests
from autoscale.sim.pressure import PressureResult, _search_peak, pressure_test
from tests.autoscale.sim.conftest import LLAMA, lengths

# The splits of these tests differ so much that runs of seconds show it.
pytestmark = pytest.mark.usefixtures("short_pressure_runs")


def test_the_best_split_is_among_those_tried_and_keeps_the_objective() -> None:
    result = pressure_test(LLAMA, lengths((1500, 2500), (100, 200)), gpus=8)
    assert result.best.requests_per_s == max(point.requests_per_s for point in result.points)
    assert result.best.attainment_frac >= LLAMA.slo.attainment_frac
    assert all(2 * (point.prefill + point.decode) <= 8 for point in (*result.points, result.aggregated))
    assert result.is_disaggregation_worthwhile
    assert (result.best.signals[Signal.DECODE_TPS] or 0.0) > 0.0
    assert 0.0 < (result.best.signals[Signal.PREFILL_GPU_UTILIZATION] or 0.0) <= 1.0


def test_long_prompts_want_more_prefill_than_long_answers() -> None:
    prompts = pressure_test(LLAMA, lengths((4000, 6000), (10, 30)), gpus=6).pd_ratio
    answers = pressure_test(LLAMA, lengths((200, 400), (200, 400)), gpus=6).pd_ratio
    assert prompts.per_decode() > answers.per_decode()


def test_prompts_that_decode_computes_itself_are_not_worth_a_prefill_pool() -> None:
    result = pressure_test(LLAMA, lengths((20, 100), (100, 200)), gpus=4)
    assert not result.is_disaggregation_worthwhile


def test_requests_that_no_engine_can_serve_in_time_do_not_count() -> None:
    """One in fifty is so long that its answer takes too long alone."""
    config = LLAMA.model_copy(update={"slo": LLAMA.slo.model_copy(update={"tpot_s": 0.0182})})
    short = lengths((500, 600), (20, 30))
    long = [replace(request, input_tokens=100_000) for request in short[:4]]
    assert impossible_requests(config, short) == 0
    assert impossible_requests(config, long) == 4
    found = pressure_test(config, [*short, *long], gpus=8)
    assert 0.9 < found.best.attainment_frac < 0.994


def test_the_ratio_can_be_configured_however_short_answers_are() -> None:
    found = pressure_test(LLAMA, lengths((4000, 6000), (2, 4)), gpus=24)
    assert found.pd_ratio == PdRatio.parse(str(found.pd_ratio))
    assert found.pd_ratio.per_decode() >= 3.0


def test_no_split_has_more_replicas_than_its_pools_allow() -> None:
    group = LLAMA.groups[0]
    few = group.model_copy(update={"prefill": group.prefill.model_copy(update={"highest_replicas": 2})})
    config = LLAMA.model_copy(update={"groups": (few,)})
    found = pressure_test(config, lengths((4000, 6000), (2, 4)), gpus=12)
    assert max(point.prefill for point in found.points) <= 2
    with pytest.raises(ValueError, match=r"no split .* that the pools' highest_replicas allow \(2 and 256\)"):
        pressure_test(config, lengths((4000, 6000), (2, 4)), gpus=10_000)


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="3 GPUs are too few: a replica of each role takes 4"):
        pressure_test(LLAMA, lengths((100, 200), (10, 20)), gpus=3)


def test_the_ratio_is_that_of_the_split_that_serves_most() -> None:
    points = [
        PressurePoint(prefill=p, decode=6 - p, requests_per_s=rate, attainment_frac=1.0, signals={})
        for p, rate in ((1, 5.0), (2, 9.0), (3, 7.0))
    ]
    alone = PressurePoint(prefill=0, decode=6, requests_per_s=8.95, attainment_frac=1.0, signals={})
    result = PressureResult(points=points, aggregated=alone, gpus=6)
    assert str(result.pd_ratio) == "1:2"
    assert not result.is_disaggregation_worthwhile  # half a per cent more does not pay


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 60))
def test_the_search_finds_a_peak_wherever_it_is_and_simulates_no_split_twice(lowest: int, peak: int, more: int) -> None:
    simulated = list[int]()

    def point_of(prefill: int, highest_rate: float | None) -> PressurePoint:
        assert highest_rate == max((100.0 - abs(peak - each) for each in simulated), default=None)
        simulated.append(prefill)
        rate = 100.0 - abs(peak - prefill)
        return PressurePoint(prefill=prefill, decode=1, requests_per_s=rate, attainment_frac=1.0, signals={})

    points = _search_peak(point_of, lowest, lowest + more)
    assert max(points, key=lambda point: point.requests_per_s).prefill == min(max(peak, lowest), lowest + more)
    assert [point.prefill for point in points] == sorted(simulated) == sorted(set(simulated))
    assert all(lowest <= prefill <= lowest + more for prefill in simulated)
