"""The commands that try policies on a virtual cluster: simulate, pressure-test and curate."""

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
from typer import Option, Typer

from autoscale.policies import POLICIES
from autoscale.sim import curate as search
from autoscale.sim import pressure
from autoscale.sim.checks import check_lengths, check_trace, notes
from autoscale.sim.compare import find_oracle
from autoscale.sim.config import BOUNDS, SimConfig
from autoscale.sim.curate import SPACES
from autoscale.sim.study import is_smallest_static, run_study
from autoscale.traces.trace import TraceRequest, cut, load_trace, scale_trace
from serve_app.checks.yaml_checks import ConfigError, config_errors, load_serve_yaml
from serve_app.cli import curate_report
from serve_app.cli.sim_report import document, print_notes, print_whole, save_html, sources, summary_table
from serve_app.cli.terminal import console, errors
from serve_app.local.shipped import shipped
from serve_app.output import write_file

commands = Typer()

# A shipped file.
_DEFAULT_CONFIG = "sim/h100_llama70b.yaml"

TracePath = Annotated[
    Path, Option("--trace", help="CSV or .gz: timestamp_s, input_tokens, output_tokens, and optionally hash_ids.")
]
RateScale = Annotated[
    str, Option(help="Multiplies the trace's requests; auto: until the oracle's peak is 40 replicas.")
]
Start = Annotated[float, Option(min=0.0, help="Begin at this second of the trace.")]
Duration = Annotated[float | None, Option(min=1.0, help="Take this many seconds of the trace.")]
Jobs = Annotated[int | None, Option(min=1, help="Number of processes; left out: one per core.")]
JsonOut = Annotated[Path | None, Option("--json", help="Write all figures to this JSON file.")]
Strict = Annotated[bool, Option("--strict", help="Refuse requests with lengths beyond the profiles.")]
ConfigFile = Annotated[
    Path | None,
    Option("--config", help="Cluster, objectives and policies; by default the shipped sim/h100_llama70b.yaml."),
]


@commands.command()
@config_errors()
def simulate(
    trace: TracePath,
    policy: Annotated[str, Option(help="Policies, with commas between: names in the config, or kinds.")] = "default",
    config: ConfigFile = None,
    rate_scale: RateScale = "1",
    time_scale: Annotated[float, Option(min=1e-6, help="Multiplies the trace's times; 2 halves the rate.")] = 1.0,
    start: Start = 0.0,
    duration: Duration = None,
    seeds: Annotated[int, Option(min=1, max=100, help="Repeat with this many seeds, and show intervals.")] = 1,
    seed: Annotated[int, Option(min=0, help="The first seed.")] = 0,
    jobs: Jobs = None,
    is_strict: Strict = False,
    json_out: JsonOut = None,
    html_out: Annotated[Path | None, Option("--html", help="Write a page with pictures to this file.")] = None,
) -> None:
    """Replay a trace on a virtual cluster under each policy, and under the oracle and other bounds."""
    config, settings = _settings(config, {"--json": json_out, "--html": html_out}, {"--trace": trace})
    names = _names(policy, settings)
    requests = _load(trace, time_scale, start, duration)
    check_trace(settings, requests, trace, is_strict=is_strict)
    scale = _rate_scale(rate_scale)
    with worker_pool(jobs) as pool, _progress() as progress:
        task = progress.add_task("oracle", total=None)

        def on_step(line: str, done: int, total: int | None) -> None:
            progress.update(task, description=line, completed=done, total=total)

        study = run_study(
            settings, requests, names, rate_scale=scale, seeds=range(seed, seed + seeds), pool=pool, on_step=on_step
        )
    print_whole(summary_table(study))
    print_notes(study.flags)
    report = document(study, trace=trace, config=config, start_s=start, duration_s=duration, time_scale=time_scale)
    write_file(json_out, _json(report), "--json")
    if html_out is not None:
        write_file(html_out, save_html(study, report), "--html")
    _refuse_winners(study.beat_the_oracle)


Gpus = Annotated[
    int | None,
    Option(min=2, help="GPUs that are split between the roles; left out: 24, or fewer by the pools' limits."),
]


