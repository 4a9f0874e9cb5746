"""Sizing and placement together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.contention import load_pairs
from autoscale.operators.costs import Phase
from autoscale.operators.demand import MemoryTooSmallError, PlanError, SloBelowServiceError
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import gpu_named
from autoscale.operators.greedy import plan_greedy
from autoscale.operators.model_level import plan_model_level
from autoscale.operators.options import batches_up_to
from autoscale.operators.planners import PlanFunction
from autoscale.operators.search import plan_search
from tests.autoscale.operators.conftest import CONTENTION, MakeTable
from tests.autoscale.operators.roofline import LLAMA_70B, HandCosts, Roofline
from tests.lab.operators.model_costs import model_costs


def test_search_by_hand(make_table: MakeTable, turns: Assumptions) -> None:
    """Where sizing first and packing then takes four GPUs, three that host a and b each keep 0.2 s (0.1724 s).

    b is needed on two of them at most: a replica less of b, which waits longer, still keeps the objective.
    """
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.04}, each_s={"a": 0.0, "b": 0.0}, weights={"a": 1e9, "b": 2e9})
    plan = plan_search(make_table(costs, slo_s=0.2), turns)
    assert plan.gpus == 3
    assert plan.evaluation.meets(0.2)
    assert plan.settings["a"].replicas == 3
    assert plan.settings["b"].replicas == 2


def test_no_rate_needs_one_gpu(make_table: MakeTable, turns: Assumptions) -> None:
    plan = plan_search(make_table(rate=0.0, batches=(1, 2)), turns)
    assert plan.gpus == 1
    assert plan.evaluation.latency_s == pytest.approx(0.14)


def test_errors_have_names_and_numbers(make_table: MakeTable, turns: Assumptions) -> None:
    with pytest.raises(SloBelowServiceError, match=r"takes 0\.14 s"):
        plan_search(make_table(slo_s=0.1), turns)
    with pytest.raises(PlanError, match=r"2 GPUs do not keep 0\.2 s at 12 passes/s"):
        plan_search(make_table(), turns, most_gpus=2)
    heavy = HandCosts(fixed_s={"a": 0.1, "b": 0.1}, each_s={"a": 0, "b": 0}, weights={"a": 50e9, "b": 50e9})
    with pytest.raises(MemoryTooSmallError, match="1 A100 GPUs do not hold the weights"):
        plan_search(make_table(heavy, rate=1.0, slo_s=9.0), turns, most_gpus=1)
    assert plan_search(make_table(heavy, rate=1.0, slo_s=9.0), turns).gpus == 2


@given(rate=st.floats(0.5, 400.0), slack=st.floats(1.5, 10.0), phase=st.sampled_from(list(Phase)))
def test_it_never_takes_more_gpus_than_model_level(
    qwen_table: MakeTable, turns: Assumptions, rate: float, slack: float, phase: Phase
) -> None:
    """A model-level plan is one of the layouts that the search looks at, as long as one GPU holds the model."""
    bare_s = 0.062 if phase is Phase.PREFILL else 0.0105  # one GPU, batch 1
    rate = rate if phase is Phase.PREFILL else 40 * rate
    table = qwen_table(phase=phase, rate=rate, slo_s=slack * bare_s)
    plan = plan_search(table, turns)
    assert plan.evaluation.meets(table.demand.slo_s)
    assert plan.gpus <= plan_model_level(table, turns).gpus
    assert plan_search(table, turns).layout == plan.layout


def test_it_saves_memory_at_the_same_gpus(qwen_table: MakeTable) -> None:
    """The paper's finding of section 4.3: only operators that are bottlenecks are scaled out, so weights fall most."""
    assumptions = Assumptions(contention=load_pairs(CONTENTION / "h100_80gb_pairs.csv"))
    table = qwen_table(rate=40.0, slo_s=0.25)
    plan, model = plan_search(table, assumptions), plan_model_level(table, assumptions)
    assert plan.gpus <= model.gpus
    assert plan.weight_bytes < 0.8 * model.weight_bytes


def test_a_model_beyond_one_gpu_is_divided(make_table: MakeTable, turns: Assumptions) -> None:
    """141 GB of Llama-3-70B on GPUs with 76 GB for it."""
    table = make_table(Roofline(shape=LLAMA_70B, phase=Phase.PREFILL), rate=4.0, slo_s=2.0, batches=(1, 2, 4))
    plan = plan_search(table, turns)
    assert plan.evaluation.is_within_memory
    assert plan.gpus <= plan_greedy(table, turns).gpus
    assert plan.gpus <= plan_model_level(table, turns).gpus


@pytest.mark.parametrize("planner", [plan_greedy, plan_search])
def test_weights_that_nearly_fill_a_gpu_take_no_more_gpus_than_model_instances(
    planner: PlanFunction, make_table: MakeTable
) -> None:
    """66 GB of weights leave an H100 little room for KV, so sizes that hold all operators on each GPU come first."""
    table = make_table(
        model_costs("qwen2.5-vl-32b", "H100", Phase.DECODE),
        rate=8000.0,
        slo_s=0.0947,
        length_tokens=1124,
        batches=batches_up_to(256),
        gpu=gpu_named("H100"),
        phase=Phase.DECODE,
    )
    assumptions = Assumptions(contention=load_pairs(CONTENTION / "h100_80gb_pairs.csv"))
    assert planner(table, assumptions).gpus <= plan_model_level(table, assumptions).gpus
