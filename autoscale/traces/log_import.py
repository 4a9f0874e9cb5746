"""Traces from JSON logs: OpenTelemetry spans of vLLM servers, and logs of OpenAI proxies (pure, but reads files)."""

import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from autoscale.traces.trace import TraceRequest

# Advice for a file without requests, by format.
_VLLM_HINT = (
    "expected the spans that vLLM sends with --otlp-traces-endpoint, as the collector's file exporter writes them; "
    "vLLM's text log is not read"
)
_OPENAI_HINT = "expected JSON objects, one a line, with usage: prompt_tokens and completion_tokens"

# Names of the fields with input and output tokens: of the chat and completions APIs, and of the responses API.
_USAGES = (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"))
# Names of times, the best first: arrival of the request, time of the log entry, start of the answer in whole seconds.
_TIMES = (
    ("startTime", "start_time", "requested_at"),
    ("timestamp", "@timestamp", "time", "ts"),
    ("created", "created_at"),
)
# Tokens and times are searched down to this level of nesting; level 1 is the record itself.
_MOST_LEVELS = 4
# Name of vLLM's span of one request.
_SPAN = "llm_request"

# Arrival in seconds since 1970, input tokens, output tokens.
Arrival = tuple[float, int, int]
# Names that lead from a record to an object or a value in it; empty: the record itself.
Place = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTrace:
    """A trace, the format of its files in words, and the numbers of skipped lines and requests, by reason."""

    requests: tuple[TraceRequest, ...]
    format: str
    skipped: Mapping[str, int]


def load_vllm(paths: Sequence[Path]) -> ImportedTrace:
    """Read files of an OpenTelemetry collector's file exporter, to which vLLM's API servers sent their spans.

    ``paths``: one file for each server, gzipped if its name ends in ``.gz``. With separate prefill, both engines have a
    span of each request: give the files of the decode engines alone.

    Raises:
        ValueError: a file cannot be read, has no requests, or a wrong value; names file, line and field.
    """
    return _imported(paths, _spans, _VLLM_HINT)


def load_openai(paths: Sequence[Path]) -> ImportedTrace:
    """Read the log of a proxy for an OpenAI API: JSON objects, one a line, with a time and the numbers of tokens.

    Examples are LiteLLM's StandardLoggingPayload and spend logs, and OpenAI's own responses. Time and tokens may be
    nested; the first request decides where they are read. Times are ISO (UTC without a zone), or seconds, ms, us or ns
    since 1970. Files are gzipped if their name ends in ``.gz``.

    Raises:
        ValueError: a file cannot be read, has no requests, or a wrong value; names file, line and field.
    """
    return _imported(paths, _proxy_log, _OPENAI_HINT)


def _imported(
    paths: Sequence[Path], read: Callable[[Path, Counter[str]], tuple[str, list[Arrival]]], hint: str
) -> ImportedTrace:
    """The trace of all files; ``read``: gives the format and the arrivals of a file, and counts what it skips."""
    arrivals, formats, skipped = list[Arrival](), list[str](), Counter[str]()
    for path in paths:
        skipped_here = Counter[str]()
        file_format, arrivals_here = read(path, skipped_here)
        if not arrivals_here:
            counts = ((reason, count) for reason, count in skipped_here.items() if count)
            content = ", ".join(f"{count} {reason}" for reason, count in counts) or "it is empty"
            raise ValueError(f"{path}: no request with both lengths ({content}): {hint}")
        formats.append(file_format)
        arrivals += arrivals_here
        skipped += skipped_here
    return ImportedTrace(
        requests=_rebased(arrivals), format="; ".join(dict.fromkeys(formats)), skipped=dict(sorted(skipped.items()))
    )


def _rebased(arrivals: list[Arrival]) -> tuple[TraceRequest, ...]:
    """Requests in order, with times from 0.

    If all times are whole seconds, the requests of a second are spread over it: they did not come at one instant.
    """
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    if all(at_s.is_integer() for at_s, _, _ in arrivals):
        seconds = [list(same) for _, same in groupby(arrivals, key=lambda arrival: arrival[0])]
        arrivals = [
            (second_s + number / len(same), prompt, output)
            for same in seconds
            for number, (second_s, prompt, output) in enumerate(same)
        ]
    start_s = arrivals[0][0]
    return tuple(
        TraceRequest(at_s=round(at_s - start_s, 6), input_tokens=prompt, output_tokens=output)
        for at_s, prompt, output in arrivals
    )


def _load_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the lines that are not blank."""
    try:
        with gzip.open(path, "rt", errors="replace") if path.suffix == ".gz" else path.open(errors="replace") as file:
            yield from ((number, line.strip()) for number, line in enumerate(file, start=1) if not line.isspace())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _spans(path: Path, skipped: Counter[str]) -> tuple[str, list[Arrival]]:
    """Format and requests of vLLM's spans.

    A request with several answers (n above 1) has one span for each: they become one request with all output tokens.
    """
    arrivals: dict[str, Arrival] = {}
    for number, text in _load_lines(path):
        where = f"{path}: line {number}"
        record = _object(text)
        try:
            resources = (record or {}).get("resourceSpans", ())
            spans = [span for resource in resources for scope in resource["scopeSpans"] for span in scope["spans"]]
            skipped["other lines"] += 0 if spans else 1
            for span in spans:
                if span.get("name") != _SPAN:
                    skipped["other spans"] += 1
                    continue
                # An attribute is {"key": name, "value": {type: value}}.
                values = {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}
                prompt, output = (_whole(values, f"gen_ai.usage.{name}", where) for name in _USAGES[0])
                if not prompt or not output:
                    skipped["requests without output"] += 1
                    continue
                at_s = _whole(span, "startTimeUnixNano", where) / 1e9
                # A span without an id is a request of its own.
                key = str(values.get("gen_ai.request.id", len(arrivals)))
                earlier_s, _, other_output = arrivals.get(key, (at_s, prompt, 0))
                arrivals[key] = (min(earlier_s, at_s), prompt, other_output + output)
        except (KeyError, TypeError, AttributeError, StopIteration) as error:
            raise ValueError(f"{where}: no spans of OpenTelemetry: {type(error).__name__} {error}") from None
    return "vLLM's spans", list(arrivals.values())


def _proxy_log(path: Path, skipped: Counter[str]) -> tuple[str, list[Arrival]]:
    """Format and requests of a proxy's log; the format names the fields with times and tokens.

    ``usage``: place of the object with the tokens. Its ``holder``, the object around it, may have the request's id.
    The first record with tokens decides the place of the tokens for all records, the first request that of the time.
    """
    arrivals: dict[str, Arrival] = {}
    usage: Place | None = None
    time: Place | None = None
    for number, text in _load_lines(path):
        record = _object(text)
        if record is None:
            skipped["lines that are no JSON object"] += 1
            continue
        where = f"{path}: line {number}"
        if usage is None:
            usage = _usage_place(record)
        tokens, holder = (_at(record, usage), _at(record, usage[:-1])) if usage is not None else ({}, {})
        names = next((pair for pair in _USAGES if tokens.get(pair[0]) is not None), None)
        reason = _skip_reason(record) or _skip_reason(holder)
        if reason or names is None or usage is None:
            skipped[reason or "objects without usage"] += 1
            continue
        # Embeddings have no output: some proxies write null for it.
        output = 0 if tokens.get(names[1]) is None else _whole(tokens, names[1], where, usage)
        if not (prompt := _whole(tokens, names[0], where, usage)) or not output:
            skipped["requests without output"] += 1
            continue
        time = time or _time_place(record, usage, where)
        key = next((each[name] for each in (tokens, holder) for name in ("id", "request_id") if name in each), None)
        key = key if isinstance(key, str) else f"line {number}"
        if key in arrivals:
            skipped["repeated ids, but for the last"] += 1
        arrivals[key] = (_seconds(record, time, where), prompt, output)
    tokens_in = ".".join(usage or ()) or "the object itself"
    return f"a proxy's log with times in {'.'.join(time or ())}, tokens in {tokens_in}", list(arrivals.values())


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object in a line; ``None``: the line is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _objects(record: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """A record and the objects nested in it, each with its place, the shallowest first."""
    level: list[tuple[Place, Mapping[str, Any]]] = [((), record)]
    for _ in range(_MOST_LEVELS):
        yield from level
        level = [
            ((*place, name), value) for place, each in level for name, value in each.items() if isinstance(value, dict)
        ]


def _usage_place(record: Mapping[str, Any]) -> Place | None:
    """The place of the first object that has both numbers of tokens."""
    return next((place for place, each in _objects(record) for pair in _USAGES if each.keys() >= set(pair)), None)


def _time_place(record: Mapping[str, Any], usage: Place, where: str) -> Place:
    """The place of a time, if possible in an object around the tokens: other objects may be about something else."""
    # False comes first: the place of an object around the tokens is the beginning of ``usage``.
    objects = sorted(_objects(record), key=lambda each: each[0] != usage[: len(each[0])])
    named = (((*at, name), each) for names in _TIMES for at, each in objects for name in names)
    place = next((place for place, each in named if each.get(place[-1]) is not None), None)
    if place is None:
        raise ValueError(f"{where}: no time: expected one of {', '.join(name for names in _TIMES for name in names)}")
    return place


def _at(record: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """The object at a place; empty: there is no object."""
    value: Any = record
    for name in place:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _skip_reason(record: Mapping[str, Any]) -> str | None:
    """The reason to skip a request: it failed, or it did not reach an engine; ``None``: it has an answer."""
    status = record.get("status", record.get("status_code"))
    if status in ("failure", "failed", "error") or (isinstance(status, int) and status >= 400):
        return "failed requests"
    return "answers from the proxy's cache" if str(record.get("cache_hit")).lower() == "true" else None


def _whole(values: Mapping[str, Any], name: str, where: str, place: Place = ()) -> int:
    """The whole number with this name; ``where`` and ``place`` are for the error message."""
    value = values.get(name)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:  # OpenTelemetry writes 64-bit integers as text
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where}: {'.'.join((*place, name))} is {value!r:.80}: expected a whole number, 0 or more")
    return value


def _seconds(record: Mapping[str, Any], place: Place, where: str) -> float:
    """The time of a record, seconds since 1970: at ``place``, or at a name beside it that means the same."""
    # A log may mix two APIs: answers of one have the field created, answers of the other created_at.
    names = next(names for names in _TIMES if place[-1] in names)
    holder = _at(record, place[:-1])
    value = next((holder[name] for name in (place[-1], *names) if holder.get(name) is not None), None)
    seconds = _parsed_time_s(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"{where}: {'.'.join(place)} is {value!r:.80}: expected an ISO time, or seconds since 1970")
    # Larger numbers are ms, us or ns. Seconds reach this number in the year 5138; milliseconds reached it in 1973.
    while seconds > 1e11:
        seconds /= 1000.0
    return float(seconds)


def _parsed_time_s(text: str) -> float | None:
    """A number, or the seconds since 1970 of an ISO time; ``None``: the text is neither."""
    with suppress(ValueError):
        return float(text)
    with suppress(ValueError, OverflowError):
        at = datetime.fromisoformat(text.strip())
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    return None
