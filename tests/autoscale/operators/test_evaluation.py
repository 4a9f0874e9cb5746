"""Latency, loads and memory of a plan, against hand-computed queues and simulations of shared GPUs."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.accounting import ACCOUNTINGS, own_queue_delays
from autoscale.operators.contention import UniformContention
from autoscale.operators.demand import PlanError
from autoscale.operators.evaluation import Assumptions, evaluate
from autoscale.operators.latency import critical_path, path_s
from autoscale.operators.layout import Layout, Replica, Unit, merged, with_replica
from autoscale.operators.loads import balanced_loads, even_loads
from autoscale.operators.queueing import WAITS, wait_in_services
from tests.autoscale.operators.conftest import MakeTable
from tests.autoscale.operators.network_sim import Service, deterministic, exponential, shared_latency_s
from tests.autoscale.operators.roofline import HandCosts


def _unit(count: int, *operators: int) -> Unit:
    return Unit(gpus=1, replicas=tuple(Replica(operator=one, gpus=(0,)) for one in operators), count=count)


def test_operators_on_one_gpu_are_one_queue(make_table: MakeTable, turns: Assumptions) -> None:
    """R GPUs that all host both operators are M/M/R of the whole pass: 0.14 s at a load of 1.68 Erlang."""
    judged = evaluate(make_table(), (0, 0), Layout(units=(_unit(3, 0, 1),)), turns)
    assert judged.latency_s == pytest.approx(0.14 * (1 + wait_in_services(3, 0.56)), rel=1e-12)
    assert judged.transfer_s.tolist() == [0.0, 0.0]


def test_operators_on_gpus_of_their_own_are_queues_of_their_own(make_table: MakeTable, turns: Assumptions) -> None:
    judged = evaluate(make_table(), (0, 0), Layout(units=(_unit(2, 0), _unit(1, 1))), turns)
    expected = 0.1 * (1 + wait_in_services(2, 0.6)) + 0.04 * (1 + wait_in_services(1, 0.48))
    assert judged.latency_s == pytest.approx(expected, rel=1e-12)


def test_a_gpu_without_time_left_is_never_a_plan(make_table: MakeTable, turns: Assumptions) -> None:
    """Each operator alone is stable on its GPU, 0.6 and 0.48 busy, but not both together."""
    layout = Layout(units=(_unit(1, 0, 1), _unit(1, 0)))
    assert evaluate(make_table(), (0, 0), layout, turns).latency_s < math.inf  # a router sends a elsewhere
    crowded = Layout(units=(_unit(1, 0, 1),))
    for accounting in ACCOUNTINGS.values():
        judged = evaluate(
            make_table(), (0, 0), crowded, Assumptions(contention=UniformContention(), accounting=accounting)
        )
        assert judged.latency_s == math.inf
        assert not judged.meets(1e9)


def test_batches_go_to_the_gpus_with_the_least_load() -> None:
    """Operator 1 can only use GPU 0, which is then full enough: operator 0 goes to the others."""
    layout = Layout(units=(_unit(1, 0, 1), _unit(2, 0)))
    loads = balanced_loads(layout, np.array([1.2, 0.7]))
    assert loads.busy.tolist() == [pytest.approx([0.0, 0.7], abs=1e-9), pytest.approx([0.6, 0.0])]
    assert even_loads(layout, np.array([1.2, 0.7])).busy.tolist() == [
        [pytest.approx(0.4), 0.7],
        [pytest.approx(0.4), 0],
    ]


@given(
    counts=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    works=st.lists(st.floats(0.0, 3.0), min_size=3, max_size=3),
)
def test_spreading_conserves_work_and_levels_loads(counts: list[int], works: list[float]) -> None:
    units = [_unit(count, *(one for one in range(3) if mask >> one & 1)) for mask, count in enumerate(counts, start=1)]
    layout = merged([*units, _unit(1, 0, 1, 2)])
    for spread in (balanced_loads, even_loads):
        loads = spread(layout, np.array(works))
        done = (loads.busy * loads.slot_counts[:, None]).sum(axis=0)
        assert done == pytest.approx(works, abs=1e-9)
        assert (loads.busy >= -1e-12).all()
    highest = [float(spread(layout, np.array(works)).busy.sum(axis=1).max()) for spread in (balanced_loads, even_loads)]
    assert highest[0] <= highest[1] + 1e-6


@pytest.mark.parametrize("service", [exponential, deterministic])
@pytest.mark.parametrize(
    ("hosts", "tolerance"),
    [([[0, 1, 2], [0, 1, 2]], 0.1), ([[0, 1, 2], [0]], 0.15), ([[0, 1], [1, 2]], 0.08)],
)
def test_shared_gpus_are_those_of_the_simulation(
    make_table: MakeTable, hosts: list[list[int]], service: Service, tolerance: float
) -> None:
    """Three GPUs that divide their time evenly over their jobs; mean latency of 30,000 jobs.

    Sharing does not depend on how services are distributed, so M/M/R is right here also for fixed services. It is
    12 % too low where an operator has a single GPU, which a router by load clears of other jobs only in part.
    """
    latency_s = shared_latency_s(
        rate_per_s=14.0, means_s=[0.1, 0.05], hosts=hosts, service=service, jobs=30_000, seed=7
    )
    units = [_unit(1, *(one for one, gpus in enumerate(hosts) if gpu in gpus)) for gpu in range(3)]
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.05}, each_s={"a": 0.0, "b": 0.0})
    assumptions = Assumptions(contention=UniformContention(), wait=WAITS["exponential"])
    judged = evaluate(make_table(costs, rate=14.0), (0, 0), merged(units), assumptions)
    assert judged.latency_s == pytest.approx(latency_s, rel=tolerance)


def test_the_accounting_as_printed_waits_too_little(make_table: MakeTable) -> None:
    """One GPU that is 0.9 busy with both operators: a simulation takes 1.5 s, own queues say a quarter of it."""
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.05}, each_s={"a": 0.0, "b": 0.0})
    table = make_table(costs, rate=6.0)
    base = Unit(gpus=1, replicas=tuple(Replica(operator=one, gpus=(0,), is_base=True) for one in range(2)))
    layout = Layout(units=(base,))
    simulated_s = shared_latency_s(
        rate_per_s=6.0, means_s=[0.1, 0.05], hosts=[[0], [0]], service=exponential, jobs=60_000, seed=1
    )
    judged = {
        name: evaluate(table, (0, 0), layout, Assumptions(contention=UniformContention(), accounting=one)).latency_s
        for name, one in ACCOUNTINGS.items()
    }
    assert judged["shared"] == pytest.approx(1.5)
    assert simulated_s == pytest.approx(1.5, rel=0.15)  # a queue that is 0.9 busy is slow to average
    assert judged["paper"] == pytest.approx(0.1 / 0.4 + 0.05 / 0.7)


def test_extra_replicas_stretch_each_other_in_the_accounting_as_printed(make_table: MakeTable) -> None:
    """a (0.3 busy) beside b (0.12): I = 1 / 0.88 for a and 1 / 0.7 for b."""
    layout = Layout(units=(_unit(1, 0, 1),))
    assumptions = Assumptions(contention=UniformContention(), accounting=ACCOUNTINGS["paper"])
    judged = evaluate(make_table(rate=3.0), (0, 0), layout, assumptions)
    assert judged.service_s.tolist() == pytest.approx([0.1 / 0.88, 0.04 / 0.7])
    assert judged.latency_s == pytest.approx(0.1 / 0.88 / (1 - 0.3 / 0.88) + 0.04 / 0.7 / (1 - 0.12 / 0.7))


def test_outputs_cross_gpus_only_where_they_must(make_table: MakeTable, turns: Assumptions) -> None:
    """Output of 3 GB over 300 GB/s takes 10 ms. All of it moves if no GPU hosts both, none if all do."""
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.04}, each_s={"a": 0.0, "b": 0.0}, output=3e9)
    table = make_table(costs, rate=2.0)
    apart = evaluate(table, (0, 0), Layout(units=(_unit(1, 0), _unit(1, 1))), turns)
    assert apart.transfer_s.tolist() == pytest.approx([0.01, 0.0])
    assert evaluate(table, (0, 0), Layout(units=(_unit(2, 0, 1),)), turns).transfer_s.tolist() == [0.0, 0.0]
    half = evaluate(table, (0, 0), Layout(units=(_unit(1, 0, 1), _unit(1, 0))), turns)
    # Each GPU is busy for 0.14. The first one does 0.3 of a, and all of b: 0.7 of the outputs of a must move.
    assert half.transfer_s[0] == pytest.approx(0.7 * 0.01)


def test_requests_wait_until_their_batch_is_full(make_table: MakeTable, turns: Assumptions) -> None:
    table = make_table(rate=10.0, batches=(1, 4))
    layout = Layout(units=(_unit(4, 0, 1),))
    judged = evaluate(table, (1, 0), layout, turns)
    assert judged.fill_s == pytest.approx(3 / 20)
    uncounted = Assumptions(contention=UniformContention(), is_fill_counted=False)
    assert judged.latency_s - evaluate(table, (1, 0), layout, uncounted).latency_s == pytest.approx(3 / 20)


def test_memory_is_that_of_weights_transients_and_all_requests_in_the_model(
    make_table: MakeTable, turns: Assumptions
) -> None:
    """12 requests/s for 1 s: 12 requests, 6 on each of two replicas of attention, 1 GB each."""
    costs = HandCosts(
        fixed_s={"attention": 0.01, "b": 0.01},
        each_s={"attention": 0.0, "b": 0.0},
        weights={"attention": 2e9, "b": 30e9},
        kv_bytes=1e9,
    )
    table = make_table(costs, slo_s=1.0)
    layout = Layout(units=(_unit(1, 0, 1), _unit(1, 0)))
    judged = evaluate(table, (0, 0), layout, turns)
    assert sorted(judged.gpu_bytes.tolist()) == pytest.approx([8e9, 38e9])
    assert judged.is_within_memory
    crowded = evaluate(make_table(costs, rate=90.0, slo_s=1.0), (0, 0), layout, turns)
    assert not crowded.is_within_memory  # 45 GB of KV beside 32 GB of weights
    assert not crowded.meets(1e9)


def test_layouts_merge_equal_units() -> None:
    assert merged([_unit(1, 0, 1), _unit(2, 1, 0), _unit(0, 1)]) == Layout(units=(_unit(3, 0, 1),))
    grown = with_replica((_unit(3, 0),), 0, Replica(operator=1, gpus=(0,)))
    assert Layout(units=grown).replicas(1) == 1
    assert Layout(units=grown).gpus == 3


def test_critical_path_by_hand() -> None:
    """a to b to d takes 6, a to c to d takes 8."""
    edges = (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
    assert critical_path("abcd", edges, (1, 2, 4, 3)) == ("a", "c", "d")
    assert path_s("abcd", edges, (1, 2, 4, 3)) == 8
    assert path_s("abcd", (), (1, 2, 4, 3)) == 10
    with pytest.raises(PlanError, match="cycle"):
        path_s("ab", (("a", "b"), ("b", "a")), (1, 2))
    with pytest.raises(PlanError, match="edge a to z"):
        path_s("ab", (("a", "z"),), (1, 2))


def test_loads_settle_over_a_chain_of_shared_gpus() -> None:
    """c is on GPU 2, b on 1 and 2, a on 0 and 1, with 0.6 of work each: each GPU ends at 0.6, after several rounds."""
    layout = Layout(units=(_unit(1, 0), _unit(1, 0, 1), _unit(1, 1, 2)))
    busy = balanced_loads(layout, np.array([0.6, 0.6, 0.6])).busy.sum(axis=1)
    assert busy.tolist() == pytest.approx([0.6, 0.6, 0.6], abs=0.01)  # six rounds; after one it is 0.75


def test_own_queues_do_not_see_that_a_gpu_is_full(make_table: MakeTable) -> None:
    """0.6 and 0.6 busy on one GPU: each queue alone is stable, so the paper's accounting needs a check of its own."""
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.1}, each_s={"a": 0.0, "b": 0.0})
    base = Unit(gpus=1, replicas=tuple(Replica(operator=one, gpus=(0,), is_base=True) for one in range(2)))
    paper = ACCOUNTINGS["paper"]
    printed = replace(paper, delays=own_queue_delays)
    for accounting, expected in ((paper, math.inf), (printed, 2 * 0.1 / 0.4)):
        assumptions = Assumptions(contention=UniformContention(), accounting=accounting)
        judged = evaluate(make_table(costs, rate=6.0), (0, 0), Layout(units=(base,)), assumptions)
        assert judged.latency_s == pytest.approx(expected)
