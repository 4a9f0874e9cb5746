"""The papers' claims beside what our code gives, in one table: ``make reproduce``."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from serve_app.cli.sim_inputs import worker_pool
from tests.lab.papers import chapter, dopd, heteroscale, wva
from tests.lab.papers.claim import Claim

PAPERS: dict[str, Callable[[], Iterator[Claim]]] = {
    "chapter": chapter.claims,
    "dopd": dopd.claims,
    "heteroscale": heteroscale.claims,
    "wva": wva.claims,
}


def show(claims: Sequence[Claim], console: Console) -> None:
    """A table for each figure of a paper, with what was assumed below it."""
    for source, group in groupby(claims, key=attrgetter("source")):
        rows = list(group)
        table = Table(title=source, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for name, share in (("claim", 5), ("claimed", 4), ("ours", 5), ("tolerance", 4)):
            table.add_column(name, overflow="fold", ratio=share)
        table.add_column("verdict", no_wrap=True)
        for row in rows:
            verdict = "[green]reproduced[/]" if row.is_reproduced else "[yellow]deviates[/]"
            table.add_row(*map(escape, (row.what, row.claimed, row.ours, row.tolerance)), verdict)
        console.print(table)
        alike: dict[str, list[str]] = {}
        for row in rows:
            alike.setdefault(row.assumption, []).append(row.what)
        for assumption, of in alike.items():
            about = "" if len(alike) == 1 else f"{'; '.join(of)}: "
            console.print(f"  [dim]{escape(about)}{escape(assumption)}[/]", highlight=False)
        console.print()


def main(
    paper: Annotated[list[str] | None, typer.Option(help=f"Only this one: {', '.join(PAPERS)}.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the rows here; of all papers, reports/reproduce.json.")
    ] = None,
) -> None:
    """Run every experiment, print the table and write it."""
    names = list(dict.fromkeys(paper or PAPERS))
    if unknown := [name for name in names if name not in PAPERS]:
        raise typer.BadParameter(f"{unknown[0]}: choose among {', '.join(PAPERS)}")
    done: dict[str, list[Claim]] = {}
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with (
        worker_pool(None) as pool,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        tasks = {pool.submit(_claims, name): (name, progress.add_task(name, total=1)) for name in names}
        for future in as_completed(tasks):
            name, task = tasks[future]
            done[name] = future.result()
            progress.update(task, completed=1, description=f"{name}: done")
    claims = [claim for name in names for claim in done[name]]
    show(claims, Console())
    reproduced = sum(claim.is_reproduced for claim in claims)
    if out is None and len(names) == len(PAPERS):
        out = Path("reports/reproduce.json")
    where = f"; written to {out}" if out else ""
    Console().print(f"{reproduced} of {len(claims)} claims reproduced{where}", highlight=False)
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([asdict(claim) for claim in claims], indent=1) + "\n")


def _claims(name: str) -> list[Claim]:
    return list(PAPERS[name]())


if __name__ == "__main__":
    typer.run(main)
