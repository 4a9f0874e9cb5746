"""Writes tables of measured times, as ``tables.load_operator_tables`` reads them (files only in ``save``)."""

import csv
import gzip
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from autoscale.operators.tables import COLUMNS


def save_operator_table(folder: Path, name: str, rows: Iterable[Sequence[str | float]]) -> int:
    """Write one table; returns its rows. The file has no time stamp: the same rows make the same bytes.

    ``rows``: the columns of ``COLUMNS[name]`` in order, then microseconds.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS[name], "time_us"])
    total = 0
    for *sizes, time_us in rows:
        writer.writerow([*sizes, f"{time_us:.6g}"])
        total += 1
    folder.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, compresslevel=9) as file:
        file.write(text.getvalue().encode())
    (folder / f"{name}.csv.gz").write_bytes(packed.getvalue())
    return total
