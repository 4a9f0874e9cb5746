"""From a model and a device to a folder of tables: the whole run, as commands call it."""

import datetime
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoscale.operators.collective import Collective
from autoscale.operators.device import DEVICE_FILE, DeviceFacts, load_device, save_device
from autoscale.operators.graph import OperatorGraph
from autoscale.operators.kinds import wide_dtype
from autoscale.operators.saved_tables import save_operator_table
from autoscale.operators.tables import COLUMNS
from deployments.operator_profiler.device import (
    ProfilingError,
    check_device,
    device_name,
    measured_facts,
    rotation_bytes,
)
from deployments.operator_profiler.measure import (
    POINTS_FILE,
    OnProgress,
    Run,
    identity,
    repeats,
    room_bytes,
    unrepeated,
)
from deployments.operator_profiler.series import Backends, Sizes, is_measured, series_of
from deployments.operator_profiler.tensors import Tensors
from deployments.operator_profiler.vllm_tensors import VllmTensors, vllm_reason
from deployments.profiler.points import Points

METADATA_FILE = "metadata.json"
METHOD = {
    "calls": "random weights; KV and weights are used in turns, so that no cache holds them",
    "kernels": "torch: torch.mm, addmm or scaled_mm, scaled_dot_product_attention (flash, KV not paged); vllm: what "
    "vLLM's CPU layers call: oneDNN with packed weights, attention of paged KV, rotary, activation",
    "time": "on a GPU the median over groups of calls in a CUDA graph; on a CPU the least group, in seconds for which "
    "the calling thread had a core, at the core's undisturbed pace. Of several rounds the median of the three least "
    "times counts, of two the lower one",
    "sizes": "first a coarse grid, then between points where the curve bends by more than 5 %",
    "norm": "with the addition of the residual; small operators are one kernel each where the compiler is named",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has measured.

    Attributes:
        facts: of the device.
        rows: rows by table.
        measured: measurements of this run; ``reused``: those of earlier ones.
        is_complete: whether nothing is left to measure.
        unrepeated: points that were measured once.
        left_out: points that were not measured, and why.
        other_operators: operators that have no table: their times are rooflines.
    """

    facts: DeviceFacts
    rows: dict[str, int]
    measured: int
    reused: int
    is_complete: bool
    unrepeated: int
    left_out: dict[str, str]
    other_operators: tuple[str, ...]


def profile_operators(
    graph: OperatorGraph,
    model: str,
    device: str,
    parallels: Sequence[int],
    sizes: Sizes,
    budget_s: float,
    folder: Path,
    on_progress: OnProgress,
    kernels: str = "auto",
) -> Outcome:
    """Measure the operators of a model and write tables, the device's facts, and how it was measured.

    ``kernels``: torch, vllm, or auto: vLLM's on a CPU where they are installed, else torch's.

    Raises:
        ProfilingError: device, data type or parallel size cannot be measured, no memory, or the folder.
        ValueError: the folder has points of another run.
    """
    dtype = graph.precision.weights
    check_device(device, dtype)
    wrong = [size for size in parallels if size not in graph.parallel_sizes()]
    if wrong:
        allowed = ", ".join(map(str, graph.parallel_sizes()))
        raise ProfilingError(
            f"--tp {wrong[0]}: the model cannot be divided over {wrong[0]} GPUs: give some of {allowed}"
        )
    began_s = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        backends = Backends(library=library_of(kernels, device), fused=_fused_backend(device))
        start = identity(graph, model, device, dtype, backends.library)
        points = Points(folder / POINTS_FILE, start, "another run")
        before = len(points.timings)
        facts = _facts(device, folder, on_progress)
        save_device(folder, facts)
        run = Run(points, facts, _tensors(backends.library, device, dtype), dtype, budget_s)
        series = series_of(graph, parallels, sizes, backends)
        run.measure(series, on_progress)
        rows = _save_tables(folder, run)
    except OSError as error:
        raise ProfilingError(f"--out {folder}: {error.strerror}: give a folder that can be written") from None
    outcome = Outcome(
        facts=facts,
        rows=rows,
        measured=len(run.points.timings) - before,
        reused=before,
        is_complete=run.is_complete,
        unrepeated=unrepeated(run.surveys),
        left_out=_left_out(run),
        other_operators=_others(graph, parallels),
    )
    metadata = start | _metadata(run, outcome, parallels, sizes, backends, time.monotonic() - began_s)
    (folder / METADATA_FILE).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    return outcome


def library_of(kernels: str, device: str) -> str:
    """Whose kernels are measured: torch or vllm.

    Raises:
        ProfilingError: vLLM's are asked for, and cannot be used.
    """
    if kernels not in ("auto", "torch", "vllm"):
        raise ProfilingError(f"--kernels {kernels}: give auto, torch or vllm")
    if kernels == "torch" or (kernels == "auto" and device != "cpu"):
        return "torch"
    reason = "they are those of CPUs" if device != "cpu" else vllm_reason()
    if reason and kernels == "vllm":
        raise ProfilingError(f"--kernels vllm: vLLM's kernels cannot be used on {device} ({reason}): give torch")
    return "torch" if reason else "vllm"


def _tensors(library: str, device: str, dtype: str) -> Tensors:
    return {"torch": Tensors, "vllm": VllmTensors}[library](
        device,
        rotation_bytes=rotation_bytes(device),
        kv_limit_bytes=int(room_bytes(device)),
        dtype=wide_dtype(dtype),
    )


def _facts(device: str, folder: Path, on_progress: OnProgress) -> DeviceFacts:
    """The facts that an earlier run of this device has written, or new ones."""
    if (folder / DEVICE_FILE).exists() and (folder / POINTS_FILE).exists():
        facts = load_device(folder)
        if facts.name == device_name(device):
            return facts
    on_progress("what the device reaches: products and copies")
    return measured_facts(device)


def _save_tables(folder: Path, run: Run) -> dict[str, int]:
    rows: dict[str, list[tuple[str | float, ...]]] = {}
    for table, row in run.rows():
        rows.setdefault(table, []).append(row)
    if not rows:
        raise ProfilingError("the budget was over before one point was measured: give a larger --budget-s")
    for name in COLUMNS:
        (folder / f"{name}.csv.gz").unlink(missing_ok=True)
    return {name: save_operator_table(folder, name, each) for name, each in sorted(rows.items())}


def _fused_backend(device: str) -> str:
    """Whether small operators are compiled, as engines run one kernel for each; where torch finds no compiler: not."""
    if device == "cpu":
        return "eager"
    try:
        Tensors(device, rotation_bytes=0, kv_limit_bytes=0).silu_mul(4, 64, "inductor")[0]()
        torch.cuda.synchronize()
    except Exception:  # whatever the compiler lacks here
        return "eager"
    return "inductor"


def _left_out(run: Run) -> dict[str, str]:
    return {
        f"{survey.series.operator} {' '.join(map(str, survey.series.key))}, {place[0] or ''} {place[1]}": reason
        for survey in run.surveys
        for place, reason in survey.left_out.items()
    }


def _others(graph: OperatorGraph, parallels: Sequence[int]) -> tuple[str, ...]:
    """Operators without a table: exchanges between GPUs, experts, vision."""
    return tuple(
        each.name
        for each in graph.operators
        if not is_measured(each) and (max(parallels) > 1 or not isinstance(each, Collective))
    )


def _metadata(
    run: Run, outcome: Outcome, parallels: Sequence[int], sizes: Sizes, backends: Backends, took_s: float
) -> dict[str, Any]:
    """How it was measured."""
    earlier: list[Any] = []
    path = run.points.path.with_name(METADATA_FILE)
    if outcome.reused and path.exists():
        try:
            earlier = list(json.loads(path.read_text(encoding="utf-8"))["runs"])
        except (ValueError, KeyError, TypeError):
            earlier = []
    return {
        "python": platform.python_version(),
        "host_cores": os.cpu_count(),
        "cuda": torch.version.cuda,
        "torch_kernels": {"attention": backends.attention, "small operators": backends.fused},
        "tp": list(parallels),
        "max_batch_tokens": sizes.max_batch_tokens,
        "max_running": sizes.max_running,
        "longest_tokens": sizes.longest_tokens,
        "runs": [
            *earlier,
            {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "took_s": round(took_s, 1),
                "measurements": outcome.measured,
            },
        ],
        "rows": outcome.rows,
        "points_by_rounds": {str(rounds): points for rounds, points in repeats(run.surveys).items()},
        "is_complete": outcome.is_complete,
        "left_out": outcome.left_out,
        "not_measured": list(outcome.other_operators),
        "method": METHOD,
    }
