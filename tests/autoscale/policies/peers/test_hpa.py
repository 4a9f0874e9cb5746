"""The HPA's arithmetic by hand, its windows and its scaling rules."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.policies.peers.hpa import Hpa, HpaConfig, ScalingRulesConfig, paced, replicas_for_metric
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, PoolKey, Snapshot
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
MakeSnapshot = Callable[..., Snapshot]
UP, DOWN = HpaConfig().up, HpaConfig().down


@pytest.mark.parametrize(
    ("values", "missing", "current", "target", "expected"),
    [
        # "if the current metric value is 200m, and the desired value is 100m, the number of replicas will be doubled"
        ([200.0, 200.0], 0, 2, 100.0, 4),
        ([50.0, 50.0], 0, 2, 100.0, 1),  # "if the current value is instead 50m, halved"
        ([110.0, 110.0], 0, 2, 100.0, 2),  # inside the tolerance
        ([111.0, 111.0], 0, 2, 100.0, 3),
        ([90.0], 0, 1, 100.0, 1),
        ([300.0, 300.0], 1, 3, 100.0, 6),  # one does not report: for a growth it counts as idle, 600 / 3 = 200
        ([30.0, 30.0], 1, 3, 100.0, 2),  # for a shrinkage it counts as at the target, 160 / 3 = 53
        ([120.0], 1, 2, 100.0, 2),  # 120 / 2 = 60 would turn a growth into a shrinkage
        ([20.0], 8, 4, 100.0, 4),  # 820 / 100 = 8.2: more than the 4 that run, so none leaves
        ([0.0, 0.0], 0, 2, 100.0, 0),
    ],
)
def test_the_ratio_by_hand(values: list[float], missing: int, current: int, target: float, expected: int) -> None:
    assert replicas_for_metric(values, missing, current, target, 0.1) == expected


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.integers(0, 5), st.floats(0, 10), st.floats(0.05, 5))
def test_a_higher_metric_never_needs_fewer_replicas(
    values: list[float], missing: int, more: float, target: float
) -> None:
    current = len(values) + missing
    assert 0 <= replicas_for_metric(values, missing, current, target, 0.1) <= max(current, sum(values) / target + 1)
    # Only if all report: Kubernetes counts the others as idle at the target itself, and as busy below it.
    ready = len(values)
    base = replicas_for_metric(values, 0, ready, target, 0.1)
    assert replicas_for_metric([value + more for value in values], 0, ready, target, 0.1) >= base


def pace(desired: list[int], *, passed_s: float, start: int = 2, **rules: Any) -> tuple[list[int], Any]:
    """Counts that follow from recommendations, if each is carried out at once."""
    memory: Any = {}
    count, counts, now_s = start, list[int](), 1000.0
    for each in desired:
        count, series = paced(each, count, now_s, "prefill", memory, HpaConfig(**{"up": UP, "down": DOWN, **rules}))
        memory = {**memory, **series}
        counts.append(count)
        now_s += passed_s
    return counts, memory


def test_counts_grow_by_four_or_by_doubling_and_shrink_after_five_minutes() -> None:
    assert pace([40, 40, 40, 40], passed_s=15.0)[0] == [6, 12, 24, 40]  # max(2 + 4, 4), then twice as many
    # The highest recommendation of the last 300 s counts: after 20 syncs the first one is older than that.
    assert pace([8] + [3] * 20, passed_s=15.0, start=8)[0] == [8] * 20 + [3]


def test_a_spike_keeps_the_count_for_the_window() -> None:
    down = ScalingRulesConfig(window_s=60.0, step_frac=1.0)
    assert pace([2, 9, 2, 2, 2, 2, 2], passed_s=15.0, down=down)[0] == [2, 6, 6, 6, 6, 2, 2]


def test_a_window_for_growth_takes_the_lowest_recommendation() -> None:
    up = ScalingRulesConfig(window_s=40.0, step_replicas=100)
    assert pace([2, 9, 9, 9, 9], passed_s=15.0, up=up)[0] == [2, 2, 2, 9, 9]


def test_steps_count_from_the_count_when_the_period_began() -> None:
    slow = ScalingRulesConfig(window_s=0.0, step_replicas=1, period_s=180.0)
    up, _ = pace([10] * 25, passed_s=15.0, start=1, up=slow)
    assert (up[0], up[11], up[12], up[24]) == (2, 2, 3, 4)  # one in 180 s
    down, _ = pace([1] * 25, passed_s=15.0, start=9, down=slow)
    assert (down[0], down[11], down[12], down[24]) == (8, 8, 7, 6)
    never = ScalingRulesConfig(window_s=0.0)
    assert pace([1, 1], passed_s=15.0, start=9, down=never)[0] == [9, 9]


def run(make_snapshot: MakeSnapshot, ticks: list[dict[Role, dict[str, Any]]], **config: Any) -> list[Decision]:
    """A tick every 5 s with two prefill and four decode replicas."""
    policy = Hpa(HpaConfig.model_validate(config), ratio=PdRatio(1, 2), slo=SloConfig())
    state = ControllerState(desired={PoolKey("g0", P): 2, PoolKey("g0", D): 4})
    decisions = []
    for index, stats in enumerate(ticks):
        snapshot = make_snapshot(2, 4, now_s=1000.0 + 5.0 * index, stats=stats, state=state)
        decisions.append(policy.decide(snapshot))
        state = replace(state, memory=decisions[-1].memory or {})
    return decisions


BUSY = {P: {"gpu_utilization_frac": 1.0}, D: {"kv_usage_frac": 0.7}}
CONFIG = {"prefill": {"target": 0.5}, "decode": {"metric": "kv_usage_frac", "target": 0.7}}


def test_each_role_follows_its_own_metric_every_fifteen_seconds(make_snapshot: MakeSnapshot) -> None:
    idle = {P: {"gpu_utilization_frac": 0.5}, D: {"kv_usage_frac": 0.7}}
    decisions = run(make_snapshot, [BUSY, idle, idle, idle], **CONFIG)
    assert [d.wanted for d in decisions[:3]] == [{P: 4.0, D: 4.0}] * 3  # the counts stay until the next sync
    assert decisions[3].wanted == {P: 2.0, D: 4.0}  # the metric is at the target, so the desired count of 2 stays
    assert decisions[0].is_step and decisions[0].ratio == PdRatio(1, 1)
    assert [(s.name, s.value) for s in decisions[0].shown] == [
        ("prefill_gpu_utilization_frac", 1.0),
        ("decode_kv_usage_frac", 0.7),
    ]


def test_of_several_metrics_the_highest_count_holds(make_snapshot: MakeSnapshot) -> None:
    config = {**CONFIG, "decode_more": [{"metric": "waiting_requests", "target": 3.0}]}
    queue = {P: BUSY[P], D: {"kv_usage_frac": 0.35, "waiting_requests": 6.0}}
    (decision,) = run(make_snapshot, [queue], **config)
    assert decision.wanted == {P: 4.0, D: 8.0}  # 4 x 6 / 3, not 4 x 0.35 / 0.7
    assert [shown.name for shown in decision.shown][1:] == ["decode_kv_usage_frac", "decode_waiting_requests"]
    # The missing metric might ask for the replicas that run, so none leaves.
    (blind,) = run(make_snapshot, [{P: BUSY[P], D: {"kv_usage_frac": 0.1}}], **config)
    assert blind.wanted == {P: 4.0, D: 4.0}
    assert blind.memory is not None and blind.memory["decode_recommended"] == (4.0,)


def test_a_role_without_metrics_stays_and_if_both_lack_them_there_is_no_decision(make_snapshot: MakeSnapshot) -> None:
    assert run(make_snapshot, [{P: BUSY[P]}], **CONFIG)[0].wanted == {P: 4.0, D: 4.0}
    first, *_, blind = run(make_snapshot, [BUSY, {}, {}, {}], **CONFIG)
    assert blind.wanted is None and blind.memory is not None and first.memory is not None
    assert blind.memory["prefill_recommended"] == first.memory["prefill_recommended"] == (4.0,)
    assert run(make_snapshot, [{}])[0].wanted is None


def test_replicas_that_start_count_as_idle_for_a_growth(make_snapshot: MakeSnapshot) -> None:
    policy = Hpa(HpaConfig.model_validate(CONFIG), ratio=PdRatio(1, 2), slo=SloConfig())
    state = ControllerState(desired={PoolKey("g0", P): 3, PoolKey("g0", D): 4})
    decision = policy.decide(make_snapshot(2, 4, stats=BUSY, state=state))
    assert decision.wanted == {P: 4.0, D: 4.0}  # 2.0 of utilization over 3 replicas are 4 at 0.5, not 6


def test_memory_is_bounded_by_the_windows_and_the_policy_has_no_other_state(make_snapshot: MakeSnapshot) -> None:
    ticks = [BUSY, {P: {"gpu_utilization_frac": 0.1}, D: {"kv_usage_frac": 0.1}}] * 200
    decisions = run(make_snapshot, ticks, **CONFIG)
    memory = decisions[-1].memory
    assert memory is not None and max(len(series) for series in memory.values()) <= 20  # 300 s at 15 s
    assert run(make_snapshot, ticks, **CONFIG) == decisions
