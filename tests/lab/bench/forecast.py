"""How long a forecast takes, and how far it is off on real traces: ``make bench-forecast``.

Each trace is shown step by step to the forecaster that the product runs. DOPD claims less than 0.8 s for a forecast,
and more than 87 % of them within 10 requests (in flight) and 50 tokens (section V-D). Requests in flight are those of
Little's law at the TPOT objective. The shipped trace is short, so give the folder of the whole ones.
"""

import csv
import gzip
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from autoscale.forecast.config import LoadForecastConfig
from autoscale.forecast.forecaster import FitTask, Forecaster, fit
from autoscale.forecast.history import Point
from autoscale.forecast.record import Outcome
from autoscale.load_forecast import SERIES, Load
from autoscale.traces.trace import TraceRequest, load_trace
from autoscale.types import Traffic

_SHIPPED = Path(__file__).parents[3] / "configs" / "traces" / "azure_conv_600s.csv.gz"
_TPOT_S = 0.05
# Length of a step for traces of hours, and for traces of days, seconds.
_STEP_S, _LONG_STEP_S = 60.0, 300.0
_LONG_S = 86400.0
# A file with this name has a row of a load for each window, not for each request.
_WINDOWS = "servegen_rate_windows_week1.csv.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The load of each step of a trace."""

    name: str
    step_s: float
    loads: Sequence[Load]


@dataclass(slots=True)
class Errors:
    """Outcomes of the forecasts of one series, and the errors of what was planned with (after stepping back)."""

    outcomes: list[Outcome] = field(default_factory=list)
    used: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float | int | None]:
        """The figures; errors are means as shares of the mean observed value."""
        if not self.outcomes:
            return {"forecasts": 0}
        mean = float(np.mean([each.actual for each in self.outcomes]))
        nonzero = [each for each in self.outcomes if each.actual > 0.0]
        covered = [each.is_covered for each in self.outcomes if each.is_covered is not None]
        return {
            "forecasts": len(self.outcomes),
            "mape_frac": float(np.mean([each.error / each.actual for each in nonzero])),
            "last_mape_frac": float(np.mean([each.last_error / each.actual for each in nonzero])),
            "error_frac": float(np.mean([each.error for each in self.outcomes])) / mean,
            "last_error_frac": float(np.mean([each.last_error for each in self.outcomes])) / mean,
            "used_error_frac": float(np.mean(self.used)) / mean,
            "near_frac": float(np.mean([each.is_near for each in self.outcomes])),
            "last_near_frac": float(np.mean([each.is_last_near for each in self.outcomes])),
            "coverage_frac": float(np.mean(covered)) if covered else None,
        }


