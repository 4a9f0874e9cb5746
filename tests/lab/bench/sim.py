"""How fast the simulator is, on one core: ``make bench-sim``.

Requests have the lengths of the committed slice of Azure's chat trace and arrive as a Poisson process; the three days
follow a curve from a fifth to the whole of their peak, and our own policy sizes both roles. A trace of one's own can
be given instead. Every measurement runs in a process of its own, so that its memory is its own too.
"""

import json
import math
import random
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from autoscale.sim.config import SimConfig
from autoscale.sim.outcome import outcome
from autoscale.sim.scenario import run_policy, run_schedule, scenario_of
from autoscale.traces.trace import TraceRequest, load_trace
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError

_ROOT = Path(__file__).parents[3]
_CONFIG = _ROOT / "configs" / "sim" / "h100_llama70b.yaml"
_LENGTHS = _ROOT / "configs" / "traces" / "azure_conv_60s.csv"
_DAYS_S, _DAYS_REQUESTS = 3 * 86_400.0, 565_392
_ROUNDS = 3

Measured = dict[str, float]


def small_cluster() -> Measured:
    """Ten replicas at a steady load: requests per second of wall time."""
    return _steady(prefill=6, decode=4, requests_per_s=40.0, requests=50_000)


def large_cluster() -> Measured:
    """A thousand replicas."""
    return _steady(prefill=660, decode=340, requests_per_s=4000.0, requests=120_000)


def three_days(trace: Path | None = None) -> Measured:
    """Three days under the controller and our own policy, read, simulated and summed up."""
    began_s = time.perf_counter()
    requests = _days() if trace is None else load_trace(trace)
    config = SimConfig.load(_CONFIG)
    scenario = scenario_of(config, requests)
    run = run_policy(scenario, config.autoscale_config("default"), dict.fromkeys(scenario.pools, 2))
    figures = outcome(run)
    return {
        "requests": len(requests),
        "seconds": time.perf_counter() - began_s,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
        "decisions": len(run.plans),
        "slo_attainment_frac": figures.slo_attainment_frac,
    }


def _steady(*, prefill: int, decode: int, requests_per_s: float, requests: int) -> Measured:
    rng = random.Random(0)
    lengths = load_trace(_LENGTHS)
    trace: list[TraceRequest] = []
    at_s = 0.0
    for _ in range(requests):
        at_s += rng.expovariate(requests_per_s)
        trace.append(replace(rng.choice(lengths), at_s=at_s))
    config = SimConfig.load(_CONFIG).model_copy(update={"warm_up_s": 1.0})
    scenario = scenario_of(config, trace)
    counts = {Role.PREFILL: prefill, Role.DECODE: decode}
    began_s = time.perf_counter()
    run = run_schedule(scenario, {key: [(0.0, counts[key.role])] for key in scenario.pools})
    seconds = time.perf_counter() - began_s
    return {"requests": requests, "requests_per_s": requests / seconds, "slo_attainment_frac": run.attainment_frac}


def _days() -> list[TraceRequest]:
    rng = random.Random(0)
    lengths = load_trace(_LENGTHS)
    peak_per_s = _DAYS_REQUESTS / _DAYS_S / 0.6
    requests: list[TraceRequest] = []
    at_s = 0.0
    while at_s < _DAYS_S:
        at_s += rng.expovariate(peak_per_s)
        if rng.random() < 0.6 - 0.4 * math.cos(2 * math.pi * at_s / 86_400.0):
            requests.append(replace(rng.choice(lengths), at_s=at_s))
    return requests


def _apart(measure: Callable[..., Measured], *arguments: object) -> Measured:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, *arguments).result()


def main(
    trace: Annotated[Path | None, typer.Option(help="Three days of your own, as for tandem simulate.")] = None,
    out: Annotated[Path, typer.Option(help="Write the figures here.")] = Path("reports/bench_sim.json"),
) -> None:
    """Measure, print and write."""
    console = Console()
    rounds: dict[str, list[Measured]] = {"10 replicas": [], "1,000 replicas": []}
    try:
        with Console(stderr=True).status("measuring, about four minutes"):
            for _ in range(_ROUNDS):
                rounds["10 replicas"].append(_apart(small_cluster))
                rounds["1,000 replicas"].append(_apart(large_cluster))
            days = _apart(three_days, trace)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    table = Table("on one core", "requests", "result")
    for name, each in rounds.items():
        table.add_row(name, f"{each[0]['requests']:,.0f}", f"{_median(each):,.0f} requests/s")
    table.add_row(
        "three days with the controller",
        f"{days['requests']:,.0f}",
        f"{days['seconds']:.0f} s, {days['peak_memory_mb']:.0f} MB, {days['decisions']:,.0f} decisions",
    )
    console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"rounds": rounds, "three_days": days}, indent=1) + "\n")


def _median(rounds: Sequence[Measured]) -> float:
    return median(each["requests_per_s"] for each in rounds)


if __name__ == "__main__":
    typer.run(main)
