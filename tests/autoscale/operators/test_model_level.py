"""The model-level baseline."""

from dataclasses import replace

import pytest

from autoscale.operators.accounting import ACCOUNTINGS, AS_PRINTED, Accounting
from autoscale.operators.contention import UniformContention
from autoscale.operators.costs import Phase
from autoscale.operators.demand import MemoryTooSmallError, SloBelowServiceError
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import gpu_named
from autoscale.operators.model_level import plan_model_level
from autoscale.operators.queueing import wait_in_services
from tests.autoscale.operators.conftest import MakeTable
from tests.autoscale.operators.roofline import LLAMA_70B, HandCosts, Roofline


def test_instances_are_the_fewest_that_keep_the_objective(make_table: MakeTable, turns: Assumptions) -> None:
    """A pass takes 0.14 s, so 12 requests/s are 1.68 Erlang. Two instances take 0.4755 s, three 0.1724 s."""
    plan = plan_model_level(make_table(slo_s=0.2), turns)
    assert plan.gpus == 3
    assert plan.evaluation.latency_s == pytest.approx(0.14 * (1 + wait_in_services(3, 0.56)), rel=1e-12)
    assert plan_model_level(make_table(slo_s=0.48), turns).gpus == 2
    assert {setting.replicas for setting in plan.settings.values()} == {3}


@pytest.mark.parametrize("accounting", [*ACCOUNTINGS.values(), AS_PRINTED], ids=lambda one: one.name)
def test_an_instance_has_one_queue_in_every_accounting(make_table: MakeTable, accounting: Accounting) -> None:
    """It serves one batch at a time. With a queue for each operator, two instances would keep 0.21 s: 0.0587 s of wait.

    A model instance would then compute several batches at once, each as fast as alone.
    """
    plan = plan_model_level(
        make_table(slo_s=0.21), Assumptions(contention=UniformContention(taken_frac=1.0), accounting=accounting)
    )
    assert plan.gpus == 3
    assert plan.evaluation.latency_s == pytest.approx(0.14 * (1 + wait_in_services(3, 0.56)), rel=1e-12)
    own_queues = 0.14 + 0.1 * wait_in_services(2, 0.6) + 0.04 * wait_in_services(2, 0.24)
    assert float(own_queues) == pytest.approx(0.1987, abs=1e-4)


def test_a_tight_objective_takes_tensor_parallelism(make_table: MakeTable, turns: Assumptions) -> None:
    costs = HandCosts(fixed_s={"a": 0.1, "b": 0.1}, each_s={"a": 0.0, "b": 0.0}, sizes=(1, 2, 4), scaling=0.9)
    plan = plan_model_level(make_table(costs, rate=0.5, slo_s=0.13), turns)
    assert {setting.parallel for setting in plan.settings.values()} == {2}
    assert plan.gpus == 2
    with pytest.raises(SloBelowServiceError):
        plan_model_level(make_table(costs, rate=0.5, slo_s=0.05), turns)


def test_a_large_model_takes_the_gpus_that_hold_it(make_table: MakeTable, turns: Assumptions) -> None:
    """141 GB of weights: two A100 have 153 GB for them, and the KV of one request."""
    costs = Roofline(shape=LLAMA_70B, phase=Phase.PREFILL)
    plan = plan_model_level(make_table(costs, rate=0.05, slo_s=3.0), turns)
    assert plan.gpus == 2
    assert plan.weight_bytes == pytest.approx(141e9, rel=0.01)
    tiny = replace(gpu_named("A100"), name="A100-20", memory_bytes=16e9)
    with pytest.raises(MemoryTooSmallError, match="does not fit into 8 A100-20 GPUs, its largest instance"):
        plan_model_level(make_table(costs, rate=0.05, slo_s=30.0, gpu=tiny), turns)


def test_no_rate_needs_one_instance(make_table: MakeTable, turns: Assumptions) -> None:
    plan = plan_model_level(make_table(rate=0.0, batches=(1, 2)), turns)
    assert plan.gpus == 1
    assert plan.evaluation.latency_s == pytest.approx(0.14)
