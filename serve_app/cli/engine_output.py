"""Sends what engines print to a file, so that a command's own lines stay readable."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console


@contextmanager
def engine_output_to(path: Path) -> Iterator[Console]:
    """Append all output of this process and its children to a file; yields a console on the terminal.

    Engines are processes that inherit the numbers 1 and 2 of standard output and error, and so do libraries in C.
    Before the block, and after it, both go where they went.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = {number: os.dup(number) for number in (1, 2)}
    try:
        with path.open("ab") as log, os.fdopen(os.dup(2), "w", encoding="utf-8") as terminal:
            for number in saved:
                os.dup2(log.fileno(), number)
            yield Console(file=terminal)
    finally:
        for number, before in saved.items():
            os.dup2(before, number)
            with suppress(OSError):
                os.close(before)
