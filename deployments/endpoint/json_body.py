"""A request's JSON object and an estimate of its tokens; bounds and memory are checked before the body is parsed.

Parsing blocks all other requests of the process, so its time must be bounded. Only commas and brackets outside of texts
count: a prompt may have any number of them.
"""

import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from deployments.endpoint.requested_answer import RequestedAnswer
from deployments.wire.openai_errors import OpenAIError
from deployments.wire.prompt_ids import chat_prompt_ids
from router.admission import QueuedRequest
from router.admission_config import Priority

# With these bounds a body of 32 MiB takes about 0.3 s to check, parse and pickle (0.5 s at worst). Half of that is the
# check. Without the bounds eight million small lists took over a minute, integers of 4,300 digits 4.5 s, unique keys
# 1.5 s.
_MAX_VALUES = 1_200_000  # enough for a prompt of a million token ids
_MAX_PARTS = 150_000  # texts, lists, objects and fractions; 10,000 messages with a part each have 110,000
_MAX_DIGITS = 24  # digits in a row; a float has 17 significant digits
_MAX_DEPTH = 100  # at a depth of some hundreds an object cannot be pickled for decode

# Memory of one value, with its place in a container that has just grown and so has free places (measured with
# tracemalloc, CPython 3.11).
_VALUE_BYTES = 48
_TEXT_BYTES = 128  # without its characters
_CONTAINER_BYTES = 200  # list or object

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # escape of half a surrogate pair
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}  # change of depth at each bracket
_NO_BRACKETS = bytes(set(range(256)).difference(_STEPS))  # all bytes except brackets
_ANY_DIGIT = bytes.maketrans(b"123456789", b"000000000")  # makes every digit a 0
# Fields of a part of a message that add no text to the prompt.
_MEDIA = frozenset(
    {f"{medium}_{kind}" for medium in ("image", "audio", "video") for kind in ("url", "embeds")}
    | {"image_pil", "input_audio", "data"}
)
_BYTES_PER_TOKEN = 4  # usual for English text; the number of tokens is only an estimate
_MESSAGE_TOKENS = 4  # a message's role and the marks that the template puts around the message


def check_content_type(value: str | None) -> None:
    """Raises OpenAIError: 415, it is not JSON. Browsers send JSON to another site only if that site allows it."""
    if (value or "").partition(";")[0].strip().lower() != "application/json":
        raise OpenAIError(415, f"Content-Type is {value!r}: send the body as application/json")


def json_object(raw: bytes, take: Callable[[int], None]) -> dict[str, Any]:
    """The JSON object of a body.

    ``take`` is called before the body is parsed, with the memory in bytes that the object takes beyond ``raw``; it may
    raise an error. Raises OpenAIError: 400, the body is no JSON object, or exceeds a bound.
    """
    values_bytes = _check_shape(raw)
    try:
        text = raw.decode()  # given bytes, json.loads would accept half a surrogate pair
    except UnicodeDecodeError as error:
        raise OpenAIError(400, f"the body is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from None
    # In CPython the widest character of a text decides the bytes of all its characters. An escape (\u0e01) may be wide.
    has_surrogate, has_escape = _SURROGATE.search(raw) is not None, b"\\u" in raw
    escape_bytes = 2 if has_escape else 1
    char_bytes = 4 if has_surrogate else escape_bytes
    characters_bytes = max(sys.getsizeof(text), char_bytes * len(text))
    take(max(0, values_bytes + characters_bytes - len(raw)))
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OpenAIError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise OpenAIError(400, f"the body must be a JSON object, got {type(body).__name__}")
    if has_surrogate:
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise OpenAIError(400, "the body has half a surrogate pair (\\ud800 to \\udfff): no text has it") from None
    return body


def _check_shape(raw: bytes) -> int:
    """Memory of a body's values without the characters of texts, bytes. Raises OpenAIError: 400, it exceeds a bound."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # so that each quote begins or ends a text
    pieces = unescaped.split(b'"', 2 * _MAX_PARTS + 2)  # more pieces exceed the bound anyway
    texts, outside = len(pieces) // 2, b"".join(pieces[::2])  # every second piece is outside of the texts
    brackets = outside.translate(None, _NO_BRACKETS)
    values, containers = outside.count(b","), len(brackets) // 2
    # Numbers with a fraction or an exponent take far longer to parse than others; true and false count too.
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


def prompt_tokens(endpoint: str, body: dict[str, Any]) -> list[int]:
    """Tokens of each prompt of a request to ``endpoint`` (``chat`` or ``completions``), estimated if they are text."""
    if isinstance(ids := chat_prompt_ids(endpoint, body), list):
        return [len(ids)]
    return [_messages_tokens(body)] if endpoint == "chat" else _prompts_tokens(body.get("prompt"))


def place_of(
    answer: RequestedAnswer,
    prompts: Sequence[int],
    key: str | None,
    priority: Priority,
    most_prompt_tokens: int | None,
) -> QueuedRequest:
    """The place in admission of a request; ``key``: name of its API key.

    ``prompts``: tokens of each of its prompts. A prompt counts as at most ``most_prompt_tokens``, since decode refuses
    a longer one before it is computed.
    """
    most_tokens = math.inf if most_prompt_tokens is None else most_prompt_tokens
    return QueuedRequest(
        tokens=sum(max(1, int(min(tokens, most_tokens))) for tokens in prompts),
        most_output_tokens=answer.most_output_tokens,
        is_stream=answer.stream is True,
        key=key,
        priority=priority,
        answers=answer.answers(len(prompts)),
    )


def _prompts_tokens(prompt: Any) -> list[int]:
    """Tokens of each prompt: the number of its ids, or an estimate from its text."""
    if not isinstance(prompt, list) or not prompt:
        return [_text_tokens(prompt)]
    if isinstance(prompt[0], int):
        return [len(prompt)]
    return [len(one) if isinstance(one, list) else _text_tokens(one) for one in prompt]


def _messages_tokens(body: dict[str, Any]) -> int:
    """Tokens of the fields that a chat template writes into the prompt."""
    messages, tokens = body.get("messages"), 0
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
            parts = content if isinstance(content, list) else [content]
            others = [message.get(name) for name in ("tool_calls", "reasoning", "reasoning_content")]
            tokens += _MESSAGE_TOKENS + _text_tokens([_without_media(part) for part in parts]) + _text_tokens(others)
    return tokens + _text_tokens([body.get(name) for name in ("tools", "documents", "chat_template_kwargs")])


def _without_media(part: Any) -> Any:
    """The texts of one part of a message; a part may have ``text``, ``refusal``, ``thinking`` and other texts."""
    if not isinstance(part, dict):
        return part
    return [value for name, value in part.items() if name != "type" and name not in _MEDIA]


def _text_tokens(value: Any) -> int:
    """Tokens of all texts in a value, including names of fields."""
    size_bytes, values = 0, [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            size_bytes += len(value) if value.isascii() else len(value.encode(errors="replace"))
        elif isinstance(value, list):
            values.extend(value)
        elif isinstance(value, dict):
            values.extend((*value, *value.values()))
    return size_bytes // _BYTES_PER_TOKEN
