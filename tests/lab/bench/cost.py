"""CPU time of a request, compared with another checkout of Tandem: ``make bench-cost BASE=folder``.

The load generator is pinned to one core, and a stack of emulated engines to the other; real engines bind themselves.
Both checkouts serve the same configuration with the same libraries, one at a time, in alternating order; a ratio is
taken round by round, and its median is what counts.
"""

import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import yaml
from rich.console import Console
from rich.table import Table

from autoscale.traces.trace import TraceRequest
from deployments.machine.claims import free_ports
from serve_app.load.generator import LoadGenerator
from serve_app.output import write_file
from tests.lab.stand.fixed_counts import ROOT, fixed_counts
from tests.lab.stand.processes import cpu_s

_STACK_CORE, _CLIENT_CORE = 0, 1
# Below and above the bound of local prefill.
_INPUT_TOKENS, _OUTPUT_TOKENS = (32, 512), 32
_WARM_REQUESTS, _SETTLE_S, _START_TIMEOUT_S, _STOP_TIMEOUT_S = 100, 20.0, 300.0, 120.0
_SIDES = ("base", "this")
_AT_ONCE = {"start_s": 0.0, "time_factor": 20.0, "chunk_s": 0.0}
_FIGURES = ("cpu_ms_per_request", "cpu_ms_per_request_above_rest", "rest_cores")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines that serve, one of each role.

    Attributes:
        config: a Serve YAML among ``configs``.
        is_pinned: the stack is pinned to one core.
        at_once: requests in flight.
        emulator: settings of emulated engines.
    """

    config: str
    is_pinned: bool
    at_once: int
    emulator: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """A Serve YAML with paths that hold in any checkout's folder."""
        return fixed_counts(self.config, 1, **self.emulator)


ENGINES = {
    # The engines' own time is negligible, so the time of everything around them is measured.
    "emulated": Engines(config="emulated", emulator=_AT_ONCE, is_pinned=True, at_once=8),
    "real": Engines(config="cpu_tiny", is_pinned=False, at_once=4),
}


@contextmanager
def served(checkout: Path, engines: Engines, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """``tandem serve`` of a checkout while the context is open; its URL and its process."""
    document, port = engines.document(), free_ports(1)[0]
    pinned = ["taskset", "--cpu-list", str(_STACK_CORE)] if engines.is_pinned else []
    document["http_options"] = {"host": "127.0.0.1", "port": port}
    with tempfile.TemporaryDirectory() as folder, log.open("w") as out:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(document))
        process = subprocess.Popen(
            [*pinned, *_command_of(checkout), "serve", str(config)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=out,
            stderr=out,
        )
        try:
            until_s = time.monotonic() + _START_TIMEOUT_S
            while "Ctrl-C" not in log.read_text():
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError(f"{checkout} did not start to serve: see {log}")
                time.sleep(1.0)
            yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_TIMEOUT_S)


def _command_of(checkout: Path) -> list[str]:
    """How a checkout's command is started: in the checkout's own environment if it has one.

    vLLM finds plugins by the environment's metadata, so a checkout with other modules needs an environment of its own.
    """
    python = checkout / ".venv" / "bin" / "python"
    # Until commit 8c60556 the folder serve_app had no rooms.
    module = "serve_app.cli.main" if (checkout / "serve_app" / "cli").is_dir() else "serve_app.cli"
    return [str(python) if python.exists() else sys.executable, "-m", module]


