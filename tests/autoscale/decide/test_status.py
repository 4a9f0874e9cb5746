"""The coordinator's stored state outlives the coordinator and an update."""

import json
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.status import CYCLE, CoordinatorState, CycleRecord, PlanRecord, stored_state
from autoscale.policies.heteroscale import Signal
from autoscale.ratio import PdRatio
from autoscale.types import ControllerState, Decision, Latency, Note, NoteKind, Plan, Traffic
from kvtransfer.topology import Role
from tests.autoscale.virtual_serve import VirtualServe


def _state(plan: Plan) -> CoordinatorState:
    signals = {Signal.DECODE_TPS: 400.0}
    record = PlanRecord(plan=plan, running={}, draining={}, latency=Latency(), traffic=Traffic(), signals=signals)
    cycle = CycleRecord(services={"m": record}, nodes=None, places=None, policy_call_p99_s=0.0, is_hooked=True)
    return CoordinatorState(version=7, cordoned=("node-1",), cycle=cycle)


def _plan_with_notes(make_autoscale: Callable[..., AutoscaleConfig]) -> Plan:
    controller = Controller(make_autoscale(guard={"cooldown_out_s": 60.0}))
    cluster = VirtualServe(controller, {Role.PREFILL: 1.0, Role.DECODE: 1.0})
    return next(plan for plan in map(cluster.tick, (90.0, 200.0, 400.0)) if plan.held_back)


def test_a_stored_state_is_read_again(make_autoscale: Callable[..., AutoscaleConfig]) -> None:
    state = _state(_plan_with_notes(make_autoscale))
    assert stored_state(state.to_json()) == state
    assert stored_state(None) == CoordinatorState()


def test_a_stored_state_whose_notes_are_plain_texts_is_read_too(
    make_autoscale: Callable[..., AutoscaleConfig],
) -> None:
    state = _state(_plan_with_notes(make_autoscale))
    stored = json.loads(state.to_json())
    stored["cycle"]["services"]["m"]["plan"]["held_back"] = ["cooldown"]
    again = stored_state(json.dumps(stored).encode())
    assert (again.version, again.cordoned) == (7, ("node-1",))
    assert again.cycle is not None
    assert again.cycle.services["m"].plan.held_back == (Note(NoteKind.UNKNOWN, "cooldown"),)


def test_a_stored_state_without_signals_is_read_too(make_autoscale: Callable[..., AutoscaleConfig]) -> None:
    stored = json.loads(_state(_plan_with_notes(make_autoscale)).to_json())
    del stored["cycle"]["services"]["m"]["signals"]
    again = stored_state(json.dumps(stored).encode())
    assert again.cycle is not None
    assert again.cycle.services["m"].signals == {}


def test_a_stored_state_of_another_form_reads_as_an_empty_one() -> None:
    assert stored_state(b'{"version": "many"}') == CoordinatorState()


@pytest.mark.parametrize("ratio", [PdRatio(12, 1), PdRatio(1, 7), PdRatio(2, 3)])
def test_a_policys_own_ratio_reaches_the_coordinator_even_if_no_configuration_may_have_it(ratio: PdRatio) -> None:
    decision = Decision(wanted=None, reason="its own", ratio=ratio)
    plan = Plan(counts={}, admitted=(), withdrawn=(), victims=(), decision=decision, state=ControllerState())
    record = PlanRecord(plan=plan, running={}, draining={}, latency=Latency(), traffic=Traffic())
    cycle = CycleRecord(services={"m": record}, nodes=None, places=None, policy_call_p99_s=0.0, is_hooked=True)
    assert CYCLE.validate_python(CYCLE.dump_python(cycle, mode="json")) == cycle
    with pytest.raises(ValidationError, match="is impossible"):
        AutoscaleConfig.model_validate({"pd_ratio": "12:1", "policy": {"kind": "wva"}})
