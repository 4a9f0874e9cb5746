"""Bounds of a body that hold on every route that has the field; vLLM does not have them (pure).

A decode replica does nothing else while it reads a conversation, and some values of a beam search end in an error of
the server.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.wire.openai_errors import OpenAIError

# Fields with a conversation: that of chats and Anthropic messages, and that of responses. Texts of ``input`` are none.
CONVERSATIONS = ("messages", "input")
_MOST_MESSAGES = 10_000  # most messages of a body, also of several conversations
_MOST_PARTS = 10_000  # most content parts of all messages
_MOST_ITEMS = {"tools": 1000, "documents": 1000}  # of other lists. vLLM itself bounds stop and bad_words.
# Largest length penalty. Beam search divides by the sequence's length to the power of the penalty. With a larger one
# the result for a long context is beyond a float's range.
_MOST_LENGTH_PENALTY = 32.0


class _BeamSearch(BaseModel):
    """Fields of a beam search, with the types that vLLM gives them: it takes "true" for ``true``."""

    model_config = ConfigDict(extra="ignore")

    use_beam_search: bool = False
    length_penalty: float | None = None
    echo: bool = False


def check_bounds(fields: Mapping[str, Any]) -> None:
    """Raises OpenAIError: 400, a field of a body is beyond a bound. Values of a wrong type pass: vLLM refuses them."""
    for name in CONVERSATIONS:
        messages = list(_messages(fields.get(name)))
        _check_count(name, "messages", len(messages), _MOST_MESSAGES)
        contents = (message.get("content") for message in messages)
        parts = sum(len(content) for content in contents if isinstance(content, list))
        _check_count(name, "content parts", parts, _MOST_PARTS)
    for name, most in _MOST_ITEMS.items():
        if isinstance(items := fields.get(name), list):
            _check_count(name, "items", len(items), most)
    _check_beams(fields)


def is_beam_search(fields: Mapping[str, Any]) -> bool:
    """Whether a body asks for a beam search."""
    search = _beam_search(fields)
    return search is not None and search.use_beam_search


def _messages(value: Any) -> Iterator[dict[str, Any]]:
    """The messages of a conversation, or of several."""
    for one in value if isinstance(value, list) else ():
        if isinstance(one, dict):
            yield one
        elif isinstance(one, list):
            yield from (message for message in one if isinstance(message, dict))


def _check_count(name: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise OpenAIError(400, f"{name} has {count} {what}: give at most {most}", param=name)


def _check_beams(fields: Mapping[str, Any]) -> None:
    if (search := _beam_search(fields)) is None:
        return
    penalty = search.length_penalty
    if penalty is not None and not abs(penalty) <= _MOST_LENGTH_PENALTY:  # also refuses NaN
        message = f"length_penalty must be within +-{_MOST_LENGTH_PENALTY:g}, got {penalty:g}"
        raise OpenAIError(400, message, param="length_penalty")
    has_prompt_logprobs = search.echo and "messages" not in fields and fields.get("logprobs") is not None
    if search.use_beam_search and has_prompt_logprobs:
        message = "a beam search has no logprobs of the prompt: leave out echo or logprobs"
        raise OpenAIError(400, message, param="logprobs")


def _beam_search(fields: Mapping[str, Any]) -> _BeamSearch | None:
    """The fields of a beam search; ``None``: one of them has a wrong type."""
    given = {name: fields[name] for name in _BeamSearch.model_fields if fields.get(name) is not None}
    try:
        return _BeamSearch.model_validate(given)
    except ValidationError:
        return None
