"""The table of clients, for ``docs/clients.md``."""

import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime

from tests.lab.clients.checks import FAILED, PASSED, SKIPPED
from tests.lab.clients.environments import Client
from tests.lab.clients.suite import ROOT, Row

# The longest cause of a failure that the page shows, in characters.
_CAUSE_CHARS = 200
_HEAD = """# Clients

`make clients` runs clients that other people wrote against a running Tandem, and writes this page.
Each client is unmodified, and has an environment of its own.
Most prompts take the remote path: a prefill engine computes them, and a decode engine answers.
"""


def write_page(rows: Sequence[Row], clients: Sequence[Client], *, server: str) -> str:
    """The page; ``server``: what the clients were run against."""
    by_name = {client.name: client for client in clients}
    lines = [
        _HEAD,
        f"Run on {datetime.now(UTC):%Y-%m-%d}, commit {_commit()}, Python {platform.python_version()}, on {server}.",
        "",
        "## Checks",
        "",
        "| client | version | passed | failed | skipped | seconds |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(cells(row))} |" for row in rows),
        "",
        *_section("## Failed checks", rows, FAILED),
        *_section("## Skipped checks", rows, SKIPPED),
        "## How to point a client at Tandem",
        "",
        "Tandem is at `http://127.0.0.1:8000` here.",
        "Where Tandem has API keys (`ingress.api_keys_file`), give one of them as `KEY`; otherwise give any text.",
        "",
        *(f"- **{row.client}**: {by_name[row.client].point}" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row of the table."""
    if row.reason:
        return (row.client, row.version, "0", "0", f"all: {_flat(row.reason)}", "0")
    return (
        row.client,
        row.version,
        *(str(row.count(state)) for state in (PASSED, FAILED, SKIPPED)),
        f"{row.seconds:.0f}",
    )


def _section(heading: str, rows: Sequence[Row], state: str) -> list[str]:
    """A list of the checks that ended in a state; nothing if there are none."""
    found = [
        f"- {row.client}, {outcome.name}: `{_flat(outcome.detail)}`"
        for row in rows
        for outcome in row.outcomes
        if outcome.state == state
    ]
    return [heading, "", *found, ""] if found else []


def _flat(text: str) -> str:
    """A text on one line that breaks no table and no code span."""
    return " ".join(text.split()).replace("`", "'").replace("|", "/")[:_CAUSE_CHARS]


def _commit() -> str:
    """The commit of the checkout, and whether files have changed since."""
    git = ("git", "-C", str(ROOT))
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return f"{commit.strip()}{' with changes' if changed.strip() else ''}"
