"""The parts of a run, each with its own share of the time and its own table."""

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from deployments.operator_profiler.meter import Meter, open_meter
from deployments.operator_profiler.timing import TIMING_COLUMNS, Timer, make_timer
from tests.lab.operators import points as plan
from tests.lab.operators.layer import Layer
from tests.lab.operators.links import LINK_COLUMNS, LinksRoom, measure_links
from tests.lab.operators.pairs import PAIR_COLUMNS, PairsRoom, measure_pairs
from tests.lab.operators.power import POWER_COLUMNS, PowerRoom, measure_power
from tests.lab.operators.shapes import Point, UnsupportedShapeError, work_of
from tests.lab.operators.shares import SHARE_COLUMNS, SHARES_PERCENT, SharesRoom, measure_shares
from tests.lab.operators.tables import (
    POINT_COLUMNS,
    Progress,
    Skipped,
    Table,
    measured_cells,
    point_cells,
    point_key,
)

# The file that a child of the part shares runs.
SCRIPT = Path(__file__).resolve().with_name("measure.py")
OPERATOR_COLUMNS = (*POINT_COLUMNS, *TIMING_COLUMNS, "flops", "bytes")
# Shares of the budget, in the order of importance; what a part leaves goes to the operators that are left.
PART_BUDGET_FRAC = {"operators": 0.48, "pairs": 0.14, "power": 0.12, "shares": 0.18, "links": 0.05}
_FILES = {name: f"{name}.csv" for name in PART_BUDGET_FRAC} | {"skipped": "skipped.csv"}
_COLUMNS = {
    "operators": OPERATOR_COLUMNS,
    "pairs": PAIR_COLUMNS,
    "power": POWER_COLUMNS,
    "shares": SHARE_COLUMNS,
    "links": LINK_COLUMNS,
}
_COPY_SIZES_BYTES = tuple(2**power for power in (16, 18, 20, 22, 24, 26, 28, 30))

METHOD = {
    "time": "CUDA graph of many calls, replayed between two events; quantiles over groups of replays; repeats = calls",
    "method column": "graph, or loop where the calls could not be captured (launch costs may count then)",
    "weights": "weights and KV are used in turns over copies that exceed three times the L2 cache; activations are not",
    "role": "both: the operator sees tokens only, so prefill and decode have the same row",
    "context": "KV tokens of each sequence: before the chunk in prefill, all that are read in decode; KV not paged",
    "tokens": "new tokens of all sequences together; sequences for lm_head and samplers",
    "flops, bytes": "of an ideal fused kernel on one rank; no collectives",
    "backend": "flash and cudnn: the kernel that scaled_dot_product_attention was restricted to; eager: torch's own "
    "kernels one by one; inductor: one compiled kernel; cublas: torch.mm, torch.addmm or torch._scaled_mm",
    "fp8": "e4m3 with one scale per tensor, fast accumulation, bf16 output; quantising the activation is not included",
    "pairs": "both run without pause in two streams; means over whole bursts inside the common window",
    "power": "mean from the energy counter where it moves, else from samples; whole GPU",
    "shares": "each share is a process of its own; sms is what the process saw or asked for",
    "links": "device-to-device counts bytes read and written; small sizes are found in the L2 cache",
    "settings": "clocks, power limit, persistence and compute mode of the GPU were left as found",
}


def models_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The models of a run."""
    return ("tiny",) if options.quick else plan.MAIN_MODELS


class Run:
    """One run: its tables, its time and its device.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        if not options.resume:
            for name in (*_FILES.values(), "metadata.json"):
                (self.out / name).unlink(missing_ok=True)
        self.started_s = time.monotonic()
        self.end_s = self.started_s + options.budget_s
        self.progress = Progress(self.started_s)
        self.tables = {name: Table(self.out / _FILES[name], columns) for name, columns in _COLUMNS.items()}
        self.skipped = Skipped(self.out / _FILES["skipped"])
        self.meter: Meter = open_meter(options.device)
        self.timer: Timer = make_timer(options.device, self.meter)
        self.layer = Layer(options.device)
        self.models = models_of(options)
        self.metadata: dict[str, Any] = _facts(options, self.meter) | {"method": METHOD, "parts": {}}
        if options.resume:
            before = json.loads((self.out / "metadata.json").read_text(encoding="utf-8"))
            self.metadata |= {"restarts": options.restarts, "parts": before["parts"]}
        self.left: list[Point] = []

    def deadline_s(self, part: str) -> float:
        """When a part must end."""
        return min(self.end_s, time.monotonic() + PART_BUDGET_FRAC[part] * float(self.options.budget_s))

    def save_metadata(self) -> None:
        """Write how it was measured, and what came out."""
        text = json.dumps(self.metadata, indent=1, sort_keys=True, default=str)
        (self.out / "metadata.json").write_text(text + "\n", encoding="utf-8")


def _facts(options: argparse.Namespace, meter: Meter) -> dict[str, Any]:
    """What the run ran on."""
    facts: dict[str, Any] = {
        "date_by_the_machine": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": options.device,
        "is_quick": options.quick,
        "budget_s": options.budget_s,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "host_cores": os.cpu_count(),
        "at_start": meter.facts(),
    }
    if options.device != "cpu":
        found = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": found.name,
            "sms": found.multi_processor_count,
            "memory_bytes": found.total_memory,
            "l2_bytes": found.L2_cache_size,
            "compute_capability": f"{found.major}.{found.minor}",
            "cudnn": str(getattr(torch.backends.cudnn, "version", lambda: None)()),
        }
    return facts


