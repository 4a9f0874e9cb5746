"""Laws of the pressure test."""

import random
from pathlib import Path

import pytest

from autoscale.policies.heteroscale import Signal
from autoscale.ratio import PdRatio
from autoscale.sim.config import SimConfig
from autoscale.sim.pressure import PressurePoint, PressureResult, pressure_test
from autoscale.trace import TraceRequest

CONFIG = SimConfig.load(Path(__file__).parents[3] / "configs" / "sim" / "h100_llama70b.yaml")


def lengths(inputs: tuple[int, int], outputs: tuple[int, int]) -> list[TraceRequest]:
    rng = random.Random(0)
    return [
        TraceRequest(at_s=float(n), input_tokens=rng.randint(*inputs), output_tokens=rng.randint(*outputs))
        for n in range(200)
    ]


def test_the_best_split_is_among_those_tried_and_keeps_the_objective() -> None:
    result = pressure_test(CONFIG, lengths((1500, 2500), (100, 200)), gpus=10)
    assert result.best.requests_per_s == max(point.requests_per_s for point in result.points)
    assert result.best.attainment_frac >= CONFIG.slo.attainment_frac
    assert all(2 * (point.prefill + point.decode) <= 10 for point in (*result.points, result.aggregated))
    assert result.is_worth_disaggregating
    assert (result.best.signals[Signal.DECODE_TPS] or 0.0) > 0.0
    assert 0.0 < (result.best.signals[Signal.PREFILL_GPU_UTILIZATION] or 0.0) <= 1.0


def test_long_prompts_want_more_prefill_than_long_answers() -> None:
    prompts = pressure_test(CONFIG, lengths((4000, 6000), (10, 30)), gpus=10).pd_ratio
    answers = pressure_test(CONFIG, lengths((200, 400), (400, 800)), gpus=10).pd_ratio
    assert prompts.per_decode() > answers.per_decode()


def test_prompts_that_decode_computes_itself_are_not_worth_a_prefill_pool() -> None:
    result = pressure_test(CONFIG, lengths((20, 100), (200, 400)), gpus=6)
    assert not result.is_worth_disaggregating


def test_the_ratio_can_be_configured_however_few_tokens_are_answered() -> None:
    found = pressure_test(CONFIG, lengths((4000, 6000), (2, 4)), gpus=24)
    assert found.pd_ratio == PdRatio.parse(str(found.pd_ratio))
    assert found.pd_ratio.per_decode() >= 3.0


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
    assert not result.is_worth_disaggregating  # half a per cent more is not
