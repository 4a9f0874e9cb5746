"""OpenAI's error shape, made in one place."""

import json
import re
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass

_MOST_CHARS = 2000  # characters of a message at most: it may quote a refused value of megabytes
# Fields that many messages mention although these are about another field.
_COMMON_FIELDS = ("model", "prompt", "stream", "messages")
# What vLLM calls the prompt in its refusals.
_PROMPT_PARAMETERS = ("input_text", "input_tokens", "prompt_token_ids")


@dataclass(eq=False)
class OpenAIError(Exception):
    """A request that cannot be served, in the words of OpenAI's API."""

    status: int  # of HTTP
    message: str  # what is wrong, the value, and what to do
    _: KW_ONLY
    param: str | None = None  # the field at fault, if a field is
    code: str | None = None  # OpenAI's machine-readable code, if the error has one
    retry_after_s: float | None = None  # time after which the request may be sent again, if known

    def __post_init__(self) -> None:
        if len(self.message) > _MOST_CHARS:
            self.message = f"{self.message[:_MOST_CHARS]} ..."
        super().__init__(self.message)

    def headers(self) -> dict[str, str]:
        """The HTTP headers of the response."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return headers if self.retry_after_s is None else {**headers, "Retry-After": f"{self.retry_after_s:.0f}"}

    def body(self) -> str:
        """The JSON body of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return json.dumps({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})


def field_at_fault(message: str, parameter: str | None, fields: Collection[str]) -> str | None:
    """The field of a client's body that an engine's refusal is about, for ``error.param`` alone.

    Args:
        message: the refusal. Where vLLM gives no parameter, the first field that it mentions is the best guess.
        parameter: the field that the engine gave, in its own words.
        fields: names of the fields that the client sent.
    """
    if parameter in _PROMPT_PARAMETERS:
        return "messages" if "messages" in fields else "prompt"
    if parameter is not None and parameter in fields:
        return parameter
    words = " " + re.sub(r"[\W_]+", " ", message) + " "
    candidates = [field for field in fields if field not in _COMMON_FIELDS]
    places = {field: words.find(f" {field.replace('_', ' ')} ") for field in candidates}
    mentioned = [field for field, place in places.items() if place >= 0]
    return min(mentioned, key=places.__getitem__, default=parameter)
