"""OpenAI's error shape, made in one place."""

import json
import re
from collections.abc import Mapping
from typing import Any

# What is refused may be megabytes long, and stands in the message.
_MOST_CHARS = 2000


class OpenAIError(Exception):
    """A request that cannot be served, in the words of OpenAI's API.

    Attributes:
        status: HTTP status.
        message: what is wrong, the value, and what to do.
        param: the field at fault, if one is.
        code: OpenAI's machine-readable code, if it has one.
        retry_after_s: when the request may be sent again, if that is known.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        message = message if len(message) <= _MOST_CHARS else f"{message[:_MOST_CHARS]} ..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        """The HTTP headers that go with it."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return headers if self.retry_after_s is None else {**headers, "Retry-After": f"{self.retry_after_s:.0f}"}

    def body(self) -> str:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return json.dumps({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})


# Fields that every other message mentions.
_COMMON_WORDS = ("model", "prompt", "stream", "messages")
# What vLLM calls a prompt that does not fit.
_PROMPT_WORDS = ("input_text", "input_tokens", "prompt_token_ids")


def field_at_fault(message: str, named: str | None, sent: Mapping[str, Any]) -> str | None:
    """The field of a client's body that an engine's refusal is about.

    Args:
        message: the refusal.
        named: the field that the engine gave, in its own words.
        sent: the client's body.
    """
    prompt = "messages" if "messages" in sent else "prompt"
    if named in _PROMPT_WORDS or "context length" in message:
        return prompt
    if named is not None and named in sent:
        return named
    said = re.sub(r"\W+", " ", message.replace("_", " "))
    places = {field: f" {said} ".find(f" {field.replace('_', ' ')} ") for field in sent if field not in _COMMON_WORDS}
    found = [field for field, place in places.items() if place >= 0]
    return min(found, key=places.__getitem__, default=named)
