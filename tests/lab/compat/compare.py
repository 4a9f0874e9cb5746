"""What differs between two answers to one shape."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tests.lab.compat.normal import Normal, structure

# Logprobs may differ by this. Both servers compute in float32, but Tandem computes the last token of a prompt in a
# batch of another shape, and the kernels of a matrix product add up in another order then.
LOGPROB_TOLERANCE = 1e-3
# Tandem may take this much longer, seconds: the machine may be busy. A request that waits for a time-out takes longer.
_SLOWER_S = 10.0
# Characters of a value that a difference quotes.
_QUOTED = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference.

    Attributes:
        kind: ``status``, ``cut``, ``slow``, ``header``, ``frame``, ``missing`` or ``extra`` key, ``type`` or ``value``.
        where: the place in the answer, without the numbers of list elements.
        vllm: what plain vLLM has there; empty: nothing.
        tandem: what Tandem has there; empty: nothing.
    """

    kind: str
    where: str
    vllm: str = ""
    tandem: str = ""


def differences(vllm: Normal, tandem: Normal, *, is_determined: bool = True) -> list[Difference]:
    """All differences, each kind and place once; ``is_determined``: whether values are compared, and not types alone.

    If the statuses differ, or one answer is cut off, the bodies say different things, and only this counts.
    """
    if vllm.status != tandem.status:
        return [_of("status", "", *(f"{each.status} {_message(each.body)}" for each in (vllm, tandem)))]
    if vllm.is_cut != tandem.is_cut:
        return [_of("cut", "", *("cut off" if each.is_cut else "whole" for each in (vllm, tandem)))]
    found = [
        *_of_time(vllm.seconds, tandem.seconds),
        *_of_headers(vllm.headers, tandem.headers),
        *_of_frames(vllm.frames, tandem.frames),
    ]
    if is_determined:
        found += _of_values(vllm.body, tandem.body, "body")
    else:
        found += _of_values(structure(vllm.body), structure(tandem.body), "body")
    first: dict[tuple[str, str], Difference] = {}
    for each in found:
        first.setdefault((each.kind, each.where), each)
    return [*first.values()]


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _of(kind: str, where: str, vllm: Any, tandem: Any) -> Difference:
    return Difference(kind=kind, where=where, vllm=str(vllm)[:_QUOTED], tandem=str(tandem)[:_QUOTED])


def _of_time(vllm: float, tandem: float) -> Iterator[Difference]:
    if tandem > vllm + _SLOWER_S:
        yield _of("slow", "", f"{vllm:.1f} s", f"{tandem:.1f} s")


def _of_headers(vllm: dict[str, str], tandem: dict[str, str]) -> Iterator[Difference]:
    for name in sorted(vllm.keys() | tandem.keys()):
        if vllm.get(name) != tandem.get(name):
            yield _of("header", name, vllm.get(name, ""), tandem.get(name, ""))


def _of_frames(vllm: dict[str, list[Any]], tandem: dict[str, list[Any]]) -> Iterator[Difference]:
    for choice in sorted(vllm.keys() | tandem.keys()):
        pairs = enumerate(zip_longest(vllm.get(choice, []), tandem.get(choice, [])))
        first = next(((number, pair) for number, pair in pairs if pair[0] != pair[1]), None)
        if first is None:
            continue
        if choice != "stream" and _holds_in_order(vllm.get(choice, []), tandem.get(choice, [])):
            continue  # one of them has put two pieces of text into one
        number, (one, other) = first
        if one is None or other is None or one["event"] != other["event"] or one.get("type") != other.get("type"):
            yield _of("frame", f"{choice}, kind {number} of its events", one, other)
        else:
            # The same event: what its data has differently.
            for each in _of_values(one["data"], other["data"], "event"):
                yield Difference(kind="frame", where=each.where, vllm=each.vllm, tandem=each.tandem)


def _holds_in_order(vllm: list[Any], tandem: list[Any]) -> bool:
    """Whether one of the lists is the other without some of its elements."""
    short, long = sorted((vllm, tandem), key=len)
    rest = iter(long)
    return bool(short) and all(any(one == other for other in rest) for one in short)


def _of_values(vllm: Any, tandem: Any, where: str) -> Iterator[Difference]:
    if isinstance(vllm, dict) and isinstance(tandem, dict):
        for key in vllm.keys() | tandem.keys():
            place = f"{where}.{key}"
            if key not in tandem:
                yield _of("missing", place, vllm[key], "")
            elif key not in vllm:
                yield _of("extra", place, "", tandem[key])
            else:
                yield from _of_values(vllm[key], tandem[key], place)
    elif isinstance(vllm, list) and isinstance(tandem, list) and len(vllm) == len(tandem):
        for one, other in zip(vllm, tandem, strict=True):
            yield from _of_values(one, other, f"{where}[]")
    elif type(vllm) is not type(tandem):
        yield _of("type", where, repr(vllm), repr(tandem))
    elif not _is_equal(vllm, tandem, where):
        yield _of("value", where, vllm, tandem)


def _is_equal(vllm: Any, tandem: Any, where: str) -> bool:
    if isinstance(vllm, float) and re.search("logprob", where):
        return bool(abs(vllm - tandem) <= LOGPROB_TOLERANCE)
    if isinstance(vllm, str) and where.endswith(".message"):
        return vllm.rstrip() == tandem.rstrip()
    return bool(vllm == tandem)
