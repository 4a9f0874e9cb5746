"""What a queue in front of prefill is worth: ``make bench-scheduler``.

First the time of a decision of ``router.prefill_scheduler``. Then the simulator: mixed lengths and traces, at a high
load of the prefill replicas, with prompts sent at once (``direct``) and with each strategy. Once every prompt is
computed by prefill, and once as served, where decode computes short prompts. With ``--live`` the same on real engines.
"""

import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from autoscale.engines.profile import EngineProfile
from autoscale.report import RequestRecord
from autoscale.sim.cluster import VirtualCluster
from autoscale.slo import SloConfig
from autoscale.traces.trace import TraceRequest, load_trace
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import PrefillQueueConfig, RouterConfig
from router.prefill_order import ORDERS, WaitingPrompt
from router.prefill_scheduler import PrefillScheduler
from serve_app.output import write_file
from tests.lab.stand.fixed_counts import ROOT

STRATEGIES = ("direct", *ORDERS)
# No prompt is computed by decode.
ALL_REMOTE = {"local_max_tokens": 0, "local_cap_tokens": 0}
_WAITING, _REPLICAS, _DECISIONS = 1000, 64, 20_000
# Requests of a simulation, and share of them at the start that is not measured.
_REQUESTS, _WARM_UP_FRAC = 4000, 0.1
# Load of the prefill replicas: arriving prompts' own time in an engine, as a share of the replicas' time. A step with
# several prompts costs less than one each, so the engines keep up with a load near 1.
_LOADS = (0.85, 0.95)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster and its requests; ``shapes``: (input, output) tokens, of which each request has one at random."""

    name: str
    profile: str
    prefill: int
    decode: int
    slo: SloConfig
    shapes: Sequence[tuple[int, int]]


def mixed(rng: random.Random, output_tokens: int, count: int = 1000) -> list[tuple[int, int]]:
    """As many prompts of 24 to 64 tokens as of 1,000 to 1,500, with answers of this mean length."""
    lengths = [rng.randint(24, 64) if number % 2 else rng.randint(1000, 1500) for number in range(count)]
    return [(length, rng.randint(1, 2 * output_tokens - 1)) for length in lengths]


def cases(traces: Sequence[Path]) -> list[Case]:
    """Mixed lengths on GPUs and on this machine's CPU engines, and the lengths of traces on GPUs."""
    scaled = SloConfig(ttft_s=0.5, ttft_s_per_input_token=0.001, tpot_s=0.1)
    shapes, short_answers = mixed(random.Random(0), 40), mixed(random.Random(0), 8)
    gpu = Case(name="mixed", profile="h100_llama70b_fp8_tp1", prefill=4, decode=8, slo=scaled, shapes=shapes)
    flat = replace(gpu, name="mixed, 1 s for all", slo=SloConfig(ttft_s=1.0, tpot_s=0.1))
    cpu = Case(name="mixed, CPU", profile="cpu_tiny", prefill=2, decode=2, slo=scaled, shapes=short_answers)
    lengths = {path: [(one.input_tokens, one.output_tokens) for one in load_trace(path)] for path in traces}
    own = [replace(gpu, name=path.name.partition(".")[0], shapes=shapes) for path, shapes in lengths.items()]
    return [gpu, flat, cpu, *own]


def decision_s(strategy: str) -> float:
    """CPU time of one decision: a prompt ends, another one is bound, and a third one comes to the queue."""
    rng, now_s, running = random.Random(0), 0.0, []
    scheduler = PrefillScheduler(PrefillQueueConfig.model_validate({"strategy": strategy}))
    scheduler.set_replicas([f"r{number}" for number in range(_REPLICAS)], now_s)
    shapes = mixed(rng, 1)

    def add(number: int) -> None:
        tokens = rng.choice(shapes)[0]
        prompt = WaitingPrompt(
            prompt_id=str(number), tokens=tokens, arrived_s=now_s, deadline_s=now_s + max(0.5, 0.001 * tokens)
        )
        scheduler.add(prompt, now_s)

    number = 0
    while scheduler.waiting < _WAITING:
        add(number := number + 1)
        running += scheduler.bind(now_s)
    began_s, bound = time.process_time(), 0
    while bound < _DECISIONS:
        now_s += 1e-3
        ended = running.pop(rng.randrange(len(running)))
        scheduler.end(ended.prompt.prompt_id, now_s)
        bindings = scheduler.bind(now_s)
        running += bindings
        bound += len(bindings)
        while scheduler.waiting < _WAITING:
            add(number := number + 1)
    return (time.process_time() - began_s) / bound


