"""The planner that keeps slack for a demand that rises."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.evaluation import Assumptions, evaluate
from autoscale.operators.queueing import wait_in_services
from autoscale.operators.search import plan_search
from autoscale.operators.steady import plan_steady
from tests.autoscale.operators.conftest import MakeTable
from tests.autoscale.operators.roofline import HandCosts


def test_a_replica_that_a_higher_rate_needs_is_kept(make_table: MakeTable, turns: Assumptions) -> None:
    """Three GPUs, objective 0.22 s. At 12 requests/s one replica of b is enough (0.2140 s), so ``search`` keeps one.

    With all replicas, the GPUs carry 14.4 requests/s: rho is 0.672, and 0.14 (1 + wait(3, 0.672)) = 0.2043 s. They do
    not carry 15.6 (0.2316 s). At 14.4 requests/s two replicas of b are enough (0.2189 s), and one takes 0.2679 s.
    """
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.04}, each_s={"a": 0.0, "b": 0.0}, weights={"a": 1e9, "b": 2e9})
    table = make_table(costs, slo_s=0.22)
    steady, search = plan_steady(table, turns), plan_search(table, turns)
    assert steady.gpus == search.gpus == 3
    assert (search.settings["b"].replicas, steady.settings["b"].replicas) == (1, 2)
    full_s = [0.14 * (1.0 + float(wait_in_services(3, rate * 0.14 / 3))) for rate in (14.4, 15.6)]
    assert full_s[0] < 0.22 < full_s[1]
    raised = replace(table, demand=replace(table.demand, passes_per_s=14.4))
    latencies = [evaluate(raised, plan.choice, plan.layout, turns).latency_s for plan in (steady, search)]
    assert latencies == pytest.approx([0.2189, 0.2679], abs=1e-4)
    # The plan is judged with the replicas that it has, at the demand that was asked for.
    now = evaluate(table, steady.choice, steady.layout, turns)
    assert steady.evaluation.latency_s == now.latency_s < latencies[0]
    assert steady.evaluation.gpu_bytes.tolist() == now.gpu_bytes.tolist()


@given(rate=st.floats(0.5, 400.0), slack=st.floats(1.5, 10.0))
def test_it_takes_the_gpus_of_the_search_within_the_objective(
    qwen_table: MakeTable, turns: Assumptions, rate: float, slack: float
) -> None:
    table = qwen_table(rate=rate, slo_s=slack * 0.062)
    steady, search = plan_steady(table, turns), plan_search(table, turns)
    assert steady.evaluation.meets(table.demand.slo_s)
    assert steady.gpus == search.gpus
