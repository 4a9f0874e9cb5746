"""Twenty thousand bad requests to every route: ``make fuzz``.

Emulated engines get most of them; everything above the engine is the real thing there. Real engines get the others,
most of which pass the endpoint's own checks. No answer may be a server's error or hang. No process may end or grow. A
normal request is answered afterwards as before.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deployments.machine.claims import free_ports
from serve_app.local.cluster import driver_environment
from serve_app.output import write_file
from tests.lab.fuzz.parts import Part, parts
from tests.lab.fuzz.run import fuzz
from tests.lab.fuzz.verdict import Tally
from tests.lab.stand.process_memory import Growth


def run_part(
    part: Part, seed: int, tally: Tally, print_line: Callable[[str], None], advance: Callable[[], None]
) -> Growth:
    """Start the application of a part and fuzz it (see ``fuzz``)."""
    from serve_app.sdk import deploy

    document = {**part.document, "http_options": {"host": "127.0.0.1", "port": free_ports(1)[0]}}
    with deploy(document, on_status=lambda status: print_line(f"{part.name}: starting: {status.state}")) as app:
        return asyncio.run(fuzz(app, part, seed, tally, advance))


def main(
    requests: Annotated[int, typer.Option(min=10, help="Number of requests.")] = 20_000,
    seed: Annotated[int, typer.Option(help="The same seed draws the same requests.")] = 1,
    only: Annotated[str | None, typer.Option(help="Run one part alone: emulated or real.")] = None,
    json_out: Annotated[Path, typer.Option("--json", help="Write the figures here.")] = Path("reports/fuzz.json"),
) -> None:
    """Send bad requests, judge every answer, print the figures and write the report."""
    driver_environment()  # before anything imports ray
    # oneDNN keeps a compiled kernel for each shape of a batch, 1,024 by default: 400 MiB that fill for thousands of
    # requests.
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "16"
    console, tally, began_s = Console(), Tally(), time.monotonic()
    memory: Growth = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with TemporaryDirectory() as folder, Progress(*columns, console=console, transient=True) as progress:
        chosen = [part for part in parts(requests, Path(folder)) if only in (None, part.name)]
        if not chosen:
            raise typer.BadParameter(f"{only!r} is neither emulated nor real", param_hint="--only")
        task = progress.add_task("bad requests", total=sum(part.requests for part in chosen))
        for part in chosen:
            growth = run_part(part, seed, tally, console.print, lambda: progress.advance(task))
            memory |= {f"{kind}, {part.name}": row for kind, row in growth.items()}
            # Written after each part, since the next one may fail.
            result = figures(tally, memory, seconds=time.monotonic() - began_s, seed=seed)
            write_file(json_out, json.dumps(result, indent=1) + "\n", "--json")
    _show(result, console)
    if tally.findings:
        raise typer.Exit(1)


def figures(tally: Tally, memory: Growth, *, seconds: float, seed: int) -> dict[str, Any]:
    """The counts, memory and findings so far, as the report has them."""
    return {
        "requests": tally.requests,
        "seconds": seconds,
        "seed": seed,
        "by_route": dict(tally.by_route.most_common()),
        "by_status": dict(tally.by_status.most_common()),
        "by_kind": dict(tally.by_kind.most_common()),
        "five_xx": tally.five_xx,
        "hangs": tally.hangs,
        "crashes": tally.crashes,
        "memory": memory,
        "findings": [finding.row() for finding in tally.findings.values()],
    }


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table("what", "count", title=f"{figures['requests']:,} bad requests", title_justify="left")
    for name in ("by_route", "by_status"):
        for key, count in figures[name].items():
            table.add_row(key, f"{count:,}")
        table.add_section()
    for name in ("five_xx", "hangs", "crashes"):
        table.add_row(name.replace("_", " "), str(figures[name]))
    console.print(table)
    columns = ("process", "first third MiB", "last third MiB", "growth", "steady rise MiB")
    grown = Table(*columns, title="Memory", title_justify="left")
    for kind, row in figures["memory"].items():
        thirds = (f"{row[name]:.1f}" for name in ("first_third_mib", "last_third_mib"))
        grown.add_row(kind, *thirds, f"{row['growth_frac']:+.1%}", f"{row['steady_mib']:.1f}")
    console.print(grown)
    for finding in figures["findings"]:
        console.print(f"{finding['count']} x {finding['what']}: {finding['text']}", highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