def tree_cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and all below it so far."""
    return sum(map(cpu_s, [process, *process.children(recursive=True)]))


def measure(checkout: Path, engines: Engines, log: Path, *, requests: int) -> dict[str, float]:
    """CPU time of one checkout's stack, at rest and per request.

    Raises:
        RuntimeError: the stack did not start, or a request failed.
    """
    model = engines.document()["applications"][0]["args"]["model"]["id"]
    cores = os.sched_getaffinity(0)
    with served(checkout, engines, log) as (url, process):
        if engines.is_pinned:
            os.sched_setaffinity(0, {_CLIENT_CORE})
        try:
            generator = LoadGenerator(url, model, seed=1)
            asyncio.run(generator.keep_in_flight(_requests(_WARM_REQUESTS), engines.at_once))
            before, began_s = tree_cpu_s(process), time.monotonic()
            time.sleep(_SETTLE_S)
            rest_cores = (tree_cpu_s(process) - before) / (time.monotonic() - began_s)
            before, began_s = tree_cpu_s(process), time.monotonic()
            records = asyncio.run(generator.keep_in_flight(_requests(requests), engines.at_once))
            used_s, took_s = tree_cpu_s(process) - before, time.monotonic() - began_s
        finally:
            os.sched_setaffinity(0, cores)
    if failed := [record.error for record in records if record.error is not None]:
        raise RuntimeError(f"{len(failed)} of {requests} requests to {checkout} failed, the first by {failed[0]}")
    return {
        "cpu_ms_per_request": 1000 * used_s / requests,
        "cpu_ms_per_request_above_rest": 1000 * (used_s - rest_cores * took_s) / requests,
        "rest_cores": rest_cores,
        "took_s": took_s,
    }


def _requests(count: int) -> list[TraceRequest]:
    lengths = [_INPUT_TOKENS[number % len(_INPUT_TOKENS)] for number in range(count)]
    return [TraceRequest(at_s=0.0, input_tokens=length, output_tokens=_OUTPUT_TOKENS) for length in lengths]


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of both sides, and the ratio of each round."""
    row: dict[str, Any] = {
        f"{side}_{name}": statistics.median(one[side][name] for one in rounds) for side in _SIDES for name in _FIGURES
    }
    for name in _FIGURES[:-1]:
        ratios = [one["this"][name] / one["base"][name] for one in rounds]
        row[f"{name}_ratio"], row[f"{name}_ratios"] = statistics.median(ratios), ratios
    return row | {"rounds": rounds}


Kind = StrEnum("Kind", {name.upper(): name for name in ENGINES})  # type: ignore[misc]


def main(
    base: Annotated[Path, typer.Argument(help="Another checkout, for instance of an earlier release.")],
    engines: Annotated[list[Kind] | None, typer.Option(help="May be repeated; default: both.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    requests: Annotated[int, typer.Option(min=10, help="Requests of each measurement.")] = 600,
    out: Path = Path("reports/cost.json"),
) -> None:
    """Measure both checkouts in turn, show and write."""
    console = Console()
    checkouts = {"base": base.resolve(), "this": ROOT}
    if not (checkouts["base"] / "serve_app").is_dir():
        raise typer.BadParameter(f"{base} is no checkout of Tandem: it has no serve_app")
    out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": platform.platform()}
    names = list(ENGINES) if engines is None else [str(one) for one in engines]
    for name in names:
        measured: list[dict[str, dict[str, float]]] = []
        for number in range(rounds):
            sides = _SIDES if number % 2 == 0 else _SIDES[::-1]
            row = {}
            for side in sides:
                log = out.parent / f"cost_{side}.log"
                row[side] = measure(checkouts[side], ENGINES[name], log, requests=requests)
                console.print(f"{name}, round {number + 1}, {side}: {row[side]['cpu_ms_per_request']:.2f} ms a request")
            measured.append(row)
            result[name] = summary(measured)
            write_file(out, json.dumps(result, indent=1) + "\n", "--out")
    columns = ("engines", "base ms", "this ms", "ratio", "above rest", "cores at rest")
    table = Table(*columns, title="CPU time per request", box=None, pad_edge=False)  # 80 columns
    for name in names:
        row = result[name]
        table.add_row(
            name,
            *(f"{row[f'{side}_cpu_ms_per_request']:.2f}" for side in _SIDES),
            *(_spread(row, figure) for figure in _FIGURES[:-1]),
            ", ".join(f"{row[f'{side}_rest_cores']:.3f}" for side in _SIDES),
        )
    console.print(table)


def _spread(row: dict[str, Any], figure: str) -> str:
    ratios = row[f"{figure}_ratios"]
    return f"{row[f'{figure}_ratio']:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    typer.run(main)
