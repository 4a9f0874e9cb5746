"""A request's JSON object, bounded and charged for its memory before it is parsed, and an estimate of its size.

Parsing blocks all requests. Commas and brackets inside texts do not count, so a prompt may hold any number of them.
"""

import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from deployments.wire.openai_errors import OpenAIError
from router.admission import QueuedRequest
from router.admission_config import Priority

# With these a body of 32 MiB takes about 0.3 s to count, parse and pickle, half of it for counting, and 0.5 s at worst.
# Without them eight million small lists took over a minute, integers of 4,300 digits 4.5 s, unique keys 1.5 s.
_MAX_VALUES = 1_200_000  # a prompt of a million token ids, and more
_MAX_PARTS = 150_000  # texts, lists, objects and fractions; 10,000 messages with a part each have 110,000
_MAX_DIGITS = 24  # in a row; a float has 17 that count
_MAX_DEPTH = 100  # what is some hundreds deep cannot be sent to decode

# Bytes of one value, text, or list or object, with its place in a container that has just grown (tracemalloc, CPython
# 3.11).
_VALUE_BYTES = 48
_TEXT_BYTES = 128
_CONTAINER_BYTES = 200

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)).difference(_STEPS))
_ANY_DIGIT = bytes.maketrans(b"123456789", b"000000000")
# Fields of a part of a message that add no text to the prompt.
_MEDIA = frozenset(
    {f"{medium}_{kind}" for medium in ("image", "audio", "video") for kind in ("url", "embeds")}
    | {"image_pil", "input_audio", "data"}
)
_BYTES_PER_TOKEN = 4
_MESSAGE_TOKENS = 4  # a message's role, and what the template puts around it
_MOST_ANSWERS = 10_000  # decode takes fewer


def check_content_type(value: str | None) -> None:
    """Raises OpenAIError: 415, it is not JSON. A browser sends JSON to another site only if that site allows it."""
    if (value or "").partition(";")[0].strip().lower() != "application/json":
        raise OpenAIError(415, f"Content-Type is {value!r}: send the body as application/json")


def json_object(raw: bytes, take: Callable[[int], None]) -> dict[str, Any]:
    """The JSON object of a body.

    ``take`` is called before anything is parsed, with the bytes that the object takes beyond the body's own.
    Raises OpenAIError: 400, it is no JSON object or beyond the bounds; what ``take`` raises.
    """
    values_bytes = _check_shape(raw)
    try:
        text = raw.decode()  # json takes half a surrogate pair in bytes
    except UnicodeDecodeError as error:
        raise OpenAIError(400, f"the body is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from None
    # One wide character makes its whole text as wide, and an escape may be one.
    escaped = 4 if _SURROGATE.search(raw) else 2 if b"\\u" in raw else 1
    take(max(0, values_bytes + max(sys.getsizeof(text), escaped * len(text)) - len(raw)))
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
    """Bytes of a body's values without the characters of texts. Raises OpenAIError: 400, it is beyond the bounds."""
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


def check_types(body: dict[str, Any]) -> None:
    """Raises OpenAIError: 400, vLLM would read ``stream`` or ``n`` otherwise than the endpoint counts."""
    for name, kind, kind_name in (("stream", bool, "true or false"), ("n", int, "a whole number")):
        value = body.get(name)
        if value is not None and type(value) is not kind:
            raise OpenAIError(400, f"{name} must be {kind_name} (got {value!r:.100})", param=name)


def place_of(
    endpoint: str, body: dict[str, Any], key: str | None, priority: Priority, most_prompt_tokens: int | None
) -> QueuedRequest:
    """The place in admission of a request to ``endpoint`` (``chat`` or ``completions``) with an API key of this name.

    Prompts count as at most ``most_prompt_tokens``: longer ones are refused later, and not computed.
    """
    prompts = [_messages_tokens(body)] if endpoint == "chat" else _prompts_tokens(body.get("prompt"))
    most = math.inf if most_prompt_tokens is None else most_prompt_tokens
    limit = _count(body.get("max_tokens"))
    if endpoint == "chat":
        limit = _count(body.get("max_completion_tokens")) or limit
    return QueuedRequest(
        tokens=sum(max(1, int(min(tokens, most))) for tokens in prompts),
        most_output_tokens=limit,
        is_stream=body.get("stream") is True,
        key=key,
        priority=priority,
        answers=min(_MOST_ANSWERS, len(prompts) * (_count(body.get("n")) or 1)),
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _prompts_tokens(prompt: Any) -> list[int]:
    """Tokens of each prompt: the number of its ids, or by its text."""
    if not isinstance(prompt, list) or not prompt:
        return [_text_tokens(prompt)]
    if isinstance(prompt[0], int):
        return [len(prompt)]
    return [len(one) if isinstance(one, list) else _text_tokens(one) for one in prompt]


def _messages_tokens(body: dict[str, Any]) -> int:
    """Tokens of the fields that a chat template writes; other fields of a message are not in its prompt."""
    messages, tokens = body.get("messages"), 0
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
            parts = content if isinstance(content, list) else [content]
            texts = [text for part in parts for text in (_texts(part) if isinstance(part, dict) else [part])]
            others = [message.get(name) for name in ("tool_calls", "reasoning", "reasoning_content")]
            tokens += _MESSAGE_TOKENS + _text_tokens(texts) + _text_tokens(others)
    return tokens + _text_tokens([body.get(name) for name in ("tools", "documents", "chat_template_kwargs")])


def _texts(part: dict[str, Any]) -> list[Any]:
    """Texts of one part of a message, whatever its type: it may be ``text``, ``refusal``, ``thinking`` and others."""
    return [value for name, value in part.items() if name != "type" and name not in _MEDIA]


def _text_tokens(value: Any) -> int:
    """Tokens of all texts in a value, including names of fields."""
    size_bytes, values = 0, [value]
    while values:
        one = values.pop()
        if isinstance(one, str):
            size_bytes += len(one) if one.isascii() else len(one.encode(errors="replace"))
        elif isinstance(one, list):
            values.extend(one)
        elif isinstance(one, dict):
            values.extend(one)
            values.extend(one.values())
    return size_bytes // _BYTES_PER_TOKEN
