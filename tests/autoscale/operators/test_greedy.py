"""The greedy planner that sizes operators together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.contention import UniformContention
from autoscale.operators.costs import Phase
from autoscale.operators.demand import MemoryTooSmallError, PlanError, SloBelowServiceError
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.greedy import plan_greedy
from autoscale.operators.joint_sizing import Together, joint_sizings
from autoscale.operators.model_level import plan_model_level
from autoscale.operators.paper_greedy import plan_paper_greedy
from autoscale.operators.queueing import wait_in_services
from tests.autoscale.operators.conftest import MakeTable
from tests.autoscale.operators.roofline import HandCosts


def test_sizing_together_by_hand(make_table: MakeTable, turns: Assumptions) -> None:
    """12 requests/s of 0.14 s are 1.68 GPUs of work. Three GPUs take 0.1724 s, two take 0.4755 s: 0.2 s needs three.

    Two replicas of b are enough: the plan of ``test_search_by_hand``.
    """
    table = make_table(slo_s=0.2)
    together = Together(table=table, assumptions=turns)
    assert together.latency_s((0, 0), 3) == pytest.approx(0.14 * (1 + float(wait_in_services(3, 0.56))))
    assert together.least_gpus((0, 0), 100) == 3
    assert {sizing.gpus for sizing in joint_sizings(table, turns, 100)} == {3}
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.04}, each_s={"a": 0.0, "b": 0.0}, weights={"a": 1e9, "b": 2e9})
    plan = plan_greedy(make_table(costs, slo_s=0.2), turns)
    assert plan.gpus == 3
    assert plan.settings["b"].replicas == 2
    assert plan_paper_greedy(make_table(slo_s=0.2), turns).gpus == 3


def test_a_large_batch_is_taken_by_all_operators_of_a_gpu(make_table: MakeTable, turns: Assumptions) -> None:
    """Services of 0.1 s for any batch: 100 requests/s are 20 GPUs of work at batch 1, and 0.625 at batch 32.

    A batch of 32 is full after 0.155 s. One operator alone gains little from it, since the other still needs ten GPUs.
    """
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.1}, each_s={"a": 0.0, "b": 0.0})
    plan = plan_greedy(make_table(costs, rate=100.0, slo_s=0.8, batches=(1, 32)), turns)
    assert plan.gpus == 1
    assert {setting.batch for setting in plan.settings.values()} == {32}
    assert plan.evaluation.latency_s == pytest.approx(31 / 200 + 0.2 / (1 - 0.625))


def test_one_operator_may_take_another_batch(make_table: MakeTable, turns: Assumptions) -> None:
    """a gains nothing from a batch, and b all: a keeps batch 1, since its service would take 16 times as long."""
    costs = HandCosts(fixed_s={"a": 0.0, "b": 0.1}, each_s={"a": 0.01, "b": 0.0})
    plan = plan_greedy(make_table(costs, rate=80.0, slo_s=0.5, batches=(1, 16)), turns)
    assert (plan.settings["a"].batch, plan.settings["b"].batch) == (1, 16)
    assert plan.gpus == 2


def test_impossible_demands_have_a_name(make_table: MakeTable, turns: Assumptions) -> None:
    with pytest.raises(SloBelowServiceError, match=r"takes 0\.14 s"):
        plan_greedy(make_table(slo_s=0.1), turns)
    with pytest.raises(PlanError, match=r"no number of GPUs up to 65,536 keeps 0\.5 s at 1 passes/s"):
        plan_greedy(make_table(rate=1.0, slo_s=0.5, batches=(8,), costs=_slow()), turns)
    heavy = HandCosts(fixed_s={"a": 0.1, "b": 0.1}, each_s={"a": 0, "b": 0}, weights={"a": 50e9, "b": 50e9})
    assert plan_greedy(make_table(heavy, rate=1.0, slo_s=9.0), turns).gpus == 2


def _slow() -> HandCosts:
    return HandCosts(fixed_s={"a": 0.1}, each_s={"a": 0.0})


@given(rate=st.floats(0.5, 400.0), slack=st.floats(1.5, 10.0), phase=st.sampled_from(list(Phase)))
def test_it_keeps_the_objective_with_no_more_gpus_than_model_level(
    qwen_table: MakeTable, turns: Assumptions, rate: float, slack: float, phase: Phase
) -> None:
    """Model instances are one of its first sizings, as long as one GPU holds the model."""
    bare_s = 0.062 if phase is Phase.PREFILL else 0.0105  # one GPU, batch 1
    table = qwen_table(phase=phase, rate=rate if phase is Phase.PREFILL else 40 * rate, slo_s=slack * bare_s)
    plan = plan_greedy(table, turns)
    assert plan.evaluation.meets(table.demand.slo_s)
    assert plan.gpus <= plan_model_level(table, turns).gpus
    assert plan_greedy(table, turns).layout == plan.layout


def test_operators_too_large_for_any_layout_are_named(make_table: MakeTable) -> None:
    costs = HandCosts(fixed_s={"attention": 0.01}, each_s={"attention": 0.0}, kv_bytes=1e9)
    turns = Assumptions(contention=UniformContention())
    plan = plan_greedy(make_table(costs, rate=100.0, slo_s=2.0), turns)
    assert plan.gpus == 3  # 200 requests of 1 GB on GPUs with 76 GB for them
    with pytest.raises(MemoryTooSmallError, match="needs 2e\\+03 GB"):
        make_table(HandCosts(fixed_s={"attention": 0.01}, each_s={"attention": 0.0}, kv_bytes=2e12), rate=1.0)


def test_the_estimate_of_each_move_is_the_latency_of_the_choice_after_it(
    qwen_table: MakeTable, turns: Assumptions
) -> None:
    """Each operator at each of its options, from a choice whose largest batch only one operator has."""
    table = qwen_table(phase=Phase.DECODE, rate=5000.0, slo_s=0.05)
    together = Together(table=table, assumptions=turns)
    choice = tuple(
        int(((one.batch == (64 if place == 2 else 16)) & (one.parallel == 1)).argmax())
        for place, one in enumerate(table.operators)
    )
    gpus = together.least_gpus(choice, 100)
    assert gpus is not None
    moved, compared, option = together._moved_s(choice, gpus), 0, 0
    for place, one in enumerate(table.operators):
        for at in range(len(one.batch)):
            after = (*choice[:place], at, *choice[place + 1 :])
            if together.least_by_work(after) <= gpus and together.latency_s(after, gpus) < 10.0:
                assert moved[option] == pytest.approx(together.latency_s(after, gpus), rel=0.02)  # the grid of waits
                compared += 1
            option += 1
    assert compared > 20
