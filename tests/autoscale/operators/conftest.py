"""Factories of option tables for the operator-level planner."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autoscale.operators.contention import UniformContention
from autoscale.operators.costs import OperatorCosts, Phase
from autoscale.operators.demand import Demand
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import Gpu, gpu_named
from autoscale.operators.option_table import option_table
from autoscale.operators.options import Limits, OptionTable, batches_up_to
from tests.autoscale.operators.roofline import QWEN2_7B, HandCosts, Roofline

MakeTable = Callable[..., OptionTable]
CONTENTION = Path(__file__).parents[3] / "configs" / "operators" / "contention"


@pytest.fixture(scope="session")
def make_table() -> MakeTable:
    """Operators a (0.1 s) and b (0.04 s) whose batches take as long as their requests one by one, at 12 requests/s."""

    def make(
        costs: OperatorCosts | None = None,
        *,
        rate: float = 12.0,
        slo_s: float = 0.2,
        length_tokens: int = 1024,
        batches: tuple[int, ...] = (1,),
        gpu: Gpu | None = None,
        phase: Phase = Phase.PREFILL,
        edges: tuple[tuple[str, str], ...] = (),
    ) -> OptionTable:
        return option_table(
            costs or HandCosts(fixed_s={"a": 0.0, "b": 0.0}, each_s={"a": 0.1, "b": 0.04}),
            demand=Demand(passes_per_s=rate, length_tokens=length_tokens, slo_s=slo_s),
            phase=phase,
            gpu=gpu or gpu_named("A100"),
            limits=Limits(batches=batches),
            edges=edges,
        )

    return make


@pytest.fixture(scope="session")
def qwen_table(make_table: MakeTable) -> MakeTable:
    """Qwen2-7B on A100 GPUs by a roofline."""

    def make(*, phase: Phase = Phase.PREFILL, rate: float, slo_s: float, length_tokens: int = 1024) -> OptionTable:
        most = 8 if phase is Phase.PREFILL else 256
        costs = Roofline(shape=QWEN2_7B, phase=phase)
        return make_table(
            costs, rate=rate, slo_s=slo_s, length_tokens=length_tokens, batches=batches_up_to(most), phase=phase
        )

    return make


@pytest.fixture(scope="session")
def turns() -> Assumptions:
    """Operators on one GPU take turns; waits of M/M/R."""
    return Assumptions(contention=UniformContention())
