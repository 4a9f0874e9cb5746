"""The SLA planner's formulas against its own tests and its published schedules."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.profile import EngineProfile
from autoscale.policies.peers.dynamo_sla import (
    DynamoSla,
    DynamoSlaConfig,
    TrafficDemand,
    decode_replicas,
    prefill_replicas,
)
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, Latency, PoolKey, Snapshot, Traffic
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
MakeSnapshot = Callable[..., Snapshot]
MakeProfile = Callable[..., EngineProfile]


def demand(requests_per_s: float, input_tokens: float, output_tokens: float) -> TrafficDemand:
    return TrafficDemand(requests_per_s=requests_per_s, input_tokens=input_tokens, output_tokens=output_tokens)


@pytest.mark.parametrize(("requests", "decode_tokens_per_s", "expected"), [(10, 10_000, (1, 1)), (500, 1_000, (1, 2))])
def test_counts_are_those_of_the_planners_own_tests(
    make_profile: MakeProfile, requests: int, decode_tokens_per_s: int, expected: tuple[int, int]
) -> None:
    # tests/planner/test_replica_calculation.py: 60 s, ISL 3000, OSL 150, prefill at 40,000 tokens/s.
    prefill = make_profile(prefill={"tokens": [0, 3000], "seconds": [0.0, 0.075]})
    step = {"batch": [1, 1000], "context_tokens": [100], "step_s": [[0.01], [0.01]]}
    decode = make_profile(kv_tokens=10_000_000, max_running=decode_tokens_per_s // 100, decode=step)
    load = demand(requests / 60.0, 3000.0, 150.0)
    assert (prefill_replicas(load, prefill, 1.0), decode_replicas(load, decode, 0.05, 1.0)) == expected


@pytest.mark.parametrize(
    ("requests_per_s", "input_tokens", "output_tokens", "expected"),
    [
        (8.0, 4000.0, 150.0, (1, 1)),  # scaling_e2e.py: 8 to 18 requests/s, "expects 1P1D -> 2P1D"
        (18.0, 4000.0, 150.0, (2, 1)),
        (10.0, 3000.0, 300.0, (1, 1)),  # perf_test_configs: 5 to 45 requests/s, dryrun_plot.png 1/1, 2/2, 3/3
        (25.0, 3000.0, 300.0, (2, 2)),
        (44.0, 3000.0, 300.0, (3, 3)),
    ],
)
def test_counts_are_those_of_the_planners_published_schedules(
    make_profile: MakeProfile,
    requests_per_s: float,
    input_tokens: float,
    output_tokens: float,
    expected: tuple[int, int],
) -> None:
    # The planner's profile of one H200 with an 8B model: ISL 2134 to 4168, and context 2997 up to a third of the KV.
    measured = make_profile(
        kv_tokens=945_029,
        max_running=787,
        prefill={"tokens": [2134, 3151, 4168], "seconds": [0.049968, 0.063215, 0.087342]},
        decode={"batch": [1, 48, 94], "context_tokens": [2997], "step_s": [[0.0044274], [0.0099375], [0.0154792]]},
    )
    load = demand(requests_per_s, input_tokens, output_tokens)
    assert (prefill_replicas(load, measured, 1.0), decode_replicas(load, measured, 0.01, 1.0)) == expected


def test_corrections_by_hand(make_profile: MakeProfile) -> None:
    profile = make_profile(kv_tokens=10_000)
    load = demand(10.0, 190.0, 50.0)  # 190 tokens in 0.2 s are 950 tokens/s; 1900 / 950 = 2
    assert [prefill_replicas(load, profile, c) for c in (1.0, 0.5, 0.6, 3.0)] == [
        2,
        1,
        2,
        2,
    ]  # a factor above 1, which queues cause, changes nothing
    # At 50 ms all 8 fit, 8 / 0.028 = 286 tokens/s for 500. Twice as slow as expected: 25 ms, 5 / 0.025 = 200.
    assert [decode_replicas(load, profile, 0.05, c) for c in (1.0, 2.0, 0.0)] == [2, 3, 2]


@given(st.floats(0, 1e3), st.floats(0, 1e2), st.floats(1, 1e4), st.floats(1, 1e3), st.floats(0, 10))
def test_more_requests_or_slower_engines_never_need_fewer(
    make_profile: MakeProfile, rate: float, more: float, inputs: float, outputs: float, correction: float
) -> None:
    profile = make_profile(kv_tokens=10_000)
    base, busier = demand(rate, inputs, outputs), demand(rate + more, inputs, outputs)
    assert 0 <= prefill_replicas(base, profile, correction) <= prefill_replicas(busier, profile, correction)
    needed = decode_replicas(base, profile, 0.05, correction)
    assert 0 <= needed <= decode_replicas(busier, profile, 0.05, correction)
    assert needed <= decode_replicas(base, profile, 0.05, correction + 1.0) or correction == 0.0


TRAFFIC = Traffic(requests_per_s=10.0, input_tokens_mean=190.0, output_tokens_mean=50.0)
# Each of four decode replicas has two requests, which get a token every 22 ms, as the profile says.
ENGINES = {D: {"running_requests": 2.0, "decode_tokens_per_s": 2.0 / 0.022}}


def run(
    make_snapshot: MakeSnapshot, profile: EngineProfile, ticks: list[dict[str, Any]], **config: Any
) -> list[Decision]:
    """A tick every 5 s with two prefill and four decode replicas."""
    chosen = {"prefill": profile, "decode": profile, "adjustment_s": 20.0, **config}
    policy = DynamoSla(DynamoSlaConfig.model_validate(chosen), ratio=PdRatio(1, 2), slo=SloConfig())
    state = ControllerState(desired={PoolKey("g0", P): 2, PoolKey("g0", D): 4})
    decisions = []
    for index, fields in enumerate(ticks):
        decisions.append(policy.decide(make_snapshot(2, 4, now_s=1000.0 + 5.0 * index, state=state, **fields)))
        state = replace(state, memory=decisions[-1].memory or {})
    return decisions


@pytest.fixture(name="busy")
def _busy() -> dict[str, Any]:
    return {"traffic": TRAFFIC, "stats": ENGINES, "latency": Latency(ttft_mean_s=0.2)}


def test_counts_are_adjusted_once_an_interval_and_then_stay(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile, busy: dict[str, Any]
) -> None:
    decisions = run(make_snapshot, make_profile(kv_tokens=10_000), [busy] * 7)
    assert [d.wanted for d in decisions[:4]] == [None] * 4
    assert [d.wanted for d in decisions[4:]] == [{P: 2.0, D: 2.0}] * 3
    assert [entry.value for entry in decisions[4].shown] == pytest.approx([1.0, 1.0])
    assert decisions[4].is_step and decisions[4].ratio == PdRatio(1, 1)
    assert decisions[0].ratio == PdRatio(1, 2)  # the ratio of the present counts, so that the gate admits them


def test_engines_that_are_slower_than_their_profile_are_corrected_for(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile, busy: dict[str, Any]
) -> None:
    slow = {**busy, "stats": {D: {"running_requests": 2.0, "decode_tokens_per_s": 1.0 / 0.022}}}
    profile = make_profile(kv_tokens=10_000)
    assert run(make_snapshot, profile, [{**slow, "latency": Latency(ttft_mean_s=0.1)}] * 5)[-1].wanted == {
        P: 1.0,
        D: 3.0,
    }
    assert run(make_snapshot, profile, [slow] * 5, is_corrected=False)[-1].wanted == {P: 2.0, D: 2.0}


def test_without_observations_there_is_no_decision(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile, busy: dict[str, Any]
) -> None:
    profile = make_profile()
    idle = {**busy, "traffic": Traffic(requests_per_s=0.0)}
    for missing in ({}, {"traffic": TRAFFIC}, {**busy, "stats": {}}, {**busy, "latency": Latency()}, idle):
        last = run(make_snapshot, profile, [missing] * 5)[-1]
        assert last.wanted is None and last.memory and last.memory["began_s"] == (1020.0,)
    partial = {**busy, "traffic": replace(TRAFFIC, is_whole=False)}
    assert run(make_snapshot, profile, [partial] * 5)[-1].wanted is None
    # An interval without requests changes neither the counts nor the remembered lengths.
    after = run(make_snapshot, profile, [busy] * 5 + [idle] * 4)[-1]
    assert after.wanted is None and after.memory and after.memory["past_input_tokens"] == pytest.approx((190.0, 190.0))


def test_memory_is_bounded_and_the_policy_has_no_other_state(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile, busy: dict[str, Any]
) -> None:
    profile = make_profile(kv_tokens=10_000)
    decisions = run(make_snapshot, profile, [busy] * 300)
    memory = decisions[-1].memory
    assert memory is not None and max(len(series) for series in memory.values()) == 50
    assert run(make_snapshot, profile, [busy] * 300) == decisions
