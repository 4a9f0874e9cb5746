"""The demonstration: replay a real trace slice against a running application and show what happened."""

import asyncio
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from autoscale.report import Report
from autoscale.trace import TraceRequest
from serve_app.bench import LoadGenerator

Metrics = Counter[tuple[str, ...]]


def run_trace(url: str, model: str, trace: Sequence[TraceRequest], console: Console) -> Report:
    """Replay a trace with a progress bar."""
    generator = LoadGenerator(url, model)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replaying the trace", total=len(trace))
        records = asyncio.run(generator.replay(trace, lambda n: progress.advance(task, n)))
    return Report.of(records)


def scrape(url: str) -> Metrics:
    """Path counts and NIXL bytes from ``/metrics``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:  # noqa: S310
        page = response.read().decode()
    totals: Metrics = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "tandem_prefill_path_total":
                totals["path", sample.labels["path"], sample.labels["reason"]] += int(sample.value)
            elif sample.name == "vllm:nixl_bytes_transferred_sum":
                totals["nixl_bytes",] += int(sample.value)
    return totals


def show(report: Report, metrics: Metrics, console: Console) -> None:
    """Print the table."""
    table = Table(title="Tandem: prefill and decode on separate engines", title_justify="left")
    for column in ("", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in (("TTFT (ms)", report.ttft_s), ("TPOT (ms)", report.tpot_s)):
        table.add_row(name, *(f"{values[q] * 1e3:.1f}" if q in values else "-" for q in ("p50", "p90", "p99")))
    table.add_section()
    table.add_row("requests ok / failed", f"{report.requests_ok} / {report.requests_failed}")
    for kind, count in sorted((key, n) for key, n in metrics.items() if key[0] == "path"):
        table.add_row(f"prefilled {kind[1]}: {kind[2]}", str(count))
    table.add_row("moved over NIXL", f"{metrics['nixl_bytes',] / 1e6:.1f} MB")
    table.add_row("output tokens/s", f"{report.output_tokens_per_s:.1f}")
    console.print(table)
    for error, count in report.errors.items():
        console.print(f"{count} x {error}", style="red", markup=False)


def is_complete(report: Report, metrics: Metrics) -> bool:
    """Whether the demonstration showed what it should: nothing failed, both paths were taken, KV moved."""
    paths = {key[1] for key, count in metrics.items() if key[0] == "path" and count}
    return report.requests_failed == 0 and paths == {"local", "remote"} and metrics["nixl_bytes",] > 0


SAMPLE_TRACE = Path(__file__).parent.parent / "configs" / "traces" / "azure_conv_60s.csv"
