"""``tandem profile``: measures engines, and holds a profile against measured operating points."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer

from autoscale.engines.operating_points import (
    OperatingPoint,
    Prediction,
    load_operating_points,
    mean_error_frac,
    predicted,
)
from autoscale.engines.profile import EngineProfile
from autoscale.operators.step_times import ASYNC_HOST, SYNC_HOST, EngineSettings
from deployments.profiler.rounds import MeasuringError
from kvtransfer.topology import Role
from serve_app.checks.ray_schema import single_app_config
from serve_app.checks.yaml_checks import ConfigError, config_errors, load_serve_yaml
from serve_app.cli import operator_options
from serve_app.cli.engine_output import engine_output_to
from serve_app.cli.operator_profile import write_operator_profile
from serve_app.cli.terminal import console, errors, figure, figures_table
from serve_app.output import write_file

commands = Typer()

_SEED = 0  # of the lengths that are drawn for a prediction: the same check gives the same figures


@commands.command()
def profile(
    config: Annotated[
        Path | None, Argument(help="A Serve YAML with one Tandem application; with --check, a profile.")
    ] = None,
    out: Annotated[Path | None, Option(help="Where to write the profile.")] = None,
    name: Annotated[str | None, Option(help="The profile's name; by default the file's.")] = None,
    group: Annotated[str | None, Option(help="The group to measure; by default the first.")] = None,
    check: Annotated[
        Path | None,
        Option(help="Measure nothing: compare the profile with the operating points in this CSV."),
    ] = None,
    most_error_frac: Annotated[
        float, Option(min=0.0, help="With --check: highest mean error of TPOT; beyond it the exit code is 1.")
    ] = 0.1,
    json_out: Annotated[Path | None, Option("--json", help="With --check: write all figures here.")] = None,
    from_operators: operator_options.Model = None,
    gpu: operator_options.GpuType = None,
    tp: operator_options.TensorParallel = 1,
    dtype: operator_options.Dtype = "bf16",
    kv_dtype: operator_options.KvDtype = None,
    max_batch_tokens: operator_options.MaxBatchTokens = 2048,
    max_running: operator_options.MaxRunning = 128,
    longest_tokens: operator_options.LongestTokens = 16_384,
    async_scheduling: operator_options.AsyncScheduling = True,
    tables: operator_options.Tables = None,
) -> None:
    """Measure the engines of a config and write their profile, compute it from operators, or check a profile."""
    if from_operators is not None:
        if config is not None or check is not None or gpu is None or out is None:
            raise ConfigError("--from-operators needs --gpu TYPE and --out FILE, and takes neither CONFIG nor --check")
        settings = EngineSettings(
            parallel=tp,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            longest_tokens=longest_tokens,
            host=ASYNC_HOST if async_scheduling else SYNC_HOST,
        )
        write_operator_profile(from_operators, gpu, (dtype, kv_dtype or dtype), settings, tables, name, out)
        return
    if config is None:
        raise ConfigError("give a CONFIG to measure, or --from-operators MODEL to compute a profile")
    if check is not None:
        _check(config, check, most_error_frac, json_out)
        return
    if out is None:
        raise ConfigError("give --out FILE for the profile, or --check FILE to compare one with measured points")
    _measure(config, out, name, group)


def _measure(config: Path, out: Path, name: str | None, group: str | None) -> None:
    """Start the engines, measure them, and write their profiles."""
    app = single_app_config(load_serve_yaml(config))
    groups = {each.name: (service, each) for service in app.services for each in service.all_groups}
    if group is not None and group not in groups:
        raise ConfigError(f"there is no group {group!r} in {config}: it has {', '.join(groups)}")
    service, chosen = groups[group or app.groups[0].name]
    log = out.with_suffix(".log")
    errors.print(f"measuring {chosen.name} of {config}; the engines write to {log}", highlight=False, soft_wrap=True)
    with config_errors(), engine_output_to(log) as terminal, terminal.status("starting") as line:
        from deployments.profiler.profile import profiles

        try:
            measured = profiles(
                name or out.stem,
                service,
                chosen,
                kv_transfer=app.kv_transfer,
                points=out.with_suffix(".points.jsonl"),
                on_progress=line.update,
            )
        except MeasuringError as error:
            raise ConfigError(f"{error}. {log} has what the engines wrote") from None
    for path, each in _files(out, measured).items():
        write_file(path, each.model_dump_json(indent=1) + "\n", "--out")
        console.print(_line(path, each), highlight=False)


def _files(out: Path, measured: Mapping[Role, EngineProfile]) -> dict[Path, EngineProfile]:
    """The files to write: one if both roles have the same engine."""
    prefill, decode = measured[Role.PREFILL], measured[Role.DECODE]
    return {out: decode} if prefill is decode else {out.with_stem(f"{out.stem}_prefill"): prefill, out: decode}


def _line(path: Path, each: EngineProfile) -> str:
    text = f"{path}: {each.name}, {each.kv_tokens} tokens of KV, {each.max_running} requests"
    if (test := each.left_out) is None:
        return text
    return (
        f"{text}; off by {test.prefill_error_frac_p90:.0%} (prefill) and {test.decode_error_frac_p90:.0%} (decode) at "
        f"{test.points} points left out (p90)"
    )


def _check(path: Path, points_path: Path, most_error_frac: float, json_out: Path | None) -> None:
    """Compare, print, and exit with 1 if the mean error of TPOT is too large."""
    with config_errors():
        engine, points = EngineProfile.load(path), load_operating_points(points_path)
        if all(point.tpot_s is None for point in points):
            raise ConfigError(f"{points_path}: no point has a tpot_s, and TPOT is what --check judges: add the column")
        found = []
        for line, point in enumerate(points, start=2):
            try:
                found.append(predicted(engine, point, random.Random(_SEED)))
            except ValueError as fault:
                raise ConfigError(
                    f"{points_path}: line {line}: {fault}: leave the point out, or check an engine with more KV"
                ) from None
    table = figures_table(
        "tokens in/out",
        ("in flight", "TTFT s", "mean", "median", "TPOT ms", "model", "error"),
        title=f"{engine.name}: {points_path.name}, measured, and by the engine model",
    )
    for point, prediction in zip(points, found, strict=True):
        error = mean_error_frac([(point.tpot_s, prediction.tpot_s)])
        sign = "-" if point.tpot_s is not None and prediction.tpot_s < point.tpot_s else "+"
        table.add_row(
            f"{point.input_tokens}/{point.output_tokens}{' *' if prediction.is_extrapolated else ''}",
            str(point.concurrency),
            figure(point.ttft_s, ".3f"),
            figure(prediction.ttft_mean_s, ".3f"),
            figure(prediction.ttft_median_s, ".3f"),
            figure(point.tpot_s, ".2f", 1e3),
            figure(prediction.tpot_s, ".2f", 1e3),
            "-" if error is None else f"{sign}{error:.1%}",
        )
    console.print(table)
    if any(prediction.is_extrapolated for prediction in found):
        console.print("* beyond the profile's points")
    by_reading = _errors(points, found)
    texts = [f"{reading} {error:.1%}" for reading, error in by_reading.items() if error is not None]
    text = ", ".join(texts) or "nothing was measured"
    console.print(f"mean error without sign: {text}", highlight=False, soft_wrap=True)
    if json_out is not None:
        rows = [point.model_dump() | asdict(each) for point, each in zip(points, found, strict=True)]
        result = {"profile": engine.name, "points": str(points_path), "mean_error_frac": by_reading, "rows": rows}
        write_file(json_out, json.dumps(result, indent=1) + "\n", "--json")
    tpot_error = by_reading["TPOT"]
    if tpot_error is not None and tpot_error > most_error_frac:
        errors.print(
            f"tandem: TPOT is off by {tpot_error:.1%} in the mean, more than --most-error-frac {most_error_frac:g}: "
            "measure the engine again with `tandem profile CONFIG --out FILE`",
            style="red",
            highlight=False,
            soft_wrap=True,
        )
        raise Exit(1)


def _errors(points: Sequence[OperatingPoint], found: Sequence[Prediction]) -> dict[str, float | None]:
    """Mean error by reading: measured TTFT may be a mean or a median."""
    pairs = list(zip(points, found, strict=True))
    return {
        "TPOT": mean_error_frac([(point.tpot_s, each.tpot_s) for point, each in pairs]),
        "TTFT if it is a mean": mean_error_frac([(point.ttft_s, each.ttft_mean_s) for point, each in pairs]),
        "TTFT if it is a median": mean_error_frac([(point.ttft_s, each.ttft_median_s) for point, each in pairs]),
    }
