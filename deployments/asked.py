"""What admission is told of a request: decode looks at it later, and refuses what makes no sense."""

import math
from typing import Any

from deployments.openai_errors import OpenAIError
from router.admission import Asked, Priority

# Fields of a part of a message that are no text in its prompt.
_MEDIA = (
    "image_url",
    "image_pil",
    "image_embeds",
    "audio_url",
    "audio_embeds",
    "input_audio",
    "video_url",
    "video_embeds",
    "data",
)
_BYTES_PER_TOKEN = 4
_MESSAGE_TOKENS = 4  # its role, and what stands around it
_MOST_ANSWERS = 10_000  # decode takes fewer


def check_types(body: dict[str, Any]) -> None:
    """Refuse what vLLM would take for something else than the endpoint does, which counts answers and streams by it.

    Raises:
        OpenAIError: 400, naming the field.
    """
    for name, kind, what in (("stream", bool, "true or false"), ("n", int, "a whole number")):
        value = body.get(name)
        if value is not None and type(value) is not kind:
            raise OpenAIError(400, f"{name} must be {what} (got {value!r:.100})", param=name)


def asked_of(
    endpoint: str, body: dict[str, Any], key: str | None, priority: Priority, most_prompt_tokens: int | None
) -> Asked:
    """One request of ``chat`` or ``completions``.

    Args:
        endpoint: which.
        body: the client's JSON object.
        key: the name of its API key.
        priority: what it asks for.
        most_prompt_tokens: that a prompt may have; a longer one is refused and never computed.
    """
    prompts = [_messages_tokens(body)] if endpoint == "chat" else _prompts_tokens(body.get("prompt"))
    most = math.inf if most_prompt_tokens is None else most_prompt_tokens
    limit = _count(body.get("max_tokens"))
    if endpoint == "chat":
        limit = _count(body.get("max_completion_tokens")) or limit
    return Asked(
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
    """Of each prompt: its ids, or by its text."""
    if not isinstance(prompt, list) or not prompt:
        return [_text_tokens(prompt)]
    if isinstance(prompt[0], int):
        return [len(prompt)]
    return [len(one) if isinstance(one, list) else _text_tokens(one) for one in prompt]


def _messages_tokens(body: dict[str, Any]) -> int:
    """Of what a chat template has to write; other fields of a message are not in its prompt."""
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
    """Whatever its type says: it may be ``text``, ``refusal``, ``thinking`` and others."""
    return [value for name, value in part.items() if name != "type" and name not in _MEDIA]


def _text_tokens(value: Any) -> int:
    """Of all texts in a value, names of fields too."""
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
