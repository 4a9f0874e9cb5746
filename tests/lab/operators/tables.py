"""Rows go to disk as they are measured, so that a run that is killed keeps all but the current point."""

import csv
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.operators.shapes import Point

POINT_COLUMNS = ("model", "operator", "role", "tokens", "batch", "context", "tp", "dtype", "backend")
SKIPPED_COLUMNS = ("part", *POINT_COLUMNS, "reason")
# Longest reason in the table, in characters: torch's messages carry whole stacks.
_REASON_CHARS = 200


def point_cells(point: Point, prefix: str = "") -> dict[str, Any]:
    """The cells that say which point a row is of."""
    return {f"{prefix}{name}": getattr(point, name) for name in POINT_COLUMNS}


def cell_text(value: Any) -> str:
    """A cell: empty for None, six digits for a fraction.

    Raises:
        ValueError: The value is NaN or infinite.
    """
    if value is None:
        return ""
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"a measurement came out as {value}")
        return f"{value:.6g}"
    return str(value)


class Table:
    """One CSV file that grows by a row at a time.

    Args:
        path: The file; rows are added where it exists.
        columns: Its header.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self.rows = 0
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self.columns)
        if path.stat().st_size == 0:
            self._writer.writeheader()
            self._file.flush()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one row through to the disk."""
        self._writer.writerow({name: cell_text(row.get(name)) for name in self.columns})
        self._file.flush()
        self.rows += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Skipped(Table):
    """Points without a measurement, each with its reason.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, SKIPPED_COLUMNS)

    def note(self, part: str, point: Point | None, reason: object) -> None:
        """Write down why a point, or a whole part, was not measured."""
        name = f"{type(reason).__name__}: " if isinstance(reason, BaseException) else ""
        text = " ".join(f"{name}{reason}".split())[:_REASON_CHARS]
        self.add(({} if point is None else point_cells(point)) | {"part": part, "reason": text})


def measured_cells(path: Path) -> set[tuple[str, ...]]:
    """The point of each row of a file, as text; nothing where there is no file."""
    if not path.exists():
        return set()
    with path.open(newline="", encoding="utf-8") as file:
        return {tuple(row[name] for name in POINT_COLUMNS) for row in csv.DictReader(file)}


def point_key(point: Point) -> tuple[str, ...]:
    """A point as `measured_cells` gives it."""
    return tuple(cell_text(getattr(point, name)) for name in POINT_COLUMNS)


class Progress:
    """Lines on the terminal, at most one in `every_s` seconds.

    Args:
        started_s: Time at which the run began.
        every_s: Least time between two lines of the same part.
    """

    def __init__(self, started_s: float, every_s: float = 4.0) -> None:
        self._started_s, self._every_s = started_s, every_s
        self._last_s = 0.0

    def say(self, text: str) -> None:
        """Print a line now."""
        self._last_s = time.monotonic()
        print(f"[{self._last_s - self._started_s:6.1f} s] {text}", flush=True)

    def tick(self, text: str) -> None:
        """Print a line if the last one is old."""
        if time.monotonic() - self._last_s >= self._every_s:
            self.say(text)
