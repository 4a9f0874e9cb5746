"""Measures operators, pairs, power, shares of SMs and links within a time budget, the most important first.

On a machine with a GPU, from the repository's root: ``python3 tests/lab/operators/measure.py --device cuda --out DIR``.
Here, as a dry run: the same with ``--device cpu --quick``.
"""

import argparse
import os
import signal
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a plain file: a package `tests` of another project must not be found first
    ROOT = Path(__file__).resolve().parents[3]
    sys.path[0] = str(ROOT)
    package = types.ModuleType("tests")
    package.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = package

import torch

from deployments.operator_profiler.meter import open_meter
from deployments.operator_profiler.timing import DeviceLostError
from tests.lab.operators.run import PARTS, SCRIPT, Run, measure_operators, models_of, share_plan, wake
from tests.lab.operators.shares import serve_child

# New processes after a lost CUDA context.
_MOST_RESTARTS = 3


def run_parts(run: Run) -> None:
    """All parts in order, then the operators that are left; the files are whole after each part."""
    chosen = run.options.parts.split(",")
    wake(run)
    for number, name in enumerate(chosen):
        began_s = time.monotonic()
        run.progress.say(f"{name}: begins, {run.end_s - began_s:.0f} s left")
        try:
            PARTS[name](run)
        except DeviceLostError as error:
            run.skipped.note(name, None, error)
            # Points of operators have rows or reasons already; another part may not end twice.
            restart(run, chosen[number:] if name == "operators" else chosen[number + 1 :])
        except Exception as error:
            run.skipped.note(name, None, error)
            run.progress.say(f"{name}: {type(error).__name__}: {error}")
        _end_part(run, name, began_s)
    if run.left and time.monotonic() < run.end_s:
        began_s = time.monotonic()
        run.left = measure_operators(run, run.left, run.end_s)
        _end_part(run, "operators, the rest", began_s)
    for point in run.left:
        run.skipped.note("operators", point, f"no time left in {run.options.budget_s:.0f} s")
    run.metadata["at_end"] = run.meter.facts()
    run.save_metadata()


def _end_part(run: Run, name: str, began_s: float) -> None:
    rows = {key: table.rows for key, table in run.tables.items()} | {"skipped": run.skipped.rows}
    run.metadata["parts"][name] = {"took_s": round(time.monotonic() - began_s, 1), "rows_so_far": rows}
    run.save_metadata()
    run.progress.say(f"{name}: ended, rows {rows}")


def restart(run: Run, parts: Sequence[str]) -> None:
    """Go on in a new process with the parts that are left, since this one has lost its CUDA context."""
    run.save_metadata()
    left_s = run.end_s - time.monotonic()
    if not parts or left_s < 5 or run.options.restarts >= _MOST_RESTARTS:
        raise SystemExit("the GPU's context is lost, and no part or no time is left")
    run.progress.say(f"the GPU's context is lost; a new process goes on with {', '.join(parts)}")
    command = [sys.executable, str(SCRIPT), "--device", run.options.device, "--out", str(run.out)]
    command += ["--budget-s", f"{left_s:.0f}", "--parts", ",".join(parts), "--resume"]
    command += ["--restarts", str(run.options.restarts + 1)] + (["--quick"] if run.options.quick else [])
    os.execv(sys.executable, command)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument("--budget-s", type=float, default=480.0, help="time for all parts together")
    parser.add_argument("--quick", action="store_true", help="the tiny model alone, as a dry run")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure, in this order")
    for hidden, kind in (("--green-sms", int), ("--restarts", int)):
        parser.add_argument(hidden, type=kind, default=None if hidden == "--green-sms" else 0, help=argparse.SUPPRESS)
    for hidden in ("--resume", "--share-child"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}: use some of {', '.join(PARTS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or be a child of the part shares."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here: use --device cpu --quick for a dry run")
    if options.share_child:
        points = share_plan(models_of(options))
        serve_child(options.device, points, open_meter(options.device), options.green_sms)
        return
    run = Run(options)
    run.save_metadata()
    run_parts(run)


if __name__ == "__main__":
    # So that the MPS daemon is ended also when the run is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    main()
