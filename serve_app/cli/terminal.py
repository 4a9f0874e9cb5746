"""What commands share: the terminal, the options of those that reach a running application, and tables."""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer import Option

console = Console()
errors = Console(stderr=True)

App = Annotated[str, Option(help="The application's name.")]
Service = Annotated[str | None, Option(help="Model of the service, if the application has several.")]
Address = Annotated[str, Option(help="The Ray cluster that this machine belongs to: auto, or HOST:PORT.")]


def figures_table(first: str, heads: Iterable[str], title: str | None = None) -> Table:
    """A table of figures, without rows yet: names in the first column, figures aligned to the right in the others."""
    table = Table(title=title, title_style="", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def figure(value: float | None, form: str, factor: float = 1.0) -> str:
    """``value * factor`` in the format ``form``; ``-``: it was not observed."""
    return "-" if value is None else f"{value * factor:{form}}"


def time_text(at_s: float) -> str:
    """A Unix time as date and time of this machine's zone."""
    return datetime.fromtimestamp(at_s).isoformat(sep=" ", timespec="seconds")
