"""CPU time of plans: ``make bench-operators``.

One plan of an 80-layer dense model at one point by each planner, and a day of 10-second windows of a 7B model. All on
one core. Times of operators come from the shipped A100 tables; reading
the files is not part of the time, and computing from them is.
"""

import math
import random
import time
from collections.abc import Sequence
from itertools import product
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from autoscale.operators.contention import load_pairs
from autoscale.operators.costs import Phase
from autoscale.operators.demand import Demand
from autoscale.operators.energy import data_sheet_power
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import gpu_named
from autoscale.operators.option_table import option_table
from autoscale.operators.options import Limits, batches_up_to
from autoscale.operators.over_time import MODEL_START_S, OPERATOR_START_S, Elasticity, course
from autoscale.operators.planners import PLANNERS, Planner
from autoscale.operators.window_demands import prefill_demands
from autoscale.traces.trace import TraceRequest
from tests.lab.operators.model_costs import PAIRS, model_costs

_GPU = gpu_named("A100")
_DAY_S = 86_400.0
# At 5 requests/s the rates of windows of 10 s have a deviation of 14 % (Poisson).
_HEADROOM_FRACS = (0.0, 0.3)


def day(seed: int, least_per_s: float = 1.0, most_per_s: float = 20.0) -> list[TraceRequest]:
    """A day with one peak, Poisson arrivals, and prompts of 1,100 tokens on average (log-normal)."""
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    at_s = 0.0
    while True:
        at_s += rng.expovariate(most_per_s)
        if at_s >= _DAY_S:
            return requests
        rate = least_per_s + (most_per_s - least_per_s) * (1 - math.cos(2 * math.pi * at_s / _DAY_S)) / 2
        if rng.random() < rate / most_per_s:
            tokens = min(8000, max(16, round(rng.lognormvariate(6.5, 1.0))))
            requests.append(TraceRequest(at_s=at_s, input_tokens=tokens, output_tokens=100))


def points(assumptions: Assumptions) -> Table:
    """One plan of Llama-3.1-70B at one point, by planner and phase."""
    table = Table(title="One plan of 80 layers (CPU seconds, its option table included)")
    for name in ("phase", "rate", "planner", "GPUs", "weights, GB", "CPU s"):
        table.add_column(name)
    for phase, rate, slo_s, length, most in (
        (Phase.PREFILL, 10.0, 1.5, 1024, 16),
        (Phase.PREFILL, 100.0, 1.5, 1024, 16),
        (Phase.DECODE, 5000.0, 0.08, 2048, 256),
        (Phase.DECODE, 50_000.0, 0.08, 2048, 256),
    ):
        for name in ("model", "paper_greedy", "greedy", "search"):
            costs = model_costs(
                "llama-3.1-70b", _GPU.name, phase
            )  # fresh ones: they keep the times that they were asked
            begun = time.process_time()
            options = option_table(
                costs,
                demand=Demand(passes_per_s=rate, length_tokens=length, slo_s=slo_s),
                phase=phase,
                gpu=_GPU,
                limits=Limits(batches=batches_up_to(most)),
            )
            made = PLANNERS[name](options, assumptions)
            seconds = time.process_time() - begun
            table.add_row(phase, f"{rate:g}", name, str(made.gpus), f"{made.weight_bytes / 1e9:.0f}", f"{seconds:.3f}")
    return table


def days(
    assumptions: Assumptions, seed: int, planners: Sequence[str] = ("model", "greedy", "search", "steady")
) -> Table:
    """A day of 8,640 windows by planner and headroom. The printed pair takes minutes, and is left out."""
    trace = day(seed)
    demands = prefill_demands(trace, 10.0)
    table = Table(title=f"A day: {len(demands)} windows, {len(trace)} requests, Qwen2-7B prefill, objective 0.5 s")
    for name in ("planner", "headroom", "GPU-hours", "kWh", "mean memory, GB", "attained", "plans", "CPU s"):
        table.add_column(name)
    for name, headroom in product(planners, _HEADROOM_FRACS):
        planner = Planner(
            costs=model_costs("qwen2-7b", _GPU.name, Phase.PREFILL),
            phase=Phase.PREFILL,
            gpu=_GPU,
            limits=Limits(batches=batches_up_to(16)),
            assumptions=assumptions,
            slo_s=0.5,
            plan=PLANNERS[name],
        )
        start_s = MODEL_START_S if name == "model" else OPERATOR_START_S
        begun = time.process_time()
        result = course(planner, demands, Elasticity(start_s=start_s, headroom_frac=headroom), data_sheet_power(_GPU))
        seconds = time.process_time() - begun
        table.add_row(
            name,
            f"{headroom:.0%}",
            f"{result.gpu_hours:.1f}",
            f"{result.energy_kwh:.2f}",
            f"{result.mean_memory_bytes / 1e9:.0f}",
            f"{result.attained_frac:.1%}",
            str(planner.plans),
            f"{seconds:.1f}",
        )
    return table


def main(seed: Annotated[int, Option(help="Seed of the day.")] = 1) -> None:
    """Print both tables."""
    assumptions = Assumptions(contention=load_pairs(PAIRS))
    Console(width=110).print(points(assumptions))
    Console(width=110).print(days(assumptions, seed))


if __name__ == "__main__":
    typer.run(main)
