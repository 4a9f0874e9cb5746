"""HeteroScale's algorithms by hand, and the counts that their combination wants."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.policies.heteroscale import (
    HeteroScale,
    HeteroScaleConfig,
    LatencyStepsConfig,
    Signal,
    negative_feedback,
    observed_signals,
)
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, Latency, PoolKey, Snapshot, Traffic
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
MakeSnapshot = Callable[..., Snapshot]


@pytest.mark.parametrize(
    ("latency_s", "expected"),
    [
        (1.20, 12.0),  # alpha_out: a fifth more
        (1.19, 11.0),  # beta_out: a tenth more
        (0.90, 11.0),
        (0.89, 10.0),
        (0.41, 10.0),
        (0.40, 9.5),  # gamma_in: a twentieth fewer
        (0.0, 9.5),
    ],
)
def test_algorithm_3_by_hand(latency_s: float, expected: float) -> None:
    steps = LatencyStepsConfig(severe_frac=1.2, moderate_frac=0.9, relaxed_frac=0.4)
    assert negative_feedback(10, latency_s, 1.0, steps) == pytest.approx(expected)


@given(st.integers(1, 500), st.floats(0, 100))
def test_a_breach_never_asks_for_fewer_as_the_printed_last_branch_would(count: int, latency_s: float) -> None:
    steps = LatencyStepsConfig()
    expected = negative_feedback(count, latency_s, 1.0, steps)
    if latency_s >= steps.moderate_frac:
        assert expected > count
    assert count * 0.95 - 1e-9 <= expected <= count * 1.2 + 1e-9


@pytest.fixture(scope="module", name="decide")
def _decide(make_snapshot: MakeSnapshot) -> Callable[..., Decision]:
    def call(
        counts: tuple[int, int] = (2, 6),
        *,
        ratio: str = "1:3",
        latency: Latency | None = None,
        backlog: tuple[float, ...] = (),
        stats: dict[Role, dict[str, Any]] | None = None,
        **config: Any,
    ) -> Decision:
        state = ControllerState(
            desired={PoolKey("g0", P): counts[0], PoolKey("g0", D): counts[1]},
            backlog=tuple((float(at), tokens) for at, tokens in enumerate(backlog)),
        )
        shown = {P: {"queued_prefill_tokens": 0.0}}
        for role, figures in (stats or {}).items():
            shown[role] = {**shown.get(role, {}), **figures}
        snapshot = make_snapshot(*counts, state=state, latency=latency or Latency(), stats=shown)
        policy = HeteroScale(
            HeteroScaleConfig.model_validate({"target": 100.0, **config}), ratio=PdRatio.parse(ratio), slo=SloConfig()
        )
        return policy.decide(snapshot)

    return call


def tps(value: float) -> dict[Role, dict[str, Any]]:
    return {D: {"decode_tokens_per_s": value}}


def test_algorithm_2_by_hand(decide: Callable[..., Decision]) -> None:
    # Ten replicas at 1,300 tokens/s each, where 1,000 is the target: R = 1.3, so thirteen.
    for tokens_per_s, expected in ((1300.0, 13.0), (800.0, 8.0)):
        decision = decide((5, 10), ratio="1:2", stats=tps(tokens_per_s), target=1000.0)
        assert decision.wanted is not None and decision.wanted[D] == pytest.approx(expected)


def test_one_signal_sizes_both_roles(decide: Callable[..., Decision]) -> None:
    decision = decide(stats=tps(150.0))
    assert decision.wanted == {D: pytest.approx(9.0), P: pytest.approx(3.0)}
    assert not decision.is_step


@pytest.mark.parametrize(
    ("signal", "shown", "target", "leaders"),
    [
        ("decode_tps", {D: {"decode_tokens_per_s": 50.0}}, 100.0, 3.0),
        ("prefill_tps", {P: {"prefill_tokens_per_s": 300.0}}, 100.0, 18.0),  # 6 prefill, so 18 decode
        ("prefill_gpu_utilization", {P: {"gpu_utilization_frac": 0.9}}, 0.6, 9.0),
        ("decode_gpu_utilization", {D: {"gpu_utilization_frac": 0.9}}, 0.6, 9.0),
        ("prefill_sm_activity", {P: {"sm_activity_frac": 0.2}}, 0.4, 3.0),
        ("decode_sm_activity", {D: {"sm_activity_frac": 0.2}}, 0.4, 3.0),
    ],
)
def test_every_linear_signal_scales_both_roles(
    decide: Callable[..., Decision], signal: str, shown: dict[Role, dict[str, float]], target: float, leaders: float
) -> None:
    wanted = decide(stats=shown, signal=signal, target=target).wanted
    assert wanted == {D: pytest.approx(leaders), P: pytest.approx(leaders / 3)}


@pytest.mark.parametrize(
    ("signal", "latency", "leaders"),
    [
        ("ttft", Latency(ttft_s=2.0, tpot_s=0.01), 7.2),
        ("ttft", Latency(ttft_s=0.95, tpot_s=0.01), 6.6),
        ("ttft", Latency(ttft_s=0.5, tpot_s=0.01), 6.0),
        ("ttft", Latency(ttft_s=0.1, tpot_s=0.01), 5.0),  # a twentieth of six, at least one replica
        ("tpot", Latency(ttft_s=0.1, tpot_s=0.01), 5.0),
        ("tpot", Latency(ttft_s=0.1, tpot_s=0.2), 7.2),
    ],
)
def test_a_latency_as_the_signal_moves_in_steps(
    decide: Callable[..., Decision], signal: str, latency: Latency, leaders: float
) -> None:
    decision = decide(signal=signal, target=None, latency=latency)
    assert decision.wanted is not None
    assert decision.wanted[D] == pytest.approx(leaders)
    assert decision.is_step


def test_scale_out_takes_the_larger_of_signal_and_latency(decide: Callable[..., Decision]) -> None:
    late = Latency(ttft_s=1.3, tpot_s=0.01)
    assert decide(stats=tps(100.0), latency=late).wanted[D] == pytest.approx(7.2)
    assert decide(stats=tps(200.0), latency=late).wanted[D] == pytest.approx(12.0)
    assert decide(stats=tps(100.0), latency=Latency(ttft_s=0.1, tpot_s=0.049)).wanted[D] == pytest.approx(6.6)


@pytest.mark.parametrize(
    ("latency", "backlog", "leaders"),
    [
        (Latency(), (), 3.0),
        (Latency(ttft_s=0.5, tpot_s=0.02), (0.0, 0.0, 0.0), 3.0),
        (Latency(ttft_s=0.5, tpot_s=0.02), (9000.0, 8000.0, 5000.0), 3.0),  # falling
        (Latency(ttft_s=0.5, tpot_s=0.02), (0.0, 0.0, 2000.0), 3.0),  # growing, but next to nothing
        (Latency(ttft_s=0.5, tpot_s=0.02), (0.0, 0.0, 5000.0), 6.0),
        # A long backlog that stays keeps decode idle too.
        (Latency(ttft_s=0.5, tpot_s=0.02), (40_000.0, 40_000.0, 38_000.0), 6.0),
        (Latency(ttft_s=1.01, tpot_s=0.02), (), 6.6),
    ],
)
def test_scale_in_needs_calm_latencies_and_a_backlog_that_does_not_grow(
    decide: Callable[..., Decision], latency: Latency, backlog: tuple[float, ...], leaders: float
) -> None:
    assert decide(stats=tps(50.0), latency=latency, backlog=backlog).wanted[D] == pytest.approx(leaders)


def test_a_latency_far_below_its_target_alone_removes_no_replica(decide: Callable[..., Decision]) -> None:
    assert decide(stats=tps(100.0), latency=Latency(ttft_s=0.01, tpot_s=0.001)).wanted[D] == pytest.approx(6.0)


def test_no_signal_is_no_decision(decide: Callable[..., Decision]) -> None:
    assert decide().wanted is None
    assert decide(signal="ttft", target=None).wanted is None


@given(
    tokens_per_s=st.floats(0, 1e5),
    more=st.floats(0, 1e5),
    ttft_s=st.none() | st.floats(0, 10),
    ratio=st.sampled_from(["1:5", "1:1", "9:1"]),
)
def test_more_decode_tokens_never_want_fewer_replicas(
    decide: Callable[..., Decision], tokens_per_s: float, more: float, ttft_s: float | None, ratio: str
) -> None:
    low, high = (
        decide(ratio=ratio, stats=tps(value), latency=Latency(ttft_s=ttft_s)).wanted
        for value in (tokens_per_s, tokens_per_s + more)
    )
    assert all(high[role] >= low[role] - 1e-6 for role in Role)
    assert high[P] == pytest.approx(high[D] * PdRatio.parse(ratio).per_decode())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "target is missing"),
        ({"target": 0}, "greater than 0"),
        ({"signal": "gpu", "target": 1}, "'decode_tps', 'prefill_tps'"),
        ({"signal": "ttft", "target": 1.0}, r"target \(1\) does nothing for ttft: set slo.ttft_s"),
        ({"signal": "prefill_sm_activity", "target": 70}, "give 0.7 for 70 %"),
        ({"target": 1, "latency": {"relaxed_frac": 1.0}}, "or one step would hide another"),
    ],
)
def test_a_wrong_config_is_refused_with_the_fix(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HeteroScaleConfig.model_validate(config)


def test_there_are_eight_signals_as_in_the_paper() -> None:
    assert len(Signal) == 8


def test_a_missed_latency_adds_replicas_though_the_signal_is_missing(decide: Callable[..., Decision]) -> None:
    decision = decide(latency=Latency(ttft_s=5.0))
    assert decision.wanted is not None
    assert decision.wanted[D] > 6


def test_latency_asks_for_no_more_replicas_while_those_it_asked_for_start(
    make_snapshot: MakeSnapshot,
) -> None:
    policy = HeteroScale(HeteroScaleConfig(target=100.0), ratio=PdRatio(1, 3), slo=SloConfig())
    desired = {PoolKey("g0", P): 2, PoolKey("g0", D): 8}
    snapshot = make_snapshot(
        2, 6, stats=tps(100.0), latency=Latency(ttft_s=5.0), state=ControllerState(desired=desired)
    )
    assert policy.decide(snapshot).wanted == {D: 8.0, P: pytest.approx(8 / 3)}


@pytest.mark.parametrize(("present", "wanted"), [(8, 8.4), (9, 9.0)])
def test_latency_adds_replicas_once_while_a_lost_replica_is_not_back(
    make_snapshot: MakeSnapshot, present: int, wanted: float
) -> None:
    policy = HeteroScale(HeteroScaleConfig(target=100.0), ratio=PdRatio(1, 3), slo=SloConfig())
    desired = {PoolKey("g0", P): 3, PoolKey("g0", D): present}
    state = ControllerState(desired=desired, lost_s=990.0)
    snapshot = make_snapshot(3, 7, now_s=1000.0, stats=tps(100.0), latency=Latency(ttft_s=5.0), state=state)
    assert policy.decide(snapshot).wanted[D] == pytest.approx(wanted)  # seven serve, and get a fifth more


def test_in_an_overload_the_leaders_grow_by_offered_over_served_requests(make_snapshot: MakeSnapshot) -> None:
    policy = HeteroScale(HeteroScaleConfig(target=100.0), ratio=PdRatio(1, 3), slo=SloConfig())
    state = ControllerState(desired={PoolKey("g0", P): 1, PoolKey("g0", D): 3})
    traffic = Traffic(requests_per_s=50.0, served_per_s=10.0)

    def wanted(latency: Latency, decode_tps: float = 90.0) -> float:
        snapshot = make_snapshot(1, 3, stats=tps(decode_tps), latency=latency, traffic=traffic, state=state)
        return policy.decide(snapshot).wanted[D]

    assert wanted(Latency(ttft_s=5.0)) == pytest.approx(15.0)  # three serve a fifth
    assert wanted(Latency(ttft_s=5.0), decode_tps=120.0) == pytest.approx(18.0)  # they are over their target, too
    assert wanted(Latency(ttft_s=0.5), decode_tps=120.0) == pytest.approx(3.6)  # all are served


def test_refused_requests_are_a_breach(make_snapshot: MakeSnapshot) -> None:
    state = ControllerState(desired={PoolKey("g0", P): 1, PoolKey("g0", D): 1})
    traffic = Traffic(requests_per_s=50.0, served_per_s=10.0)
    for signal in (Signal.DECODE_TPS, Signal.TTFT):
        target = 100.0 if signal is Signal.DECODE_TPS else None
        policy = HeteroScale(HeteroScaleConfig(signal=signal, target=target), ratio=PdRatio(1, 1), slo=SloConfig())
        latency = Latency(ttft_s=0.1, refused_frac=0.8)
        snapshot = make_snapshot(1, 1, stats=tps(10.0), latency=latency, traffic=traffic, state=state)
        decision = policy.decide(snapshot)
        assert decision.wanted[D] == pytest.approx(5.0)
        assert "80% of the requests are refused" in decision.reason


@pytest.mark.parametrize(
    ("settled_s", "withdrawn", "decode"),
    # A request that has waited for 5 s was sent at 995.
    [(1001.0, {}, 6.0), (996.0, {}, 6.0), (995.0, {}, 7.2), (1001.0, {"d5": 990.0}, 7.2)],
)
def test_latency_adds_no_replica_before_it_shows_the_effect_of_the_last_unless_withdrawn_ones_can_return(
    make_snapshot: MakeSnapshot, settled_s: float, withdrawn: dict[str, float], decode: float
) -> None:
    policy = HeteroScale(HeteroScaleConfig(target=100.0), ratio=PdRatio(1, 3), slo=SloConfig())
    desired = {PoolKey("g0", P): 2, PoolKey("g0", D): 6}
    state = ControllerState(desired=desired, settled_s=settled_s, withdrawn=withdrawn)
    snapshot = make_snapshot(2, 6, now_s=1000.0, stats=tps(100.0), latency=Latency(ttft_s=5.0), state=state)
    decision = policy.decide(snapshot)
    assert decision.wanted is not None
    assert decision.wanted[D] == pytest.approx(decode)


def test_a_latency_as_the_signal_scales_in_without_requests(make_snapshot: MakeSnapshot) -> None:
    policy = HeteroScale(HeteroScaleConfig(signal=Signal.TTFT), ratio=PdRatio(1, 3), slo=SloConfig())
    desired = {PoolKey("g0", P): 2, PoolKey("g0", D): 6}
    state = ControllerState(desired=desired)
    stats = {P: {"queued_prefill_tokens": 0.0}}
    idle = make_snapshot(2, 6, stats=stats, traffic=Traffic(requests_per_s=0.0), state=state)
    assert policy.decide(idle).wanted == {D: 5.0, P: pytest.approx(5 / 3)}
    assert policy.decide(make_snapshot(2, 6, stats=stats, state=state)).wanted is None


@pytest.mark.parametrize(("name", "replicas"), [("d5", 6.0), ("x", 0.6)])
def test_no_replica_leaves_if_one_that_serves_does_not_report(
    make_snapshot: MakeSnapshot, name: str, replicas: float
) -> None:
    # One decode replica of six does not report. If it serves, the reports of the others are not all of the load.
    whole = make_snapshot(2, 6, stats={P: {"queued_prefill_tokens": 0.0}, D: {"decode_tokens_per_s": 12.0}})
    pools = [
        replace(
            pool,
            replicas=tuple(
                replace(replica, replica_id=f"d{index}", decode_tokens_per_s=None if index == 5 else 12.0)
                for index, replica in enumerate(pool.replicas)
            ),
        )
        if pool.key.role is D
        else pool
        for pool in whole.pools
    ]
    admitted = ("d0", "d1", "d2", "d3", "d4", name)
    state = replace(whole.state, admitted=admitted, desired={PoolKey("g0", P): 2, PoolKey("g0", D): 6})
    policy = HeteroScale(HeteroScaleConfig(target=100.0), ratio=PdRatio(1, 3), slo=SloConfig())
    decision = policy.decide(replace(whole, pools=tuple(pools), state=state))
    assert decision.wanted is not None
    assert decision.wanted[D] == pytest.approx(replicas)
    assert ("d5 does not report decode_tps" in decision.reason) is (name == "d5")


def test_an_unknown_prefill_backlog_removes_no_replica(decide: Callable[..., Decision]) -> None:
    decision = decide(stats={**tps(10.0), P: {"queued_prefill_tokens": None}})
    assert decision.wanted == {D: 6.0, P: 2.0}
    assert "the prefill backlog is not known" in decision.reason


def test_observed_signals_are_the_values_that_the_policy_uses(make_snapshot: MakeSnapshot) -> None:
    stats = {P: {"prefill_tokens_per_s": 3000.0}, D: {"decode_tokens_per_s": 450.0, "gpu_utilization_frac": 0.9}}
    snapshot = make_snapshot(1, 2, stats=stats, latency=Latency(ttft_s=0.4))
    first, *others = snapshot.pools[1].replicas
    decode = replace(snapshot.pools[1], replicas=(replace(first, decode_tokens_per_s=350.0), *others))
    snapshot = replace(snapshot, pools=(snapshot.pools[0], decode))
    assert observed_signals(snapshot) == {
        Signal.DECODE_TPS: 400.0,
        Signal.PREFILL_TPS: 3000.0,
        Signal.DECODE_GPU_UTILIZATION: 0.9,
        Signal.TTFT: 0.4,
    }
    policy = HeteroScale(HeteroScaleConfig(target=100.0), ratio=PdRatio(1, 2), slo=SloConfig())
    (shown,) = policy.decide(snapshot).shown
    assert shown.value == observed_signals(snapshot)[Signal.DECODE_TPS]
