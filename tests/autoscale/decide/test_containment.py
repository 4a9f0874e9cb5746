"""A policy that fails keeps the counts of its service, and the plan says which policy and why."""

import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.containment import PolicyLate, checked_decision
from autoscale.decide.controller import Controller
from autoscale.decide.cycle import tick_all
from autoscale.decide.decision_log import PLAN, config_line, decision_line, is_news, replay
from autoscale.decide.ray_policy_limit import LimitedCalls
from autoscale.extension import DEFERRED
from autoscale.policies.heteroscale import HeteroScale
from autoscale.ratio import PdRatio
from autoscale.types import ControllerState, Decision, Plan, PolicyFault, PoolKey, Snapshot
from kvtransfer.topology import Role
from tests.autoscale.own import CAUSES

P, D = Role.PREFILL, Role.DECODE
OWN = "tests.autoscale.own:Fixed"
MakeConfig = Callable[..., AutoscaleConfig]
MakeSnapshot = Callable[..., Snapshot]


@pytest.fixture
def snapshot(make_snapshot: MakeSnapshot) -> Snapshot:
    """Three replicas of each role, which serve."""
    plain = make_snapshot(3, 3)
    desired = {pool.key: 3 for pool in plain.pools}
    admitted = tuple(replica.replica_id for pool in plain.pools for replica in pool.replicas)
    state = ControllerState(
        ticked_s=995.0, desired=desired, admitted=admitted, memory={"series": (1.0, 2.0)}, scaled_out_s=0.0
    )
    return replace(plain, state=state)


def own(make_autoscale: MakeConfig, fault: str = "", **fields: Any) -> AutoscaleConfig:
    return make_autoscale(policy={"kind": OWN, "fault": fault}, **fields)


def counts(plan: Plan) -> list[int]:
    return list(plan.counts.values())


def test_a_policy_of_ones_own_decides(make_autoscale: MakeConfig, snapshot: Snapshot) -> None:
    config = make_autoscale(policy={"kind": OWN, "decode": 5})
    plan = Controller(config).tick(snapshot)
    assert counts(plan) == [5, 5]
    assert (plan.decision.reason, plan.decision.fault) == ("as configured", None)
    assert plan.state.memory == {"ticks": (1000.0,)}


@pytest.mark.parametrize("name", CAUSES)
def test_a_failing_policy_keeps_the_counts_and_its_memory_and_is_named(
    make_autoscale: MakeConfig, snapshot: Snapshot, name: str
) -> None:
    plan = Controller(own(make_autoscale, name)).tick(snapshot)
    assert counts(plan) == [3, 3]
    assert plan.state.memory == {"series": (1.0, 2.0)}
    assert plan.admitted == snapshot.state.admitted
    reason = plan.decision.reason
    assert reason.startswith(f"policy {OWN} ")
    assert reason.endswith("; the counts stay")
    assert CAUSES[name][1] in reason
    assert len(reason) < 500
    assert plan.decision.fault is (PolicyFault.RAISED if "raised" in reason else PolicyFault.INVALID)
    assert PLAN.validate_json(PLAN.dump_json(plan)) == plan


def test_a_policy_that_cannot_be_built_keeps_the_counts(make_autoscale: MakeConfig, snapshot: Snapshot) -> None:
    plan = Controller(make_autoscale(policy={"kind": "tests.autoscale.own:RaisingConstructor"})).tick(snapshot)
    assert counts(plan) == [3, 3]
    assert "raised OSError: no database" in plan.decision.reason


def test_settings_that_no_door_has_checked_are_an_error_of_the_policy(
    make_autoscale: MakeConfig, snapshot: Snapshot
) -> None:
    document = own(make_autoscale).model_dump(mode="json")
    document["policy"]["decode"] = -1
    plan = Controller(AutoscaleConfig.model_validate(document, context=DEFERRED)).tick(snapshot)
    assert counts(plan) == [3, 3]
    assert f"policy {OWN} raised ValidationError: decode: Input should be greater than 0" in plan.decision.reason


def test_a_built_in_policy_that_raises_is_contained_too(
    make_autoscale: MakeConfig, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: HeteroScale, snapshot: Snapshot) -> Decision:
        raise ArithmeticError("a sum went wrong")

    monkeypatch.setattr(HeteroScale, "decide", broken)
    plan = Controller(make_autoscale()).tick(snapshot)
    assert counts(plan) == [3, 3]
    assert plan.decision.reason == "policy heteroscale raised ArithmeticError: a sum went wrong; the counts stay"


def test_the_other_services_of_a_cycle_are_decided(make_autoscale: MakeConfig, snapshot: Snapshot) -> None:
    controllers = {
        "broken": Controller(own(make_autoscale, "zero")),
        "sound": Controller(make_autoscale(policy={"kind": OWN, "decode": 5})),
    }
    decided = tick_all(controllers, dict.fromkeys(controllers, snapshot))
    assert {name: counts(plan) for name, (_, plan) in decided.items()} == {"broken": [3, 3], "sound": [5, 5]}