def wake(run: Run) -> None:
    """Some products, so that the first point does not find a sleeping GPU."""
    side = 64 if run.options.device == "cpu" else 4096
    left = torch.randn(side, side, device=run.options.device, dtype=torch.bfloat16)
    end_s = time.monotonic() + (0.0 if run.options.device == "cpu" else 1.0)
    burst = run.timer.burst([lambda: torch.mm(left, left)])
    while run.timer.marks_us(burst, 3) and time.monotonic() < end_s:
        pass


def measure_operators(run: Run, todo: Sequence[Point], deadline_s: float) -> list[Point]:
    """Time points until the deadline; those that are left."""
    for index, point in enumerate(todo):
        if time.monotonic() > deadline_s:
            return list(todo[index:])
        try:
            flops, moved_bytes = work_of(point)
            # Engines sample outside their graphs; a sort may refuse capture, and that upsets the allocator.
            timing = run.timer.time(run.layer.calls(point), can_capture=point.operator != "top_p")
            run.tables["operators"].add(point_cells(point) | timing.cells() | {"flops": flops, "bytes": moved_bytes})
        except UnsupportedShapeError as error:
            run.skipped.note("operators", point, error)
        except Exception as error:
            run.skipped.note("operators", point, error)
            run.layer.give_up_compiling(point, error)
            if isinstance(error, torch.OutOfMemoryError):
                run.layer.drop()
            run.timer.finish()  # a lost context ends this process
        run.progress.tick(f"operators: {index + 1}/{len(todo)}: {point.label()}")
    return []


def operators_part(run: Run) -> None:
    """The points of the plan that have no row yet; first as many as the part's time allows."""
    todo = run.left
    if not todo:
        found = plan.full_plan()
        if run.options.quick:
            found = plan.quick_plan() + (plan.compiled_plan() if run.options.device != "cpu" else [])
        have = measured_cells(run.out / _FILES["operators"]) | measured_cells(run.out / _FILES["skipped"])
        todo = [point for point in found if point_key(point) not in have]
        run.layer.reserve_kv(todo)
    run.left = measure_operators(run, todo, run.deadline_s("operators"))
    run.layer.drop()


def pairs_part(run: Run) -> None:
    """Interference, one model after another."""
    ends_s = run.deadline_s("pairs")
    for number, model in enumerate(run.models):
        room = PairsRoom(
            device=run.options.device,
            meter=run.meter,
            table=run.tables["pairs"],
            skipped=run.skipped,
            deadline_s=ends_s - (len(run.models) - 1 - number) * (ends_s - time.monotonic()) * 0.4,
            window_us=10_000.0 if run.options.quick else 150_000.0,
            say=run.progress.tick,
        )
        chosen = plan.representative(model)
        measure_pairs(room, chosen[:2] if run.options.device == "cpu" else chosen)
        run.layer.drop()


def power_part(run: Run) -> None:
    """Idle and busy power; Eq. 9."""
    room = PowerRoom(
        meter=run.meter,
        timer=run.timer,
        layer=run.layer,
        table=run.tables["power"],
        skipped=run.skipped,
        deadline_s=run.deadline_s("power"),
        warm_up_s=0.05 if run.options.quick else 0.5,
        window_s=0.1 if run.options.quick else 1.5,
        say=run.progress.tick,
    )
    points = [point for model in run.models[:1] for point in plan.representative(model)]
    shared = [points[0], next(point for point in points if point.role == "decode")]
    if run.options.device == "cpu":
        points, shared = points[:2], shared[:1]
    measure_power(room, points, shared)
    run.layer.drop()


def shares_part(run: Run) -> None:
    """Times by share of SMs, in processes of their own."""
    is_cpu = run.options.device == "cpu"
    script = [str(SCRIPT), "--out", str(run.out)] + (["--quick"] if run.options.quick else [])
    room = SharesRoom(
        script=script,
        device=run.options.device,
        sms=run.metadata.get("sms", 1),
        table=run.tables["shares"],
        skipped=run.skipped,
        deadline_s=run.deadline_s("shares"),
        shares_percent=(100,) if is_cpu else SHARES_PERCENT,
        say=run.progress.say,
    )
    run.metadata["share_method"] = measure_shares(room, share_plan(run.models))


def share_plan(models: Sequence[str]) -> list[Point]:
    """Points of all models, Qwen2 first as in Fig. 8."""
    return [point for model in sorted(models, reverse=True) for point in plan.share_points(model)]


def links_part(run: Run) -> None:
    """Ceilings, launch costs and copies."""
    room = LinksRoom(
        device=run.options.device,
        timer=run.timer,
        table=run.tables["links"],
        skipped=run.skipped,
        deadline_s=run.deadline_s("links"),
        sizes_bytes=_COPY_SIZES_BYTES[:2] if run.options.quick else _COPY_SIZES_BYTES,
        square=64 if run.options.quick else 8192,
        say=run.progress.tick,
    )
    measure_links(room)


PARTS: dict[str, Callable[[Run], None]] = {
    "operators": operators_part,
    "pairs": pairs_part,
    "power": power_part,
    "shares": shares_part,
    "links": links_part,
}
