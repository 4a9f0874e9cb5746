"""Dynamo's capacity search, its two loops and what they may do while replicas start."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.engines.profile import EngineProfile
from autoscale.policies.peers.dynamo import (
    DECODE_THRESHOLDS,
    PREFILL_THRESHOLDS,
    DecodeLoad,
    Dynamo,
    DynamoConfig,
    decode_capacity,
    decode_engines_by_itl,
    engines_by_threshold,
    prefill_capacity,
    prefill_engines_by_ttft,
    prefill_s,
)
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, PoolKey, Snapshot, Traffic
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
MakeSnapshot = Callable[..., Snapshot]
MakeProfile = Callable[..., EngineProfile]


def test_long_prompts_are_computed_in_steps(make_profile: MakeProfile) -> None:
    profile = make_profile()  # 10 ms, 1 ms a token, 100 tokens a step
    assert prefill_s(profile, 100.0) == pytest.approx(0.11)
    assert prefill_s(profile, 249.5) == pytest.approx(2 * 0.11 + 0.06)
    assert prefill_s(profile, 0.0) == 0.0


def test_capacity_by_hand(make_profile: MakeProfile) -> None:
    profile = make_profile()
    assert prefill_capacity(profile, 20.0, 1.0) == pytest.approx(5 / 0.11)  # five prompts fill a step
    assert prefill_capacity(profile, 20.0, 0.06) == pytest.approx(2 / 0.05)  # three would take 70 ms
    assert prefill_capacity(profile, 150.0, 0.1) == pytest.approx(1 / 0.17)  # no batch keeps 0.1 s: the best one counts
    assert decode_capacity(profile, 50.0, 100.0, 0.05) == pytest.approx(8 / (100 * 0.028))  # max_running
    assert decode_capacity(profile, 50.0, 100.0, 0.0245) == pytest.approx(4 / (100 * 0.024))
    assert decode_capacity(profile, 250.0, 100.0, 0.05) == pytest.approx(3 / (100 * 0.023))  # 1000 / 300 fit
    assert decode_capacity(profile, 50.0, 100.0, 0.001) == pytest.approx(8 / (100 * 0.028))
    assert decode_capacity(profile, 990.0, 100.0, 0.05) is None


def test_prefill_grows_if_all_engines_miss_ttft_and_shrinks_if_the_others_would_keep_it(
    make_profile: MakeProfile,
) -> None:
    profile = make_profile()
    ask: Any = {"input_tokens": 90.0, "ttft_s": 0.5, "config": DynamoConfig(prefill=profile, decode=profile)}
    # A prompt by itself takes 0.1 s, which leaves 0.8 x 0.4 = 0.32 s for queues; 100 tokens take 0.11 s.
    assert prefill_engines_by_ttft([400.0, 400.0], **ask) == 3
    assert prefill_engines_by_ttft([400.0, 0.0], **ask) is None
    assert prefill_engines_by_ttft([140.0, 140.0], **ask) == 1  # 280 tokens on one engine: 0.41 s
    assert prefill_engines_by_ttft([150.0, 150.0], **ask) is None  # 300 tokens on one engine: 0.43 s
    assert prefill_engines_by_ttft([0.0], **ask) == 0


def test_decode_grows_if_all_engines_miss_itl_and_shrinks_if_the_others_would_keep_it(
    make_profile: MakeProfile,
) -> None:
    profile = make_profile()
    ask: Any = {"context_tokens": 100.0, "config": DynamoConfig(prefill=profile, decode=profile)}

    def load(requests: float, waiting: float = 0.0) -> DecodeLoad:
        return DecodeLoad(requests=requests + waiting, kv_tokens=(requests + waiting) * 100)

    # With the next request, 4 running and 1 waiting are 6, and a step of 6 takes 26 ms.
    assert decode_engines_by_itl([load(4.0, 1.0)] * 2, itl_s=0.025, **ask) == 3
    assert decode_engines_by_itl([load(4.0, 1.0), load(1.0)], itl_s=0.025, **ask) is None
    # 4 and 4 on one engine are 9 with the next request: 29 ms; 0.8 x 0.037 = 0.0296.
    assert decode_engines_by_itl([load(4.0)] * 2, itl_s=0.037, **ask) == 1
    assert decode_engines_by_itl([load(4.0)] * 2, itl_s=0.036, **ask) is None
    assert decode_engines_by_itl([load(5.0)] * 2, itl_s=1.0, **ask) is None  # 1000 tokens leave no room for the next


def test_thresholds_by_hand() -> None:
    prefill, decode = PREFILL_THRESHOLDS["throughput"], DECODE_THRESHOLDS["throughput"]
    assert engines_by_threshold([0.0, 1.0], prefill) == 3
    assert engines_by_threshold([0.05, 0.09], prefill) == 1
    assert engines_by_threshold([0.05, 0.1], prefill) is None
    assert engines_by_threshold([1.0, 1.0], decode) is None
    assert engines_by_threshold([0.3, 1.01], decode) == 3
    assert engines_by_threshold([0.4, 0.4], decode) == 1
    assert engines_by_threshold([0.5, 0.59], decode) == 2  # 2 x 0.59 on one would bring the second back
    assert engines_by_threshold([0.1], decode) == 0
    assert engines_by_threshold([0.0, 0.0], PREFILL_THRESHOLDS["latency"]) == 1


@given(st.lists(st.floats(0, 5), min_size=1, max_size=8), st.floats(0, 5), st.sampled_from(["throughput", "latency"]))
def test_more_load_never_asks_for_fewer_engines(values: list[float], more: float, target: str) -> None:
    for limits in (PREFILL_THRESHOLDS[target], DECODE_THRESHOLDS[target]):
        base, busier = (engines_by_threshold([value + extra for value in values], limits) for extra in (0.0, more))
        assert (len(values) if busier is None else busier) >= (len(values) if base is None else base)
        assert base is None or abs(base - len(values)) <= 1


@given(st.floats(1, 2000), st.floats(1, 500), st.floats(0.01, 2))
def test_capacity_grows_with_the_allowed_wait(
    make_profile: MakeProfile, inputs: float, outputs: float, limit_s: float
) -> None:
    profile = make_profile(kv_tokens=10_000)
    # If no batch keeps the limit, the capacity is the best of all: only limits that one prompt keeps are compared.
    if prefill_s(profile, inputs) <= limit_s:
        assert 0 < prefill_capacity(profile, inputs, limit_s) <= prefill_capacity(profile, inputs, 2 * limit_s)
    base, later = (decode_capacity(profile, inputs, outputs, each) for each in (limit_s, 2 * limit_s))
    assert base and later and (base <= later or limit_s < 0.021)


TRAFFIC = Traffic(requests_per_s=100.0, input_tokens_mean=20.0, output_tokens_mean=100.0)
IDLE = {
    P: {"queued_prefill_tokens": 0.0},
    D: {"running_requests": 1.0, "waiting_requests": 0.0, "kv_usage_frac": 0.07},
}


def run(
    make_snapshot: MakeSnapshot,
    profile: EngineProfile,
    ticks: list[dict[str, Any]],
    *,
    desired: tuple[int, int] = (2, 4),
    **config: Any,
) -> list[Decision]:
    """A tick every 5 s with two prefill and four decode replicas."""
    chosen = {"prefill": profile, "decode": profile, "adjustment_s": 20.0, **config}
    policy = Dynamo(DynamoConfig.model_validate(chosen), ratio=PdRatio(1, 2), slo=SloConfig())
    counts = {PoolKey("g0", role): count for role, count in zip(Role, desired, strict=True)}
    state = ControllerState(desired=counts)
    decisions = []
    for index, fields in enumerate(ticks):
        decisions.append(policy.decide(make_snapshot(2, 4, now_s=1000.0 + 5.0 * index, state=state, **fields)))
        state = replace(state, memory=decisions[-1].memory or {})
    return decisions


def test_counts_are_demand_over_capacity_and_at_most_a_step_away(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile
) -> None:
    ticks = [{"traffic": TRAFFIC}] * 7
    decisions = run(make_snapshot, make_profile(), ticks)
    assert [d.wanted for d in decisions[:4]] == [None] * 4
    # 100 / 45.5 = 2.2; decode needs 100 / 2.86 = 35, and 8 come at a time. The counts stay until the next interval.
    assert [d.wanted for d in decisions[4:]] == [{P: 3.0, D: 12.0}] * 3
    assert decisions[4].is_step and decisions[4].ratio == PdRatio(1, 4)
    assert run(make_snapshot, make_profile(), ticks, step_replicas=64)[-1].wanted == {P: 3.0, D: 35.0}
    assert run(make_snapshot, make_profile(), ticks, cached_frac=0.5)[-1].wanted == {P: 2.0, D: 12.0}


def test_an_idle_interval_asks_for_no_replica_and_remembers_the_lengths(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile
) -> None:
    idle = {"traffic": Traffic(requests_per_s=0.0)}
    last = run(make_snapshot, make_profile(), [{"traffic": TRAFFIC}] * 5 + [idle] * 4)[-1]
    assert last.wanted == {P: 0.0, D: 0.0}  # the guard keeps the minimum (Dynamo's min_endpoint)
    assert last.memory and last.memory["past_output_tokens"] == pytest.approx((100.0, 100.0))
    assert run(make_snapshot, make_profile(), [idle] * 5)[-1].wanted is None  # no request has arrived yet


def test_while_replicas_start_counts_only_fall(make_snapshot: MakeSnapshot, make_profile: MakeProfile) -> None:
    ticks = [{"traffic": TRAFFIC}] * 5
    assert run(make_snapshot, make_profile(), ticks, desired=(3, 6))[-1].wanted == {P: 3.0, D: 6.0}
    calm = [{"traffic": replace(TRAFFIC, requests_per_s=5.0)}] * 5
    assert run(make_snapshot, make_profile(), calm, desired=(3, 6))[-1].wanted == {P: 1.0, D: 2.0}


def test_the_reactive_loop_steps_and_the_predictive_one_is_its_floor(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile
) -> None:
    profile = make_profile(kv_tokens=10_000)
    tick = {"traffic": replace(TRAFFIC, requests_per_s=1.0), "stats": IDLE}
    alone = run(make_snapshot, profile, [tick], is_predictive=False, is_reactive=True)[0]
    assert alone.wanted == {P: 1.0, D: 3.0}
    both_loops = run(make_snapshot, profile, [{**tick, "traffic": TRAFFIC}] * 5, is_reactive=True)
    assert both_loops[0].wanted == {P: 1.0, D: 3.0}
    assert both_loops[4].wanted == {P: 3.0, D: 12.0}
    deep = {**IDLE, P: {"queued_prefill_tokens": 1000.0}}
    more = run(make_snapshot, profile, [{**tick, "stats": deep}], is_predictive=False, is_reactive=True)[0]
    assert more.wanted == {P: 3.0, D: 3.0}
    starting = run(make_snapshot, profile, [tick], desired=(2, 5), is_predictive=False, is_reactive=True)[0]
    assert starting.wanted == {P: 1.0, D: 3.0}
    more = run(make_snapshot, profile, [{**tick, "stats": deep}], desired=(2, 5), target="latency", longest_tokens=100)[
        0
    ]
    assert more.wanted == {P: 2.0, D: 3.0}  # prefill asks for one more while decode starts, and has to wait


@pytest.mark.parametrize("target", ["sla", "throughput"])
@pytest.mark.parametrize(("desired", "expected"), [(1, 1.0), (2, 0.0)])
def test_the_last_engine_leaves_only_while_another_one_starts(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile, target: str, desired: int, expected: float
) -> None:
    config = {"prefill": make_profile(kv_tokens=10_000), "decode": make_profile(kv_tokens=10_000)}
    loops = {"is_predictive": False, "is_reactive": True, "target": target, "longest_tokens": 1000}
    policy = Dynamo(DynamoConfig.model_validate({**config, **loops}), ratio=PdRatio(1, 1), slo=SloConfig())
    state = ControllerState(desired={PoolKey("g0", P): desired, PoolKey("g0", D): desired})
    decision = policy.decide(make_snapshot(1, 1, state=state, stats=IDLE))
    assert decision.wanted == {P: expected, D: expected}


def test_the_threshold_targets_need_no_traffic(make_snapshot: MakeSnapshot, make_profile: MakeProfile) -> None:
    full = {P: {"queued_prefill_tokens": 100.0}, D: {**IDLE[D], "kv_usage_frac": 0.9}}
    config = {"longest_tokens": 1000, "reaction_s": 10.0}
    decisions = run(make_snapshot, make_profile(), [{"stats": full}] * 2, target="latency", **config)
    assert [d.wanted for d in decisions] == [{P: 3.0, D: 5.0}] * 2
    assert "every 10 s" in decisions[1].reason
    assert run(make_snapshot, make_profile(), [{"stats": full}], target="throughput", **config)[0].wanted == {
        P: 2.0,
        D: 4.0,
    }


def test_without_observations_there_is_no_decision(make_snapshot: MakeSnapshot, make_profile: MakeProfile) -> None:
    last = run(make_snapshot, make_profile(), [{}] * 5)[-1]
    assert last.wanted is None and last.memory and last.memory["began_s"] == (1020.0,)
    too_long = {"traffic": replace(TRAFFIC, input_tokens_mean=2000.0)}
    assert run(make_snapshot, make_profile(), [too_long] * 5)[-1].wanted is None
    for stats in ({}, {P: IDLE[P]}, {D: IDLE[D]}):
        blind = run(make_snapshot, make_profile(), [{"stats": stats}], is_reactive=True)[0]
        assert blind.wanted is None and "not every replica reports" in blind.reason


def test_memory_is_bounded_and_the_policy_has_no_other_state(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile
) -> None:
    ticks = [{"traffic": TRAFFIC, "stats": IDLE}] * 300
    decisions = run(make_snapshot, make_profile(), ticks, is_reactive=True)
    memory = decisions[-1].memory
    assert memory is not None and max(len(series) for series in memory.values()) == 50
    assert run(make_snapshot, make_profile(), ticks, is_reactive=True) == decisions


@pytest.mark.parametrize(
    ("config", "cause"),
    [({"target": "latency"}, "longest_tokens"), ({"is_predictive": False}, "neither"), ({"cached_frac": 1.0}, "0.95")],
)
def test_a_configuration_that_would_never_decide_is_refused(
    make_profile: MakeProfile, config: dict[str, Any], cause: str
) -> None:
    with pytest.raises(ValidationError, match=cause):
        DynamoConfig.model_validate({"prefill": make_profile(), "decode": make_profile(), **config})
