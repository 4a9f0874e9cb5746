"""The rate of a decode replica at the TPOT objective is learned while no request waits."""

import math
import random
from collections.abc import Callable

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.policies.decode_rate import DecodeRate
from autoscale.sim.scenario import Run, run_policy
from autoscale.types import Snapshot
from kvtransfer.topology import Role
from tests.autoscale.sim.conftest import KEYS, PROFILE, make_scenario

P, D = Role.PREFILL, Role.DECODE
MakeSnapshot = Callable[..., Snapshot]
_MINUTES = 10
_INPUT_TOKENS, _OUTPUT_TOKENS = 500, 300
_TPOT_S = 0.025  # the objective


def simulated(requests_per_s: float, configured_per_s: float) -> Run:
    """Ten minutes of Poisson arrivals, whose rate rises and falls by 40 %."""
    rng, at_s, arrivals = random.Random(5), 0.0, []
    while at_s < 60.0 * _MINUTES:
        arrivals.append((at_s, _INPUT_TOKENS, _OUTPUT_TOKENS))
        at_s += rng.expovariate(requests_per_s * (1.0 + 0.4 * math.sin(at_s / 80.0)))
    policy = {"kind": "queue_depth", "prefill_requests_per_s": 6.0, "decode_requests_per_s": configured_per_s}
    slo = {"ttft_s": 2.0, "tpot_s": _TPOT_S}
    config = AutoscaleConfig.model_validate({"policy": policy, "pd_ratio": "3:2", "slo": slo})
    return run_policy(make_scenario(arrivals, highest=32), config, {KEYS[P]: 4, KEYS[D]: 3})


def test_after_ten_minutes_the_learned_rate_is_within_15_percent() -> None:
    run = simulated(requests_per_s=24.0, configured_per_s=60.0)
    shown = {each.name: each.value for each in run.plans[-1][1].decision.shown}
    assert shown["decode_queue"] == 0.0
    # Each output token reads the KV of the prompt and of half of the answer, in the mean.
    true_tokens_per_s = decode_tokens_per_s(PROFILE, _INPUT_TOKENS + _OUTPUT_TOKENS / 2, _TPOT_S)
    assert shown["decode_service_rate"] == pytest.approx(true_tokens_per_s / _OUTPUT_TOKENS, rel=0.15)


def learned(make_snapshot: MakeSnapshot, batches: list[float], tpot_s: float) -> DecodeRate:
    """What points on the line ``10 ms + 0.2 ms x batch`` show, each 31 s apart."""
    rate, now_s = DecodeRate(), 1000.0
    for batch in [*batches, batches[-1]]:
        step_s = 0.01 + 0.0002 * batch
        stats = {D: {"running_requests": batch, "decode_tokens_per_s": batch / step_s}}
        rate = rate.observed(make_snapshot(1, 2, now_s=now_s, stats=stats), tpot_s)
        now_s += 31.0
    return rate


RISING = [40.0, 44.0, 50.0, 56.0, 62.0, 68.0]


def test_the_line_gives_the_rate_at_the_objective(make_snapshot: MakeSnapshot) -> None:
    rate = learned(make_snapshot, RISING, tpot_s=0.024)
    # A step of 24 ms has a batch of 70, and 70 requests get a token each 24 ms.
    assert rate.requests_per_s(100.0, 1200.0) == pytest.approx(70.0 / 0.024 / 100.0)
    assert rate.requests_per_s(50.0, 1200.0) == pytest.approx(70.0 / 0.024 / 50.0)
    assert rate.requests_per_s(None, 1200.0) is None
    assert rate.requests_per_s(100.0, 1200.0 + 3601.0) is None  # nothing was learned for an hour


@pytest.mark.parametrize(
    ("batches", "tpot_s"),
    [
        ([50.0] * 8, 0.024),  # one point, no line
        (RISING[:3], 0.024),  # too few
        (RISING, 0.05),  # the objective would allow 200, far beyond what was seen
        ([10.0, 40.0, 10.0, 40.0, 10.0, 40.0, 10.0], 0.015),  # the batch changes too fast for the window
    ],
)
def test_points_that_show_nothing_give_no_rate(
    make_snapshot: MakeSnapshot, batches: list[float], tpot_s: float
) -> None:
    assert learned(make_snapshot, batches, tpot_s).requests_per_s(100.0, 1300.0) is None


def test_a_memory_is_read_again_and_one_of_the_future_is_forgotten(make_snapshot: MakeSnapshot) -> None:
    rate = learned(make_snapshot, RISING, tpot_s=0.024)
    assert DecodeRate.of(rate.memory(), 1300.0) == rate
    assert DecodeRate.of(rate.memory(), 1100.0) == DecodeRate()
    assert DecodeRate.of({"decode_steps": (1.0, 2.0)}, 1300.0) == DecodeRate()