@commands.command("pressure-test")
@config_errors()
def pressure_test(
    trace: TracePath,
    config: ConfigFile = None,
    gpus: Gpus = None,
    start: Start = 0.0,
    duration: Duration = None,
    seed: Annotated[int, Option(min=0, help="Seed of arrivals and ties.")] = 0,
    is_strict: Strict = False,
    json_out: JsonOut = None,
) -> None:
    """Find the P/D ratio that serves most of a workload and its signals, or advise against disaggregation."""
    config, settings = _settings(config, {"--json": json_out}, {"--trace": trace})
    requests = _load(trace, 1.0, start, duration)
    check_lengths(settings, requests, trace, is_strict=is_strict)
    with _progress() as progress:
        task = progress.add_task("pressure test", total=None)

        def on_point(point: pressure.PressurePoint) -> None:
            progress.update(task, advance=1, description=f"{point.name} tried")

        result = pressure.pressure_test(settings, requests, gpus=gpus, seed=seed, on_point=on_point)
    console.print(curate_report.pressure_table(result))
    console.print(curate_report.pressure_verdict(result), highlight=False)
    flags = notes(settings, requests)
    print_notes(flags)
    report = {**sources(settings, trace, config), "flags": flags, **curate_report.pressure_document(result)}
    write_file(json_out, _json(report), "--json")


@commands.command()
@config_errors()
def curate(
    trace: TracePath,
    out: Annotated[Path, Option(help="Write a configuration with the best policy to this file.")],
    policy: Annotated[
        str, Option(help="Kinds of policy, with commas between; all: every kind that can be searched.")
    ] = "all",
    config: ConfigFile = None,
    serve: Annotated[
        Path | None, Option(help="A Serve YAML to put the policy into; left out: --out is for tandem simulate.")
    ] = None,
    tries: Annotated[int, Option(min=1, help="Parameters that are tried per policy.")] = 12,
    gpus: Gpus = None,
    rate_scale: RateScale = "1",
    start: Start = 0.0,
    duration: Duration = None,
    seed: Annotated[int, Option(min=0, help="Seed of parameters, copies and ties.")] = 0,
    jobs: Jobs = None,
    is_strict: Strict = False,
    json_out: JsonOut = None,
) -> None:
    """Search the policy and parameters that keep the objectives on the fewest GPU-hours."""
    inputs = {"--trace": trace} | ({} if serve is None else {"--serve": serve})
    config, settings = _settings(config, {"--json": json_out, "--out": out}, inputs)
    kinds = _kinds(policy, is_served=serve is not None)
    served = None if serve is None else load_serve_yaml(serve)
    requests = _load(trace, 1.0, start, duration)
    check_trace(settings, requests, trace, is_strict=is_strict)
    flags = notes(settings, requests)
    if serve is not None and served is not None:
        flags += curate_report.autoscaled(served, serve, settings)
    scale = _rate_scale(rate_scale)
    with worker_pool(jobs) as pool, _progress() as progress:
        task = progress.add_task("pressure test", total=None)
        pressed = pool.submit(pressure.pressure_test, settings, requests, gpus=gpus, seed=seed).result()
        progress.update(task, description="oracle")
        oracle = pool.submit(find_oracle, settings, requests, rate_scale=scale, seed=seed).result()
        progress.update(task, description="policies", total=tries * len(kinds), completed=0)

        def on_done(candidate: search.Candidate) -> None:
            progress.update(task, advance=1)

        found = search.curate(settings, oracle, pressed, kinds, tries=tries, seed=seed, pool=pool, on_done=on_done)
    console.print(curate_report.pressure_verdict(pressed), highlight=False)
    console.print(curate_report.candidates_table(oracle, found))
    if not pressed.is_disaggregation_worthwhile:
        flags.append("the policies have a prefill pool, against the advice of the pressure test")
    print_notes(flags)
    best = max((each[0] for each in found.values()), key=lambda one: one.score(oracle.least_frac))
    if not best.score(oracle.least_frac)[0]:
        errors.print(f"note: no candidate attained {oracle.least_frac:.2%}; the nearest one is written", style="yellow")
    write_file(out, curate_report.curated_yaml(settings, best, config, served, trace), "--out")
    console.print(f"{out}: {best.kind}", highlight=False)
    figures = curate_report.candidates_document(pressed, oracle, found)
    write_file(json_out, _json({**sources(settings, trace, config), "flags": flags, **figures}), "--json")
    _refuse_winners([kind for kind, each in found.items() if oracle.is_beaten_by(each[0].result)])


