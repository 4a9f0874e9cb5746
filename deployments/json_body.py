"""A request's JSON object: bounded before it is parsed, which holds up everybody else, and charged for what it takes.

Counts are of what stands outside texts, so a prompt may hold any number of commas and brackets.
"""

import itertools
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from deployments.openai_errors import OpenAIError

# With these a body of 32 MiB takes about 0.3 s to count, parse and pickle, half of it for counting, and 0.5 s at worst.
# Without them eight million small lists took over a minute, integers of 4,300 digits 4.5 s, unique keys 1.5 s.
_MAX_VALUES = 1_200_000  # a prompt of a million token ids, and more
_MAX_PARTS = 150_000  # 10,000 messages with a part each have 110,000
_MAX_DIGITS = 24  # in a row; a float has 17 that count
_MAX_DEPTH = 100  # what is deeper than some hundred cannot be sent to decode

# Of each, with its place in a list or an object that has just grown (tracemalloc, CPython 3.11).
_VALUE_BYTES, _TEXT_BYTES, _CONTAINER_BYTES = 48, 128, 200

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)).difference(_STEPS))
_ANY_DIGIT = bytes.maketrans(b"123456789", b"000000000")


def check_content_type(value: str | None) -> None:
    """Refuse what does not say that it is JSON: browsers send that, and no other, for other sites only where they may.

    Raises:
        OpenAIError: 415.
    """
    if (value or "").partition(";")[0].strip().lower() != "application/json":
        raise OpenAIError(415, f"Content-Type is {value!r}: send the body as application/json")


def json_object(raw: bytes, take: Callable[[int], None]) -> dict[str, Any]:
    """The JSON object of a body.

    Args:
        raw: the body, which counts for its own bytes.
        take: called before anything is parsed, with the bytes that the object takes beyond those.

    Raises:
        OpenAIError: 400, it is none, or one that nobody needs; what ``take`` raises.
    """
    held_bytes = _check_shape(raw)
    try:
        text = raw.decode()  # of bytes, json takes what is half of a surrogate pair in them
    except UnicodeDecodeError as error:
        raise OpenAIError(400, f"the body is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from None
    # One wide character makes all of its text as wide, and escapes may be one.
    escaped = 4 if _SURROGATE.search(raw) else 2 if b"\\u" in raw else 1
    take(max(0, held_bytes + max(sys.getsizeof(text), escaped * len(text)) - len(raw)))
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OpenAIError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise OpenAIError(400, f"the body must be a JSON object, got {type(body).__name__}")
    if escaped == 4:
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise OpenAIError(400, "the body has half a surrogate pair (\\ud800 to \\udfff): no text has it") from None
    return body


def _check_shape(raw: bytes) -> int:
    """The bytes that a body's values take but for the characters of its texts.

    Raises:
        OpenAIError: 400, there are too many, too deep in each other, or a number is too long.
    """
    pieces = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', 2 * _MAX_PARTS + 2)
    texts, outside = len(pieces) // 2, b"".join(pieces[::2])
    brackets = outside.translate(None, _NO_BRACKETS)
    values, containers = outside.count(b","), len(brackets) // 2
    # Numbers with a fraction or an exponent take far longer than others; true and false have an e too.
    fractions = outside.count(b".") + outside.count(b"e") + outside.count(b"E")
    if texts + containers + fractions > _MAX_PARTS:
        raise OpenAIError(400, f"the body has more than {_MAX_PARTS} texts, lists, objects and fractions: send fewer")
    if values > _MAX_VALUES:
        raise OpenAIError(400, f"the body has {values} values, more than {_MAX_VALUES}: send fewer in one request")
    if b"0" * (_MAX_DIGITS + 1) in outside.translate(_ANY_DIGIT):
        raise OpenAIError(400, f"the body has a number of more than {_MAX_DIGITS} digits in a row: give fewer")
    if max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0) > _MAX_DEPTH:
        raise OpenAIError(400, f"the body is nested more than {_MAX_DEPTH} deep: nest it less")
    return values * _VALUE_BYTES + texts * _TEXT_BYTES + containers * _CONTAINER_BYTES