def loads_of(trace: Sequence[TraceRequest], step_s: float) -> list[Load]:
    """The load of each whole step; a step without requests has the lengths of the one before."""
    steps = int(trace[-1].at_s // step_s)
    sums = np.zeros((3, steps))
    for request in trace:
        if (step := int(request.at_s // step_s)) < steps:
            sums[:, step] += (1.0, request.input_tokens, request.output_tokens)
    loads, lengths = list[Load](), (1.0, 1.0)
    for count, inputs, outputs in sums.T:
        lengths = (inputs / count, outputs / count) if count else lengths
        loads.append(Load(count / step_s, *map(float, lengths)))
    return loads


def replay(case: Case, config: LoadForecastConfig, *, steps_ahead: int = 1) -> tuple[dict[str, Errors], list[float]]:
    """The errors of each series, and the time of each forecast, seconds."""
    own = Forecaster(config=config, tpot_s=_TPOT_S)
    errors, seconds = {name: Errors() for name in SERIES}, list[float]()
    planned: dict[float, tuple[float, ...]] = {}
    for number, load in enumerate(case.loads):
        now_s = (number + 0.5) * case.step_s
        traffic = Traffic(
            requests_per_s=load.requests_per_s,
            input_tokens_mean=load.input_tokens,
            output_tokens_mean=load.output_tokens,
        )
        task = own.observe(traffic, now_s, steps_ahead * case.step_s)
        if task is None:
            continue
        used = planned.pop(task.last.at_s, None)
        if used is not None:
            for index, (name, actual) in enumerate(zip(SERIES, task.last.load, strict=True)):
                errors[name].outcomes.append(own.state.records[index].outcomes[-1])
                errors[name].used.append(abs(used[index] - actual))
        began_s = time.perf_counter()
        own.take(task, fit(task))
        seconds.append(time.perf_counter() - began_s)
        forecast = own.forecast(now_s)
        assert forecast is not None
        planned[forecast.issued_s + forecast.horizon_s] = tuple(each.value for each in forecast.series.values())
    return errors, seconds


def durations(points: int, *, rounds: int) -> dict[str, float]:
    """Wall and CPU time of forecasts of three series with order selection, from so many points, seconds."""
    config = LoadForecastConfig(fit_points=min(points, 1000), season_s=None)
    walls, cpus = list[float](), list[float]()
    for seed in range(rounds):
        rng = np.random.default_rng(seed)
        level = 20.0 + np.cumsum(rng.normal(size=points)) * 0.3
        noise = rng.gamma(20.0, 1 / 20.0, size=(3, points))
        series = (np.maximum(0.1, level) * noise[0], 900.0 * noise[1], 200.0 * noise[2])
        rows = tuple(Point(60.0 * (n + 1), *(float(each[n]) for each in series)) for n in range(points))
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        until_s = wall_s + config.budget_s
        fit(FitTask(config=config, points=rows, horizon_s=60.0), lambda until_s=until_s: time.perf_counter() < until_s)  # type: ignore[misc]
        walls.append(time.perf_counter() - wall_s)
        cpus.append(time.process_time() - cpu_s)
    figures = {"wall": walls, "cpu": cpus}
    return {f"{name}_p{q}_s": float(np.percentile(each, q)) for name, each in figures.items() for q in (50, 99)}


def cases(folder: Path | None) -> Iterator[Case]:
    """The shipped trace, and all traces of a folder."""
    paths = [_SHIPPED, *(sorted(folder.glob("*.csv.gz")) if folder is not None else [])]
    for path in paths:
        name = path.name.removesuffix(".csv.gz")
        if path.name == _WINDOWS:
            yield from _windows(path)
            continue
        trace = load_trace(path)
        if trace[-1].at_s > _LONG_S:
            yield Case(name=name, step_s=_LONG_STEP_S, loads=loads_of(trace, _LONG_STEP_S))
        else:
            for step_s in (_STEP_S / 2, _STEP_S):
                yield Case(name=name, step_s=step_s, loads=loads_of(trace, step_s))


def _windows(path: Path) -> Iterator[Case]:
    """A week of ten-minute windows of each model of the file; windows without requests are gaps of the source."""
    loads: dict[str, list[Load]] = {}
    with gzip.open(path, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            load = Load(*(float(row[name]) for name in ("rate_rps", "mean_input_tokens", "mean_output_tokens")))
            if load.requests_per_s > 0.0:
                loads.setdefault(row["model"], []).append(load)
    for model, its in loads.items():
        yield Case(name=f"servegen_week {model}", step_s=600.0, loads=its)


def main(
    traces: Annotated[Path | None, typer.Argument(help="Folder with traces; else the shipped one.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only cases with this beginning of their name.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Forecasts that are timed, for each number of points.")] = 40,
    out: Annotated[Path, typer.Option(help="Write the figures here.")] = Path("reports/bench_forecast.json"),
) -> None:
    """Measure, print and write."""
    console, documents = Console(), list[dict[str, Any]]()
    durations(50, rounds=1)  # imports statsmodels
    timed = {points: durations(points, rounds=rounds) for points in (50, 288, 1000)}
    table = Table(title="Three series with order selection", title_justify="left")
    for head in ("points", "p50", "p99", "CPU p50", "CPU p99"):
        table.add_column(head, justify="right")
    for points, figures in timed.items():
        table.add_row(str(points), *(f"{seconds:.2f} s" for seconds in figures.values()))
    console.print(table)
    heads = ("forecasts", "MAPE", "last value", "error ratio", "used ratio", "in 80 %", "near", "last near")
    table = Table(title="Accuracy, one step ahead", title_justify="left")
    table.add_column("trace, step, series", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    for case in cases(traces):
        if only and not any(case.name.startswith(name) for name in only):
            continue
        lasts_days = case.step_s * len(case.loads) > 1.2 * _LONG_S
        for season_s in (None, 86400.0) if lasts_days else (None,):
            config = LoadForecastConfig(step_s=case.step_s, season_s=season_s)
            errors, seconds = replay(case, config)
            title = f"{case.name}, {case.step_s:.0f} s{', day before' if season_s else ''}"
            rows = {name: each.row() for name, each in errors.items()}
            documents.append({"case": title, "series": rows, "p99_s": float(np.percentile(seconds, 99))})
            for name, row in rows.items():
                cells = f"{title}, {name}", *_cells(row)
                table.add_row(*cells)
                if not console.is_terminal:  # a log shows what is done
                    typer.echo("  ".join(cells), err=True)
    console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"durations": timed, "accuracy": documents}, indent=1) + "\n")
    console.print(f"written to {out}", highlight=False)


def _cells(row: dict[str, Any]) -> list[str]:
    if not row["forecasts"]:
        return ["0"]
    used, last = row["used_error_frac"], row["last_error_frac"]
    ratios = [f"{row['error_frac'] / last:.2f}", f"{used / last:.2f}"] if last else ["-", "-"]
    covered = math.nan if row["coverage_frac"] is None else row["coverage_frac"]
    shares = [covered, row["near_frac"], row["last_near_frac"]]
    errors = [f"{row[name]:.1%}" for name in ("mape_frac", "last_mape_frac")]
    return [str(row["forecasts"]), *errors, *ratios, *(f"{share:.0%}" for share in shares)]


if __name__ == "__main__":
    typer.run(main)
