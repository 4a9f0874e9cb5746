"""The commands that try policies on a virtual cluster before any GPU is spent."""

import importlib.util
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autoscale.sim import curate as search
from autoscale.sim import pressure
from autoscale.sim.compare import check_lengths, check_trace, find_oracle, notes
from autoscale.sim.config import SimConfig
from autoscale.sim.curate import SPACES
from autoscale.sim.study import run_study
from autoscale.trace import TraceRequest, cut, load_trace, scale_trace
from serve_app.curate_report import (
    autoscaled,
    candidates_document,
    candidates_table,
    curated_yaml,
    pressure_document,
    pressure_table,
    pressure_verdict,
)
from serve_app.output import write_file
from serve_app.sim_report import document, print_notes, print_whole, save_html, sources, summary_table
from serve_app.validate import ConfigError, load_serve_yaml
from serve_app.workers import worker_pool

console = Console()
errors = Console(stderr=True)
commands = typer.Typer()

_DEFAULT_CONFIG = Path("configs/sim/h100_llama70b.yaml")

TracePath = Annotated[
    Path, typer.Option("--trace", help="CSV or .gz: timestamp_s, input_tokens, output_tokens and perhaps hash_ids.")
]
RateScale = Annotated[
    str, typer.Option(help="So many times the trace's requests; auto: until the oracle's peak is 40 replicas.")
]
Start = Annotated[float, typer.Option(min=0.0, help="Begin here, seconds of the trace.")]
Duration = Annotated[float | None, typer.Option(min=1.0, help="Take so many seconds of it.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; as many as cores.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write everything here.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse requests beyond the profiles.")]
ConfigFile = Annotated[Path, typer.Option("--config", help="Cluster, objectives and policies (configs/sim/).")]


@commands.command()
def simulate(
    trace: TracePath,
    policy: Annotated[str, typer.Option(help="Names, with commas: of the config's policies, or kinds.")] = "default",
    config: ConfigFile = _DEFAULT_CONFIG,
    rate_scale: RateScale = "1",
    time_scale: Annotated[float, typer.Option(min=1e-6, help="Multiplies the trace's times; 2 halves the rate.")] = 1.0,
    start: Start = 0.0,
    duration: Duration = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Repeat with so many seeds, and give intervals.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    jobs: Jobs = None,
    is_strict: Strict = False,
    json_out: JsonOut = None,
    html_out: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures here.")] = None,
) -> None:
    """Replay a trace on a virtual cluster under each policy, beside the oracle and the causal bound."""
    try:
        _check_outputs({"--json": json_out, "--html": html_out}, {"--trace": trace, "--config": config})
        settings = SimConfig.load(config)
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
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print_whole(summary_table(study), console)
    print_notes(study.flags, console)
    report = document(study, trace=trace, config=config, start_s=start, duration_s=duration, time_scale=time_scale)
    write_file(json_out, json.dumps(report, indent=1) + "\n", "--json")
    if html_out is not None:
        write_file(html_out, save_html(study, report), "--html")
    _refuse_winners(study.beat_the_oracle)


Gpus = Annotated[
    int | None,
    typer.Option(min=2, help="The GPUs that are split between the roles; 24, or what the pools' limits allow."),
]


@commands.command("pressure-test")
def pressure_test(
    trace: TracePath,
    config: ConfigFile = _DEFAULT_CONFIG,
    gpus: Gpus = None,
    start: Start = 0.0,
    duration: Duration = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and ties.")] = 0,
    is_strict: Strict = False,
    json_out: JsonOut = None,
) -> None:
    """Find the P/D ratio that serves most of a workload, or that it is better not disaggregated, and its signals."""
    try:
        _check_outputs({"--json": json_out}, {"--trace": trace, "--config": config})
        settings = SimConfig.load(config)
        requests = _load(trace, 1.0, start, duration)
        check_lengths(settings, requests, trace, is_strict=is_strict)
        with _progress() as progress:
            task = progress.add_task("pressure test", total=None)
            result = pressure.pressure_test(
                settings,
                requests,
                gpus=gpus,
                seed=seed,
                on_point=lambda point: progress.update(task, advance=1, description=f"{point.name} tried"),
            )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    console.print(pressure_table(result))
    console.print(pressure_verdict(result), highlight=False)
    flags = notes(settings, requests)
    print_notes(flags, console)
    report = {**sources(settings, trace, config), "flags": flags, **pressure_document(result)}
    write_file(json_out, json.dumps(report, indent=1) + "\n", "--json")


