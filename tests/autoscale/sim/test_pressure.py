"""Laws of the pressure test."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.policies.heteroscale import Signal
from autoscale.ratio import PdRatio
from autoscale.sim.checks import impossible_requests
from autoscale.sim.config import SimConfig
from autoscale.sim.pressure import PressurePoint, PressureResult, SplitSimulator, _search_peak, pressure_test
from autoscale.traces.trace import TraceRequest

# What is asked here is far from even between the splits: runs of seconds show it.
pytestmark = pytest.mark.usefixtures("short_pressure_runs")

CONFIG = SimConfig.load(Path(__file__).parents[3] / "configs" / "sim" / "h100_llama70b.yaml")


def lengths(inputs: tuple[int, int], outputs: tuple[int, int]) -> list[TraceRequest]:
    rng = random.Random(0)
    return [
        TraceRequest(at_s=float(n), input_tokens=rng.randint(*inputs), output_tokens=rng.randint(*outputs))
        for n in range(200)
    ]


def test_the_best_split_is_among_those_tried_and_keeps_the_objective() -> None:
    result = pressure_test(CONFIG, lengths((1500, 2500), (100, 200)), gpus=8)
    assert result.best.requests_per_s == max(point.requests_per_s for point in result.points)
    assert result.best.attainment_frac >= CONFIG.slo.attainment_frac
    assert all(2 * (point.prefill + point.decode) <= 8 for point in (*result.points, result.aggregated))
    assert result.is_disaggregation_worthwhile
    assert (result.best.signals[Signal.DECODE_TPS] or 0.0) > 0.0
    assert 0.0 < (result.best.signals[Signal.PREFILL_GPU_UTILIZATION] or 0.0) <= 1.0


def test_long_prompts_want_more_prefill_than_long_answers() -> None:
    prompts = pressure_test(CONFIG, lengths((4000, 6000), (10, 30)), gpus=6).pd_ratio
    answers = pressure_test(CONFIG, lengths((200, 400), (200, 400)), gpus=6).pd_ratio
    assert prompts.per_decode() > answers.per_decode()


def test_prompts_that_decode_computes_itself_are_not_worth_a_prefill_pool() -> None:
    result = pressure_test(CONFIG, lengths((20, 100), (100, 200)), gpus=4)
    assert not result.is_disaggregation_worthwhile


def test_prompts_that_share_blocks_are_drawn_with_their_neighbours() -> None:
    """A conversation's turns follow each other, so what is cached of one serves the next."""
    plain = lengths((3000, 3001), (50, 60))
    shared = [replace(request, hash_ids=(100 + n // 10, 200 + n)) for n, request in enumerate(plain)]
    test = SplitSimulator(CONFIG, shared, 0)
    trace = test.run(2, 1, 10.0).scenario.trace
    same = sum(a.hash_ids[0] == b.hash_ids[0] for a, b in pairwise(trace))
    assert same >= 0.85 * (len(trace) - 1)
    assert max(Counter(request.hash_ids for request in trace).values()) == 1


def test_objectives_that_no_engine_can_meet_are_asked_of_nobody() -> None:
    """One in fifty is so long that its answer takes too long alone."""
    config = CONFIG.model_copy(update={"slo": CONFIG.slo.model_copy(update={"tpot_s": 0.0182})})
    short = lengths((500, 600), (20, 30))
    long = [replace(request, input_tokens=100_000) for request in short[:4]]
    assert impossible_requests(config, short) == 0
    assert impossible_requests(config, long) == 4
    found = pressure_test(config, [*short, *long], gpus=8)
    assert 0.9 < found.best.attainment_frac < 0.994


def test_the_ratio_can_be_configured_however_few_tokens_are_answered() -> None:
    found = pressure_test(CONFIG, lengths((4000, 6000), (2, 4)), gpus=24)
    assert found.pd_ratio == PdRatio.parse(str(found.pd_ratio))
    assert found.pd_ratio.per_decode() >= 3.0


def test_a_rate_that_is_kept_is_kept_for_longer_too() -> None:
    """Answers of 40 s in runs of 20 s: decode is as full as it gets only after as long."""
    test = SplitSimulator(CONFIG, lengths((500, 501), (800, 801)), 0)
    found = test.find_highest_rate(1, 1)
    again = SplitSimulator(CONFIG, lengths((500, 501), (800, 801)), 0)
    again._run_s *= 3
    assert again.run(1, 1, 0.85 * found.requests_per_s).attainment_frac > 0.99


def test_tiny_requests_end_the_search_too() -> None:
    found = SplitSimulator(CONFIG, lengths((1, 1), (1, 1)), 0).find_highest_rate(1, 1)
    assert 100.0 < found.requests_per_s < 1e6


def test_no_split_has_more_replicas_than_its_pools_may() -> None:
    group = CONFIG.groups[0]
    few = group.model_copy(update={"prefill": group.prefill.model_copy(update={"highest_replicas": 2})})
    config = CONFIG.model_copy(update={"groups": (few,)})
    found = pressure_test(config, lengths((4000, 6000), (2, 4)), gpus=12)
    assert max(point.prefill for point in found.points) <= 2
    with pytest.raises(ValueError, match=r"no split .* that the pools' highest_replicas allow \(2 and 256\)"):
        pressure_test(config, lengths((4000, 6000), (2, 4)), gpus=10_000)


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="3 GPUs are too few: a replica of each role takes 4"):
        pressure_test(CONFIG, lengths((100, 200), (10, 20)), gpus=3)


def test_the_ratio_is_that_of_the_split_that_serves_most() -> None:
    points = [
        PressurePoint(prefill=p, decode=6 - p, requests_per_s=rate, attainment_frac=1.0, signals={})
        for p, rate in ((1, 5.0), (2, 9.0), (3, 7.0))
    ]
    alone = PressurePoint(prefill=0, decode=6, requests_per_s=8.95, attainment_frac=1.0, signals={})
    result = PressureResult(points=points, aggregated=alone, gpus=6)
    assert str(result.pd_ratio) == "1:2"
    assert not result.is_disaggregation_worthwhile  # half a per cent more is not


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
