"""Twenty thousand bad requests to every route: ``make fuzz``.

Most of them to emulated engines, where everything above the engine is the real thing; the rest, of which most pass the
endpoint's own checks, to real ones. Nothing may answer with a server's error, hang, break, end or grow, and a normal
request is answered afterwards as before.
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

from deployments.ports import free_ports
from serve_app.cluster import driver_environment
from serve_app.fuzz_parts import Part, parts
from serve_app.fuzz_run import fuzz
from serve_app.fuzz_verdict import Tally
from serve_app.output import write_file
from serve_app.process_memory import Growth


def run_part(part: Part, number: int, tally: Tally, say: Callable[[str], None], advance: Callable[[], None]) -> Growth:
    """Start the application, send everything, and look what is left of it.

    Args:
        part: what to start and to send.
        number: the seed.
        tally: what is found is put here.
        say: told what happens.
        advance: called after each request.

    Returns:
        How much memory grew, by kind of process.
    """
    from serve_app.sdk import deploy

    document = {**part.document, "http_options": {"host": "127.0.0.1", "port": free_ports(1)[0]}}
    with deploy(document, on_status=lambda status: say(f"{part.name}: starting: {status.state}")) as app:
        return asyncio.run(fuzz(app, part, number, tally, advance))


def main(
    requests: Annotated[int, typer.Option(min=10, help="How many requests.")] = 20_000,
    number: Annotated[int, typer.Option("--seed", help="Draws the same requests again.")] = 1,
    only: Annotated[str | None, typer.Option(help="emulated or real: that part alone.")] = None,
    json_out: Annotated[Path, typer.Option("--json", help="Write the figures here.")] = Path("reports/fuzz.json"),
) -> None:
    """Send bad requests, judge every answer, print and write."""
    driver_environment()  # before anything imports ray
    # What a real engine on CPUs keeps for each shape of a batch, 1,024 by default, are 400 MiB that fill for thousands
    # of requests (oneDNN).
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
            growth = run_part(part, number, tally, console.print, lambda: progress.advance(task))
            memory |= {f"{kind}, {part.name}": row for kind, row in growth.items()}
            # Whatever becomes of the next one.
            result = figures(tally, memory, seconds=time.monotonic() - began_s, number=number)
            write_file(json_out, json.dumps(result, indent=1) + "\n", "--json")
    _show(result, console)
    if tally.findings:
        raise typer.Exit(1)


def figures(tally: Tally, memory: Growth, *, seconds: float, number: int) -> dict[str, Any]:
    """What has been sent, answered and found so far, as the report has it; ``number`` is the seed."""
    return {
        "requests": tally.requests,
        "seconds": seconds,
        "seed": number,
        "by_route": dict(tally.by_route.most_common()),
        "by_status": dict(tally.by_status.most_common()),
        "by_kind": dict(tally.by_kind.most_common()),
        "five_xx": tally.five_xx,
        "hangs": tally.hangs,
        "crashes": tally.crashes,
        "memory": memory,
        "findings": list(tally.findings.values()),
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
        console.print(f"{finding['count']} x {finding['what']}: {finding['said']}", highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
