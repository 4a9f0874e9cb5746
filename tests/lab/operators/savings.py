"""GPUs, memory and energy of operator-level plans against model level: ``make operators-savings``.

A model in prefill and decode, by length and by rate, with the contention of GPUs as measured, 0.8 and 1.2 times as
strong (the sensitivity rows), with shares of SMs, and with the paper's accounting of queues, with and without a limit
of 1 to the busy share of a GPU. The assumptions of all planners of a row are the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from autoscale.operators.accounting import ACCOUNTINGS, AS_PRINTED
from autoscale.operators.contention import ScaledContention, load_pairs
from autoscale.operators.costs import OperatorCosts, Phase
from autoscale.operators.demand import Demand, PlanError
from autoscale.operators.energy import data_sheet_power, mean_power_w
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import gpu_named
from autoscale.operators.option_table import option_table
from autoscale.operators.options import Limits, batches_up_to
from autoscale.operators.plan import Plan
from autoscale.operators.planners import PLANNERS
from autoscale.operators.sm_shares import SmBandwidthContention, load_shares
from serve_app.output import write_file
from tests.lab.operators.model_costs import PAIRS, SM_SHARES, model_costs

# The objective is this multiple of a pass that never waits on the smallest GPU group that holds the model.
_SLO_FACTOR = 4.0
_MPS = "MPS shares"
_MOST_BATCH = {Phase.PREFILL: 16, Phase.DECODE: 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One demand: passes per second, and their length."""

    phase: Phase
    passes_per_s: float
    length_tokens: int


def points() -> Iterator[Point]:
    """The lengths of Fig. 10 at about one rate of work, and the rates of Fig. 11 at 1,024 tokens."""
    for length in (512, 1024, 2048, 4096, 8192, 16384, 32768):
        yield Point(phase=Phase.PREFILL, passes_per_s=20.0, length_tokens=length)
    for rate in (5.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0):
        yield Point(phase=Phase.PREFILL, passes_per_s=rate, length_tokens=1024)
    for rate in (1000.0, 5000.0, 20_000.0, 60_000.0):
        yield Point(phase=Phase.DECODE, passes_per_s=rate, length_tokens=2048)


def assumptions_by_name() -> Mapping[str, Assumptions]:
    """The rows of every point."""
    pairs = load_pairs(PAIRS)
    return {
        _MPS: Assumptions(contention=SmBandwidthContention(shares=load_shares(SM_SHARES))),
        "measured pairs": Assumptions(contention=pairs),
        "pairs x 0.8": Assumptions(contention=ScaledContention(base=pairs, factor=0.8)),
        "pairs x 1.2": Assumptions(contention=ScaledContention(base=pairs, factor=1.2)),
        "own queues, GPU time limited": Assumptions(
            contention=pairs, accounting=ACCOUNTINGS["paper"], is_fill_counted=False
        ),
        "own queues, as printed": Assumptions(contention=pairs, accounting=AS_PRINTED, is_fill_counted=False),
    }


def objective_s(costs: OperatorCosts, point: Point) -> float:
    """``_SLO_FACTOR`` passes at batch 1 on one GPU, or on the smallest size that all operators have and holds it."""
    sizes = set.intersection(*(set(costs.parallel_sizes(name)) for name in costs.names))
    weights = sum(costs.weight_bytes(name) for name in costs.names)
    size = min(size for size in sizes if weights / size < 70e9)
    at = {"parallel": size, "length_tokens": point.length_tokens, "batch": 1}
    return _SLO_FACTOR * sum(costs.time_s(name, **at) for name in costs.names)


def plans(
    costs: OperatorCosts, point: Point, gpu: str, assumptions: Assumptions, *, has_shares: bool = False
) -> dict[str, Plan | None]:
    """The plan of each planner; None: it finds none. ``has_shares``: operators get shares of the SMs (MPS)."""
    demand = Demand(passes_per_s=point.passes_per_s, length_tokens=point.length_tokens, slo_s=objective_s(costs, point))
    limits = Limits(batches=batches_up_to(_MOST_BATCH[point.phase]))
    shares = load_shares(SM_SHARES) if has_shares else None
    table = option_table(costs, demand=demand, phase=point.phase, gpu=gpu_named(gpu), limits=limits, shares=shares)
    found: dict[str, Plan | None] = {}
    for name in ("model", "paper_greedy", "greedy", "search"):
        try:
            found[name] = PLANNERS[name](table, assumptions)
        except PlanError:
            found[name] = None
    return found


def _saved(plan: Plan | None, model: Plan | None, gpu: str) -> str:
    """Share of GPUs, memory and power that a plan saves."""
    if plan is None or model is None:
        return "no plan"
    power = data_sheet_power(gpu_named(gpu))
    gpus = 1.0 - plan.gpus / model.gpus
    memory = 1.0 - plan.memory_bytes / model.memory_bytes
    energy = 1.0 - mean_power_w(plan, power) / mean_power_w(model, power)
    return f"{plan.gpus} ({gpus:+.0%}, {memory:+.0%}, {energy:+.0%})"


def main(
    model: Annotated[str, Option(help="A file of configs/operators/models.")] = "qwen2-7b",
    gpu: Annotated[str, Option(help="A folder of configs/operators/tables.")] = "A100",
    out: Annotated[Path | None, Option(help="CSV of all rows.")] = None,
) -> None:
    """Print all points; a cell has GPUs, and in brackets what is saved: GPUs, memory, energy."""
    console = Console(width=130)
    lines = ["accounting,phase,passes_per_s,length_tokens,planner,gpus,memory_bytes"]
    costs = {phase: model_costs(model, gpu, phase) for phase in Phase}
    for name, assumptions in assumptions_by_name().items():
        table = Table(title=f"{model} on {gpu}, {name}. Saved against model level: GPUs, memory, energy")
        for column in ("phase", "rate", "tokens", "model GPUs", "paper greedy", "greedy", "search"):
            table.add_column(column)
        for point in points():
            found = plans(costs[point.phase], point, gpu, assumptions, has_shares=name == _MPS)
            base = found["model"]
            table.add_row(
                point.phase,
                f"{point.passes_per_s:g}",
                str(point.length_tokens),
                str(base.gpus) if base else "no plan",
                _saved(found["paper_greedy"], base, gpu),
                _saved(found["greedy"], base, gpu),
                _saved(found["search"], base, gpu),
            )
            for planner, plan in found.items():
                if plan is not None:
                    where = f"{name},{point.phase},{point.passes_per_s:g},{point.length_tokens}"
                    lines.append(f"{where},{planner},{plan.gpus},{plan.memory_bytes:.0f}")
        console.print(table)
    if out is not None:
        write_file(out, "\n".join(lines) + "\n", "--out")


if __name__ == "__main__":
    typer.run(main)
