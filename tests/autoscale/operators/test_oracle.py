"""The brute-force oracle and its bounds."""

import math
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.operators.contention import UniformContention
from autoscale.operators.demand import PlanError, TooFewGpusError
from autoscale.operators.evaluation import Assumptions, evaluate
from autoscale.operators.greedy import plan_greedy
from autoscale.operators.model_level import plan_model_level
from autoscale.operators.options import OptionTable
from autoscale.operators.oracle import gap_frac, lower_bounds, plan_oracle
from autoscale.operators.search import best_on, plan_search
from tests.autoscale.operators.conftest import MakeTable
from tests.autoscale.operators.roofline import HandCosts


def test_oracle_by_hand(make_table: MakeTable, turns: Assumptions) -> None:
    """1.68 GPU-seconds of work a second need two GPUs. Both operators on both take 0.4755 s.

    The least weights on two GPUs within 0.5 s: a on both, b on one (a 1.2, b 0.48; each GPU is busy for 0.84).
    """
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.04}, each_s={"a": 0.0, "b": 0.0}, weights={"a": 1e9, "b": 1e9})
    assert plan_oracle(make_table(costs, slo_s=0.48), turns, 3).gpus == 2
    assert plan_oracle(make_table(costs, slo_s=0.47), turns, 3).gpus == 3
    frugal = plan_oracle(make_table(costs, slo_s=0.61), turns, 3)
    assert (frugal.gpus, frugal.weight_bytes) == (2, 3e9)
    expected = 0.1 * (1 + 0.84**2 * 2 / (1 + 0.84 * 2 + 0.84**2 * 2 / 0.16) / 0.16 / (2 * 0.16)) + 0.04 / 0.16
    assert frugal.evaluation.latency_s == pytest.approx(expected)


def test_it_counts_gpus_up_to_its_limit(make_table: MakeTable, turns: Assumptions) -> None:
    with pytest.raises(TooFewGpusError, match="1 GPUs do not carry 12 passes/s"):
        plan_oracle(make_table(), turns, 1)
    many = HandCosts(fixed_s=dict.fromkeys("abcde", 0.01), each_s=dict.fromkeys("abcde", 0.0))
    with pytest.raises(PlanError, match="at most 4 operators"):
        plan_oracle(make_table(many), turns, 1)


_CASES = st.fixed_dictionaries(
    {
        "rate": st.floats(0.5, 14.0),
        "slack": st.floats(1.05, 5.0),
        "fixed": st.tuples(st.floats(0.005, 0.05), st.floats(0.005, 0.05)),
        "each": st.tuples(st.floats(0.01, 0.1), st.floats(0.01, 0.1)),
        "taken": st.floats(0.7, 1.2),
        "weights": st.tuples(st.sampled_from([1e9, 40e9]), st.sampled_from([1e9, 40e9])),
        "sizes": st.sampled_from([(1,), (1, 2)]),
    }
)


def _case(make_table: MakeTable, case: dict[str, object]) -> tuple[OptionTable, Assumptions]:
    names = ("a", "attention")
    costs = HandCosts(
        fixed_s=dict(zip(names, case["fixed"], strict=True)),  # type: ignore[call-overload]
        each_s=dict(zip(names, case["each"], strict=True)),  # type: ignore[call-overload]
        weights=dict(zip(names, case["weights"], strict=True)),  # type: ignore[call-overload]
        sizes=case["sizes"],  # type: ignore[arg-type]
        scaling=0.85,
        kv_bytes=2e9,
        output=1e7,
    )
    free = make_table(costs, rate=case["rate"], slo_s=1e3, batches=(1, 2))
    slo_s = float(case["slack"]) * free.bare_s  # type: ignore[arg-type]
    table = make_table(costs, rate=case["rate"], slo_s=slo_s, batches=(1, 2))
    return table, Assumptions(contention=UniformContention(taken_frac=float(case["taken"])))  # type: ignore[arg-type]


@settings(max_examples=15)
@given(case=_CASES)
def test_bounds_never_change_the_result(make_table: MakeTable, case: dict[str, object]) -> None:
    table, assumptions = _case(make_table, case)
    results = []
    for is_pruned in (True, False):
        try:
            plan = plan_oracle(table, assumptions, 3, is_pruned=is_pruned)
            results.append((plan.gpus, plan.weight_bytes, plan.choice))
        except TooFewGpusError:
            results.append((math.inf, 0.0, ()))
    assert results[0] == results[1]


@given(case=_CASES, gpus=st.integers(1, 6))
def test_no_layout_is_faster_than_its_bound(make_table: MakeTable, case: dict[str, object], gpus: int) -> None:
    table, assumptions = _case(make_table, case)
    choices = list(product(*(range(len(one.batch)) for one in table.operators)))
    bounds = dict(zip(choices, lower_bounds(table, assumptions, choices, gpus), strict=True))
    plan = best_on(table, assumptions, gpus)
    if plan is not None:
        assert bounds[plan.choice] <= plan.evaluation.latency_s


@settings(max_examples=15)
@given(case=_CASES)
def test_no_planner_beats_the_oracle(make_table: MakeTable, case: dict[str, object]) -> None:
    table, assumptions = _case(make_table, case)
    try:
        oracle = plan_oracle(table, assumptions, 3)
    except TooFewGpusError:
        return
    again = evaluate(table, oracle.choice, oracle.layout, assumptions)
    assert again.meets(table.demand.slo_s)
    for planner in (plan_greedy, plan_search):
        assert gap_frac(planner(table, assumptions), oracle) >= 0.0
    with suppress(PlanError):  # an instance may be too large for its GPUs where operators are not
        assert gap_frac(plan_model_level(table, assumptions), oracle) >= 0.0


def test_kernels_that_overlap_carry_more_work_than_a_gpu_has_time(make_table: MakeTable) -> None:
    """0.6 and 0.6 busy: with a share of 0.6 each sees 0.6 + 0.6 x 0.6 = 0.96, and one GPU is enough."""
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.1}, each_s={"a": 0.0, "b": 0.0})
    overlapping = Assumptions(contention=UniformContention(taken_frac=0.6))
    plan = plan_oracle(make_table(costs, rate=6.0, slo_s=5.1), overlapping, 2)
    assert plan.gpus == 1
    assert plan.evaluation.latency_s == pytest.approx(0.2 / 0.04)
