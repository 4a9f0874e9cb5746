"""What the commands on a virtual cluster share: options, inputs, worker processes and progress."""

import importlib.util
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer import Option

from autoscale.sim.config import SimConfig
from autoscale.traces.trace import TraceRequest, cut, load_trace, scale_trace
from serve_app.checks.yaml_checks import ConfigError
from serve_app.cli.terminal import errors
from serve_app.local.shipped import shipped

# The configuration without --config: a shipped file, under configs/ in a checkout.
_DEFAULT_CONFIG = "sim/h100_llama70b.yaml"
# --rate-scale must be below this. Far smaller factors already make more requests than can be simulated; then the check
# of the trace refuses them and says how many they are.
_MOST_RATE_SCALE = 1_000_000

TracePath = Annotated[
    Path, Option("--trace", help="CSV or .gz: timestamp_s, input_tokens, output_tokens, and optionally hash_ids.")
]
RateScale = Annotated[
    str,
    Option(help="Multiplies the number of the trace's requests; auto: so that the oracle's peak is 40 replicas."),
]
Start = Annotated[float, Option(min=0.0, help="Begin at this second of the trace.")]
Duration = Annotated[float | None, Option(min=1.0, help="Length of the used part, seconds; left out: to the end.")]
Jobs = Annotated[int | None, Option(min=1, help="Number of processes; left out: one per core.")]
JsonOut = Annotated[Path | None, Option("--json", help="Write all figures to this JSON file.")]
Strict = Annotated[bool, Option("--strict", help="Refuse a trace with requests that are longer than the profiles.")]
ConfigFile = Annotated[
    Path | None,
    Option("--config", help="Cluster, objectives and policies; by default the shipped sim/h100_llama70b.yaml."),
]
Gpus = Annotated[
    int | None,
    Option(
        min=2, help="GPUs that are split between the roles; left out: 24, or fewer if the pools' limits allow fewer."
    ),
]


def names_in(policy: str) -> list[str]:
    """The names of an option, which has commas between them. Raises ValueError: there is none."""
    names = list(dict.fromkeys(name.strip() for name in policy.split(",") if name.strip()))
    if not names:
        raise ValueError("--policy: give at least one name")
    return names


def load_part(
    path: Path, start_s: float, duration_s: float | None, time_scale: float = 1.0
) -> tuple[TraceRequest, ...]:
    """The requests of a part of a trace. Raises ValueError: an option is not finite, or no request is in the part."""
    for option, value in (("--time-scale", time_scale), ("--start", start_s), ("--duration", duration_s or 0.0)):
        if not math.isfinite(value):
            raise ValueError(f"{option} {value:g}: give a number")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is no file: it is read twice, the second time for its hash; save it first")
    whole = load_trace(path)
    requests = cut(whole, start_s, math.inf if duration_s is None else duration_s)
    if not requests:
        end = "s on" if duration_s is None else f"to {start_s + duration_s:g} s"
        raise ValueError(
            f"{path}: no request from --start {start_s:g} {end}: the first is at {whole[0].at_s:g} s, "
            f"the last at {whole[-1].at_s:g} s"
        )
    return requests if time_scale == 1.0 else scale_trace(requests, time_factor=time_scale)


def rate_scale_of(text: str) -> float | None:
    """The factor of --rate-scale; ``None``: auto."""
    if text == "auto":
        return None
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.0 < scale < _MOST_RATE_SCALE:
        raise ValueError(f"--rate-scale {text}: give a number above 0 and below {_MOST_RATE_SCALE}, or auto")
    return scale


@contextmanager
def worker_pool(jobs: int | None) -> Iterator[ProcessPoolExecutor]:
    """A pool of ``jobs`` processes, or with ``None`` one per core; an interrupt ends them.

    A terminal sends the interrupt to all processes. The pool's processes ignore it, or each would print a traceback. So
    this process terminates them.
    """
    pool = ProcessPoolExecutor(
        max_workers=jobs or os.cpu_count(),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        yield pool
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def progress_bar() -> Progress:
    """A progress bar on standard error, which disappears at the end."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(SpinnerColumn(), *columns, console=errors, transient=True)


def settings_of(
    config: Path | None, outputs: Mapping[str, Path | None], inputs: Mapping[str, Path]
) -> tuple[Path, SimConfig]:
    """The path of the simulator's configuration, and the configuration.

    ``outputs`` and ``inputs``: the command's files by option. Output files are checked before the run, so that no long
    run ends without its report.

    Raises:
        ConfigError: an output file cannot be written or is also another option's file, or matplotlib is missing.
        ValueError: the configuration is wrong.
    """
    config = config or shipped(_DEFAULT_CONFIG)
    check_outputs(outputs, {**inputs, "--config": config})
    return config, SimConfig.load(config)


def check_outputs(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path]) -> None:
    """Check the output files of a command, by option; raises ConfigError as ``settings_of``."""
    option_of = {path.resolve(): option for option, path in inputs.items()}
    for option, path in outputs.items():
        if path is None:
            continue
        if option == "--html" and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--html needs matplotlib: pip install 'tandem-serve[demo]'")
        if other := option_of.get(path.resolve()):
            raise ConfigError(f"{option} {path}: is the file of {other} too: give another one")
        option_of[path.resolve()] = option
        _check_writable(path, option)


def _check_writable(path: Path, option: str) -> None:
    """Check that a file can be written, or be made below the nearest folder that exists; raises ConfigError if not."""
    if path.is_dir():
        raise ConfigError(f"{option} {path}: {path} is a folder: give a file")
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    if existing != path and not existing.is_dir():
        raise ConfigError(f"{option} {path}: {existing} is no folder: give a file")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"{option} {path}: {existing} cannot be written: give a file that can be")


def json_text(report: Mapping[str, object]) -> str:
    """A report as the text of its file."""
    return json.dumps(report, indent=1) + "\n"


def check_oracle(better: Sequence[str]) -> None:
    """Raise ConfigError if ``better`` names policies that were better than the oracle: the simulator has a fault."""
    if better:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(better))} kept the objectives with fewer GPU-hours than the oracle, so the "
            "search for the oracle has failed: please report it with the trace and the configuration"
        )
