"""The commands that try policies on a virtual cluster: simulate, pressure-test and curate.

Policies are compared with bounds, such as the oracle, which knows the whole trace. A pressure test tries splits of GPUs
between prefill and decode. ``least_frac`` is the share of requests that must meet their objectives (``autoscale.sim``).
"""

import importlib.util
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer import Option, Typer

from autoscale.policies import POLICIES
from autoscale.sim import curate as search
from autoscale.sim import pressure
from autoscale.sim.checks import check_lengths, check_trace, notes
from autoscale.sim.compare import OracleResult, find_oracle
from autoscale.sim.config import BOUNDS, SimConfig
from autoscale.sim.curate import SPACES, Candidate
from autoscale.sim.simulations import run_study
from autoscale.sim.split import PressurePoint
from autoscale.sim.study import is_smallest_static
from autoscale.traces.trace import TraceRequest, cut, load_trace, scale_trace
from serve_app.checks.yaml_checks import ConfigError, config_errors, load_serve_yaml
from serve_app.cli import curate_report
from serve_app.cli.sim_report import document, html_page, print_notes, print_whole, sources, summary_table
from serve_app.cli.terminal import console, errors
from serve_app.local.shipped import shipped
from serve_app.output import write_file

commands = Typer()

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


@commands.command()
@config_errors()
def simulate(
    trace: TracePath,
    policy: Annotated[str, Option(help="Policies, separated by commas: names in the config, or kinds.")] = "default",
    config: ConfigFile = None,
    rate_scale: RateScale = "1",
    time_scale: Annotated[float, Option(min=1e-6, help="Multiplies the trace's times: 2 halves the rate.")] = 1.0,
    start: Start = 0.0,
    duration: Duration = None,
    seeds: Annotated[
        int, Option(min=1, max=100, help="Number of runs, each with another seed; above 1, intervals are shown.")
    ] = 1,
    seed: Annotated[int, Option(min=0, help="The first seed.")] = 0,
    jobs: Jobs = None,
    is_strict: Strict = False,
    json_out: JsonOut = None,
    html_out: Annotated[Path | None, Option("--html", help="Write a page with pictures to this file.")] = None,
) -> None:
    """Replay a trace on a virtual cluster under each policy, and under the oracle and other bounds."""
    config, settings = _settings(config, {"--json": json_out, "--html": html_out}, {"--trace": trace})
    names = _policy_names(policy, settings)
    scale = _rate_scale(rate_scale)
    requests = _load(trace, start, duration, time_scale)
    check_trace(settings, requests, trace, is_strict=is_strict)
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
        write_file(html_out, html_page(study, report), "--html")
    _check_oracle(study.beat_the_oracle)  # last, so that the files are written even if this fails