def test_a_service_whose_tick_fails_keeps_its_counts_and_the_others_are_decided(
    make_autoscale: MakeConfig, snapshot: Snapshot
) -> None:
    controllers = {name: Controller(make_autoscale(policy={"kind": OWN, "decode": 5})) for name in ("broken", "sound")}
    too_much = tuple(
        replace(
            pool, replicas=tuple(replace(replica, waiting_requests=sys.float_info.max) for replica in pool.replicas)
        )
        for pool in snapshot.pools
    )
    snapshots = {"broken": replace(snapshot, pools=too_much), "sound": snapshot}
    with pytest.raises(OverflowError):
        tick_all(controllers, snapshots)
    errors = list[tuple[str, type]]()
    decided = tick_all(controllers, snapshots, on_error=lambda name, error: errors.append((name, type(error))))
    assert {name: counts(plan) for name, (_, plan) in decided.items()} == {"broken": [3, 3], "sound": [5, 5]}
    assert errors == [("broken", OverflowError)]
    assert decided["broken"][1].decision.reason.startswith("no decision: OverflowError")


@pytest.mark.parametrize("ratio", [PdRatio(Fraction(1, 3), 1), PdRatio(np.int64(1), np.float32(3.0))])  # type: ignore[arg-type]
def test_a_decision_has_plain_numbers_and_no_fault_of_its_own(make_autoscale: MakeConfig, ratio: PdRatio) -> None:
    answer = Decision(wanted={P: 1.0, D: 3.0}, reason="", ratio=ratio, fault=PolicyFault.LATE)
    decision = checked_decision(answer, make_autoscale().pd_ratio)
    assert decision.fault is None
    assert decision.ratio is not None
    assert {type(decision.ratio.prefill), type(decision.ratio.decode)} <= {int, float}


def test_a_policy_cannot_change_the_snapshot_of_the_tick(make_autoscale: MakeConfig, snapshot: Snapshot) -> None:
    plan = Controller(own(make_autoscale, "vandal")).tick(snapshot)
    assert counts(plan) == [3, 3]
    assert plan.decision.reason == "changed what it got"
    assert all(not pool.on for pool in snapshot.pools)
    assert snapshot.state.desired == {PoolKey("g0", role): 3 for role in Role}


def test_counts_set_by_hand_hold_whatever_the_policy_does(make_autoscale: MakeConfig, snapshot: Snapshot) -> None:
    plan = Controller(own(make_autoscale, "zero", override={"prefill": 2, "decode": 2})).tick(snapshot)
    assert plan.decision.reason == "set by hand"
    assert plan.state.desired == {PoolKey("g0", role): 2 for role in Role}


def test_a_policy_that_answers_too_late_keeps_the_counts(make_autoscale: MakeConfig, snapshot: Snapshot) -> None:
    def late(call: Callable[[], Decision]) -> Decision:
        raise PolicyLate("has been computing for 2.0 s, longer than 1 s")

    plan = Controller(own(make_autoscale), late).tick(snapshot)
    assert counts(plan) == [3, 3]
    assert plan.decision.fault is PolicyFault.LATE
    words = f"policy {OWN} has been computing for 2.0 s, longer than 1 s; the counts stay"
    assert plan.decision.reason == words


def test_a_log_of_failures_replays_as_it_was_written(make_autoscale: MakeConfig, snapshot: Snapshot) -> None:
    def late(call: Callable[[], Decision]) -> Decision:
        raise PolicyLate("has been computing for 2.0 s, longer than 1 s")

    failing = own(make_autoscale, "nan")
    plans = [Controller(failing).tick(snapshot), Controller(failing, late).tick(snapshot)]
    lines = [config_line("m", failing, 0.0, "start"), *(decision_line("m", snapshot, plan) for plan in plans)]
    assert list(replay(lines)) == [None, None]


def test_another_fault_is_news(make_autoscale: MakeConfig, snapshot: Snapshot) -> None:
    zero, nan = (Controller(own(make_autoscale, fault)).tick(snapshot) for fault in ("zero", "nan"))
    again = Controller(own(make_autoscale, "zero")).tick(snapshot)
    assert [is_news(nan, zero), is_news(again, zero)] == [True, False]


def test_an_aggregated_service_needs_no_prefill_count(make_autoscale: MakeConfig, make_snapshot: MakeSnapshot) -> None:
    config = make_autoscale(pd_ratio="0:1", policy={"kind": "tests.autoscale.own:AggregatedFixed", "fault": "one role"})
    plain = make_snapshot(0, 3, targets=(0, 3))
    decode = replace(plain, pools=plain.pools[1:])
    plan = Controller(config).tick(decode)
    assert plan.decision.wanted == {P: 0.0, D: 2.0}


def test_an_interrupt_that_a_policy_raises_does_not_end_the_process(
    make_autoscale: MakeConfig, snapshot: Snapshot
) -> None:
    calls = LimitedCalls()
    plan = Controller(own(make_autoscale, "interrupt"), lambda call: calls.run(call, 5.0)).tick(snapshot)
    assert counts(plan) == [3, 3]
    assert plan.decision.reason == f"policy {OWN} raised RuntimeError: KeyboardInterrupt; the counts stay"


def test_the_time_of_a_policy_includes_reading_its_answer(make_autoscale: MakeConfig, snapshot: Snapshot) -> None:
    calls = LimitedCalls()
    plan = Controller(own(make_autoscale, "slow answer"), lambda call: calls.run(call, 0.1)).tick(snapshot)
    assert counts(plan) == [3, 3]
    assert plan.decision.fault is PolicyFault.LATE
