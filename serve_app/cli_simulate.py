"""The commands that try policies on a virtual cluster before any GPU is spent."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autoscale.sim.compare import check_trace
from autoscale.sim.config import SimConfig
from autoscale.sim.study import Study, run_study
from autoscale.trace import TraceRequest, cut, load_trace, scale_trace
from serve_app.sim_report import document, save_html, summary_table
from serve_app.validate import ConfigError

console = Console()
errors = Console(stderr=True)
commands = typer.Typer()

_DEFAULT_CONFIG = Path(__file__).parents[1] / "configs" / "sim" / "h100_llama70b.yaml"

TracePath = Annotated[
    Path, typer.Option("--trace", help="CSV or .gz: timestamp_s, input_tokens, output_tokens and perhaps hash_ids.")
]
ConfigFile = Annotated[Path, typer.Option("--config", help="Cluster, objectives and policies (configs/sim/).")]


@commands.command()
def simulate(
    trace: TracePath,
    policy: Annotated[str, typer.Option(help="Names, with commas: of the config's policies, or kinds.")] = "default",
    config: ConfigFile = _DEFAULT_CONFIG,
    rate_scale: Annotated[
        str, typer.Option(help="So many times the trace's requests; auto: until the oracle's peak is 40 replicas.")
    ] = "1",
    time_scale: Annotated[float, typer.Option(min=1e-6, help="Multiplies the trace's times; 2 halves the rate.")] = 1.0,
    start: Annotated[float, typer.Option(min=0.0, help="Begin here, seconds of the trace.")] = 0.0,
    duration: Annotated[float | None, typer.Option(min=1.0, help="Take so many seconds of it.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Repeat with so many seeds, and give intervals.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; as many as cores.")] = None,
    is_strict: Annotated[bool, typer.Option("--strict", help="Refuse requests beyond the profiles.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    html_out: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures here.")] = None,
) -> None:
    """Replay a trace on a virtual cluster under each policy, beside the oracle and the causal bound."""
    try:
        settings = SimConfig.load(config)
        names = _names(policy, settings)
        requests = _load(trace, time_scale, start, duration)
        check_trace(settings, requests, trace, is_strict=is_strict)
        scale = _rate_scale(rate_scale)
        with _pool(jobs) as pool, _progress() as progress:
            task = progress.add_task("oracle", total=None)

            def on_step(line: str, done: int, total: int | None) -> None:
                progress.update(task, description=line, completed=done, total=total)

            study = run_study(
                settings, requests, names, rate_scale=scale, seeds=range(seed, seed + seeds), pool=pool, on_step=on_step
            )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    console.print(summary_table(study))
    for line in study.flags:
        console.print(f"[yellow]note:[/] {line}", highlight=False)
    report = document(study, trace=trace, config=config, start_s=start, duration_s=duration, time_scale=time_scale)
    _write(json_out, json.dumps(report, indent=1) + "\n", "--json")
    if html_out is not None:
        _write(html_out, save_html(study, report), "--html")
    _refuse_winners(study)


def _names(policy: str, settings: SimConfig) -> list[str]:
    names = [name.strip() for name in policy.split(",") if name.strip()]
    if not names:
        raise ValueError("--policy: give at least one name")
    for name in names:
        if name != "static" or name in settings.policies:
            settings.autoscale_config(name)
    return list(dict.fromkeys(names))


def _load(path: Path, time_scale: float, start_s: float, duration_s: float | None) -> tuple[TraceRequest, ...]:
    whole = load_trace(path)
    requests = cut(whole, start_s) if duration_s is None else cut(whole, start_s, duration_s)
    if not requests:
        raise ValueError(f"{path}: no request between --start {start_s:g} and its end: it ends at {whole[-1].at_s:g} s")
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


def _pool(jobs: int | None) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max_workers=jobs or os.cpu_count(), mp_context=get_context("spawn"))


def _progress() -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=errors, transient=True)


def _write(path: Path | None, text: str, option: str) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}: give a file that can be written") from None


def _refuse_winners(study: Study) -> None:
    if study.beat_the_oracle:
        raise ConfigError(
            f"{', '.join(study.beat_the_oracle)} attained as much with fewer GPU-hours than the oracle, which is then "
            "none: please report it with the trace and the configuration"
        )
