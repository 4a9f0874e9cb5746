"""Traces from logs: what vLLM and OpenAI proxies write of each request, and how much of a log is none."""

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from autoscale.trace import TraceRequest

# Of vLLM 0.29, and of earlier ones, which put no bracket before the file: when, and the message.
_VLLM_LINE = re.compile(r"(?:DEBUG|INFO) (\d\d-\d\d \d\d:\d\d:\d\d) \[?[^\]\s]+\] (.*)")
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_RECEIVED = re.compile(r"(?:Received request|Request) (\S+?)(?: details)?: (.*)")
_GENERATED = re.compile(r"Generated response (\S+?)(?: \(streaming \w+\))?(?: details)?: (.*)")
_ENDED = re.compile(r"Request (\S+) (?:aborted|failed)\b")
# With what follows, since a prompt or an answer may hold the same words.
_PROMPT_IDS = re.compile(r"prompt_token_ids: \[([\d, ]*)\], (?:prompt_embeds|lora_request)")
_OUTPUT_IDS = re.compile(r"output_token_ids: [\[(]([\d, ]*)[\])](?:, finish_reason: \w+)?\s*$")
_MAX_TOKENS = re.compile(r", max_tokens=(\d+), ")
_LOG_LIMIT = re.compile(r"non-default args: \{.*'max_log_len': (\d+)")
_LOG, _SPANS = "vLLM's log", "vLLM's spans"
_VLLM_HINT = (
    "start vLLM with VLLM_LOGGING_LEVEL=DEBUG --enable-log-requests --enable-log-outputs for the lengths of chats, or "
    "with --otlp-traces-endpoint for all"
)

