"""Algorithm 1."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.contention import UniformContention
from autoscale.operators.costs import Phase
from autoscale.operators.demand import MemoryTooSmallError, PlanError, SloBelowServiceError
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.queueing import wait_in_services
from autoscale.operators.sizing import size
from autoscale.operators.sojourns import by_gpu_time, by_sojourn, sojourn_s
from tests.autoscale.operators.conftest import MakeTable
from tests.autoscale.operators.roofline import HandCosts


def test_algorithm_1_by_hand(make_table: MakeTable, turns: Assumptions) -> None:
    """Operators of 0.1 s and 0.04 s at 12 requests/s, one GPU and one request each, objective 0.2 s.

    Loads are 1.2 and 0.48 Erlang, so the seed is R = 2 and 1. Two servers at 1.2: C = 1.8 / (2.2 + 1.8) = 0.45 and
    W = 0.1 x 0.45 / (2 x 0.4) = 0.05625. One server at 0.48: W = 0.04 x 0.48 / 0.52 = 0.03692. T_total = 0.2332 s is
    above 0.2, so the bottleneck a gets a third replica: C = 0.48 / (2.92 + 0.48) = 0.14118, W = 0.1 x C / (3 x 0.6) =
    0.00784, T_total = 0.18477 s. A replica less of a breaks the objective, and b has only one: the end.
    """
    sizing = size(make_table(), turns)
    assert sizing.replicas == (3, 1)
    assert sizing.steps == 1
    assert sizing.latency_s == pytest.approx(0.14 + 0.04 * 0.48 / 0.52 + 0.1 * (0.48 / 3.4) / 1.8, rel=1e-12)


def test_a_request_waits_for_its_whole_batch(make_table: MakeTable, turns: Assumptions) -> None:
    """Line 8 as printed would divide T_v by the batch: 0.1 + 4 x 0.01 s for a batch of 4 would count as 0.035 s."""
    costs = HandCosts(fixed_s={"a": 0.1}, each_s={"a": 0.01})
    with pytest.raises(
        SloBelowServiceError, match=r"the objective is 0\.1 s, and one pass that never waits takes 0\.11 s"
    ):
        size(make_table(costs, rate=100.0, slo_s=0.1, batches=(1, 2, 4)), turns)
    sizing = size(make_table(costs, rate=100.0, slo_s=9.0, batches=(4,)), turns)
    # T = 0.14 s for 25 batches/s are 3.5 Erlang on four servers, and a batch is full after 3 / 200 s.
    assert sizing.replicas == (4,)
    expected = 0.14 * (1 + wait_in_services(4, 0.875)) + 3 / 200
    assert sizing.latency_s == pytest.approx(float(expected), rel=1e-12)


def test_replicas_that_are_not_needed_are_released(make_table: MakeTable, turns: Assumptions) -> None:
    """The seed takes the batch with the least sojourn time; a larger batch needs fewer replicas and is fast enough."""
    costs = HandCosts(fixed_s={"a": 0.1}, each_s={"a": 0.0})
    sizing = size(make_table(costs, rate=100.0, slo_s=0.5, batches=(1, 2, 4, 8, 16)), turns)
    assert sizing.replicas == (1,)
    assert sizing.choice == (4,)  # the batch of 16: 6.25 batches/s of 0.1 s


def test_no_rate_needs_one_replica_each(make_table: MakeTable, turns: Assumptions) -> None:
    sizing = size(make_table(rate=0.0, slo_s=0.14, batches=(1, 2)), turns)
    assert sizing.replicas == (1, 1)
    assert sizing.latency_s == pytest.approx(0.14)


def test_memory_limits_parallelism_and_replicas(make_table: MakeTable, turns: Assumptions) -> None:
    """100 GB of weights need two GPUs of 80 GB; KV of 120 requests of 1 GB each needs three replicas of 53."""
    fixed, each = {"attention": 0.02}, {"attention": 0.0}
    costs = HandCosts(fixed_s=fixed, each_s=each, sizes=(1, 2), weights={"attention": 100e9}, kv_bytes=1e9)
    table = make_table(costs, rate=100.0, slo_s=1.2, batches=(8,))
    sizing = size(table, turns)
    option = sizing.choice[0]
    assert table.operators[0].parallel[option] == 2
    room = 2 * table.memory_bytes - 100e9 - 8e9
    assert sizing.replicas[0] == -(-120 // (8 + room / 1e9))
    huge = HandCosts(fixed_s=fixed, each_s=each, sizes=(1, 2), weights={"attention": 200e9})
    with pytest.raises(MemoryTooSmallError, match="operator attention needs 100 GB on each of 2 GPUs"):
        make_table(huge)


def test_an_objective_that_queues_cannot_reach_is_named(make_table: MakeTable, turns: Assumptions) -> None:
    """Replicas bring waits as near to zero as an objective asks, but not services."""
    sizing = size(make_table(rate=5000.0, slo_s=0.1401), turns)
    assert sizing.latency_s <= 0.1401
    with pytest.raises(PlanError):
        size(make_table(rate=12.0, slo_s=0.1399), turns)


@given(
    rate=st.floats(0.01, 3000.0),
    slack=st.floats(1.001, 20.0),
    fixed=st.lists(st.floats(0.0, 0.1), min_size=2, max_size=4),
    each=st.floats(1e-4, 0.05),
)
def test_it_ends_within_the_objective(
    make_table: MakeTable, rate: float, slack: float, fixed: list[float], each: float
) -> None:
    costs = HandCosts(
        fixed_s={f"v{at}": seconds for at, seconds in enumerate(fixed)},
        each_s={f"v{at}": each for at in range(len(fixed))},
        sizes=(1, 2, 4),
        scaling=0.8,
        output=1e6,
    )
    turns = Assumptions(contention=UniformContention())
    bare_s = make_table(costs, rate=rate, slo_s=100.0, batches=(1, 2, 4, 8)).bare_s
    table = make_table(costs, rate=rate, slo_s=slack * bare_s, batches=(1, 2, 4, 8))
    sizing = size(table, turns)
    assert sizing.latency_s <= table.demand.slo_s
    for one, option, replicas in zip(table.operators, sizing.choice, sizing.replicas, strict=True):
        assert rate * one.time_s[option] / one.batch[option] < replicas
    assert size(table, turns) == sizing


def test_the_critical_path_is_what_counts(make_table: MakeTable, turns: Assumptions) -> None:
    """Two branches of 0.1 and 0.04 s side by side: a pass takes the longer one."""
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.04, "c": 0.01}, each_s={"a": 0.0, "b": 0.0, "c": 0.0})
    table = make_table(costs, rate=0.0, slo_s=0.112, edges=(("a", "c"), ("b", "c")))
    assert table.bare_s == pytest.approx(0.11)
    assert size(table, turns).latency_s == pytest.approx(0.11)


def test_decode_takes_large_batches(qwen_table: MakeTable, turns: Assumptions) -> None:
    """A decode step reads the weights once for the whole batch, so a good plan has few replicas with large batches."""
    table = qwen_table(phase=Phase.DECODE, rate=4000.0, slo_s=0.05, length_tokens=1024)
    sizing = size(table, turns)
    place = table.names.index("gate_up")
    assert table.operators[place].batch[sizing.choice[place]] >= 64


def test_the_seed_by_gpu_time_starts_with_large_batches(make_table: MakeTable, turns: Assumptions) -> None:
    """A service takes 0.1 s for any batch. A batch of one has the least sojourn time, one of 16 the least GPU time."""
    costs = HandCosts(fixed_s={"a": 0.1}, each_s={"a": 0.0})
    table = make_table(costs, rate=100.0, slo_s=5.0, batches=(1, 16))
    one = table.operators[0]
    sojourns_s = sojourn_s(table, one, table.least_replicas[0], turns)
    assert by_sojourn(one, sojourns_s).argmin() == 0
    assert by_gpu_time(one, sojourns_s).argmin() == 1
    for seed in (by_sojourn, by_gpu_time):
        assert size(table, turns, seed=seed).replicas == (1,)  # the objective leaves room for one replica
