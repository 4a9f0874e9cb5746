"""Time from a raised target to a serving replica: cold, with staged weights, and warm: ``make bench-starts``.

Real engines start one after another on this machine, with a random Llama of 1.6 GB that is not in the page cache. Cold:
the node's folder is empty, so the model's files are copied and then loaded. Staged: the folder has the files. Warm: the
replica runs already but gets no requests. ``--source FOLDER`` takes the files from another store than this disk.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autoscale.types import PoolKey
from kvtransfer.topology import Role
from serve_app.local.tiny_model import Shape, build_tiny_model
from serve_app.output import write_file
from tests.lab.stand.fixed_counts import fixed_counts

_SHAPE = Shape(hidden=1536, layers=16, heads=24, kv_heads=8, head_dim=64, ffn=4096)
_MODEL, _POOL = "big", PoolKey("g0", Role.DECODE)
# A replica must come or go within this time, in seconds.
_START_S = 300.0
# Time between two looks, in seconds.
_POLL_S = 0.05


def document(source: Path, stage_folder: Path) -> dict[str, Any]:
    """One aggregated pool of one engine or two, and a controller without cooldowns."""
    made = fixed_counts("cpu_tiny", 1)
    application = made["applications"][0]
    application["name"] = "starts"
    application["autoscaling_policy"] = {"policy_function": "autoscale.ray_policy:JointPolicy"}
    args = application["args"]
    args["model"] = {"id": _MODEL, "source": str(source), "stage_folder": str(stage_folder)}
    args["engine_kwargs"] |= {"max_model_len": 1024, "max_num_batched_tokens": 1024}
    args["groups"][0] |= {"prefill": None}
    args["groups"][0]["decode"]["max_replicas"] = 2
    args["autoscale"] = {
        "pd_ratio": "0:1",
        "policy": {"kind": "static", "prefill": 0, "decode": 1},
        "guard": {"cooldown_out_s": 0.0, "cooldown_in_s": 0.0},
        "gate": {"observation_s": 0.0},
        "interval_s": 1.0,
    }
    return made


class Starts:
    """The application; its second replica comes and goes."""

    def __init__(self, control: Any, source: Path, stage_folder: Path) -> None:
        self._control, self._source, self._stage_folder = control, source, stage_folder

    def cold_s(self) -> float:
        """Seconds of a start with nothing on the node's disk."""
        shutil.rmtree(self._stage_folder, ignore_errors=True)
        _forget(self._source)
        return self._grow_s()

    def staged_s(self) -> float:
        """Seconds of a start with the model's files on the node's disk, but not in memory."""
        _forget(self._stage_folder)
        return self._grow_s()

    def warm_s(self) -> float:
        """Seconds until a warm replica serves."""
        self._control.tune({"warm_replicas": 1}, "bench")
        _until(lambda: self._running() == 2 and self._admitted() == 1)
        taken_s = self._grow_s()
        self._control.tune({"warm_replicas": 0}, "bench")
        return taken_s

    def shrink(self) -> None:
        """Back to one replica."""
        self._control.scale(0, 1)
        _until(lambda: self._running() == 1 and self._admitted() == 1)

    def _grow_s(self) -> float:
        began_s = time.monotonic()
        self._control.scale(0, 2)
        _until(lambda: self._admitted() == 2)
        return time.monotonic() - began_s

    def _running(self) -> int:
        last = self._control.status().last
        return len(last.running[_POOL]) + len(last.draining[_POOL])

    def _admitted(self) -> int:
        return len(self._control.status().last.plan.admitted)


def _forget(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _START_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no replica has come or gone in {_START_S:g} s: see the logs of Ray")
        time.sleep(_POLL_S)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    source: Annotated[Path | None, typer.Option(help="Folder for the model's files, such as your store.")] = None,
    out: Annotated[Path, typer.Option("--json", help="Write the figures here.")] = Path("reports/starts.json"),
) -> None:
    """Measure, show and write."""
    from serve_app.sdk import deploy

    console = Console()
    with tempfile.TemporaryDirectory(prefix="tandem-starts-") as scratch:
        model, stage_folder = (source or Path(scratch)) / "model", Path(scratch) / "staged"
        build_tiny_model(model, shape=_SHAPE)
        size_gb = sum(path.stat().st_size for path in model.iterdir()) / 1e9
        taken: dict[str, list[float]] = {"cold": [], "staged": [], "warm": []}
        with deploy(document(model, stage_folder), on_status=lambda status: None) as app:
            starts = Starts(app.control, model, stage_folder)
            for number in range(rounds):  # in turns
                for name, measure in (("cold", starts.cold_s), ("staged", starts.staged_s), ("warm", starts.warm_s)):
                    taken[name].append(measure())
                    console.print(f"round {number + 1}: {name} {taken[name][-1]:.1f} s", highlight=False)
                    starts.shrink()
    table = Table(title=f"A replica of {size_gb:.1f} GB", title_justify="left")
    for column in ("start", "median s", "least s", "most s"):
        table.add_column(column, justify="right")
    for name, seconds in taken.items():
        table.add_row(name, *(f"{value:.1f}" for value in (statistics.median(seconds), min(seconds), max(seconds))))
    console.print(table)
    write_file(out, json.dumps({"model_gb": size_gb, "seconds": taken}, indent=1) + "\n", "--json")


if __name__ == "__main__":
    typer.run(main)