_USAGES = (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"))
# Best first: when it came, when it was logged, when the answer began in whole seconds.
_TIMES = (
    ("startTime", "start_time", "requested_at"),
    ("timestamp", "@timestamp", "time", "ts"),
    ("created", "created_at"),
)
_DEEPEST = 4
_OPENAI_HINT = "expected JSON objects, one a line, with usage: prompt_tokens and completion_tokens"

Arrival = tuple[float, int, int]
Lines = Iterator[tuple[int, str]]
Place = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTrace:
    """A trace, the format it was found in, and how many of what were left out."""

    requests: tuple[TraceRequest, ...]
    format: str
    skipped: Mapping[str, int]


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What a text log has said of a request so far."""

    stamp: str
    where: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None
    has_ended: bool = False


def load_vllm(paths: Sequence[Path], *, assume_max_tokens: bool = False) -> ImportedTrace:
    """Read the logs of vLLM's API servers, or the spans they sent to an OpenTelemetry collector (its file exporter).

    Spans tell all, to the microsecond. Logs have whole seconds and the outputs of chats alone; while one streams, a
    token without text of its own is not logged. Of prefill and decode engines give the files of decode alone, since
    both have each request.

    Args:
        paths: one for each server, gzipped where its name ends in ``.gz``; all logs or all spans.
        assume_max_tokens: take ``max_tokens``, the limit, where a log does not tell how long an output was.

    Raises:
        ValueError: a file cannot be read, has no requests, or a value in it is none; names file, line and field.
    """

    def read(path: Path, skipped: Counter[str]) -> tuple[str, list[Arrival]]:
        lines = _load_lines(path)
        first = next(lines, (1, ""))
        lines = chain([first], lines)
        if first[1].startswith("{"):
            return _SPANS, _spans(lines, path, skipped)
        return _LOG, _log(lines, path, skipped, assume_max_tokens=assume_max_tokens)

    return _imported(paths, read, _VLLM_HINT)


def load_openai(paths: Sequence[Path]) -> ImportedTrace:
    """Read a proxy's log of an OpenAI API: JSON objects, one a line, with a time and the tokens used.

    LiteLLM's StandardLoggingPayload and spend logs, OpenAI's own responses, and others that have both, at the top or
    nested; the first request says where. Times are ISO (UTC if no zone is said), or seconds, ms, us or ns since 1970.

    Args:
        paths: the files, gzipped where their name ends in ``.gz``.

    Raises:
        ValueError: a file cannot be read, has no requests, or a value in it is none; names file, line and field.
    """
    return _imported(paths, _proxy_log, _OPENAI_HINT)


def _imported(
    paths: Sequence[Path], read: Callable[[Path, Counter[str]], tuple[str, list[Arrival]]], hint: str
) -> ImportedTrace:
    arrivals: list[Arrival] = []
    formats: list[str] = []
    skipped: Counter[str] = Counter()
    for path in paths:
        here: Counter[str] = Counter()
        name, found = read(path, here)
        if not found:
            rest = ", ".join(f"{count} {what}" for what, count in (+here).items()) or "it is empty"
            raise ValueError(f"{path}: no request with both lengths ({rest}): {hint}")
        formats.append(name)
        arrivals += found
        skipped += here
    if {_LOG, _SPANS} <= set(formats):
        raise ValueError("logs, which have no year, and spans cannot be put together: import either by itself")
    return ImportedTrace(
        requests=_rebased(arrivals), format="; ".join(dict.fromkeys(formats)), skipped=dict(sorted(skipped.items()))
    )


def _rebased(arrivals: list[Arrival]) -> tuple[TraceRequest, ...]:
    """In order and from 0; where all times are whole seconds, the requests of one are spread evenly over it."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    if all(at_s.is_integer() for at_s, _, _ in arrivals):
        seconds = [list(same) for _, same in groupby(arrivals, key=lambda arrival: arrival[0])]
        arrivals = [(at_s + n / len(same), i, o) for same in seconds for n, (at_s, i, o) in enumerate(same)]
    start_s = arrivals[0][0]
    return tuple(
        TraceRequest(at_s=round(at_s - start_s, 6), input_tokens=prompt, output_tokens=output)
        for at_s, prompt, output in arrivals
    )


def _load_lines(path: Path) -> Lines:
    """The lines that are not blank, with their numbers."""
    try:
        with gzip.open(path, "rt", errors="replace") if path.suffix == ".gz" else path.open(errors="replace") as file:
            yield from ((number, line.strip()) for number, line in enumerate(file, start=1) if not line.isspace())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _log(lines: Lines, path: Path, skipped: Counter[str], *, assume_max_tokens: bool) -> list[Arrival]:
    requests: list[_Seen] = []
    by_id: dict[str, _Seen] = {}
    limit = math.inf
    for number, text in lines:
        if cut := _LOG_LIMIT.search(text):
            limit = int(cut[1])
        line = _VLLM_LINE.search(_COLOR.sub("", text))
        stamp, message = (line[1], line[2]) if line else ("", "")
        where = f"{path}: line {number}"
        if told := _RECEIVED.match(message):
            ids, most = _PROMPT_IDS.findall(told[2]), _MAX_TOKENS.findall(told[2])
            seen = by_id.get(told[1])
            # A request is told of twice, first its prompt and then its parameters; thereafter the id is another's.
            if seen is None or (ids and seen.input_tokens is not None) or (most and seen.max_tokens is not None):
                seen = by_id[told[1]] = _Seen(stamp=stamp, where=where)
                requests.append(seen)
            if ids:
                seen.input_tokens = _tokens(ids[-1], limit, f"{where}: prompt_token_ids")
            if most:
                seen.max_tokens = int(most[-1])
        elif told := _GENERATED.match(message):
            # Of one that may have several prompts, the answer's id is that of the first without its number.
            seen = by_id.get(told[1], by_id.get(f"{told[1]}_0"))
            if seen is not None and (output := _OUTPUT_IDS.search(told[2])):
                count = _tokens(output[1], limit, f"{where}: output_token_ids")
                seen.output_tokens = (seen.output_tokens or 0) + count
        elif (told := _ENDED.match(message)) and told[1] in by_id:
            by_id[told[1]].has_ended = True
        else:
            skipped["other lines"] += 1
    return _told(requests, skipped, assume_max_tokens=assume_max_tokens)


def _tokens(ids: str, limit: float, what: str) -> int:
    count = len(re.findall(r"\d+", ids))
    if count >= limit:
        raise ValueError(f"{what} are cut at {limit:g} by --max-log-len: log without it")
    return count


def _told(requests: Sequence[_Seen], skipped: Counter[str], *, assume_max_tokens: bool) -> list[Arrival]:
    """The requests of a text log that it tells enough about, in seconds since the start of its first year."""
    year = 2024 if any(seen.stamp.startswith("02-29") for seen in requests) else 2023
    start, turned_s, month = datetime(year, 1, 1), 0.0, 0
    arrivals = []
    for seen in requests:
        try:
            at = datetime.strptime(f"{year}-{seen.stamp}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            raise ValueError(f"{seen.where}: time is {seen.stamp!r}: expected month-day and h:m:s") from None
        if at.month < month - 6:
            turned_s += (datetime(year + 1, 1, 1) - start).total_seconds()
        month = at.month
        output = seen.output_tokens
        if output is None and assume_max_tokens and not seen.has_ended:
            output = seen.max_tokens
        if not seen.input_tokens:
            skipped["requests without prompt_token_ids"] += 1
        elif output:
            arrivals.append(((at - start).total_seconds() + turned_s, seen.input_tokens, output))
        else:
            skipped["requests that ended early" if seen.has_ended else "requests without output_token_ids"] += 1
    return arrivals


def _spans(lines: Lines, path: Path, skipped: Counter[str]) -> list[Arrival]:
    """Of ``llm_request``; the choices of one request (n above 1) have a span each."""
    found: dict[str, Arrival] = {}
    for number, text in lines:
        where = f"{path}: line {number}"
        record = _object(text)
        try:
            resources = (record or {}).get("resourceSpans", ())
            spans = [span for each in resources for scope in each["scopeSpans"] for span in scope["spans"]]
            skipped["other lines"] += not spans
            for span in spans:
                if span.get("name") != "llm_request":
                    skipped["other spans"] += 1
                    continue
                values = {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}
                prompt, output = (_whole(values, f"gen_ai.usage.{name}", where) for name in _USAGES[0])
                if not prompt or not output:
                    skipped["requests without output"] += 1
                    continue
                at_s = _whole(span, "startTimeUnixNano", where) / 1e9
                key = str(values.get("gen_ai.request.id", len(found)))
                sooner_s, _, before = found.get(key, (at_s, prompt, 0))
                found[key] = (min(sooner_s, at_s), prompt, before + output)
        except (KeyError, TypeError, AttributeError, StopIteration) as error:
            raise ValueError(f"{where}: no spans of OpenTelemetry: {type(error).__name__} {error}") from None
    return list(found.values())


def _proxy_log(path: Path, skipped: Counter[str]) -> tuple[str, list[Arrival]]:
    found: dict[str, Arrival] = {}
    usage: Place | None = None
    times: Place | None = None
    for number, text in _load_lines(path):
        record = _object(text)
        if record is None:
            skipped["lines that are no JSON object"] += 1
            continue
        where = f"{path}: line {number}"
        usage = usage if usage is not None else _usage_place(record)
        tokens, holder = (_at(record, usage), _at(record, usage[:-1])) if usage is not None else ({}, {})
        names = next((pair for pair in _USAGES if tokens.get(pair[0]) is not None), None)
        why = _left_out(record) or _left_out(holder)
        if why or names is None or usage is None:
            skipped[why or "objects without usage"] += 1
            continue
        # Embeddings have no output, and some proxies say so with null.
        output = 0 if tokens.get(names[1]) is None else _whole(tokens, names[1], where, usage)
        if not (prompt := _whole(tokens, names[0], where, usage)) or not output:
            skipped["requests without output"] += 1
            continue
        times = times or _time_place(record, usage, where)
        key = next((each[name] for each in (tokens, holder) for name in ("id", "request_id") if name in each), None)
        key = key if isinstance(key, str) else f"line {number}"
        if key in found:
            skipped["repeated ids, but for the last"] += 1
        found[key] = (_seconds(record, times, where), prompt, output)
    text = (
        f"a proxy's log with times in {'.'.join(times or ())}, tokens in {'.'.join(usage or ()) or 'the object itself'}"
    )
    return text, list(found.values())


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _objects(record: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """A record and what is nested in it, with its place, the shallowest first."""
    level: list[tuple[Place, Mapping[str, Any]]] = [((), record)]
    for _ in range(_DEEPEST):
        yield from level
        level = [((*at, k), v) for at, each in level for k, v in each.items() if isinstance(v, dict)]


def _usage_place(record: Mapping[str, Any]) -> Place | None:
    found = (at for at, each in _objects(record) for pair in _USAGES if all(name in each for name in pair))
    return next(found, None)


def _time_place(record: Mapping[str, Any], usage: Place, where: str) -> Place:
    """Around the tokens before anywhere else: another part of a record may be about something else."""
    objects = sorted(_objects(record), key=lambda each: each[0] != usage[: len(each[0])])
    for names in _TIMES:
        for at, each in objects:
            for name in names:
                if each.get(name) is not None:
                    return (*at, name)
    raise ValueError(f"{where}: no time: expected one of {', '.join(name for names in _TIMES for name in names)}")


def _at(record: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    for name in place:
        record = record.get(name, {})
        if not isinstance(record, dict):
            return {}
    return record


def _left_out(record: Mapping[str, Any]) -> str | None:
    """Why a request has not reached an engine, or not to its end."""
    status = record.get("status", record.get("status_code"))
    if status in ("failure", "failed", "error") or (isinstance(status, int) and status >= 400):
        return "failed requests"
    return "answers from the proxy's cache" if str(record.get("cache_hit")).lower() == "true" else None


def _whole(values: Mapping[str, Any], name: str, where: str, place: Place = ()) -> int:
    value = values.get(name)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:  # so OpenTelemetry writes 64 bits
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where}: {'.'.join((*place, name))} is {value!r:.80}: expected a whole number, 0 or more")
    return value


def _seconds(record: Mapping[str, Any], place: Place, where: str) -> float:
    """A time, in seconds since 1970."""
    # One API's answers have created, another's created_at.
    names = next(names for names in _TIMES if place[-1] in names)
    value = next((v for name in (place[-1], *names) if (v := _at(record, place[:-1]).get(name)) is not None), None)
    seconds = value
    if isinstance(value, str):
        try:
            seconds = float(value)
        except ValueError:
            try:
                at = datetime.fromisoformat(value.strip())
                seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):
                seconds = None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"{where}: {'.'.join(place)} is {value!r:.80}: expected an ISO time, or seconds since 1970")
    # Seconds reach it in the year 5138, and milliseconds had it in 1973.
    while seconds > 1e11:
        seconds /= 1000.0
    return float(seconds)