def simulated(case: Case, strategy: str, load: float, *, is_all_remote: bool) -> Row:
    """One case with one strategy."""
    profile = EngineProfile.load(ROOT / "configs" / "profiles" / f"{case.profile}.json")
    prefill = profile.prefill
    rate = load * case.prefill / mean(prefill.step_s + prefill.chunk_s(0, tokens) for tokens, _ in case.shapes)
    rng, at_s, trace = random.Random(1), 0.0, []
    for _ in range(_REQUESTS):
        at_s += rng.expovariate(rate)
        tokens, output_tokens = rng.choice(case.shapes)
        trace.append(TraceRequest(at_s=at_s, input_tokens=max(1, tokens), output_tokens=max(1, output_tokens)))
    router = RouterConfig.model_validate(
        {"length": ALL_REMOTE if is_all_remote else {}, "prefill_queue": {"strategy": strategy}}
    )
    pools = {PoolKey("g0", Role.PREFILL): case.prefill, PoolKey("g0", Role.DECODE): case.decode}
    cluster = VirtualCluster(dict.fromkeys(pools, profile), router, random.Random(0), slo=case.slo)
    records = cluster.replay(trace, pools)
    short = median(tokens for tokens, _ in case.shapes)
    row = {"case": case.name, "load": load, "strategy": strategy, "all_remote": is_all_remote}
    return {**row, **figures(records[round(_WARM_UP_FRAC * len(records)) :], case.slo, short)}


def figures(records: Sequence[RequestRecord], slo: SloConfig, short_tokens: float) -> Row:
    """TTFT of short and of long prompts, and goodput; short ones have fewer than ``short_tokens`` tokens."""
    row: Row = {}
    ended = [(one, one.ttft_s) for one in records if one.error is None and one.ttft_s is not None]
    for name, is_short in (("short", True), ("long", False)):
        times_s = [ttft_s for one, ttft_s in ended if (one.input_tokens < short_tokens) is is_short]
        for share in (50, 90):
            row[f"{name}_ttft_p{share}_s"] = float(np.percentile(times_s, share))
    good = sum(
        ttft_s <= slo.objective_s(one.input_tokens) and (one.tpot_s or 0.0) <= slo.tpot_s for one, ttft_s in ended
    )
    row["requests"], row["within_frac"] = len(records), good / len(records)
    row["goodput_requests_per_s"] = good / (records[-1].sent_s - records[0].sent_s)
    row["failed"] = len(records) - len(ended)
    return row


def table(title: str, rows: Sequence[Row]) -> Table:
    """The rows, each with the P90 of short prompts as a change against ``fcfs`` with all prompts remote."""
    shown = Table(title=title, box=None, pad_edge=False)
    columns = ("", "load", "all remote", "strategy", "short p50", "p90", "", "long p50", "p90", "goodput", "within")
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    bases = {(row["case"], row["load"]): row for row in rows if row["all_remote"] and row["strategy"] == "fcfs"}
    for row in rows:
        base = bases.get((row["case"], row["load"]), row)
        change = row["short_ttft_p90_s"] / base["short_ttft_p90_s"] - 1.0
        shown.add_row(
            row["case"],
            f"{row['load']:g}",
            "yes" if row["all_remote"] else "",
            row["strategy"],
            f"{row['short_ttft_p50_s']:.3f}",
            f"{row['short_ttft_p90_s']:.3f}",
            "" if row is base else f"{change:+.0%}",
            f"{row['long_ttft_p50_s']:.3f}",
            f"{row['long_ttft_p90_s']:.3f}",
            f"{row['goodput_requests_per_s']:.2f}",
            f"{row['within_frac']:.1%}",
        )
    return shown


def show_decisions(console: Console) -> dict[str, float]:
    """Measure the time of a decision with each strategy, and print it."""
    seconds = {strategy: min(decision_s(strategy) for _ in range(3)) for strategy in ORDERS}
    for strategy, each_s in seconds.items():
        console.print(
            f"{strategy}: {1e6 * each_s:.1f} us of CPU time for a decision, {_WAITING} waiting, {_REPLICAS} replicas"
        )
    return seconds


def run_simulations(traces: Sequence[Path], console: Console, save: Callable[[list[Row]], None]) -> list[Row]:
    """All cases with all strategies."""
    rows: list[Row] = []
    for case in cases(traces):
        for load in _LOADS:
            for is_all_remote in (True, False):
                rows += [simulated(case, strategy, load, is_all_remote=is_all_remote) for strategy in STRATEGIES]
        save(rows)
        console.print(table(f"{case.name}, simulated: TTFT, s", [row for row in rows if row["case"] == case.name]))
    return rows


def main(
    live: Annotated[bool, typer.Option("--live", help="Real engines instead of the simulator.")] = False,
    trace: Annotated[list[Path] | None, typer.Option(help="More traces whose lengths are simulated.")] = None,
    out: Annotated[Path, typer.Option("--out")] = Path("reports/scheduler.json"),
) -> None:
    """Measure, show and write."""
    console = Console(width=120)
    results: dict[str, Any] = {"machine": platform.platform()}

    def save(rows: list[Row]) -> None:
        results["rows"] = rows
        write_file(out, json.dumps(results, indent=1) + "\n", "--out")

    if live:
        from tests.lab.bench.scheduler_live import run_live

        run_live(console, save)
        return
    results["decision_s"] = show_decisions(console)
    run_simulations([ROOT / "configs/traces/azure_conv_600s.csv.gz", *(trace or [])], console, save)


if __name__ == "__main__":
    typer.run(main)
