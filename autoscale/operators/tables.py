"""Measured times of operators on one GPU type, and their files (pure, but ``load`` reads files).

A folder has one gzipped CSV for each kind of operator; a missing file means that this kind was not measured. Times are
of one copy of the operator on one rank, in microseconds.

| file | columns before ``time_us`` |
|---|---|
| gemm | dtype, n (outputs), k (inputs), m (rows of the batch) |
| decode_attention | kv_dtype, heads, kv_heads, head_dim (of one rank), batch, context_tokens |
| prompt_attention | as above to head_dim, then prompts, new_tokens: nothing was computed before |
| chunk_attention | as above to head_dim, then past_tokens, new_tokens: one prompt |
| mixed_attention | as above to head_dim, then new_tokens, decoding, context_tokens: one prompt beside decodes |
| pointwise | table (kind of operator), width (elements of a row on one rank), rows |
| all_reduce | gpus, message_bytes |
"""

import csv
import gzip
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from autoscale.operators.curves import Curve, Surface

_US = 1e-6
_HEADS = ("kv_dtype", "heads", "kv_heads", "head_dim")
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("dtype", "n", "k", "m"),
    "decode_attention": (*_HEADS, "batch", "context_tokens"),
    "prompt_attention": (*_HEADS, "prompts", "new_tokens"),
    "chunk_attention": (*_HEADS, "past_tokens", "new_tokens"),
    "mixed_attention": (*_HEADS, "new_tokens", "decoding", "context_tokens"),
    "pointwise": ("table", "width", "rows"),
    "all_reduce": ("gpus", "message_bytes"),
}
_TEXTS = frozenset({"dtype", "kv_dtype", "table"})

Cell = str | float
Key = TypeVar("Key")
Group = TypeVar("Group")


class TableError(ValueError):
    """A table cannot be read, or has a value that is no time or no size."""


@dataclass(frozen=True, slots=True, order=True)
class HeadShape:
    """Heads of attention on one rank, and the type of the KV cache."""

    kv_dtype: str
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTables:
    """All measured times of one GPU type, in seconds; an empty mapping: that kind was not measured.

    Attributes:
        gemm: by data type and (n, k), a curve over rows m.
        decode: by heads, a surface over (batch, context tokens).
        prompts: by heads, a surface over (prompts, new tokens of each).
        chunks: by heads, a surface over (past tokens, new tokens) of one prompt.
        mixed: by heads, and new tokens of a prompt, a surface over (requests that decode beside it, context tokens).
        pointwise: by kind and width, a curve over rows.
        all_reduce: by GPUs, a curve over the bytes of the message.
    """

    gemm: Mapping[str, Mapping[tuple[int, int], Curve]]
    decode: Mapping[HeadShape, Surface]
    prompts: Mapping[HeadShape, Surface]
    chunks: Mapping[HeadShape, Surface]
    mixed: Mapping[HeadShape, Mapping[int, Surface]]
    pointwise: Mapping[str, Mapping[int, Curve]]
    all_reduce: Mapping[int, Curve]

    @classmethod
    def empty(cls) -> "OperatorTables":
        """Tables of a GPU on which nothing was measured."""
        return tables_of({})


def load_operator_tables(folder: Path) -> OperatorTables:
    """Read the tables of one GPU type.

    Raises:
        TableError: the folder has no table, a file cannot be read, or a value is missing, NaN, negative or no number.
    """
    paths = {name: folder / f"{name}.csv.gz" for name in COLUMNS}
    rows = {name: tuple(_rows(path, COLUMNS[name])) for name, path in paths.items() if path.exists()}
    if not rows:
        raise TableError(f"{folder}: there is no table: expected files such as gemm.csv.gz")
    return tables_of(rows)


