"""The load planner's thresholds, trend and grace by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, PoolKey, Snapshot
from kvtransfer.topology import Role
from tests.lab.papers.dynamo_load import DynamoLoad, DynamoLoadConfig, decode_step, prefill_step

P, D = Role.PREFILL, Role.DECODE
MakeSnapshot = Callable[..., Snapshot]
Ticks = list[tuple[float | None, float | None]]
CONFIG = DynamoLoadConfig()


@pytest.mark.parametrize(
    ("mean", "first", "last", "expected"),
    [
        (6.0, 4.0, 8.0, 1),  # 8 + 3 x 4 = 20 will wait
        (13.0, 20.0, 6.0, 0),  # 6 - 3 x 14: the queue empties by itself
        (6.0, 6.0, 6.0, 1),
        (5.0, 0.0, 10.0, 0),  # not above the threshold
        (0.2, 0.0, 0.4, 0),
        (0.19, 0.0, 0.4, -1),
    ],
)
def test_the_prefill_step_by_hand(mean: float, first: float, last: float, expected: int) -> None:
    assert prefill_step(mean, first, last, CONFIG) == expected


@pytest.mark.parametrize(
    ("mean", "grace", "expected"), [(0.91, 3.0, 1), (0.9, 0.0, 0), (0.5, 0.0, 0), (0.49, 0.0, -1), (0.49, 1.0, 0)]
)
def test_the_decode_step_by_hand(mean: float, grace: float, expected: int) -> None:
    assert decode_step(mean, grace, CONFIG) == expected


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.floats(0, 3))
def test_more_load_never_takes_a_smaller_step(
    mean: float, last: float, first: float, more: float, grace: float
) -> None:
    assert -1 <= prefill_step(mean, first, last, CONFIG) <= prefill_step(mean + more, first, last + more, CONFIG) <= 1
    assert -1 <= decode_step(mean, grace, CONFIG) <= decode_step(mean + more, grace, CONFIG) <= 1


def run(
    make_snapshot: MakeSnapshot,
    ticks: Ticks,
    *,
    acted_on: bool = False,
    **config: Any,
) -> list[Decision]:
    """A tick every 5 s with a queue at each of two prefill replicas, and a KV usage of each of four decode replicas."""
    chosen = {"adjustment_s": 20.0, "pull_s": 5.0, **config}
    policy = DynamoLoad(DynamoLoadConfig.model_validate(chosen), ratio=PdRatio(1, 2), slo=SloConfig())
    counts = {P: 2, D: 4}
    memory: Any = {}
    decisions = []
    for index, (queue, kv) in enumerate(ticks):
        stats = {
            P: {} if queue is None else {"waiting_requests": queue},
            D: {} if kv is None else {"kv_usage_frac": kv, "running_requests": 1.0, "waiting_requests": 0.0},
        }
        state = ControllerState(desired={PoolKey("g0", role): count for role, count in counts.items()}, memory=memory)
        snapshot = make_snapshot(counts[P], counts[D], now_s=1000.0 + 5.0 * index, stats=stats, state=state)
        decisions.append(policy.decide(snapshot))
        memory, wanted = decisions[-1].memory, decisions[-1].wanted
        if acted_on and wanted is not None:
            counts = {role: int(wanted[role]) for role in Role}
    return decisions


def test_one_step_of_each_role_an_interval(make_snapshot: MakeSnapshot) -> None:
    decisions = run(make_snapshot, [(4.0, 0.3)] * 5)
    assert [d.wanted for d in decisions] == [None] * 4 + [{P: 3.0, D: 3.0}]  # 8 wait for prefill
    assert decisions[-1].is_step and decisions[-1].ratio == PdRatio(1, 1)
    assert [(s.name, s.value) for s in decisions[-1].shown] == [
        ("prefill_queue", 8.0),
        ("decode_kv", pytest.approx(0.3)),
    ]
    assert run(make_snapshot, [(0.0, 0.7)] * 5)[-1].wanted == {P: 1.0, D: 4.0}


def test_waiting_requests_count_as_a_fiftieth_of_the_kv(make_snapshot: MakeSnapshot) -> None:
    policy = DynamoLoad(DynamoLoadConfig(adjustment_s=5.0), ratio=PdRatio(1, 1), slo=SloConfig())
    stats = {
        P: {"waiting_requests": 1.0},
        D: {"kv_usage_frac": 0.8, "running_requests": 9.0, "waiting_requests": 10.0},
    }
    desired = {PoolKey("g0", P): 1, PoolKey("g0", D): 1}
    first = policy.decide(make_snapshot(stats=stats, now_s=1000.0, state=ControllerState(desired=desired)))
    state = ControllerState(desired=desired, memory=first.memory or {})
    second = policy.decide(make_snapshot(stats=stats, now_s=1005.0, state=state))
    assert second.wanted == {P: 1.0, D: 2.0} and second.shown[1].value == pytest.approx(1.0)


def test_an_interval_in_which_replicas_change_has_no_step_and_grace_keeps_decode(make_snapshot: MakeSnapshot) -> None:
    # A replica is added after 20 s. Its arrival voids the next interval, and grace keeps it for two more.
    decisions = run(make_snapshot, [(1.0, 0.95)] * 5 + [(1.0, 0.1)] * 17, acted_on=True)
    at = [d.wanted[D] if d.wanted else None for d in decisions[4::4]]
    assert at == [5.0, 5.0, 5.0, 5.0, 4.0]
    assert "came or went" in decisions[8].reason


def test_without_observations_there_is_no_decision(make_snapshot: MakeSnapshot) -> None:
    for ticks in ([(None, 0.3)] * 5, [(4.0, None)] * 5, [(None, None)] * 5):
        last = run(make_snapshot, ticks)[-1]
        assert last.wanted is None and "was observed" in last.reason
        assert last.memory is not None and last.memory["began_s"] == (1020.0,)


def test_memory_is_bounded_and_nothing_else_is_kept(make_snapshot: MakeSnapshot) -> None:
    ticks: Ticks = [(4.0, 0.3), (0.0, 0.95)] * 100
    decisions = run(make_snapshot, ticks, acted_on=True)
    assert max(len(series) for d in decisions for series in (d.memory or {}).values()) == 2
    assert run(make_snapshot, ticks, acted_on=True) == decisions


@pytest.mark.parametrize("config", [{"prefill_down_requests": 5.0}, {"decode_up_kv_frac": 0.4}])
def test_thresholds_that_would_undo_each_other_are_refused(config: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="must be below up"):
        DynamoLoadConfig.model_validate(config)
