"""Time from a request for a model at zero to its first token: ``make bench-starts``.

One application after another serves a random Llama of 1.6 GB on this machine, with real engines. Its model goes to zero
when it is idle, or its engine sleeps, and the benchmark then sends requests to the endpoint. Cold: the node's folder is
empty, and the model's files are not in the page cache. Staged: the folder has the files. Start host: a process with all
imports waits, and the folder has the files. Sleeping: the replica runs, and its engine sleeps at level 1 or 2.
``--source FOLDER`` takes the files from another store than this disk.
"""

import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from serve_app.local.tiny_model import Shape, build_tiny_model
from serve_app.output import write_file
from tests.lab.stand.fixed_counts import one_autoscaled_engine
from tests.lab.stand.processes import is_start_host

_SHAPE = Shape(hidden=1536, layers=16, heads=24, kv_heads=8, head_dim=64, ffn=4096)
_MODEL = "big"
# A replica must come or go within this time, in seconds.
_START_S = 300.0
# Time between two looks, in seconds.
_POLL_S = 0.25
# Time that the machine rests before a request, in seconds: what the last start left behind is over.
_REST_S = 5.0
# Requests that come together while the model wakes; each must be answered.
_TOGETHER = 8
# What each way to wait sets: start hosts on the node, and the level at which the engine sleeps.
_WAYS: dict[str, tuple[int, int]] = {
    "cold": (0, 0),
    "staged": (0, 0),
    "start host": (1, 0),
    "sleeping, level 1": (0, 1),
    "sleeping, level 2": (0, 2),
}


def document(source: Path, stage_folder: Path, hosts: int, level: int) -> dict[str, Any]:
    """One aggregated pool of at most one engine, which goes to zero after some idle seconds, or sleeps."""
    sleep = {"engine_sleep": {"after_s": 2, "level": level}} if level else {}
    made = one_autoscaled_engine(replicas=1 if level else 0, **sleep)
    application = made["applications"][0]
    application["name"] = "starts"
    args = application["args"]
    args["model"] = {"id": _MODEL, "source": str(source), "stage_folder": str(stage_folder)}
    args["engine_kwargs"] |= {"max_model_len": 1024, "max_num_batched_tokens": 1024}
    args["start_hosts"] = {"per_node": hosts}
    if not level:
        args["autoscale"]["idle_to_zero_s"] = 5.0
    return made


class Starts:
    """An application whose model waits in one way."""

    def __init__(self, app: Any, name: str, source: Path, stage_folder: Path) -> None:
        self._app, self._name, self._source, self._stage_folder = app, name, source, stage_folder
        self._client = app.client()

    def first_token_s(self) -> float:
        """Seconds from a request at the endpoint to its first token, while others come together with it."""
        self._until_it_waits()
        if self._name == "cold":
            shutil.rmtree(self._stage_folder, ignore_errors=True)
            _forget(self._source)
        elif not self._name.startswith("sleeping"):
            _forget(self._stage_folder)
        answers: list[int] = []
        others = [threading.Thread(target=lambda: answers.append(self._ask()[1])) for _ in range(_TOGETHER - 1)]
        for other in others:
            other.start()
        first_s, tokens = self._ask()
        for other in others:
            other.join()
        if len(answers) != len(others) or not tokens or not all(answers):
            raise RuntimeError(f"{self._name}: a request was lost while the model woke: {answers}")
        return first_s

    def _ask(self) -> tuple[float, int]:
        """Seconds to the first token, and the number of tokens."""
        began_s, first_s, tokens = time.monotonic(), 0.0, 0
        request = {"model": _MODEL, "prompt": "Hello", "max_tokens": 4, "extra_body": {"ignore_eos": True}}
        for chunk in self._client.completions.create(**request, stream=True, timeout=_START_S):
            if chunk.choices:
                first_s, tokens = first_s or time.monotonic() - began_s, tokens + 1
        return first_s, tokens

    def _until_it_waits(self) -> None:
        if not self._name.startswith("sleeping"):
            _until(lambda: not self._replicas())
        if self._name == "start host":
            _until(lambda: any(map(is_start_host, self._app.processes())))
        time.sleep(_REST_S)

    def _replicas(self) -> int:
        last = self._app.control.status().last
        return 1 if last is None else sum(len(names) for names in (*last.running.values(), *last.draining.values()))


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
    way: Annotated[
        list[str] | None, typer.Option(help=f"Measure this way alone: {', '.join(_WAYS)}. May be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option("--json", help="Write the figures here.")] = Path("reports/starts.json"),
) -> None:
    """Measure, show and write."""
    from serve_app.sdk import deploy

    console = Console()
    if unknown := set(way or ()) - set(_WAYS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: give {', '.join(_WAYS)}")
    with tempfile.TemporaryDirectory(prefix="tandem-starts-") as scratch:
        model, stage_folder = (source or Path(scratch)) / "model", Path(scratch) / "staged"
        build_tiny_model(model, shape=_SHAPE)
        size_gb = sum(path.stat().st_size for path in model.iterdir()) / 1e9
        taken: dict[str, list[float]] = {}
        for name, (hosts, level) in _WAYS.items():
            if way and name not in way:
                continue
            with deploy(document(model, stage_folder, hosts, level), on_status=lambda status: None) as app:
                starts = Starts(app, name, model, stage_folder)
                starts.first_token_s()  # the first start of an application fills caches
                taken[name] = []
                for number in range(rounds):
                    taken[name].append(starts.first_token_s())
                    console.print(f"{name}, round {number + 1}: {taken[name][-1]:.1f} s", highlight=False)
    table = Table(title=f"First token of a model of {size_gb:.1f} GB that waits at zero", title_justify="left")
    for column in ("the model waits", "median s", "least s", "most s"):
        table.add_column(column, justify="right")
    for name, seconds in taken.items():
        table.add_row(name, *(f"{value:.1f}" for value in (statistics.median(seconds), min(seconds), max(seconds))))
    console.print(table)
    write_file(out, json.dumps({"model_gb": size_gb, "seconds": taken}, indent=1) + "\n", "--json")


if __name__ == "__main__":
    typer.run(main)