def tables_of(rows: Mapping[str, tuple[tuple[Cell, ...], ...]]) -> OperatorTables:
    """Tables from rows by file name; each row has the columns of ``COLUMNS``, then seconds."""
    gemm: dict[str, dict[tuple[int, int], Curve]] = {}
    by_shape = _grouped(rows.get("gemm", ()), lambda row: (str(row[0]), int(row[1]), int(row[2])), 3)
    for (dtype, n, k), points in by_shape.items():
        gemm.setdefault(dtype, {})[n, k] = Curve.of({at[0]: time_s for at, time_s in points.items()})
    pointwise: dict[str, dict[int, Curve]] = {}
    by_width = _grouped(rows.get("pointwise", ()), lambda row: (str(row[0]), int(row[1])), 2)
    for (table, width), points in by_width.items():
        pointwise.setdefault(table, {})[width] = Curve.of({at[0]: time_s for at, time_s in points.items()})
    mixed: dict[HeadShape, dict[int, Surface]] = {}
    by_chunk = _grouped(rows.get("mixed_attention", ()), lambda row: (_heads(row), int(row[4])), 5)
    for (heads, new_tokens), points in by_chunk.items():
        mixed.setdefault(heads, {})[new_tokens] = _surface(points)
    by_gpus = _grouped(rows.get("all_reduce", ()), lambda row: int(row[0]), 1)
    return OperatorTables(
        gemm=gemm,
        decode=_surfaces(rows.get("decode_attention", ())),
        prompts=_surfaces(rows.get("prompt_attention", ()), in_logs=True),
        chunks=_surfaces(rows.get("chunk_attention", ()), in_logs=True),
        mixed=mixed,
        pointwise=pointwise,
        all_reduce={
            gpus: Curve.of({at[0]: time_s for at, time_s in points.items()}) for gpus, points in by_gpus.items()
        },
    )


def _heads(row: tuple[Cell, ...]) -> HeadShape:
    return HeadShape(str(row[0]), int(row[1]), int(row[2]), int(row[3]))


def _surfaces(rows: tuple[tuple[Cell, ...], ...], *, in_logs: bool = False) -> dict[HeadShape, Surface]:
    return {heads: _surface(points, in_logs=in_logs) for heads, points in _grouped(rows, _heads, 4).items()}


def _surface(points: Mapping[tuple[float, ...], float], *, in_logs: bool = False) -> Surface:
    return Surface.of({(at[0], at[1]): time_s for at, time_s in points.items()}, in_logs=in_logs)


def _grouped(
    rows: tuple[tuple[Cell, ...], ...], key: Callable[[tuple[Cell, ...]], Group], width: int
) -> dict[Group, dict[tuple[float, ...], float]]:
    """Seconds by the numbers after the first ``width`` columns, by the group of those columns."""
    groups: dict[Group, dict[tuple[float, ...], float]] = {}
    for row in rows:
        groups.setdefault(key(row), {})[tuple(map(float, row[width:-1]))] = float(row[-1])
    return groups


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[Cell, ...]]:
    """The rows of a file: its columns in order, then seconds."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = {*columns, "time_us"} - set(reader.fieldnames or ())
            if missing:
                raise TableError(f"{path}: there is no column {', '.join(sorted(missing))}")
            for line, row in enumerate(reader, start=2):
                sizes = tuple(row[name] if name in _TEXTS else _size(path, line, name, row[name]) for name in columns)
                yield (*sizes, _time_s(path, line, row["time_us"]))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read: {error}") from None


def _size(path: Path, line: int, name: str, text: str | None) -> float:
    value = _number(text)
    if value < 0 or value != int(value):
        raise TableError(f"{path}: line {line}: {name} is {text!r}: expected a whole number of at least 0")
    return value


def _time_s(path: Path, line: int, text: str | None) -> float:
    value = _number(text)
    if value <= 0:
        raise TableError(f"{path}: line {line}: time_us is {text!r}: expected a number above 0")
    return value * _US


def _number(text: str | None) -> float:
    """The number of a cell; -1, which no table may have, for a missing one, NaN, infinity and other texts."""
    try:
        value = float(text or "")
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0
