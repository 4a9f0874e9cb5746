"""Algorithm 2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.accounting import ACCOUNTINGS
from autoscale.operators.contention import UniformContention
from autoscale.operators.demand import PlanError, SloBelowServiceError
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.layout import Replica, Unit
from autoscale.operators.paper_greedy import plan_apart, plan_paper_greedy
from autoscale.operators.placement import place, place_apart
from autoscale.operators.sizing import Sizing, size
from tests.autoscale.operators.conftest import MakeTable
from tests.autoscale.operators.roofline import HandCosts

# Latency of operators a and b at 12 requests/s on three GPUs, of which all host a and one hosts b. Loads are 1.2 and
# 0.48, so each GPU is busy for 0.56. Three servers: C = 1.796073 / (4.0912 + 1.796073), one server: C = 0.56.
_ON_THREE_S = 0.14 + 0.1 * (1.796073 / (4.0912 + 1.796073)) / (3 * 0.44) + 0.04 * 0.56 / 0.44


def test_algorithm_2_by_hand(make_table: MakeTable, turns: Assumptions) -> None:
    """Algorithm 1 gives R = 3 and 1, so there is one instance, and two extra replicas of a.

    With an objective of 0.22 s the instance fits on one GPU, since its latency of 0.2140 s counts the work of a there.
    The two extra replicas cannot go to that GPU, which hosts a already: two new GPUs.
    """
    table = make_table(slo_s=0.22)
    plan = place(table, size(table, turns), turns)
    assert plan.gpus == 3
    assert plan.evaluation.latency_s == pytest.approx(_ON_THREE_S, rel=1e-6)  # the numbers above have seven digits
    assert plan.layout.units == (
        Unit(gpus=1, replicas=(Replica(operator=0, gpus=(0,)),), count=2),
        Unit(
            gpus=1,
            replicas=(Replica(operator=0, gpus=(0,), is_base=True), Replica(operator=1, gpus=(0,), is_base=True)),
        ),
    )
    assert plan.evaluation.gpu_busy_fracs.tolist() == pytest.approx([0.56, 0.56])
    assert plan.settings["a"].replicas == 3


def test_interference_provisions_a_new_device(make_table: MakeTable, turns: Assumptions) -> None:
    """With an objective of 0.2 s the same placement is too slow: a and b must not share a GPU, which takes four."""
    table = make_table(slo_s=0.2)
    plan = place(table, size(table, turns), turns)
    assert plan.gpus == 4
    assert plan.evaluation.latency_s == pytest.approx(0.18477, abs=1e-5)  # that of Algorithm 1: nothing is shared
    # With smaller objectives for Algorithm 1 there are more replicas, whose queues leave room for interference.
    greedy = plan_paper_greedy(table, turns)
    assert greedy.gpus == 3
    # b has two replicas: C = 1.425455 / (2.12 + 1.425455) at a load of 1.12 Erlang.
    waits_s = 0.1 * (1.796073 / 5.887273) / (3 * 0.44) + 0.04 * (1.425455 / 3.545455) / (2 * 0.44)
    assert greedy.evaluation.latency_s == pytest.approx(0.14 + waits_s, rel=1e-6)


def test_an_extra_replica_goes_where_slack_is_largest(make_table: MakeTable, turns: Assumptions) -> None:
    """R = 2, 2 and 1. The second a takes a new GPU, and the second b shares it: no third one."""
    costs = HandCosts(fixed_s={"a": 0.0, "b": 0.0, "c": 0.0}, each_s={"a": 0.1, "b": 0.01, "c": 0.01})
    table = make_table(costs, rate=8.0, slo_s=0.5)
    plan = place(table, Sizing(choice=(0, 0, 0), replicas=(2, 2, 1), latency_s=0.0, steps=0), turns)
    assert plan.evaluation.meets(0.5)
    hosted = sorted(sorted(one.operator for one in unit.replicas) for unit in plan.layout.units)
    assert hosted == [[0, 1], [0, 1, 2]]
    assert plan.gpus == 2


def test_memory_provisions_a_new_device(make_table: MakeTable, turns: Assumptions) -> None:
    """Two operators of 50 GB each do not fit on one A100."""
    costs = HandCosts(fixed_s={"a": 0.01, "b": 0.01}, each_s={"a": 0.0, "b": 0.0}, weights={"a": 50e9, "b": 50e9})
    plan = plan_paper_greedy(make_table(costs, rate=1.0, slo_s=1.0), turns)
    assert plan.gpus == 2
    assert plan.evaluation.is_within_memory
    assert plan.weight_bytes == 100e9


def test_without_shared_gpus_the_largest_operator_counts(make_table: MakeTable, turns: Assumptions) -> None:
    """Default streams: the k-th replicas of all operators are on the k-th GPU, so R = 3 and 1 take three GPUs."""
    table = make_table(slo_s=0.22)
    plan = place_apart(table, size(table, turns), turns)
    assert plan.gpus == 3
    assert plan.layout.replicas(1) == 1


def test_an_impossible_objective_is_named(make_table: MakeTable, turns: Assumptions) -> None:
    with pytest.raises(
        SloBelowServiceError, match=r"0\.13 s, and one pass that never waits takes 0\.14 s at 1024 tokens"
    ):
        plan_paper_greedy(make_table(slo_s=0.13), turns)


@given(
    rate=st.floats(0.1, 60.0),
    slack=st.floats(1.1, 10.0),
    taken=st.floats(0.5, 1.3),
    accounting=st.sampled_from(sorted(ACCOUNTINGS)),
)
def test_every_plan_keeps_the_objective_and_hosts_all_replicas(
    make_table: MakeTable, rate: float, slack: float, taken: float, accounting: str
) -> None:
    costs = HandCosts(
        fixed_s={"a": 0.02, "attention": 0.01, "c": 0.003},
        each_s={"a": 0.08, "attention": 0.03, "c": 0.01},
        sizes=(1, 2),
        scaling=0.8,
        weights={"a": 30e9, "attention": 5e9, "c": 1e9},
        kv_bytes=1e8,
        output=1e6,
    )
    table = make_table(costs, rate=rate, slo_s=slack * 0.153, batches=(1, 2, 4))
    assumptions = Assumptions(contention=UniformContention(taken_frac=taken), accounting=ACCOUNTINGS[accounting])
    plan = plan_paper_greedy(table, assumptions)
    assert plan.evaluation.meets(table.demand.slo_s)
    assert all(setting.replicas >= 1 for setting in plan.settings.values())
    assert plan.gpus >= plan.busy_gpus
    assert plan_paper_greedy(table, assumptions).layout == plan.layout


def test_the_default_stream_mode_keeps_the_objective_on_its_own_gpus(make_table: MakeTable, turns: Assumptions) -> None:
    """As many GPUs as the operator with the most replicas has; b has fewer replicas, so there are fewer weights."""
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.04}, each_s={"a": 0.0, "b": 0.0}, weights={"a": 1e9, "b": 1e9})
    plan = plan_apart(make_table(costs, slo_s=0.22), turns)
    assert plan.evaluation.meets(0.22)
    assert plan.gpus == max(setting.replicas for setting in plan.settings.values())
    assert plan.weight_bytes < 2e9 * plan.gpus


def test_a_placement_that_misses_the_objective_is_no_plan(make_table: MakeTable, turns: Assumptions) -> None:
    """Outputs of 30 GB take 0.1 s to the next GPU: one GPU has no time for both, and two are too slow."""
    costs = HandCosts(
        fixed_s={"a": 0.1, "b": 0.1}, each_s={"a": 0.0, "b": 0.0}, weights={"a": 50e9, "b": 50e9}, output=3e10
    )
    with pytest.raises(PlanError, match=r"no placement keeps 0\.25 s at 1 passes/s"):
        plan_paper_greedy(make_table(costs, rate=1.0, slo_s=0.25), turns)
