"""Request traces: arrival times and lengths of requests, which are read, scaled and cut (pure, but for loading)."""

import csv
import gzip
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# The optional column of a CSV.
_HASHES = "hash_ids"
# Columns of a CSV: the function that reads a value, and the expected value in words.
_COLUMNS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "timestamp_s": (float, "a number"),
    "input_tokens": (int, "a whole number"),
    "output_tokens": (int, "a whole number"),
    _HASHES: (lambda text: tuple(map(int, text.split())), "whole numbers with spaces between"),
}
_REQUIRED = tuple(name for name in _COLUMNS if name != _HASHES)
# A copy of a request arrives at most this long before or after it, seconds. On Azure's chat trace a rate is estimated
# best over a window of this width to both sides (Shimazaki and Shinomoto 2007; docs/decisions/simulator.md 86).
_SPREAD_S = 30.0
# A copy has the lengths of another request, which is at most this number of places before or after the original.
_NEARBY_PLACES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request; ``at_s``: its arrival, seconds from the start of the trace.

    ``hash_ids``: one for each block of the prompt; empty: not known. Two prompts have the same id at a place if they
    are equal up to the end of this block. ``line``: its line in the file, for messages.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    line: int | None = field(default=None, compare=False, repr=False)


def load_trace(path: Path) -> tuple[TraceRequest, ...]:
    """Read a CSV, gzipped if its name ends in ``.gz``, in order of time.

    Columns are ``timestamp_s``, ``input_tokens``, ``output_tokens`` and optionally ``hash_ids``: integers with spaces
    between. Other columns are ignored.

    Raises:
        ValueError: the file cannot be read, a column is missing, or a value is wrong; names line and field.
    """
    try:
        # Files of spreadsheets begin with a byte order mark.
        with (
            gzip.open(path, "rt", newline="", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(newline="", encoding="utf-8-sig")
        ) as lines:
            requests = _requests(csv.reader(lines), path)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not requests:
        raise ValueError(f"{path}: no requests after its first line")
    return tuple(requests)


def _requests(rows: Iterable[Sequence[str]], path: Path) -> list[TraceRequest]:
    rows = iter(rows)
    header = [name.strip() for name in next(rows, [])]
    expected = f"expected {', '.join(_REQUIRED)}, and optionally {_HASHES}"
    if not header:
        raise ValueError(f"{path}: it is empty: {expected} in its first line")
    for name in _REQUIRED:
        if name not in header:
            raise ValueError(f"{path}: line 1: no column {name} in {','.join(header)!r:.80}: {expected}")
    for name in _COLUMNS:
        if header.count(name) > 1:
            raise ValueError(f"{path}: line 1: {header.count(name)} columns {name}: keep one of them")
    columns = {name: header.index(name) for name in _COLUMNS if name in header}
    requests: list[TraceRequest] = []
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        try:
            if len(row) != len(header):
                raise ValueError(f"{len(row)} values for {len(header)} columns")
            requests.append(_request(row, columns, number, requests[-1].at_s if requests else None))
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
    return requests


def _request(row: Sequence[str], columns: Mapping[str, int], line: int, before_s: float | None) -> TraceRequest:
    """The request of a row; ``columns``: index of each column by name; ``before_s``: time of the row before."""
    values: dict[str, Any] = {}
    for name, index in columns.items():
        read, expected = _COLUMNS[name]
        try:
            values[name] = read(row[index])
        except ValueError:
            raise ValueError(f"{name} is {row[index]!r:.80}: expected {expected}") from None
    at_s, hash_ids = values["timestamp_s"], values.get(_HASHES, ())
    is_backwards = before_s is not None and at_s < before_s
    if is_backwards or not 0.0 <= at_s < math.inf:
        why = "time runs backwards" if is_backwards else "expected seconds from the start, 0 or more"
        raise ValueError(f"timestamp_s is {row[columns['timestamp_s']]:.80}: {why}")
    if min(hash_ids, default=0) < 0:
        raise ValueError(f"{_HASHES} has {min(hash_ids)}: expected 0 or more")
    for name in ("input_tokens", "output_tokens"):
        if values[name] < 1:
            raise ValueError(f"{name} is {values[name]!s:.80}: expected at least 1")
    return TraceRequest(
        at_s=at_s,
        input_tokens=values["input_tokens"],
        output_tokens=values["output_tokens"],
        hash_ids=hash_ids,
        line=line,
    )


def scale_trace(
    requests: Iterable[TraceRequest],
    *,
    time_factor: float = 1.0,
    length_factor: float = 1.0,
    max_total_tokens: int | None = None,
    limit: int | None = None,
) -> tuple[TraceRequest, ...]:
    """The first ``limit`` requests with scaled times and lengths; a prompt whose length changes loses its ``hash_ids``.

    ``time_factor`` multiplies arrival times. ``length_factor`` multiplies both lengths, which stay at least 1. A prompt
    is cut so that prompt and output together fit into ``max_total_tokens``.
    """
    scaled = []
    for request in list(requests)[:limit]:
        output = max(1, round(request.output_tokens * length_factor))
        prompt = max(1, round(request.input_tokens * length_factor))
        if max_total_tokens is not None:
            output = min(output, max_total_tokens - 1)
            prompt = min(prompt, max_total_tokens - output)
        hash_ids = request.hash_ids if prompt == request.input_tokens else ()
        at_s = request.at_s * time_factor
        scaled.append(replace(request, at_s=at_s, input_tokens=prompt, output_tokens=output, hash_ids=hash_ids))
    return tuple(scaled)


def scale_rate(requests: Sequence[TraceRequest], factor: float, rng: random.Random) -> tuple[TraceRequest, ...]:
    """The same load curve, ``factor`` times as high.

    Each request becomes ``factor`` requests on average: itself, and copies at most half a minute earlier or later, each
    with the lengths of a request nearby. So the curve over minutes stays, and bursts within seconds do not grow with
    the factor. Above a factor of 60, copies are spread over more time. Otherwise one heavy user would become hundreds
    at once. If a request has ``hash_ids``, its copies have its own lengths. The first copies of all requests share
    prefixes with each other as the originals do; so do the second copies, and so on.

    Raises:
        ValueError: the factor is not above 0.
    """
    if not 0.0 < factor < math.inf:
        raise ValueError(f"a trace's rate cannot be scaled by {factor:g}: give a factor above 0")
    last_s = requests[-1].at_s
    spread_s = max(_SPREAD_S, factor / 2)  # on average at most one copy of a request in each second
    # Added to the ids of a copy, so that they are equal to no original's.
    id_count = 1 + max(max(request.hash_ids, default=0) for request in requests)
    scaled: list[TraceRequest] = []
    for index, request in enumerate(requests):
        is_one_more = rng.random() < factor % 1.0
        count = math.floor(factor) + (1 if is_one_more else 0)
        if count:
            scaled.append(request)
        for copy in range(1, count):
            nearby = request
            if not request.hash_ids:
                place = index + rng.randint(-_NEARBY_PLACES, _NEARBY_PLACES)
                nearby = requests[min(len(requests) - 1, max(0, place))]
            at_s = _mirrored(rng.uniform(request.at_s - spread_s, request.at_s + spread_s), last_s)
            hash_ids = tuple([block + copy * id_count for block in request.hash_ids])
            scaled.append(replace(nearby, at_s=at_s, hash_ids=hash_ids, line=None))
    return tuple(sorted(scaled, key=lambda request: request.at_s))


def _mirrored(at_s: float, last_s: float) -> float:
    """A time from 0 to ``last_s``: one before 0 or after ``last_s`` is mirrored there.

    So the load does not fall towards the ends of the trace.
    """
    if last_s <= 0.0:
        return 0.0
    folded = at_s % (2 * last_s)  # to be mirrored at both ends moves a time by this period
    return min(folded, 2 * last_s - folded)


def cut(requests: Iterable[TraceRequest], start_s: float, duration_s: float = math.inf) -> tuple[TraceRequest, ...]:
    """The part of a trace that begins at ``start_s``, with times from there, seconds."""
    return tuple(replace(r, at_s=r.at_s - start_s) for r in requests if start_s <= r.at_s < start_s + duration_s)


def poisson_arrivals(
    requests: Iterable[TraceRequest], requests_per_s: float, rng: random.Random
) -> Iterator[TraceRequest]:
    """The same requests, with random arrivals at a constant rate."""
    at_s = 0.0
    requests = iter(requests)
    while True:
        at_s += rng.expovariate(requests_per_s)
        request = next(requests, None)
        if request is None:
            return
        yield replace(request, at_s=at_s)
