"""The commands that make traces: synthetic ones, and from logs; and that show what is in one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from autoscale.trace import TraceRequest, load_trace
from autoscale.trace_import import load_openai, load_vllm
from autoscale.workload import Floats, WorkloadConfig, save_trace, synthesize
from serve_app.validate import ConfigError

console = Console()
commands = typer.Typer(name="trace", help="Make traces, import them from logs, and show them.", no_args_is_help=True)

OutPath = Annotated[Path, typer.Option("--out", help="The CSV to write, gzipped where its name ends in .gz.")]


@commands.command("synthesize")
def synthesize_trace(
    out: OutPath,
    config: Annotated[Path | None, typer.Option(help="A YAML with duration_s, arrivals and lengths.")] = None,
    poisson: Annotated[float | None, typer.Option(help="Instead: Poisson arrivals, so many requests a second.")] = None,
    duration: Annotated[float | None, typer.Option(help="How long, seconds; the config's.")] = None,
    input_tokens: Annotated[int | None, typer.Option(help="The length of each prompt.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="The length of each output.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same trace.")] = 0,
) -> None:
    """Write a synthetic trace: Poisson or bursts, ramps, stairs, spikes or a day, lengths as you say."""
    lengths = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    plain = {"--poisson": poisson, "--duration": duration} | {f"--{k.replace('_', '-')}": v for k, v in lengths.items()}
    try:
        if config is not None:
            if given := [name for name, value in plain.items() if value is not None]:
                raise ValueError(f"{', '.join(given)} beside --config: write it into {config}")
            workload = WorkloadConfig.load(config)
        elif missing := [name for name, value in plain.items() if value is None]:
            raise ValueError(f"give --config, or all of {', '.join(plain)}: {', '.join(missing)} is missing")
        else:
            document: dict[str, Any] = {
                "duration_s": duration,
                "arrivals": {"kind": "poisson", "rate": {"kind": "constant", "requests_per_s": poisson}},
                "lengths": {"kind": "separate"} | {k: {"kind": "constant", "tokens": v} for k, v in lengths.items()},
            }
            workload = WorkloadConfig.parse(document, "the options")
        trace = synthesize(workload, np.random.default_rng(seed))
        if not trace:
            raise ValueError(f"no request came in {workload.duration_s:g} s: raise the rate or the duration")
        save_trace(out, trace)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    console.print(f"{out}: {_summary(trace)}", highlight=False, soft_wrap=True)


@commands.command("import")
def import_trace(
    out: OutPath,
    vllm: Annotated[
        list[Path] | None, typer.Option(help="What vLLM logged, or its OpenTelemetry spans; for each server one.")
    ] = None,
    openai: Annotated[
        list[Path] | None, typer.Option(help="What a proxy of an OpenAI API logged, JSON lines; again for more.")
    ] = None,
    assume_max_tokens: Annotated[
        bool,
        typer.Option("--assume-max-tokens", help="Take max_tokens where vLLM's log does not tell an output's length."),
    ] = False,
) -> None:
    """Make a trace from logs of requests; say what in them was none."""
    try:
        if bool(vllm) == bool(openai):
            raise ValueError("give --vllm or --openai, and not both")
        if openai and assume_max_tokens:
            raise ValueError("--assume-max-tokens goes with --vllm: proxies log the output's length")
        found = load_openai(openai) if openai else load_vllm(vllm or [], assume_max_tokens=assume_max_tokens)
        save_trace(out, found.requests)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    console.print(f"{out}: {_summary(found.requests)}, from {found.format}", highlight=False, soft_wrap=True)
    for what, count in found.skipped.items():
        console.print(f"left out: {count:,} {what}", highlight=False)


@commands.command()
def show(
    trace: Annotated[Path, typer.Argument(help="CSV or .gz: timestamp_s, input_tokens, output_tokens.")],
    window: Annotated[float, typer.Option(min=1e-3, help="The peak is of so many seconds.")] = 10.0,
) -> None:
    """Show how many requests a trace has, how they come and how long they are."""
    try:
        requests = load_trace(trace)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    times_s = np.array([request.at_s for request in requests])
    arrivals = Table("", trace.name, box=SIMPLE_HEAD)
    arrivals.add_row("requests", f"{len(requests):,}")
    arrivals.add_row("span", f"{times_s[-1] - times_s[0]:,.1f} s")
    arrivals.add_row("mean rate", _mean_rate(times_s))
    arrivals.add_row(f"peak rate over {window:g} s", _peak_rate(times_s, window))
    arrivals.add_row("CV of gaps", _gap_cv(times_s))
    console.print(arrivals)
    lengths = Table("tokens", box=SIMPLE_HEAD)
    for head in ("mean", "p50", "p90", "p99", "max", "total"):
        lengths.add_column(head, justify="right")
    for name in ("input_tokens", "output_tokens"):
        values = np.array([getattr(request, name) for request in requests])
        quantiles = np.quantile(values, (0.5, 0.9, 0.99, 1.0), method="inverted_cdf")
        lengths.add_row(name.partition("_")[0], *(f"{v:,.0f}" for v in (values.mean(), *quantiles, values.sum())))
    console.print(lengths)


def _summary(requests: Sequence[TraceRequest]) -> str:
    times_s = np.array([request.at_s for request in requests])
    return f"{len(requests):,} requests in {times_s[-1] - times_s[0]:,.1f} s, {_mean_rate(times_s)}"


def _mean_rate(times_s: Floats) -> str:
    span_s = times_s[-1] - times_s[0]
    return f"{(len(times_s) - 1) / span_s:.4g} /s" if span_s else "-"


def _peak_rate(times_s: Floats, window_s: float) -> str:
    """Of all windows that begin with a request; none where the trace is shorter than one."""
    if times_s[-1] - times_s[0] < window_s:
        return "-"
    inside = np.searchsorted(times_s, times_s + window_s, side="left") - np.arange(len(times_s))
    return f"{inside.max() / window_s:.4g} /s"


def _gap_cv(times_s: Floats) -> str:
    """Standard deviation of the time between two requests over its mean: 1 for Poisson, more where they clump."""
    gaps_s = np.diff(times_s)
    return f"{gaps_s.std() / gaps_s.mean():.2f}" if times_s[-1] > times_s[0] else "-"
