"""The demonstration: replay a real trace slice against a running application and show what happened."""

import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from autoscale.report import Report
from autoscale.traces.trace import TraceRequest, load_trace, scale_trace
from router.length import PathReason
from serve_app.checks.yaml_checks import ConfigError, sole_application
from serve_app.load.generator import LoadGenerator
from serve_app.load.metrics_page import scrape
from serve_app.local.shipped import shipped

# Prompts by ("path", where they were prefilled, reason); bytes of KV under ("nixl_bytes",).
Metrics = Counter[tuple[str, ...]]
_NIXL_BYTES = ("nixl_bytes",)

_SAMPLE_TRACE = "traces/azure_conv_60s.csv"

# What the table says for paths and reasons. "there": on the replica that decodes; "its": the prompt's.
_WHERE = {"local": "where they decode", "remote": "by a prefill engine"}
_WHY = {
    PathReason.SHORT: "short",
    PathReason.CACHED: "mostly cached there",
    PathReason.PREFILL_BACKLOG: "prefill had a queue",
    PathReason.LONG: "long",
    PathReason.DECODE_BUSY: "decode was busy",
    PathReason.NOT_TRANSFERABLE: "cannot be handed over",
    PathReason.AGGREGATED: "its group has no prefill",
    PathReason.PREFILL_FAILED: "prefill failed",
    PathReason.KV_LATE: "prefill's answer came late",
    PathReason.NO_CREDIT: "decode had no room for the KV",
    PathReason.MEDIA_TOO_LARGE: "its images are too large for the handoff",
}


def without_keys(document: dict[str, Any]) -> dict[str, Any]:
    """A Serve YAML whose endpoint asks for no API key, for a demonstration on this machine alone."""
    document = copy.deepcopy(document)
    ingress = _section(document, "ingress")
    if ingress is not None:
        ingress.pop("api_keys_file", None)
    return document


def _section(document: dict[str, Any], name: str) -> dict[str, Any] | None:
    """A mapping in the application's ``args``; ``None``: it is absent or no mapping, which later checks may refuse."""
    args = sole_application(document).get("args")
    section = args.get(name) if isinstance(args, dict) else None
    return section if isinstance(section, dict) else None


def sample_trace(*, time_factor: float, limit: int) -> tuple[TraceRequest, ...]:
    """The shipped slice of Azure's conversation trace, with lengths and a rate that the tiny model can serve.

    ``time_factor``: multiplies the times. ``limit``: most requests. Raises ConfigError: the file is missing.
    """
    try:
        trace = load_trace(shipped(_SAMPLE_TRACE))
    except ValueError as error:
        raise ConfigError(f"{error}: install tandem-serve again") from None
    return scale_trace(trace, time_factor=time_factor, length_factor=0.125, max_total_tokens=2048, limit=limit)


def build_missing_model(document: dict[str, Any]) -> None:
    """Build the tiny model where a shipped configuration looks for it; raises ConfigError if it cannot be written."""
    from serve_app.local.tiny_model import SOURCE, build_tiny_model

    model = _section(document, "model")
    if model is None or model.get("source") != SOURCE:
        return
    try:
        build_tiny_model(Path(SOURCE))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tiny model cannot be built in {SOURCE}: {error}") from None


def run_trace(url: str, model: str, trace: Sequence[TraceRequest], console: Console) -> Report:
    """Replay a trace with a progress bar."""
    generator = LoadGenerator(url, model)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replaying the trace", total=len(trace))
        records = asyncio.run(generator.replay(trace, lambda request, record: progress.advance(task)))
    return Report.of(records)


def prefill_metrics(url: str) -> Metrics:
    """Path counts and NIXL bytes from a metrics page, summed over its processes."""
    totals: Metrics = Counter()
    for sample in scrape(url, "tandem_prefill_path_total", "vllm:nixl_bytes_transferred_sum"):
        is_path = sample.name == "tandem_prefill_path_total"
        key = ("path", sample.labels["path"], sample.labels["reason"]) if is_path else _NIXL_BYTES
        totals[key] += int(sample.value)
    return totals


def show(report: Report, metrics: Metrics, console: Console) -> None:
    """Print the tables of latencies and counts, and the errors of requests."""
    latency = Table("", title="Tandem: prefill and decode on separate engines", title_justify="left")
    for column in ("p50", "p90", "p99"):
        latency.add_column(column, justify="right")
    times = {"time to first token, TTFT (ms)": report.ttft_s, "time per output token, TPOT (ms)": report.tpot_s}
    for name, values in times.items():
        latency.add_row(name, *(f"{values[q] * 1e3:.1f}" if q in values else "-" for q in ("p50", "p90", "p99")))
    console.print(latency)
    counts = Table(show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    counts.add_row("requests ok / failed", f"{report.requests_ok} / {report.requests_failed}")
    for (_, path, reason), count in sorted((key, n) for key, n in metrics.items() if key[0] == "path"):
        counts.add_row(f"prompts prefilled {_WHERE[path]}: {_WHY[PathReason(reason)]}", str(count))
    counts.add_row("KV moved over NIXL", f"{metrics[_NIXL_BYTES] / 1e6:.1f} MB")
    counts.add_row("output tokens/s", f"{report.output_tokens_per_s:.1f}")
    console.print(counts)
    for error, count in report.errors.items():
        console.print(f"{count} x {error}", style="red", markup=False)


def is_complete(report: Report, metrics: Metrics) -> bool:
    """Whether the demonstration showed what it should: nothing failed, both paths were taken, KV moved."""
    paths = {key[1] for key, count in metrics.items() if key[0] == "path" and count}
    return report.requests_failed == 0 and paths == {"local", "remote"} and metrics[_NIXL_BYTES] > 0
