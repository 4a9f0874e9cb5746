"""Two readings of the paper's model, and what an operator-level plan saves under each (pure, but for reading tables).

- ``own queues``: as printed. Each replica of an operator has a queue of its own (Eq. 1), operators of one GPU are
  limited by the interference of others alone, and a full batch is not waited for. The planner is the printed pair.
- ``GPU time``: a GPU has one second of time in a second, and a batch must be full. The planner is our search.

The baseline is the same in both: model instances that compute one batch at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autoscale.operators.accounting import AS_PRINTED
from autoscale.operators.contention import load_pairs
from autoscale.operators.costs import OperatorCosts, Phase
from autoscale.operators.demand import Demand, PlanError
from autoscale.operators.energy import data_sheet_power, mean_power_w
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import gpu_named
from autoscale.operators.option_table import option_table
from autoscale.operators.options import Limits, OptionTable, batches_up_to
from autoscale.operators.planners import PLANNERS
from tests.lab.operators.model_costs import PAIRS

GPU = gpu_named("A100")
LIMITS = MappingProxyType(
    {
        Phase.PREFILL: Limits(batches=batches_up_to(16)),
        Phase.DECODE: Limits(batches=batches_up_to(256)),
    }
)
OWN_QUEUES, GPU_TIME = "own queues", "GPU time"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How plans are judged, and which planner makes those of operators. ``planner``: a key of ``PLANNERS``."""

    name: str
    planner: str
    assumptions: Assumptions


def readings() -> Mapping[str, Reading]:
    """Both readings, with the contention of measured pairs."""
    pairs = load_pairs(PAIRS)
    printed = Assumptions(contention=pairs, accounting=AS_PRINTED, is_fill_counted=False)
    return {
        OWN_QUEUES: Reading(name=OWN_QUEUES, planner="paper_greedy", assumptions=printed),
        GPU_TIME: Reading(name=GPU_TIME, planner="search", assumptions=Assumptions(contention=pairs)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """GPUs of both levels, and the shares of GPUs, memory and power that single operators save; sums over demands."""

    model_gpus: float
    gpus: float
    gpu_frac: float
    memory_frac: float
    energy_frac: float

    def text(self) -> str:
        """The GPUs that are saved, with both numbers."""
        return f"{self.gpu_frac:.0%} ({self.model_gpus:g} to {self.gpus:g})"


def bare_s(costs: OperatorCosts, length_tokens: int) -> float:
    """A pass at batch 1 that never waits, on the smallest GPU group that holds the weights, seconds."""
    sizes = set.intersection(*(set(costs.parallel_sizes(name)) for name in costs.names))
    weights = sum(costs.weight_bytes(name) for name in costs.names)
    size = min(size for size in sizes if weights / size < 0.85 * GPU.memory_bytes)
    at = {"parallel": size, "length_tokens": length_tokens, "batch": 1}
    return sum(costs.time_s(name, **at) for name in costs.names)


def table_of(costs: OperatorCosts, phase: Phase, demand: Demand) -> OptionTable:
    """The options of a model at a demand."""
    return option_table(costs, demand=demand, phase=phase, gpu=GPU, limits=LIMITS[phase])


def saved(tables: Sequence[OptionTable], reading: Reading) -> Saved | None:
    """What the reading's planner saves over all tables against model instances; None: a demand has no plan."""
    power = data_sheet_power(GPU)
    sums = []
    for planner in ("model", reading.planner):
        try:
            plans = [PLANNERS[planner](table, reading.assumptions) for table in tables]
        except PlanError:
            return None
        sums.append(
            (
                sum(plan.gpus for plan in plans),
                sum(plan.memory_bytes for plan in plans),
                sum(mean_power_w(plan, power) for plan in plans),
            )
        )
    model, ours = sums
    gpus, memory, energy = (1.0 - mine / theirs for mine, theirs in zip(ours, model, strict=True))
    return Saved(model_gpus=model[0], gpus=ours[0], gpu_frac=gpus, memory_frac=memory, energy_frac=energy)
