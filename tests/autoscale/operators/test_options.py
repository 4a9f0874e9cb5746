"""The table of options, and demands that cannot be planned."""

import math
from dataclasses import replace

import pytest

from autoscale.operators.costs import Phase
from autoscale.operators.demand import BadCostError, Demand, MemoryTooSmallError, PlanError
from autoscale.operators.gpu import gpu_named
from autoscale.operators.option_table import option_table
from autoscale.operators.options import MEMORY_FRAC, Limits, batches_up_to
from autoscale.operators.settings import OperatorSetting, replica_gpus
from autoscale.operators.sm_shares import load_shares
from tests.autoscale.operators.conftest import CONTENTION, MakeTable
from tests.autoscale.operators.roofline import QWEN2_7B, HandCosts, Roofline


def test_batches_are_a_few_that_grow() -> None:
    assert batches_up_to(16) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert batches_up_to(10) == (1, 2, 3, 4, 6, 8, 10)
    assert batches_up_to(1) == (1,)


def test_collectives_follow_the_operator_before_them() -> None:
    """The all-reduce after o takes no time on one GPU. It has no replicas, and its time is in o at two GPUs."""
    costs = Roofline(shape=QWEN2_7B, phase=Phase.PREFILL)
    table = option_table(
        costs,
        demand=Demand(passes_per_s=1.0, length_tokens=512, slo_s=1.0),
        phase=Phase.PREFILL,
        gpu=gpu_named("A100"),
        limits=Limits(batches=(1, 4), most_parallel=2),
        edges=(("attention", "o"), ("o", "o_all_reduce"), ("o_all_reduce", "post_norm")),
    )
    assert len(table.operators) == len(costs.names) - 2
    assert table.edges == (("attention", "o"), ("o", "post_norm"))
    o = table.operators[table.names.index("o")]
    at = {"parallel": 2, "length_tokens": 512, "batch": 4}
    assert o.parallel.tolist() == [1, 1, 2, 2]
    assert o.time_s[3] == costs.time_s("o", **at) + costs.time_s("o_all_reduce", **at)
    assert o.gpu_s[3] == pytest.approx(2 * o.time_s[3] / 4)


def test_kv_grows_with_requests_in_the_model(make_table: MakeTable) -> None:
    costs = HandCosts(fixed_s={"attention": 0.1}, each_s={"attention": 0.0}, weights={"attention": 4e9}, kv_bytes=1e9)
    table = make_table(costs, rate=100.0, slo_s=0.5, batches=(1, 8))
    assert table.in_flight == 50.0
    one = table.operators[0]
    assert one.gpu_bytes(1, 5.0) == 12e9  # a batch of 8 is the least that is in memory
    assert one.gpu_bytes(1, 50.0) == 54e9
    assert table.least_replicas[0].tolist() == [11, 2]  # 10 Erlang; 1.25 Erlang, and 25 GB of KV on each of two
    assert table.memory_bytes == MEMORY_FRAC * gpu_named("A100").memory_bytes


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
def test_bad_costs_are_named(make_table: MakeTable, value: float) -> None:
    with pytest.raises(BadCostError, match=r"operator b, parallel 1, length_tokens 1024, batch 1: the value is"):
        make_table(HandCosts(fixed_s={"a": 0.1, "b": value}, each_s={"a": 0.1, "b": 0.0}))
    with pytest.raises(BadCostError, match="operator a, weight_bytes"):
        make_table(HandCosts(fixed_s={"a": 0.1}, each_s={"a": 0.1}, weights={"a": value}))


def test_what_cannot_be_planned_is_named(make_table: MakeTable) -> None:
    heavy = HandCosts(fixed_s={"a": 0.1}, each_s={"a": 0.1}, weights={"a": 90e9})
    with pytest.raises(
        MemoryTooSmallError, match=r"operator a needs 90 GB on each of 1 GPUs, and one A100 has 76\.6 GB"
    ):
        make_table(heavy)
    with pytest.raises(PlanError, match="no tensor parallel size up to 8"):
        make_table(HandCosts(fixed_s={"a": 0.1}, each_s={"a": 0.1}, sizes=(16,)))
    with pytest.raises(PlanError, match="give 1 or more"):
        make_table(batches=(0,))
    with pytest.raises(PlanError, match="take no time"):
        make_table(HandCosts(fixed_s={}, each_s={}))
    for field, value in (("passes_per_s", math.nan), ("passes_per_s", -1.0), ("length_tokens", 0), ("slo_s", math.inf)):
        with pytest.raises(PlanError, match=field):
            replace(Demand(passes_per_s=1.0, length_tokens=1, slo_s=1.0), **{field: value})


def test_mps_gives_each_operator_the_share_that_it_needs() -> None:
    """Eq. 6: a decode step of 64 sequences needs half of the SMs for its products, and is at most 5 % slower."""
    costs = Roofline(shape=QWEN2_7B, phase=Phase.DECODE)
    demand = Demand(passes_per_s=100.0, length_tokens=512, slo_s=1.0)
    limits = Limits(batches=(64,), most_parallel=1)
    gpu, shares = gpu_named("A100"), load_shares(CONTENTION / "h100_80gb_sm_shares.csv")
    table, whole = (
        option_table(costs, demand=demand, phase=Phase.DECODE, gpu=gpu, limits=limits, shares=one)
        for one in (shares, None)
    )
    gate_up = table.operators[table.names.index("gate_up")]
    assert 10 < gate_up.sm_share_percent[0] < 100
    for one, full in zip(table.operators, whole.operators, strict=True):
        assert full.sm_share_percent[0] == 100
        assert full.time_s[0] <= one.time_s[0] <= 1.05 * full.time_s[0] * (1 + 1e-12)


def test_settings_count_gpus_as_the_paper_does() -> None:
    settings = {
        "a": OperatorSetting(replicas=3, batch=1, parallel=2),
        "b": OperatorSetting(replicas=1, batch=8, parallel=1, sm_share_percent=40),
    }
    assert replica_gpus(settings) == 7
    with pytest.raises(ValueError, match="each number is 1 or more"):
        OperatorSetting(replicas=0, batch=1, parallel=1)
