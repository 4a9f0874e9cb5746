"""Runs other people's clients against a Tandem of its own, or against a server that runs: ``make clients``."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deployments.machine.claims import free_ports
from serve_app.checks.yaml_checks import load_serve_yaml
from serve_app.local.cluster import driver_environment
from serve_app.output import write_file
from tests.lab.clients.checks import FAILED, SKIPPED, Server
from tests.lab.clients.environments import Client, NotInstalledError, load_clients, prepare
from tests.lab.clients.page import cells, write_page
from tests.lab.clients.suite import ROOT, Row, run_checks

_CONFIG = Path(__file__).with_name("tandem.yaml")
_PAGE = ROOT / "docs" / "clients.md"
_ENVIRONMENTS = ROOT / "build" / "clients"


def main(
    url: Annotated[str, typer.Option(help="URL of a running server; empty: start Tandem with the tiny model.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model on the server.")] = "tiny",
    tokenizer: Annotated[Path, typer.Option(help="Folder with the model's tokenizer.")] = ROOT / "models" / "tiny",
    clients: Annotated[str, typer.Option(help="Names of the clients to run, with spaces; empty: all.")] = "",
    reports: Annotated[Path, typer.Option(help="Folder for the outcomes and for what clients print.")] = Path(
        "reports/clients"
    ),
    page: Annotated[Path | None, typer.Option(help="Page; by default docs/clients.md after a whole run.")] = None,
    only_install: Annotated[bool, typer.Option(help="Make the environments, and run nothing.")] = False,
) -> None:
    """Install what is missing, run all checks, print the table and write it. The code is 1 if a check failed."""
    console, chosen = Console(), _chosen(clients)
    reports.mkdir(parents=True, exist_ok=True)
    pythons = {client.name: _prepared(client, console) for client in chosen}
    if only_install:
        return
    is_whole = not url and not clients
    with _server(url, console) as address, TemporaryDirectory(prefix="clients-") as folder:
        key = os.environ.get("OPENAI_API_KEY", "none")
        server = Server(url=address, model=model, tokenizer=str(tokenizer.resolve()), key=key, folder=folder)
        rows = [_row(client, pythons[client.name], server, reports, console) for client in chosen]
    text = write_page(rows, chosen, server=f"the server at {url}" if url else "Tandem with the tiny model")
    write_file(page or (_PAGE if is_whole else reports / "clients.md"), text, "--page")
    write_file(reports / "clients.json", json.dumps([asdict(row) for row in rows], indent=1) + "\n", "--reports")
    _show(rows, console)
    if any(row.has_failed for row in rows):
        raise typer.Exit(1)


def _chosen(names: str) -> Sequence[Client]:
    known = {client.name: client for client in load_clients()}
    if unknown := set(names.split()) - set(known):
        raise typer.BadParameter(f"{' '.join(sorted(unknown))}: choose among {' '.join(known)}", param_hint="--clients")
    return [client for name, client in known.items() if not names or name in names.split()]


def _prepared(client: Client, console: Console) -> Path | str:
    """The Python of a client, or why there is none."""
    console.print(f"{client.name}: environment", highlight=False)
    try:
        return prepare(client, _ENVIRONMENTS)
    except NotInstalledError as reason:
        return str(reason)


def _row(client: Client, python: Path | str, server: Server, reports: Path, console: Console) -> Row:
    if isinstance(python, str):
        return Row(client=client.name, version=client.version, reason=python)
    console.print(f"{client.name}: checks", highlight=False)
    return run_checks(client, python, server, reports)


@contextmanager
def _server(url: str, console: Console) -> Iterator[str]:
    """The URL of the server under test; a Tandem that was started for it ends afterwards."""
    if url:
        yield url.rstrip("/").removesuffix("/v1")
        return
    driver_environment()  # before anything imports ray
    from serve_app.sdk import deploy

    document = load_serve_yaml(_CONFIG)
    document["http_options"]["port"] = free_ports(1)[0]
    document["applications"][0]["args"]["model"]["source"] = str(ROOT / "models" / "tiny")
    with deploy(document, on_status=lambda status: console.print(f"Tandem: {status.state}", highlight=False)) as app:
        yield app.url


def _show(rows: Sequence[Row], console: Console) -> None:
    table = Table("client", "version", "passed", "failed", "skipped", "seconds", title="Clients", title_justify="left")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    for row in rows:
        for outcome in row.outcomes:
            if outcome.state in (FAILED, SKIPPED):
                text = f"{row.client}, {outcome.name}: {outcome.state}: {outcome.detail}"
                console.print(text, highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
