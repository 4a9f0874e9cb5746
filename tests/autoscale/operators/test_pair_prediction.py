"""Predictions for a pair of pools: against hand-computed values, and against the simulator."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoscale.engines.profile import DecodeSurface, EngineProfile, Handoff, PrefillCurve, Source
from autoscale.operators.pair_load import PairLoad
from autoscale.operators.pair_prediction import predict
from autoscale.operators.pool_pair import Effect, LengthRule, Objectives, PoolPair
from autoscale.sim.config import SimConfig
from autoscale.sim.scenario import run_schedule, scenario_of
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import LengthConfig

OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=0.05, attained_frac=0.95)
REMOTE = LengthRule()


def engine(**changes: Any) -> EngineProfile:
    """0.1 ms for each prompt token; a step takes 10 ms and 0.1 ms for each request; KV moves at once."""
    return EngineProfile(
        name="made",
        model="m",
        gpu="H100",
        gpus=1,
        kv_tokens=1_000_000,
        max_batch_tokens=8192,
        max_running=256,
        prefill=PrefillCurve(tokens=(0, 10_000), seconds=(0.0, 1.0)),
        decode=DecodeSurface(batch=(1, 256), context_tokens=(1, 10_000), step_s=((0.0101, 0.0101), (0.0356, 0.0356))),
        handoff=Handoff(base_s=0.0, kv_bytes_per_token=1.0, bytes_per_s=1e15),
        start_s=1.0,
        flops_per_token=1e9,
        peak_flops=1e15,
        sources=(Source(part="all", kind="assumed", text="a test"),),
    ).model_copy(update=changes)


def requests(rate: float, seconds: float, inputs: tuple[int, int], outputs: tuple[int, int]) -> list[TraceRequest]:
    """Poisson arrivals with lengths that are drawn evenly."""
    rng, at_s, found = random.Random(7), 0.0, list[TraceRequest]()
    while at_s < seconds:
        found.append(TraceRequest(at_s=at_s, input_tokens=rng.randint(*inputs), output_tokens=rng.randint(*outputs)))
        at_s += rng.expovariate(rate)
    return found


def pair(prefills: int = 1, decodes: int = 1, **changes: Any) -> PoolPair:
    return PoolPair(prefill=engine(), decode=engine(**changes), prefill_replicas=prefills, decode_replicas=decodes)


def simulated(pools: PoolPair, trace: list[TraceRequest], length: LengthConfig) -> Effect:
    config = SimConfig.model_validate(
        {
            "groups": [{"prefill": {"profile": pools.prefill}, "decode": {"profile": pools.decode}}],
            "router": {"length": length},
            "warm_up_s": 0.0,
        }
    )
    counts = {Role.PREFILL: pools.prefill_replicas, Role.DECODE: pools.decode_replicas}
    run = run_schedule(scenario_of(config, trace), {PoolKey("g0", role): [(0.0, counts[role])] for role in Role})
    ttfts = [record.ttft_s or 0.0 for record in run.measured]
    tpots = [record.tpot_s or 0.0 for record in run.measured]
    met = [ttft <= OBJECTIVES.ttft_s and tpot <= OBJECTIVES.tpot_s for ttft, tpot in zip(ttfts, tpots, strict=True)]
    return Effect(
        gpus=pools.gpus,
        ttft_p90_s=float(np.quantile(ttfts, 0.9)),
        tpot_p90_s=float(np.quantile(tpots, 0.9)),
        attained_frac=sum(met) / len(met),
    )


def test_an_idle_pair_takes_the_prompt_and_one_and_a_half_steps() -> None:
    load = PairLoad.of_requests([TraceRequest(at_s=100.0 * n, input_tokens=1000, output_tokens=11) for n in range(9)])
    effect = predict(pair(), load, REMOTE, OBJECTIVES)
    # 1,000 tokens x 0.1 ms, half a step until decode looks, and the step with the first token.
    assert effect.ttft_p90_s == pytest.approx(0.1 + 1.5 * 0.0101, rel=1e-3)
    assert effect.tpot_p90_s == pytest.approx(0.0101, rel=1e-3)
    assert (effect.gpus, effect.attained_frac) == (2, 1.0)


def test_prompts_wait_as_in_m_m_1_halved_where_all_are_alike() -> None:
    # 5 prompts of 0.1 s per second keep one engine half busy; a wait of M/D/1 is 0.05 s in the mean, and half of the
    # prompts wait, so those that wait do so for 0.1 s in the mean. The 90th percentile of the exponential tail is then
    # 0.1 x ln(0.5 / 0.1) = 0.161 s.
    load = PairLoad.of_requests(requests(5.0, 2000.0, (1000, 1000), (2, 2)))
    load = replace(load, rates_per_s=np.full_like(load.rates_per_s, 5.0))
    effect = predict(pair(), load, REMOTE, OBJECTIVES)
    # Twelve points stand for the tail: the next one to the quantile is within a tenth of a second times their distance.
    assert effect.ttft_p90_s == pytest.approx(0.1 + 0.161 + 0.015, abs=0.03)


@pytest.mark.parametrize(("rate", "prefills", "decodes"), [(6.0, 1, 1), (12.0, 2, 1), (12.0, 2, 2)])
@pytest.mark.parametrize("local", [0, 128])
def test_predictions_are_near_the_simulator(rate: float, prefills: int, decodes: int, local: int) -> None:
    length = LengthConfig(local_max_tokens=local, local_cap_tokens=2048 if local else 0)
    trace = requests(rate, 240.0, (20, 2000), (20, 300))
    pools = pair(prefills, decodes)
    predicted = predict(pools, PairLoad.of_requests(trace), LengthRule(**length.model_dump()), OBJECTIVES)
    run = simulated(pools, trace, length)
    # The bound of the length rule moves all the time, and the prediction has its mean: most of the error is in the run
    # with two prefill engines and one busy decode engine.
    assert predicted.ttft_p90_s == pytest.approx(run.ttft_p90_s, rel=0.25)
    assert predicted.tpot_p90_s == pytest.approx(run.tpot_p90_s, rel=0.20)
    assert predicted.attained_frac == pytest.approx(run.attained_frac, abs=0.02)


def test_work_that_a_window_leaves_over_delays_the_next() -> None:
    load = PairLoad.of_requests(requests(12.0, 240.0, (1000, 1000), (2, 2)))
    effect = predict(pair(), load, REMOTE, OBJECTIVES)
    # 12 prompts of 0.1 s each second are 0.2 s of work too much: after 216 s, the last tenth waits for 40 s and more.
    assert 35.0 < effect.ttft_p90_s < 60.0
    assert effect.attained_frac < 0.1


def test_short_prompts_on_decode_do_not_wait_for_prefill() -> None:
    load = PairLoad.of_requests(requests(20.0, 120.0, (100, 100), (20, 40)))
    local = predict(pair(), load, LengthRule(local_max_tokens=128, local_cap_tokens=128), OBJECTIVES)
    # A prompt of 100 tokens takes 10 ms on decode, beside steps of 11 ms and a few requests.
    assert 0.02 < local.ttft_p90_s < 0.05


def test_a_batch_without_room_is_told_by_the_share_within_the_objectives() -> None:
    load = PairLoad.of_requests(requests(10.0, 120.0, (100, 100), (200, 200)))
    wide, narrow = (predict(pair(decodes=1, max_running=most), load, REMOTE, OBJECTIVES) for most in (256, 8))
    assert wide.attained_frac > 0.95
    # 8 requests at 0.0109 s a step are 730 tokens per second; 2,000 are wanted.
    assert narrow.attained_frac < 0.2


@pytest.mark.parametrize("count", [0, 1])
def test_a_trace_without_a_rate_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=r"have no rate: give a longer trace"):
        PairLoad.of_requests([TraceRequest(at_s=0.0, input_tokens=1, output_tokens=1)] * count)