@commands.command()
def curate(
    trace: TracePath,
    out: Annotated[Path, typer.Option(help="Write a configuration with the best policy here.")],
    policy: Annotated[str, typer.Option(help="Kinds, with commas; all: every one that can be searched.")] = "all",
    config: ConfigFile = _DEFAULT_CONFIG,
    serve: Annotated[
        Path | None, typer.Option(help="A Serve YAML to put the policy into; without it, --out is for tandem simulate.")
    ] = None,
    tries: Annotated[int, typer.Option(min=1, help="Parameters tried of each policy.")] = 12,
    gpus: Gpus = None,
    rate_scale: RateScale = "1",
    start: Start = 0.0,
    duration: Duration = None,
    seed: Annotated[int, typer.Option(min=0, help="Of parameters, copies and ties.")] = 0,
    jobs: Jobs = None,
    is_strict: Strict = False,
    json_out: JsonOut = None,
) -> None:
    """Pressure test, then policies x parameters, then the best: enough within the objectives, on the fewest GPUs."""
    try:
        inputs = {"--trace": trace, "--config": config} | ({} if serve is None else {"--serve": serve})
        _check_outputs({"--json": json_out, "--out": out}, inputs)
        settings = SimConfig.load(config)
        kinds = sorted(SPACES) if policy == "all" else _split(policy)
        if unknown := [kind for kind in kinds if kind not in SPACES]:
            raise ValueError(f"--policy {unknown[0]}: cannot be searched; choose among {', '.join(sorted(SPACES))}")
        document = None if serve is None else load_serve_yaml(serve)
        requests = _load(trace, 1.0, start, duration)
        check_trace(settings, requests, trace, is_strict=is_strict)
        flags = notes(settings, requests)
        if serve is not None and document is not None:
            flags += autoscaled(document, serve, settings)
        scale = _rate_scale(rate_scale)
        with worker_pool(jobs) as pool, _progress() as progress:
            task = progress.add_task("pressure test", total=None)
            pressed = pool.submit(pressure.pressure_test, settings, requests, gpus=gpus, seed=seed).result()
            progress.update(task, description="oracle")
            oracle = pool.submit(find_oracle, settings, requests, rate_scale=scale, seed=seed).result()
            progress.update(task, description="policies", total=tries * len(kinds), completed=0)
            found = search.curate(
                settings,
                oracle,
                pressed,
                kinds,
                tries=tries,
                seed=seed,
                pool=pool,
                on_done=lambda candidate: progress.update(task, advance=1),
            )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    console.print(pressure_verdict(pressed), highlight=False)
    console.print(candidates_table(oracle, found))
    if not pressed.is_worth_disaggregating:
        flags.append("the policies size a prefill pool all the same, which the pressure test advises against")
    print_notes(flags, console)
    best = max((each[0] for each in found.values()), key=lambda one: one.score(oracle.least_frac))
    if not best.score(oracle.least_frac)[0]:
        errors.print(
            f"note: no candidate attained {oracle.least_frac:.2%}; the one that came nearest is written",
            style="yellow",
        )
    text = curated_yaml(settings, best, config_path=config, serve=document, trace=trace)
    write_file(out, text, "--out")
    console.print(f"{out}: {best.kind}", highlight=False)
    report = {**sources(settings, trace, config), "flags": flags, **candidates_document(pressed, oracle, found)}
    write_file(json_out, json.dumps(report, indent=1) + "\n", "--json")
    _refuse_winners([kind for kind, each in found.items() if oracle.is_beaten_by(each[0].result)])


def _names(policy: str, settings: SimConfig) -> list[str]:
    names = _split(policy)
    if beside := {"oracle", "causal_bound", "smallest_static", "aggregated"} & set(names):
        raise ValueError(f"--policy {sorted(beside)[0]}: stands beside every comparison; leave it out")
    for name in names:
        if name != "static" or name in settings.policies:
            settings.autoscale_config(name)
    return names


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
    requests = cut(whole, start_s) if duration_s is None else cut(whole, start_s, duration_s)
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


def _progress() -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=errors, transient=True)


def _check_outputs(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path]) -> None:
    """Before minutes of work, that what they come to can be written; by option.

    Raises:
        ValueError: names the option and the file.
    """
    taken = {path.resolve(): option for option, path in inputs.items()}
    for option, path in outputs.items():
        if path is None:
            continue
        if option == "--html" and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--html needs matplotlib: pip install 'tandem-serve[demo]'")
        if other := taken.get(path.resolve()):
            raise ValueError(f"{option} {path}: is the file of {other} too: give another one")
        taken[path.resolve()] = option
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        is_file_expected = there == path
        if (is_file_expected and there.is_dir()) or (not is_file_expected and not there.is_dir()):
            raise ValueError(f"{option} {path}: {there} is {'a' if there.is_dir() else 'no'} folder: give a file")
        if not os.access(there, os.W_OK):
            raise ValueError(f"{option} {path}: {there} cannot be written: give a file that can be")


def _refuse_winners(names: list[str]) -> None:
    if names:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(names))} attained as much with fewer GPU-hours than the oracle, which is then "
            "none: please report it with the trace and the configuration"
        )