Gpus = Annotated[
    int | None,
    Option(
        min=2, help="GPUs that are split between the roles; left out: 24, or fewer if the pools' limits allow fewer."
    ),
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
    """Find the P/D ratio with the highest rate, and its signals; or advise against disaggregation."""
    config, settings = _settings(config, {"--json": json_out}, {"--trace": trace})
    requests = _load(trace, start, duration)
    # Not check_trace: the pressure test makes its own arrivals, so only the lengths of the trace matter.
    check_lengths(settings, requests, trace, is_strict=is_strict)
    with _progress() as progress:
        task = progress.add_task("pressure test", total=None)

        def on_point(point: PressurePoint) -> None:
            progress.update(task, advance=1, description=f"{point.name} tried")

        result = pressure.pressure_test(settings, requests, gpus=gpus, seed=seed, on_point=on_point)
    console.print(curate_report.pressure_table(result))
    console.print(curate_report.pressure_verdict(result), highlight=False)
    flags = notes(settings, requests, is_replayed=False)
    print_notes(flags)
    report = {**sources(settings, trace, config), "flags": flags, **curate_report.pressure_document(result)}
    write_file(json_out, _json(report), "--json")


@commands.command()
@config_errors()
def curate(
    trace: TracePath,
    out: Annotated[Path, Option(help="Write a configuration with the best policy to this file.")],
    policy: Annotated[
        str, Option(help="Kinds of policy, separated by commas; all: every kind that can be searched.")
    ] = "all",
    config: ConfigFile = None,
    serve: Annotated[
        Path | None,
        Option(help="Write this Serve YAML with the policy; left out: write a configuration for tandem simulate."),
    ] = None,
    tries: Annotated[int, Option(min=1, help="Sets of parameters to try for each kind of policy.")] = 12,
    gpus: Gpus = None,
    rate_scale: RateScale = "1",
    start: Start = 0.0,
    duration: Duration = None,
    seed: Annotated[int, Option(min=0, help="Seed of parameters, copies and ties.")] = 0,
    jobs: Jobs = None,
    is_strict: Strict = False,
    json_out: JsonOut = None,
) -> None:
    """Search the policy and parameters that keep the objectives with the fewest GPU-hours."""
    inputs = {"--trace": trace} | ({} if serve is None else {"--serve": serve})
    config, settings = _settings(config, {"--json": json_out, "--out": out}, inputs)
    kinds = _policy_kinds(policy, is_served=serve is not None)
    scale = _rate_scale(rate_scale)
    serve_document = None if serve is None else load_serve_yaml(serve)
    requests = _load(trace, start, duration)
    check_trace(settings, requests, trace, is_strict=is_strict)
    flags = notes(settings, requests)
    if serve is not None and serve_document is not None:
        flags += curate_report.serve_notes(serve_document, serve, settings)
    with worker_pool(jobs) as pool:
        ratio_test, oracle, candidates = _search(
            settings, requests, kinds, gpus=gpus, rate_scale=scale, tries=tries, seed=seed, pool=pool
        )
    console.print(curate_report.pressure_verdict(ratio_test), highlight=False)
    console.print(curate_report.candidates_table(oracle, candidates))
    if not ratio_test.is_disaggregation_worthwhile:
        flags.append("the policies have a prefill pool, against the advice of the pressure test")
    print_notes(flags)
    best = _best(candidates, oracle.least_frac)
    write_file(out, curate_report.curated_yaml(settings, best, config, serve_document, trace), "--out")
    console.print(f"{out}: {best.kind}", highlight=False)
    figures = curate_report.candidates_document(ratio_test, oracle, candidates)
    write_file(json_out, _json({**sources(settings, trace, config), "flags": flags, **figures}), "--json")
    _check_oracle([kind for kind, each in candidates.items() if oracle.is_beaten_by(each[0].result)])


def _search(
    settings: SimConfig,
    requests: Sequence[TraceRequest],
    kinds: Sequence[str],
    *,
    gpus: int | None,
    rate_scale: float | None,
    tries: int,
    seed: int,
    pool: Executor,
) -> tuple[pressure.PressureResult, OracleResult, Mapping[str, Sequence[Candidate]]]:
    """The pressure test, the oracle, and the candidates of each kind, the best one first; shows the progress."""
    with _progress() as progress:
        task = progress.add_task("pressure test", total=None)
        ratio_test = pool.submit(pressure.pressure_test, settings, requests, gpus=gpus, seed=seed).result()
        progress.update(task, description="oracle")
        oracle = pool.submit(find_oracle, settings, requests, rate_scale=rate_scale, seed=seed).result()
        progress.update(task, description="policies", total=tries * len(kinds), completed=0)

        def on_done(candidate: Candidate) -> None:
            progress.update(task, advance=1)

        candidates = search.curate(
            settings, oracle, ratio_test, kinds, tries=tries, seed=seed, pool=pool, on_done=on_done
        )
    return ratio_test, oracle, candidates


def _best(candidates: Mapping[str, Sequence[Candidate]], least_frac: float) -> Candidate:
    """The best candidate of all kinds; prints a note if it keeps the objectives of too few requests.

    ``candidates``: of each kind, the best one first.
    """
    best = max((each[0] for each in candidates.values()), key=lambda one: one.score(least_frac))
    is_attained, _ = best.score(least_frac)
    if not is_attained:
        errors.print(
            f"note: no candidate kept the objectives of {least_frac:.2%} of the requests; the nearest one is written",
            style="yellow",
        )
    return best


def _policy_names(policy: str, settings: SimConfig) -> list[str]:
    """The policies of --policy. Raises ValueError: a name belongs to a bound, or to no policy."""
    names = _split(policy)
    if bounds := set(BOUNDS) & set(names):
        raise ValueError(f"--policy {sorted(bounds)[0]}: is shown beside every policy anyway; leave it out")
    for name in names:
        if not is_smallest_static(settings, name):  # the counts of that policy come from the study, not from settings
            settings.autoscale_config(name)  # raises ValueError for an unknown name
    return names


def _policy_kinds(policy: str, *, is_served: bool) -> list[str]:
    """The kinds of policy to search. Raises ValueError: a kind has no search space, or cannot be served.

    ``is_served``: whether the best policy goes into a Serve YAML. Only kinds in ``POLICIES`` can be served. The other
    kinds in ``SPACES`` are policies of other systems, for the simulator only.
    """
    choices = sorted(kind for kind in SPACES if kind in POLICIES or not is_served)
    kinds = choices if policy == "all" else _split(policy)
    for kind in kinds:
        if kind not in SPACES:
            raise ValueError(f"--policy {kind}: cannot be searched; choose among {', '.join(choices)}")
        if kind not in choices:
            raise ValueError(
                f"--policy {kind}: for the simulator only, not with --serve; choose among {', '.join(choices)}"
            )
    return kinds


def _split(policy: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in policy.split(",") if name.strip()))
    if not names:
        raise ValueError("--policy: give at least one name")
    return names


def _load(path: Path, start_s: float, duration_s: float | None, time_scale: float = 1.0) -> tuple[TraceRequest, ...]:
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


def _rate_scale(text: str) -> float | None:
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


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(SpinnerColumn(), *columns, console=errors, transient=True)


def _settings(
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
    option_of = {path.resolve(): option for option, path in {**inputs, "--config": config}.items()}
    for option, path in outputs.items():
        if path is None:
            continue
        if option == "--html" and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--html needs matplotlib: pip install 'tandem-serve[demo]'")
        if other := option_of.get(path.resolve()):
            raise ConfigError(f"{option} {path}: is the file of {other} too: give another one")
        option_of[path.resolve()] = option
        _check_writable(path, option)
    return config, SimConfig.load(config)


def _check_writable(path: Path, option: str) -> None:
    """Check that a file can be written, or be made below the nearest folder that exists; raises ConfigError if not."""
    if path.is_dir():
        raise ConfigError(f"{option} {path}: {path} is a folder: give a file")
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    if existing != path and not existing.is_dir():
        raise ConfigError(f"{option} {path}: {existing} is no folder: give a file")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"{option} {path}: {existing} cannot be written: give a file that can be")


def _json(report: Mapping[str, object]) -> str:
    return json.dumps(report, indent=1) + "\n"


def _check_oracle(better: Sequence[str]) -> None:
    """Raise ConfigError if ``better`` names policies that were better than the oracle: the simulator has a fault."""
    if better:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(better))} kept the objectives with fewer GPU-hours than the oracle, so the "
            "search for the oracle has failed: please report it with the trace and the configuration"
        )
