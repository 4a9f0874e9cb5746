"""What stays of an answer when ids, times and the cuts between the pieces of a stream are taken out."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.lab.compat.answer import Answer, events, is_stream, parsed

# An id: an optional prefix, then a UUID, 16 or 32 hexadecimal digits, or eight or more that are no plain number.
# Each gets a number by its first appearance, so two places with the same id still have the same id.
_ID = re.compile(
    r"((?<![0-9A-Za-z.])(?:[a-z]+[-_])*)"
    r"([0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-f]{16}(?:[0-9a-f]{16})?|(?=[0-9]*[a-f])[0-9a-f]{8,})(?![0-9A-Za-z])"
)
# Numbers that tell a moment or a duration.
_TIMES = re.compile(r"^(created|created_at|completed_at|.*_time|.*_ms|.*_timestamp)$")
# Fields of a piece that continue what earlier pieces of the stream have begun.
_CONTINUED = frozenset({"content", "reasoning", "reasoning_content", "text", "delta", "arguments", "partial_json",
                        "thinking", "refusal"})  # fmt: skip
# The address at which a server listens, such as in Location.
_SERVER = re.compile(r"http://127\.0\.0\.1:\d+")
# Tandem names every answer, so that its line in a log can be found.
_TANDEMS_HEADER = "x-request-id"
# A hash of an engine's configuration, which the connector for KV is a part of.
_FINGERPRINT = "system_fingerprint"
# Number of an event in its stream: it depends on how a server cuts the text into pieces.
_POSITION = "sequence_number"


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """An answer that can be compared.

    Attributes:
        status: HTTP status; 0: no answer came.
        headers: headers without those of the connection, with their normal values.
        body: JSON, text, or the pieces of a stream put together.
        frames: for each choice of a stream, what kinds of events came in which order; empty: the answer is no stream.
        is_cut: the connection ended before the answer did.
        seconds: until its end.
    """

    status: int
    headers: dict[str, str]
    body: Any
    frames: dict[str, list[Any]]
    is_cut: bool = False
    seconds: float = 0.0


def normal(answer: Answer) -> Normal:
    """The answer without what chance and time decide."""
    ids: dict[str, str] = {}
    if is_stream(answer.headers):
        stream = [(name, _clean(data, ids)) for name, data in events(answer.text) if (name, data) != ("", "")]
        body, kinds = joined(stream), frames(stream)
    else:
        body, kinds = _clean(parsed(answer.text), ids), {}
    # After the body: Tandem has one more id in its headers, and the body's ids keep their numbers.
    headers = {name: _plain(value, ids) for name, value in answer.headers.items() if name != _TANDEMS_HEADER}
    return Normal(
        status=answer.status,
        headers=headers,
        body=body,
        frames=kinds,
        is_cut=answer.is_cut,
        seconds=answer.seconds,
    )


def _clean(value: Any, ids: dict[str, str], key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _clean(each, ids, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_clean(each, ids) for each in value]
    if isinstance(value, str):
        return value.rpartition("-")[0] if key == _FINGERPRINT else _plain(value, ids)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "<time>" if is_number and _TIMES.match(key) else "<position>" if key == _POSITION else value


def _plain(text: str, ids: dict[str, str]) -> str:
    def number(match: re.Match[str]) -> str:
        return match[1] + ids.setdefault(match[2], f"<id {len(ids)}>")

    return _ID.sub(number, _SERVER.sub("<server>", text))


def joined(stream: Iterable[tuple[str, Any]]) -> list[Any]:
    """The events of a stream, those in a row of one kind put together."""
    pieces: list[Any] = []
    last = None
    for name, data in stream:
        if (kind := _kind(name, data)) == last and isinstance(data, dict):
            pieces[-1] = _merged(pieces[-1], data)
        else:
            pieces.append(data)
        last = kind
    return [_without_empty_tokens(piece) for piece in pieces]


def _without_empty_tokens(value: Any) -> Any:
    """The value without the logprobs of tokens that have no text of their own, such as half a character.

    vLLM leaves out a piece without text, and the logprobs with it, unless another token is in the same piece.
    """
    if isinstance(value, dict):
        return {name: _without_empty_tokens(each) for name, each in value.items()}
    if isinstance(value, list):
        is_empty = (isinstance(each, dict) and each.get("token") == "" and "logprob" in each for each in value)
        return [_without_empty_tokens(each) for each, drop in zip(value, is_empty, strict=True) if not drop]
    return value


def _kind(name: str, data: Any) -> tuple[Any, ...]:
    if not isinstance(data, dict):
        return (name, data)
    # Pieces of different parts of an answer are different kinds.
    place = tuple(data.get(key) for key in ("type", "object", "output_index", "content_index"))
    return (name, "error" in data, *place)


def _merged(first: Any, second: Any, key: str = "") -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        both = {name: _merged(first[name], second[name], name) for name in first if name in second}
        return {**first, **second, **both}
    if isinstance(first, list) and isinstance(second, list):
        if all(isinstance(each, dict) and "index" in each for each in [*first, *second]):
            return _by_index(first, second)
        return first + second
    if isinstance(first, str) and isinstance(second, str) and key in _CONTINUED:
        return first + second
    return first if second is None else second


def _by_index(first: list[Any], second: list[Any]) -> list[Any]:
    merged = {each["index"]: each for each in first}
    for each in second:
        merged[each["index"]] = _merged(merged[each["index"]], each) if each["index"] in merged else each
    return [merged[index] for index in sorted(merged)]


def frames(stream: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    """The kinds of events by choice, in order; events of one kind in a row count once.

    Choices are told apart, since a server may send their pieces in any order.
    """
    found: dict[str, list[Any]] = {}
    for name, data in stream:
        choices = data.get("choices") if isinstance(data, dict) else None
        choice = f"choice {choices[0].get('index')}" if choices else "stream"
        kind = {"event": name, "data": _place(data) if choices else structure(data) if isinstance(data, dict) else data}
        if isinstance(data, dict) and "type" in data:
            kind["type"] = data["type"]
        kinds = found.setdefault(choice, [])
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return found


def _place(piece: dict[str, Any]) -> dict[str, Any]:
    """What tells where in its choice a piece is, whatever text it has."""
    choice = piece["choices"][0]
    rest = {key: value for key, value in piece.items() if key != "choices"}
    begins, ends = "role" in (choice.get("delta") or {}), choice.get("finish_reason") is not None
    return {**structure(rest), "begins": begins, "ends": ends}


def structure(value: Any) -> Any:
    """The keys and types of a value; a list has the structure of its elements, each once."""
    if isinstance(value, dict):
        return {key: structure(each) for key, each in value.items()}
    if isinstance(value, list):
        kinds: list[Any] = []
        for each in map(structure, value):
            if each not in kinds:
                kinds.append(each)
        return kinds
    return "null" if value is None else type(value).__name__
