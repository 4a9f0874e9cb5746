"""Profiles from operators alone against whole engines on the same GPUs: ``make operators-truth``.

Two kinds of measured runs (``operator_runs/README.md``): all requests of open-loop runs, and means of closed-loop runs.
What was looked at while the constants were chosen is named ``chosen on``; all else is held out.
"""

import csv
import gzip
import json
import random
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autoscale.engines.engine_model import EngineModel
from autoscale.engines.engine_step import ModelRequest
from autoscale.engines.operating_points import OperatingPoint, predicted
from autoscale.engines.profile import EngineProfile
from autoscale.operators.engine_profile import engine_profile
from autoscale.operators.gpu import Gpu, gpu_named
from autoscale.operators.graph import OperatorPrecision, operator_graph
from autoscale.operators.step_times import ASYNC_HOST, SYNC_HOST, EngineSettings, HostTimes
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes
from tests.lab.truth.operator_steps import fitted_host, held_out_errors

RUNS = Path(__file__).parent / "operator_runs"
OPERATORS = Path(__file__).parents[3] / "configs" / "operators"
# Of vLLM's runs on RTX PRO 6000: max_num_batched_tokens and max_num_seqs.
_OPEN_LOOP = {"max_batch_tokens": 2048, "max_running": 128}
# Speeds of an exchange between two GPUs over PCIe 5.0, for the sensitivity: through the host's memory, and direct.
_EXCHANGE_BYTES_PER_S = (14e9, 18.5e9, 25e9, 55e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One measured request: times in seconds from the first arrival."""

    timestamp_s: float
    input_tokens: int
    output_tokens: int
    first_token_s: float
    last_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Mean TPOT and median TTFT of a run, seconds."""

    tpot_mean_s: float
    ttft_p50_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on GPUs of one type.

    ``chosen_on``: whether a constant was chosen on its rows; otherwise it is held out.
    """

    model: str
    gpu: str
    parallel: int
    dtype: str
    kv_dtype: str
    chosen_on: bool = False
    host: HostTimes = ASYNC_HOST


def _llama(gpu: str, parallel: int, kv_dtype: str) -> Case:
    return Case(model="llama-3.1-70b", gpu=gpu, parallel=parallel, dtype="fp8", kv_dtype=kv_dtype)


def _qwen(parallel: int) -> Case:
    # vLLM 0.12: async scheduling was not the default before 0.14.
    return Case(
        model="qwen3-32b",
        gpu="H100",
        parallel=parallel,
        dtype="bf16",
        kv_dtype="bf16",
        host=SYNC_HOST,
    )


OPEN_CASES = (
    Case(model="llama-3.1-8b", gpu="RTX-PRO-6000", parallel=1, dtype="bf16", kv_dtype="bf16", chosen_on=True),
    Case(model="qwen3-32b", gpu="RTX-PRO-6000", parallel=2, dtype="bf16", kv_dtype="bf16", chosen_on=True),
)
# The source says FP8 KV for all 70B rows. See docs/operators_times.md for why the H100 is listed with both types.
CLOSED_CASES = (
    *(_llama("H100", parallel, "fp8") for parallel in (2, 4)),
    *(_llama("H100", parallel, "bf16") for parallel in (2, 4)),
    *(_llama("H200", parallel, "fp8") for parallel in (1, 2, 4)),
    *(_qwen(parallel) for parallel in (2, 4)),
)


def load_requests(path: Path) -> tuple[Request, ...]:
    """The requests of a run, in their order of arrival."""
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(
        Request(
            timestamp_s=float(row["timestamp_s"]),
            input_tokens=int(row["input_tokens"]),
            output_tokens=int(row["output_tokens"]),
            first_token_s=float(row["first_token_s"]),
            last_token_s=float(row["last_token_s"]),
        )
        for row in rows
    )


def measured_figures(requests: Sequence[Request]) -> Figures:
    """Mean TPOT and median TTFT of measured requests."""
    return Figures(
        tpot_mean_s=statistics.fmean(
            (each.last_token_s - each.first_token_s) / max(1, each.output_tokens - 1) for each in requests
        ),
        ttft_p50_s=statistics.median(each.first_token_s - each.timestamp_s for each in requests),
    )


def replayed(profile: EngineProfile, requests: Sequence[Request]) -> tuple[Request, ...]:
    """The same requests through the engine model: their first and last tokens are predicted."""
    engine, now_s, left = EngineModel(profile), 0.0, deque(enumerate(requests))
    first_s, last_s = dict[int, float](), dict[int, float]()
    while len(last_s) < len(requests):
        while left and left[0][1].timestamp_s <= now_s:
            number, each = left.popleft()
            engine.add(ModelRequest(str(number), each.input_tokens, each.output_tokens))
        step = engine.plan(now_s)
        if step is None:
            now_s = left[0][1].timestamp_s
            continue
        now_s += step.duration_s
        first, ended = engine.apply(step)
        first_s |= {int(request.request_id): now_s for request in first}
        last_s |= {int(request.request_id): now_s for request in ended}
    return tuple(
        Request(
            timestamp_s=each.timestamp_s,
            input_tokens=each.input_tokens,
            output_tokens=each.output_tokens,
            first_token_s=first_s[number],
            last_token_s=last_s[number],
        )
        for number, each in enumerate(requests)
    )


def profile_of(case: Case, settings: Mapping[str, Any], gpu: Gpu | None = None) -> EngineProfile:
    """The profile of a case from its operators alone; ``gpu``: another one than that of its name."""
    config = json.loads((OPERATORS / "models" / f"{case.model}.json").read_text())
    graph = operator_graph(config, OperatorPrecision(weights=case.dtype, kv=case.kv_dtype))
    times = OperatorTimes(gpu or gpu_named(case.gpu), load_operator_tables(OPERATORS / "tables" / case.gpu))
    name = f"{case.model} {case.dtype}, {case.parallel} x {case.gpu}"
    whole = EngineSettings(parallel=case.parallel, host=case.host, **settings)
    return engine_profile(name, case.model, graph, times, whole)


def closed_rows(case: Case) -> list[tuple[OperatingPoint, float]]:
    """The measured points of a case, each with its TPOT in seconds."""
    with (RUNS / "closed_loop.csv").open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["model"], row["gpu"], int(row["tp"])) == (case.model, case.gpu, case.parallel)
        ]
    return [
        (
            OperatingPoint(
                input_tokens=int(row["input_tokens"]),
                output_tokens=int(row["output_tokens"]),
                shortest_frac=float(row["shortest_frac"]),
                concurrency=int(row["concurrency"]),
                ttft_s=float(row["ttft_ms"]) / 1e3,
                tpot_s=float(row["tpot_ms"]) / 1e3,
            ),
            float(row["tpot_ms"]) / 1e3,
        )
        for row in rows
    ]


def open_loop(case: Case, gpu: Gpu | None = None) -> dict[str, Any]:
    """Errors of an open-loop run."""
    requests = load_requests(RUNS / f"{case.gpu.lower()}_{case.model}_requests.csv.gz")
    measured = measured_figures(requests)
    found = measured_figures(replayed(profile_of(case, _OPEN_LOOP, gpu), requests))
    return asdict(case) | {
        "requests": len(requests),
        "measured": asdict(measured),
        "predicted": asdict(found),
        "tpot_error_frac": found.tpot_mean_s / measured.tpot_mean_s - 1.0,
        "ttft_p50_error_frac": found.ttft_p50_s / measured.ttft_p50_s - 1.0,
    }


def closed_loop(case: Case) -> dict[str, Any]:
    """Errors of TPOT at each closed-loop point; each engine may run as many requests as were in flight."""
    profile = profile_of(case, {"max_batch_tokens": 8192, "max_running": 128, "longest_tokens": 10_240})
    rows = []
    for point, tpot_s in closed_rows(case):
        engine = profile.model_copy(update={"max_running": point.concurrency})
        found = predicted(engine, point, random.Random(0))
        rows.append(
            point.model_dump()
            | {"predicted_tpot_s": found.tpot_s, "predicted_ttft_mean_s": found.ttft_mean_s}
            | {"tpot_error_frac": found.tpot_s / tpot_s - 1.0}
        )
    errors = [row["tpot_error_frac"] for row in rows]
    return asdict(case) | {
        "points": len(rows),
        "tpot_mape_frac": statistics.fmean(map(abs, errors)),
        "tpot_bias_frac": statistics.fmean(errors),
        "ttft_mape_frac": statistics.fmean(abs(row["predicted_ttft_mean_s"] / row["ttft_s"] - 1.0) for row in rows),
        "rows": rows,
    }


def exchange_sensitivity(case: Case, bytes_per_s: Sequence[float]) -> dict[float, dict[str, Any]]:
    """Errors of an open-loop run if two GPUs exchanged data at other speeds; by bytes/s."""
    return {speed: open_loop(case, gpu=replace(gpu_named(case.gpu), link_bytes_per_s=speed)) for speed in bytes_per_s}


def _show(opened: Sequence[Mapping[str, Any]], closed: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table("run", "rows", "TPOT", "TTFT", "bias of TPOT", title="Errors of profiles from operators alone")
    for each in opened:
        table.add_row(
            _label(each),
            f"{each['requests']} requests",
            f"{each['tpot_error_frac']:+.1%} (mean)",
            f"{each['ttft_p50_error_frac']:+.1%} (median)",
            "",
        )
    for each in closed:
        table.add_row(
            _label(each),
            f"{each['points']} points",
            f"{each['tpot_mape_frac']:.1%} (MAPE)",
            f"{each['ttft_mape_frac']:.1%} (MAPE of means)",
            f"{each['tpot_bias_frac']:+.1%}",
        )
    console.print(table)
    console.print("* a constant was chosen on these rows; which rows were in view: docs/operators_times.md")


def _label(each: Mapping[str, Any]) -> str:
    precision = f"{each['dtype']}, {each['kv_dtype']} KV"
    return f"{each['model']} {precision}, {each['parallel']} x {each['gpu']}{' *' if each['chosen_on'] else ''}"


def main(json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None) -> None:
    """Compare, and print errors."""
    opened, closed = [open_loop(case) for case in OPEN_CASES], [closed_loop(case) for case in CLOSED_CASES]
    console = Console(width=140)
    _show(opened, closed, console)
    speeds = exchange_sensitivity(OPEN_CASES[1], _EXCHANGE_BYTES_PER_S)
    for speed, each in speeds.items():
        console.print(
            f"{_label(each)}, exchange at {speed / 1e9:g} GB/s: TPOT {each['tpot_error_frac']:+.1%}, "
            f"median TTFT {each['ttft_p50_error_frac']:+.1%}"
        )
    host, held_out = fitted_host(), held_out_errors()
    errors = [abs(error) for _, _, error in held_out]
    console.print(
        f"Host of a synchronous engine (H100, Llama-70B, TP 2, 4, 8): {host.step_s * 1e3:.2f} ms, "
        f"{host.request_s * 1e6:.0f} us for each request"
    )
    console.print(
        f"Decode steps of Llama-3.1-8B FP8 on H200, held out: MAPE {statistics.fmean(errors):.1%}, "
        f"median {statistics.median(errors):.1%} of {len(errors)}"
    )
    if json_out is not None:
        json_out.parent.mkdir(parents=True, exist_ok=True)
        json_out.write_text(
            json.dumps({"open_loop": opened, "closed_loop": closed, "exchange": speeds}, indent=1) + "\n"
        )


if __name__ == "__main__":
    typer.run(main)
