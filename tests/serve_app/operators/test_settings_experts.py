"""Experts: a busy one is copied where ranks hold whole experts, and what engines cannot have is said with its size."""

import json
from pathlib import Path

import pytest

from autoscale.operators.gpu import gpu_named
from autoscale.operators.graph import OperatorGraph, operator_graph
from autoscale.operators.pair_load import PairLoad
from autoscale.operators.role_settings import RoleEngines
from autoscale.operators.step_times import EngineSettings
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role
from serve_app.operators.settings_config import RoleState
from serve_app.operators.settings_experts import expert_settings, unavailable, with_experts

CONFIGS = Path(__file__).parents[3] / "configs" / "operators"
SPREAD = {"enable_expert_parallel": True}


def graph_of(model: str) -> OperatorGraph:
    return operator_graph(json.loads((CONFIGS / "models" / f"{model}.json").read_text()))


def state(parallel: int) -> RoleState:
    return RoleState(replicas=1, engine=EngineSettings(parallel=parallel))


def test_a_busy_expert_is_copied_only_where_ranks_hold_whole_experts() -> None:
    graph = graph_of("qwen3-30b-a3b")
    spread = with_experts(state(4), Role.DECODE, SPREAD, graph, 8.0).engine
    # Its rank has 32 experts, so the busiest adds (8 - 1) / 32 to what chance gives.
    assert spread.expert_load == pytest.approx(1.0 + 1.029 * (3 / 512) ** 0.5 + 7 / 32)
    (found,) = expert_settings(Role.DECODE, spread, spread, graph, 8.0)
    assert (found.name, found.after) == ("eplb_config", {"num_redundant_experts": 8})
    assert found.expert_load == pytest.approx(1.0 + 1.029 * (3 / 512) ** 0.5)
    assert expert_settings(Role.DECODE, spread, spread, graph, None) == []
    for whole in (
        with_experts(state(4), Role.DECODE, {}, graph, 8.0),
        with_experts(state(1), Role.DECODE, SPREAD, graph, 8.0),
        with_experts(state(4), Role.DECODE, SPREAD, graph_of("qwen2-7b"), 8.0),
    ):
        assert whole.engine.expert_load == 1.0
        assert expert_settings(Role.DECODE, whole.engine, whole.engine, graph, 8.0) == []
    even = with_experts(state(4), Role.DECODE, {**SPREAD, "enable_eplb": True}, graph, 8.0).engine
    assert expert_settings(Role.DECODE, even, even, graph, 8.0) == []


def test_what_engines_cannot_have_is_said_with_its_size() -> None:
    load = PairLoad.of_requests([TraceRequest(at_s=float(n), input_tokens=500, output_tokens=50) for n in range(9)])
    times = OperatorTimes(gpu_named("H100"), load_operator_tables(CONFIGS / "tables" / "H100"))
    engines = RoleEngines("m", graph_of("qwen3-30b-a3b"), times, load, 0.05)
    notes = "\n".join(unavailable(engines, {Role.PREFILL: state(1), Role.DECODE: state(4)}, None))
    assert "single operators cannot be replicated" in notes
    assert "prefill: enable_dbo is not available" in notes and "with one GPU there is no exchange to hide" in notes
    assert "of a step of 256 tokens are exchanges" in notes
    assert "enable_expert_parallel is not written: with it the busiest of 4 ranks does 1.08 times the mean" in notes
