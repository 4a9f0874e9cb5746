"""The operators' paper beside our results, under both readings: ``make reproduce-operators``."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from serve_app.output import write_file
from tests.lab.operators import paper_figures
from tests.lab.operators.paper_figures import SLO_FACTOR, SPREAD, Curves
from tests.lab.operators.paper_oracle import oracle_rows
from tests.lab.operators.paper_plots import draw
from tests.lab.operators.paper_row import PaperRow
from tests.lab.operators.paper_traces import RATE_SCALE, trace_rows
from tests.lab.operators.readings import GPU, GPU_TIME, OWN_QUEUES

ASSUMPTIONS = (
    f"{GPU.name} GPUs in bf16, times of the shipped tables. Objective: {SLO_FACTOR:g} times a pass of one request that "
    "never waits, on the smallest GPU group that holds the model; it holds for the mean latency. Contention of pairs "
    f"measured on an H100. Figures: prefill, {paper_figures.FIXED_RATE:g} prompts/s (by length) or "
    f"{paper_figures.FIXED_LENGTH:,} tokens (by rate), sums over {', '.join(f'{one:g}' for one in SPREAD)} times the "
    f"rate. Traces: rates times {RATE_SCALE:g}, windows of 10 s, each planned for its own demand. Baseline: model "
    "instances that compute one batch at a time."
)
READINGS = {
    OWN_QUEUES: "as printed: each operator has queues of its own, GPU time has no limit; planner: the printed pair",
    GPU_TIME: "a GPU has one second of time in a second, and batches must fill; planner: our search",
}


class Part(StrEnum):
    """Parts of the experiment."""

    FIGURES = "figures"
    TRACES = "traces"
    ORACLE = "oracle"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows, and the curves behind Figs. 10 and 11 if that part was run."""

    rows: Sequence[PaperRow]
    curves: Curves | None


def run(parts: Sequence[Part], traces: Path | None, say: Callable[[str], None]) -> Report:
    """Run some parts."""
    rows: list[PaperRow] = []
    curves = None
    if Part.FIGURES in parts:
        say("savings by length and rate")
        curves = paper_figures.curves()
        rows += [*paper_figures.length_rows(curves), *paper_figures.rate_rows(curves)]
        say("savings by model size, throughput")
        rows += [*paper_figures.size_rows(), *paper_figures.throughput_rows()]
    if Part.TRACES in parts:
        say("traces")
        rows += trace_rows(traces)
    if Part.ORACLE in parts:
        say("oracle")
        rows += oracle_rows()
    return Report(rows=rows, curves=curves)


def markdown(rows: Sequence[PaperRow]) -> str:
    """The table, what was assumed, and the reasons of rows that do not come out."""
    lines = ["# The operators' paper beside our results", "", ASSUMPTIONS, ""]
    lines += [f"- {name}: {words}." for name, words in READINGS.items()]
    lines += ["", f"| source | quantity | the paper | {OWN_QUEUES} | {GPU_TIME} |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [_cell(row, name) for name in READINGS]
        lines.append("| " + " | ".join([row.source, row.what, row.claimed, *cells]) + " |")
    lines += ["", "Why rows do not come out:", ""]
    for name in READINGS:
        for reason in dict.fromkeys(row.reason[name] for row in rows if _deviates(row, name)):
            of = [f"{row.source} ({row.what})" for row in rows if _deviates(row, name) and row.reason[name] == reason]
            lines.append(f"- {name}: {reason} Rows: {'; '.join(of)}.")
    return "\n".join(lines) + "\n"


def _cell(row: PaperRow, reading: str) -> str:
    if reading not in row.results:
        return "-"
    result = row.results[reading]
    return f"{result.ours}: {'yes' if result.is_reproduced else 'no'}"


def _deviates(row: PaperRow, reading: str) -> bool:
    return reading in row.results and not row.results[reading].is_reproduced


def shown(rows: Sequence[PaperRow]) -> Table:
    """The table for a terminal."""
    table = Table(title="The operators' paper beside our results (yes: comes out)")
    for name in ("source", "quantity", "the paper", OWN_QUEUES, GPU_TIME):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(row.source, row.what, row.claimed, *(_cell(row, name) for name in READINGS))
    return table


def main(
    only: Annotated[list[Part] | None, Option(help="Only this part; may be given more than once.")] = None,
    traces: Annotated[
        Path | None, Option(help="Folder with the full traces; without it, ten minutes of Azure chat.", exists=True)
    ] = None,
    out: Annotated[Path, Option(help="Folder of operators_paper.md, .json and .png.")] = Path("reports"),
) -> None:
    """Run the parts, print the table and write it."""
    console = Console(width=150)
    report = run(only or list(Part), traces, lambda line: Console(stderr=True).print(f"... {line}"))
    console.print(shown(report.rows))
    claims = [claim for row in report.rows for claim in row.claims(ASSUMPTIONS)]
    console.print(f"{sum(one.is_reproduced for one in claims)} of {len(claims)} come out; written to {out}")
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "operators_paper.md", markdown(report.rows), "--out")
    write_file(out / "operators_paper.json", json.dumps([asdict(one) for one in claims], indent=1) + "\n", "--out")
    if report.curves is not None:
        draw(report.curves, out / "operators_paper.png")


if __name__ == "__main__":
    typer.run(main)
