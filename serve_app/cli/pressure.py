"""The command that finds the best P/D ratio and its signals, on engine models or on a running application."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from autoscale.pressure.live_test import Limits
from autoscale.pressure.rate_search import PressurePoint
from autoscale.sim import pressure
from autoscale.sim.checks import check_lengths, notes
from autoscale.traces.trace import TraceRequest
from serve_app.checks.yaml_checks import ConfigError, config_errors
from serve_app.cli import curate_report
from serve_app.cli.pressure_live import run_live
from serve_app.cli.pressure_plan import LiveOptions
from serve_app.cli.pressure_report import live_document, live_notes, live_table, patch, patch_yaml, tune_command
from serve_app.cli.sim_inputs import (
    ConfigFile,
    Duration,
    Gpus,
    JsonOut,
    Start,
    Strict,
    check_outputs,
    json_text,
    load_part,
    progress_bar,
    settings_of,
)
from serve_app.cli.sim_report import file_source, print_notes, print_whole, sources
from serve_app.cli.terminal import console
from serve_app.local.shipped import shipped
from serve_app.output import write_file

commands = Typer()

# Requests of --live without --trace: lengths of a minute of Azure's conversation trace.
_SAMPLE_TRACE = "traces/azure_conv_60s.csv"
# Heading of the options in the help.
_LIVE = "With --live"

Trace = Annotated[
    Path | None, Option("--trace", help="As for tandem simulate; with --live left out: a shipped sample of a minute.")
]
Live = Annotated[bool, Option("--live", help="Load a running application instead of engine models.")]
App = Annotated[str, Option(help="The application's name.", rich_help_panel=_LIVE)]
Service = Annotated[
    str | None, Option(help="Model of the service, if the application has several.", rich_help_panel=_LIVE)
]
Address = Annotated[
    str, Option(help="The Ray cluster that this machine belongs to: auto, or HOST:PORT.", rich_help_panel=_LIVE)
]
Url = Annotated[
    str | None, Option(help="The endpoint, without /v1; left out: where Serve listens.", rich_help_panel=_LIVE)
]
ApiKey = Annotated[
    str | None, Option(envvar="OPENAI_API_KEY", help="Sent if the endpoint requires a key.", rich_help_panel=_LIVE)
]
Ratios = Annotated[
    str | None,
    Option(
        help="P/D ratios to test, as 1:1,1:2; left out: the configured one and its neighbours.", rich_help_panel=_LIVE
    ),
]
FirstRate = Annotated[float, Option(min=0.01, help="The first rate, requests/s.", rich_help_panel=_LIVE)]
MostRate = Annotated[float, Option(min=0.01, help="The highest rate that is sent, requests/s.", rich_help_panel=_LIVE)]
MostMinutes = Annotated[float, Option(min=0.1, help="Longest time of the test, minutes.", rich_help_panel=_LIVE)]
MostErrors = Annotated[int, Option(min=0, help="Failed requests after which a step ends.", rich_help_panel=_LIVE)]
StepTime = Annotated[
    float, Option("--step-s", min=1.0, help="Seconds in which a step's requests count.", rich_help_panel=_LIVE)
]
Tolerance = Annotated[
    float, Option(min=0.01, max=1.0, help="Accuracy of the highest rate, as a share of it.", rich_help_panel=_LIVE)
]
Headroom = Annotated[
    float,
    Option(
        min=0.1,
        max=1.0,
        help="Share of the signal at the highest rate that becomes the target.",
        rich_help_panel=_LIVE,
    ),
]
LengthFactor = Annotated[float, Option(min=0.001, help="Multiplies the trace's lengths.", rich_help_panel=_LIVE)]
BesideTraffic = Annotated[
    bool, Option("--beside-traffic", help="Test although others send requests.", rich_help_panel=_LIVE)
]
DespiteOverride = Annotated[
    bool,
    Option(
        "--despite-override",
        help="Test although counts are set by hand, or decisions are paused.",
        rich_help_panel=_LIVE,
    ),
]
Yes = Annotated[bool, Option("--yes", help="Start without a question.", rich_help_panel=_LIVE)]
Out = Annotated[Path | None, Option(help="Write the settings to change to this YAML.", rich_help_panel=_LIVE)]


@commands.command("pressure-test")
@config_errors()
def pressure_test(
    trace: Trace = None,
    config: ConfigFile = None,
    gpus: Gpus = None,
    start: Start = 0.0,
    duration: Duration = None,
    seed: Annotated[int, Option(min=0, help="Seed of arrivals and ties.")] = 0,
    is_strict: Strict = False,
    json_out: JsonOut = None,
    is_live: Live = False,
    app: App = "tandem",
    service: Service = None,
    address: Address = "auto",
    url: Url = None,
    api_key: ApiKey = None,
    ratios: Ratios = None,
    first_rate: FirstRate = 1.0,
    most_rate: MostRate = 50.0,
    most_minutes: MostMinutes = 60.0,
    most_errors: MostErrors = 10,
    step_s: StepTime = 60.0,
    tolerance: Tolerance = 0.1,
    headroom: Headroom = 0.8,
    length_factor: LengthFactor = 1.0,
    is_beside_traffic: BesideTraffic = False,
    is_despite_override: DespiteOverride = False,
    is_confirmed: Yes = False,
    out: Out = None,
) -> None:
    """Find the P/D ratio with the highest rate, and its signals; or advise against disaggregation."""
    if not is_live:
        _test_models(trace, config, gpus, start, duration, seed, is_strict, json_out)
        return
    if config is not None or is_strict:
        raise ConfigError("--config and --strict are for engine models: leave them out with --live")
    path = trace or shipped(_SAMPLE_TRACE)
    check_outputs({"--json": json_out, "--out": out}, {"--trace": path})
    _check_limits(first_rate, most_rate, most_minutes, step_s)
    options = LiveOptions(
        app=app,
        service=service,
        address=address,
        url=url,
        api_key=api_key,
        ratios=ratios,
        first_requests_per_s=first_rate,
        step_s=step_s,
        tolerance_frac=tolerance,
        length_factor=length_factor,
        limits=Limits(
            most_requests_per_s=most_rate,
            most_s=60.0 * most_minutes,
            most_gpus=math.inf if gpus is None else gpus,
            most_errors=most_errors,
        ),
        is_beside_traffic=is_beside_traffic,
        is_despite_override=is_despite_override,
        is_confirmed=is_confirmed,
    )
    _test_live(options, path, load_part(path, start, duration), headroom_frac=headroom, json_out=json_out, out=out)


def _check_limits(first_rate: float, most_rate: float, most_minutes: float, step_s: float) -> None:
    """Check that the limits of a live test leave a step; a ConfigError if not."""
    if first_rate > most_rate:
        raise ConfigError(f"--first-rate {first_rate:g} is above --most-rate {most_rate:g}: lower the first one")
    if 60.0 * most_minutes < step_s:
        raise ConfigError(
            f"--most-minutes {most_minutes:g} is shorter than one step of {step_s:g} s: raise it, or lower --step-s"
        )


def _test_live(
    options: LiveOptions,
    path: Path,
    trace: Sequence[TraceRequest],
    *,
    headroom_frac: float,
    json_out: Path | None,
    out: Path | None,
) -> None:
    """Test a running application, and write what was found, also if the test ended before its time."""
    result = run_live(options, trace, path.name)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    changes = patch(result, headroom_frac)
    if result.test.points:
        print_whole(live_table(result))
    if changes:
        command = tune_command(changes, options.app, options.service)
        console.print(f"To change the application:\n  {command}", highlight=False, soft_wrap=True, markup=False)
        write_file(out, patch_yaml(changes, result, options, date), "--out")
    print_notes(live_notes(result, changes))
    write_file(json_out, json_text(live_document(result, changes, options, file_source(path), date)), "--json")
    if result.stopped is not None:
        raise result.stopped
    if not changes:
        raise ConfigError(
            "no rate kept the objectives: give a lower --first-rate, or objectives that these engines can keep"
        )


def _test_models(
    trace: Path | None,
    config: Path | None,
    gpus: int | None,
    start_s: float,
    duration_s: float | None,
    seed: int,
    is_strict: bool,
    json_out: Path | None,
) -> None:
    """Test engine models."""
    if trace is None:
        raise ConfigError("--trace is missing: only --live has a sample of its own")
    config, settings = settings_of(config, {"--json": json_out}, {"--trace": trace})
    requests = load_part(trace, start_s, duration_s)
    # Not check_trace: the pressure test makes its own arrivals, so only the lengths of the trace matter.
    check_lengths(settings, requests, trace, is_strict=is_strict)
    with progress_bar() as progress:
        task = progress.add_task("pressure test", total=None)

        def on_point(point: PressurePoint) -> None:
            progress.update(task, advance=1, description=f"{point.name} tried")

        result = pressure.pressure_test(settings, requests, gpus=gpus, seed=seed, on_point=on_point)
    console.print(curate_report.pressure_table(result))
    console.print(curate_report.pressure_verdict(result), highlight=False)
    flags = notes(settings, requests, is_replayed=False)
    print_notes(flags)
    report = {**sources(settings, trace, config), "flags": flags, **curate_report.pressure_document(result)}
    write_file(json_out, json_text(report), "--json")
