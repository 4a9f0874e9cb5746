"""Request traces: when requests arrive and how long they are (pure; the benchmark's and the simulator's input)."""

import csv
import gzip
import math
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

_COLUMNS = ("timestamp_s", "input_tokens", "output_tokens")
_HASHES = "hash_ids"
# A copy comes at most so long before or after its original, with the lengths of one of so many requests around it.
_SPREAD_S = 30.0
_NEARBY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One arrival: seconds from the start of the trace, prompt length, output length.

    ``hash_ids``: one for each block of the prompt, equal where the block and all before it are; empty where unknown.
    ``line``: of its file, for messages.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    line: int | None = field(default=None, compare=False, repr=False)


def load_trace(path: Path) -> tuple[TraceRequest, ...]:
    """Read a CSV, gzipped where its name ends in ``.gz``, in order of time.

    Columns ``timestamp_s``, ``input_tokens``, ``output_tokens`` and, where prefixes are known, ``hash_ids``: integers
    with spaces between. Others are not read.

    Raises:
        ValueError: the file cannot be read, a column is missing, or a value is none; says which line and field.
    """
    try:
        # What spreadsheets save begins with a byte order mark.
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
    expected = f"expected {', '.join(_COLUMNS)}, and may be {_HASHES}"
    if not header:
        raise ValueError(f"{path}: it is empty: {expected} in its first line")
    for name in _COLUMNS:
        if name not in header:
            raise ValueError(f"{path}: line 1: no column {name} in {','.join(header)!r:.80}: {expected}")
    for name in (*_COLUMNS, _HASHES):
        if header.count(name) > 1:
            raise ValueError(f"{path}: line 1: {header.count(name)} columns {name}: leave one of them")
    at, prompt, output = (header.index(name) for name in _COLUMNS)
    hashes = header.index(_HASHES) if _HASHES in header else None
    requests: list[TraceRequest] = []
    last_s = 0.0
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise ValueError(f"{path}: line {number}: {len(row)} values for {len(header)} columns")
        try:
            at_s, input_tokens, output_tokens = float(row[at]), int(row[prompt]), int(row[output])
            hash_ids = () if hashes is None else tuple(map(int, row[hashes].split()))
        except ValueError:
            raise ValueError(f"{path}: line {number}: {_not_a_number(row, header)}") from None
        if not last_s <= at_s < math.inf:
            why = "time runs backwards" if requests and at_s < last_s else "expected seconds from the start, 0 or more"
            raise ValueError(f"{path}: line {number}: timestamp_s is {row[at]:.80}: {why}")
        if min(hash_ids, default=0) < 0:
            raise ValueError(f"{path}: line {number}: {_HASHES} has {min(hash_ids)}: expected 0 or more")
        if input_tokens < 1 or output_tokens < 1:
            name, value = ("input_tokens", input_tokens) if input_tokens < 1 else ("output_tokens", output_tokens)
            raise ValueError(f"{path}: line {number}: {name} is {value!s:.80}: expected at least 1")
        last_s = at_s
        requests.append(
            TraceRequest(
                at_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens, hash_ids=hash_ids, line=number
            )
        )
    return requests


def _not_a_number(row: Sequence[str], header: Sequence[str]) -> str:
    for name, kind in (("timestamp_s", float), ("input_tokens", int), ("output_tokens", int)):
        value = row[header.index(name)]
        try:
            kind(value)
        except ValueError:
            return f"{name} is {value!r:.80}: expected a {'number' if kind is float else 'whole number'}"
    return f"{_HASHES} is {row[header.index(_HASHES)]!r:.80}: expected whole numbers with spaces between"


def scale_trace(
    requests: Iterable[TraceRequest],
    *,
    time_factor: float = 1.0,
    length_factor: float = 1.0,
    max_total_tokens: int | None = None,
    limit: int | None = None,
) -> tuple[TraceRequest, ...]:
    """The first ``limit`` requests, slowed down and shortened; a prompt that is shortened shares no blocks.

    Args:
        requests: a trace.
        time_factor: multiplies arrival times; 2 halves the rate.
        length_factor: multiplies both lengths; they stay at least 1.
        max_total_tokens: a prompt is cut so that prompt and output together fit into this many tokens.
        limit: keep at most this many requests.
    """
    scaled = []
    for request in list(requests)[:limit]:
        output = max(1, round(request.output_tokens * length_factor))
        prompt = max(1, round(request.input_tokens * length_factor))
        if max_total_tokens is not None:
            output = min(output, max_total_tokens - 1)
            prompt = min(prompt, max_total_tokens - output)
        # Of a prompt that is another one, it is not known which blocks it shares.
        hash_ids = request.hash_ids if prompt == request.input_tokens else ()
        scaled.append(
            replace(
                request,
                at_s=request.at_s * time_factor,
                input_tokens=prompt,
                output_tokens=output,
                hash_ids=hash_ids,
            )
        )
    return tuple(scaled)


def scale_rate(requests: Sequence[TraceRequest], factor: float, rng: random.Random) -> tuple[TraceRequest, ...]:
    """The same load curve, ``factor`` times as high.

    Each request becomes ``factor`` requests, on average: itself, and others at most half a minute earlier or later with
    the lengths of a request nearby, as of more users who do the same. So the curve over minutes stays, while chance
    within seconds does not grow with the factor as it would if whole requests were repeated. Beyond a factor of 60 they
    are spread further: no second draws on fewer requests of the trace than it holds itself, or one heavy user would
    become hundreds at once. Where prefixes are known, a copy keeps its original's lengths, and the blocks of one copy
    of the trace are its own.

    Raises:
        ValueError: the factor is not above 0.
    """
    if not 0.0 < factor < math.inf:
        raise ValueError(f"a trace's rate cannot be scaled by {factor:g}: give a factor above 0")
    last_s = requests[-1].at_s
    spread_s = max(_SPREAD_S, factor / 2)
    ids = 1 + max((max(request.hash_ids, default=0) for request in requests), default=0)
    scaled: list[TraceRequest] = []
    for index, request in enumerate(requests):
        copies = math.floor(factor) + (rng.random() < factor % 1.0)
        for copy in range(copies):
            if not copy:
                scaled.append(request)
                continue
            like = request
            if not request.hash_ids:
                like = requests[min(len(requests) - 1, max(0, index + rng.randint(-_NEARBY, _NEARBY)))]
            at_s = _inside(rng.uniform(request.at_s - spread_s, request.at_s + spread_s), last_s)
            scaled.append(
                TraceRequest(
                    at_s=at_s,
                    input_tokens=like.input_tokens,
                    output_tokens=like.output_tokens,
                    hash_ids=tuple([block + copy * ids for block in request.hash_ids]),
                )
            )
    return tuple(sorted(scaled, key=lambda request: request.at_s))


def _inside(at_s: float, last_s: float) -> float:
    """A time beyond an end of the trace comes back as far inside: so the load stays level up to the ends."""
    if last_s <= 0.0:
        return 0.0
    folded = at_s % (2 * last_s)
    return min(folded, 2 * last_s - folded)


def cut(requests: Iterable[TraceRequest], start_s: float, duration_s: float = math.inf) -> tuple[TraceRequest, ...]:
    """A part of a trace, from its own start."""
    return tuple(replace(r, at_s=r.at_s - start_s) for r in requests if start_s <= r.at_s < start_s + duration_s)
