"""The commands that make synthetic traces, make traces from logs, and show what is in a trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from typer import Argument, Option, Typer

from autoscale.traces.arrivals import Floats
from autoscale.traces.log_import import load_openai, load_vllm
from autoscale.traces.synthesis import WorkloadConfig, save_trace, synthesize
from autoscale.traces.trace import TraceRequest, load_trace
from serve_app.checks.yaml_checks import config_errors
from serve_app.cli.terminal import console

commands = Typer(name="trace", help="Make traces, import them from logs, and show them.", no_args_is_help=True)

OutPath = Annotated[Path, Option("--out", help="The CSV to write, gzipped where its name ends in .gz.")]


@commands.command("synthesize")
@config_errors()
def synthesize_trace(
    out: OutPath,
    config: Annotated[Path | None, Option(help="A YAML with duration_s, arrivals and lengths.")] = None,
    poisson: Annotated[float | None, Option(help="Instead of --config: Poisson arrivals, requests per second.")] = None,
    duration: Annotated[float | None, Option(help="Length of the trace, seconds, with --poisson.")] = None,
    input_tokens: Annotated[int | None, Option(help="Length of each prompt, tokens, with --poisson.")] = None,
    output_tokens: Annotated[int | None, Option(help="Length of each output, tokens, with --poisson.")] = None,
    seed: Annotated[int, Option(min=0, help="The same seed gives the same trace.")] = 0,
) -> None:
    """Write a synthetic trace: Poisson arrivals, bursts, ramps, stairs, spikes or a daily curve; any token lengths."""
    lengths = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    poisson_options = {"--poisson": poisson, "--duration": duration}
    poisson_options |= {f"--{name.replace('_', '-')}": tokens for name, tokens in lengths.items()}
    if config is not None:
        if extra_options := [name for name, value in poisson_options.items() if value is not None]:
            raise ValueError(f"--config is given too: set {', '.join(extra_options)} in {config}")
        workload = WorkloadConfig.load(config)
    elif missing := [name for name, value in poisson_options.items() if value is None]:
        raise ValueError(f"give --config, or all of {', '.join(poisson_options)}: {', '.join(missing)} is missing")
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
    console.print(f"{out}: {_summary(trace)}", highlight=False, soft_wrap=True)


@commands.command("import")
@config_errors()
def import_trace(
    out: OutPath,
    vllm: Annotated[
        list[Path] | None,
        Option(help="A file of vLLM's OpenTelemetry spans; repeat the option for each server."),
    ] = None,
    openai: Annotated[
        list[Path] | None,
        Option(help="A JSON lines log of an OpenAI API's proxy; repeat the option for each file."),
    ] = None,
) -> None:
    """Make a trace from logs of requests; print what was left out."""
    if bool(vllm) == bool(openai):
        raise ValueError("give --vllm or --openai, and not both")
    imported = load_openai(openai) if openai else load_vllm(vllm or [])
    save_trace(out, imported.requests)
    console.print(f"{out}: {_summary(imported.requests)}, from {imported.format}", highlight=False, soft_wrap=True)
    for what, count in imported.skipped.items():
        console.print(f"left out: {count:,} {what}", highlight=False)


@commands.command()
@config_errors()
def show(
    trace: Annotated[Path, Argument(help="CSV or .gz: timestamp_s, input_tokens, output_tokens.")],
    window: Annotated[float, Option(min=1e-3, help="The peak rate is taken over this time, seconds.")] = 10.0,
) -> None:
    """Show how many requests a trace has, when they arrive and how long they are."""
    requests = load_trace(trace)
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
    """The largest rate of all windows that begin with a request; "-" if the trace is shorter than a window."""
    if times_s[-1] - times_s[0] < window_s:
        return "-"
    # For each request: index of the first request after its window, minus its own index.
    after_window = np.searchsorted(times_s, times_s + window_s, side="left")
    requests = after_window - np.arange(len(times_s))
    return f"{requests.max() / window_s:.4g} /s"


def _gap_cv(times_s: Floats) -> str:
    """Coefficient of variation of the times between requests: 1 for Poisson, more for bursts."""
    gaps_s = np.diff(times_s)
    return f"{gaps_s.std() / gaps_s.mean():.2f}" if times_s[-1] > times_s[0] else "-"
