"""Errors in the form of OpenAI's API."""

import json
import re
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass

from pydantic import ValidationError

_MOST_CHARS = 2000  # longest message, characters: a message may quote a refused value of megabytes
_COMMON_FIELDS = ("model", "prompt", "stream", "messages")  # also mentioned in messages about other fields
_PROMPT_PARAMETERS = ("input_text", "input_tokens", "prompt_token_ids")  # vLLM's names of the prompt in its refusals


@dataclass(eq=False)
class OpenAIError(Exception):
    """The reason why a request cannot be served, for its client."""

    status: int  # HTTP status
    message: str  # the fault, the value, and the remedy
    _: KW_ONLY
    param: str | None = None  # the field at fault; ``None``: no field is
    code: str | None = None  # OpenAI's code of the error; ``None``: it has none
    retry_after_s: float | None = None  # time after which the request may be sent again; ``None``: unknown

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


def wrong_type(error: ValidationError) -> OpenAIError:
    """The refusal of a body whose field has a value that pydantic does not accept; the first such field is named.

    The message has pydantic's name of the fault, such as ``greater_than_equal``, since vLLM's messages have it too.
    """
    first = error.errors(include_url=False)[0]
    # pydantic adds names of types to the path, such as ``list[int]``; the client knows only fields and indices.
    path = [part for part in map(str, first["loc"]) if not set(part) & set("[](){}")]
    where = f"{'.'.join(path)}: " if path else ""
    value, message = first.get("input"), str(first["msg"]).removeprefix("Value error, ")
    got = f", got {value!r:.100}" if path and not isinstance(value, dict) else ""
    return OpenAIError(400, f"{where}{message} ({first['type']}{got})", param=path[0] if path else None)


def field_at_fault(message: str, parameter: str | None, fields: Collection[str]) -> str | None:
    """The field of a client's body that an engine's refusal is about; used only for ``error.param``.

    If the engine names no field of the body, the result is the first field that the message mentions, which is a guess.

    Args:
        message: the refusal.
        parameter: the engine's name of the field; ``None``: the engine names none.
        fields: names of the fields in the client's body.
    """
    if parameter in _PROMPT_PARAMETERS:
        return "messages" if "messages" in fields else "prompt"
    if parameter == "max_tokens" and "max_completion_tokens" in fields:  # vLLM names both by the older one
        return "max_completion_tokens"
    if parameter is not None and parameter in fields:
        return parameter
    words = " " + re.sub(r"[\W_]+", " ", message) + " "
    positions = {field: words.find(f" {field.replace('_', ' ')} ") for field in fields if field not in _COMMON_FIELDS}
    mentioned = [field for field, position in positions.items() if position >= 0]
    return min(mentioned, key=positions.__getitem__, default=parameter)
