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
    run = simulated(requests_per_s=32.0, configured_per_s=60.0)
    shown = {each.name: each.value for each in run.plans[-1][1].decision.shown}
    assert shown["decode_queue"] == 0.0
    # Each output token reads the KV of the prompt and of half of the answer, in the mean.
    true_tokens_per_s = decode_tokens_per_s(PROFILE, _INPUT_TOKENS + _OUTPUT_TOKENS / 2, _TPOT_S)
    assert shown["decode_service_rate"] == pytest.approx(true_tokens_per_s / _OUTPUT_TOKENS, rel=0.15)


def learned(
    make_snapshot: MakeSnapshot,
    batches: list[float],
    tpot_s: float,
    rate: DecodeRate | None = None,
    now_s: float = 1000.0,
    slower: float = 1.0,
) -> DecodeRate:
    """What points on the line ``10 ms + 0.2 ms x batch`` show, each 31 s apart; ``slower``: factor on both times."""
    rate = rate or DecodeRate()
    for batch in [*batches, batches[-1]]:
        step_s = slower * (0.01 + 0.0002 * batch)
        stats = {D: {"running_requests": batch, "decode_tokens_per_s": batch / step_s}}
        rate = rate.observed(make_snapshot(1, 2, now_s=now_s, stats=stats), tpot_s)
        now_s += 31.0
    return rate


RISING = [40.0, 44.0, 50.0, 56.0, 62.0, 68.0]


def test_the_line_gives_the_rate_at_the_objective(make_snapshot: MakeSnapshot) -> None:
    rate = learned(make_snapshot, RISING, tpot_s=0.024)
    # A step of 24 ms has a batch of 70, and 70 requests get a token each 24 ms.
    assert rate.requests_per_s(0.024, 100.0) == pytest.approx(70.0 / 0.024 / 100.0)
    assert rate.requests_per_s(0.024, 50.0) == pytest.approx(70.0 / 0.024 / 50.0)
    assert rate.requests_per_s(0.022, 50.0) == pytest.approx(60.0 / 0.022 / 50.0)  # another objective
    assert rate.requests_per_s(0.024, None) is None


def test_the_line_holds_until_a_point_is_off_it(make_snapshot: MakeSnapshot) -> None:
    rate = learned(make_snapshot, RISING, tpot_s=0.024)
    known = rate.requests_per_s(0.024, 100.0)
    idle = rate
    for hour in range(1, 24):
        idle = idle.observed(make_snapshot(1, 2, now_s=1200.0 + 3600.0 * hour), 0.024)
    assert idle.requests_per_s(0.024, 100.0) == known
    # With more replicas the batches are small. They are on the line, and too far from the objective to show a new one.
    small = learned(make_snapshot, [20.0] * 25, 0.024, idle, now_s=90_000.0)
    assert small.requests_per_s(0.024, 100.0) == pytest.approx(known)
    changed = learned(make_snapshot, [20.0] * 2, 0.024, small, now_s=99_000.0, slower=1.3)
    assert changed.requests_per_s(0.024, 100.0) is None


def test_a_slowdown_of_two_minutes_does_not_spoil_what_is_learned_after_it(make_snapshot: MakeSnapshot) -> None:
    rate = learned(make_snapshot, RISING, tpot_s=0.024)
    slow = learned(make_snapshot, [52.0, 60.0, 68.0, 60.0], tpot_s=0.024, rate=rate, now_s=1300.0, slower=3.0)
    back = learned(make_snapshot, [62.0, *RISING], tpot_s=0.024, rate=slow, now_s=1500.0)
    assert back.requests_per_s(0.024, 100.0) == pytest.approx(70.0 / 0.024 / 100.0)


def test_a_steady_load_above_the_objective_lowers_the_rate(make_snapshot: MakeSnapshot) -> None:
    rate = learned(make_snapshot, [100.0] * 4, tpot_s=0.024).requests_per_s(0.024, 100.0)
    # Steps take 30 ms, so each replica serves 33 requests per second; at the objective it would serve 70 at a time, 29.
    assert rate is not None
    assert rate < 70.0 / 0.024 / 100.0


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
    assert learned(make_snapshot, batches, tpot_s).requests_per_s(tpot_s, 100.0) is None


def test_a_memory_is_read_again_and_one_of_the_future_is_forgotten(make_snapshot: MakeSnapshot) -> None:
    rate = learned(make_snapshot, RISING, tpot_s=0.024)
    assert DecodeRate.of(rate.memory(), 1300.0) == rate
    assert DecodeRate.of(rate.memory(), 1100.0) == DecodeRate()
    assert DecodeRate.of({"decode_steps": (1.0, 2.0)}, 1300.0) == DecodeRate()
