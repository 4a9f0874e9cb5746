"""The command of ``make drill``: breaks parts of an application and prints a row for each fault."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from serve_app.checks.yaml_checks import ConfigError
from serve_app.cli.main import run
from serve_app.cli.sim_report import print_whole
from serve_app.cli.terminal import console
from serve_app.output import write_file
from tests.lab.drill.apis import APIS
from tests.lab.drill.faults import FAULTS, DrillError
from tests.lab.drill.stacks import STACKS, faults_of
from tests.lab.drill.verdict import VERDICTS

commands = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Fault = StrEnum("Fault", {name.replace("-", "_").upper(): name for name in ("all", *FAULTS)})  # type: ignore[misc]
Api = StrEnum("Api", {name.upper(): name for name in APIS})  # type: ignore[misc]
Stack = StrEnum("Stack", {name.replace("-", "_").upper(): name for name in STACKS})  # type: ignore[misc]

_OURS = [Stack("tandem")]
_COMPLETIONS = [Api("completions")]
_CONFIG = Path(__file__).parent / "tiny.yaml"
_SHOWN = ("requests", *VERDICTS, "retried", "resumed", "failed_undisturbed")


@commands.command()
def drill(
    fault: Annotated[list[Fault], typer.Option(help="The part to break; may be repeated.")],
    config: Annotated[Path, typer.Argument(help="A Serve YAML with one Tandem application.")] = _CONFIG,
    stack: Annotated[list[Stack], typer.Option(help="The stack to break; may be repeated.")] = _OURS,
    api: Annotated[list[Api], typer.Option(help="API of the requests; several take turns.")] = _COMPLETIONS,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests/s.")] = 2.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the load; each fault runs it twice.")] = 30.0,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the row here, or a list of rows for several drills.")
    ] = None,
) -> None:
    """Break a part of an application under load, on this machine, and check the whole output of every answer."""
    from tests.lab.drill.drill import drill as run_drill
    from tests.lab.drill.drill import failures

    _check_file(json_out)
    names = [str(name) for name in FAULTS] if Fault("all") in fault else [str(one) for one in fault]
    stacks = [str(one) for one in stack]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    drills = sum(len(faults_of(one, names)) for one in stacks)
    rows: list[dict[str, Any]] = []
    missed: list[str] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        rows.sort(key=lambda one: names.index(one["fault"]))  # rows of the same fault stand together
        # Written after each row, since a later drill may fail.
        write_file(json_out, json.dumps(rows[0] if drills == 1 else rows, indent=1, allow_nan=False) + "\n", "--json")

    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("answers", total=drills * 2 * max(1, round(rate * seconds)))
        for one in stacks:
            try:
                run_drill(
                    config,
                    names,
                    stack=one,
                    rate=rate,
                    seconds=seconds,
                    apis=[str(name) for name in api],
                    say=lambda line: console.print(line, highlight=False, markup=False),
                    on_answer=lambda: progress.advance(task),
                    on_row=keep,
                )
            except DrillError as error:
                missed.append(str(error))
    if not rows:
        raise ConfigError(f"drill: {'; '.join(missed)}")
    print_whole(_table(rows))
    for row in rows:
        for why, count in row["errors"].items():
            console.print(f"{row['stack']}, {row['fault']}: {count} x {why}", highlight=False, markup=False)
    failed = [f"{row['fault']}: {line}" for row in rows if row["stack"] == _OURS[0] for line in failures(row)]
    for line in failed:
        console.print(f"failed: {line}", highlight=False, markup=False)
    if missed:
        raise ConfigError(f"drill: {'; '.join(missed)}")
    if failed:
        raise typer.Exit(1)


def _check_file(path: Path | None) -> None:
    """Say before long work that the rows cannot be written."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise ConfigError(f"--json {path}: {error.strerror}: give a file that can be written") from None


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("fault", "stack", title="Drills", title_justify="left")
    for name in (*_SHOWN, "TTFT p99 +s", "gap p99 +s", "whole again s"):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        again = "never" if row["recovered_s"] is None else f"{row['recovered_s']:.0f}"
        added = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("added_ttft_p99_s", "added_gap_p99_s"))
        table.add_row(row["fault"], row["stack"], *(str(row[name]) for name in _SHOWN), *added, again)
    return table


if __name__ == "__main__":
    run(commands)