def _names(policy: str, settings: SimConfig) -> list[str]:
    names = _split(policy)
    if bounds := set(BOUNDS) & set(names):
        raise ValueError(f"--policy {sorted(bounds)[0]}: stands beside every comparison; leave it out")
    for name in names:
        if not is_smallest_static(settings, name):
            settings.autoscale_config(name)
    return names


def _kinds(policy: str, *, is_served: bool) -> list[str]:
    """The kinds of policy that are searched; an application is never served by those for the simulator only."""
    choices = sorted(kind for kind in SPACES if kind in POLICIES or not is_served)
    kinds = choices if policy == "all" else _split(policy)
    for kind in kinds:
        if kind not in SPACES:
            raise ValueError(f"--policy {kind}: cannot be searched; choose among {', '.join(choices)}")
        if kind not in choices:
            raise ValueError(f"--policy {kind}: for the simulator only, not with --serve; {', '.join(choices)} can be")
    return kinds


def _split(policy: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in policy.split(",") if name.strip()))
    if not names:
        raise ValueError("--policy: give at least one name")
    return names


def _load(path: Path, time_scale: float, start_s: float, duration_s: float | None) -> tuple[TraceRequest, ...]:
    for option, value in (("--time-scale", time_scale), ("--start", start_s), ("--duration", duration_s or 0.0)):
        if not math.isfinite(value):
            raise ValueError(f"{option} {value:g}: give a number")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is no file: it is read twice, the second time for its hash; save it first")
    whole = load_trace(path)
    requests = cut(whole, start_s, math.inf if duration_s is None else duration_s)
    if not requests:
        end_s = whole[-1].at_s if duration_s is None else start_s + duration_s
        raise ValueError(
            f"{path}: no request from --start {start_s:g} to {end_s:g} s: the first is at {whole[0].at_s:g} s, "
            f"the last at {whole[-1].at_s:g} s"
        )
    return requests if time_scale == 1.0 else scale_trace(requests, time_factor=time_scale)


def _rate_scale(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.0 < scale < 1e6:
        raise ValueError(f"--rate-scale {text}: give a number above 0, or auto")
    return scale


@contextmanager
def worker_pool(jobs: int | None) -> Iterator[ProcessPoolExecutor]:
    """A pool of ``jobs`` processes, ``None``: one per core; an interrupt ends them.

    The processes themselves ignore the interrupt, which a terminal sends to all, or each would print a traceback.
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


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(SpinnerColumn(), *columns, console=errors, transient=True)


def _settings(
    config: Path | None, outputs: Mapping[str, Path | None], inputs: Mapping[str, Path]
) -> tuple[Path, SimConfig]:
    """The simulator's configuration and its file, once every output file of the command can be written."""
    config = config or shipped(_DEFAULT_CONFIG)
    taken = {path.resolve(): option for option, path in {**inputs, "--config": config}.items()}
    for option, path in outputs.items():
        if path is None:
            continue
        if option == "--html" and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--html needs matplotlib: pip install 'tandem-serve[demo]'")
        if other := taken.get(path.resolve()):
            raise ConfigError(f"{option} {path}: is the file of {other} too: give another one")
        taken[path.resolve()] = option
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        if existing.is_dir() == (existing == path):
            raise ConfigError(f"{option} {path}: {existing} is {'a' if existing == path else 'no'} folder: give a file")
        if not os.access(existing, os.W_OK):
            raise ConfigError(f"{option} {path}: {existing} cannot be written: give a file that can be")
    return config, SimConfig.load(config)


def _json(report: Mapping[str, object]) -> str:
    return json.dumps(report, indent=1) + "\n"


def _refuse_winners(names: Sequence[str]) -> None:
    if names:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(names))} attained enough with fewer GPU-hours than the oracle, so the search "
            "for the oracle has failed: please report it with the trace and the configuration"
        )
