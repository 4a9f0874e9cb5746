"""Ids of responses of the Responses API: an id belongs to the API key that has created it (pure)."""

import hashlib
import re
from typing import Any

from deployments.wire.openai_errors import OpenAIError

_ID = re.compile(r"resp_[0-9a-f]{16}([0-9a-f]{16})")


def new_response_id(seed: str, key: str | None) -> str:
    """An id that no other request has.

    ``seed``: random, 16 hexadecimal digits or more. ``key``: name of the API key; ``None``: the endpoint has no keys.
    """
    return f"resp_{seed[:16]}{_owner(key)}"


def check_owner(response_id: Any, key: str | None, param: str) -> None:
    """Raises OpenAIError: 404, the response is not of this key, or it is no id of a response; 400, it is no string.

    The message does not tell which of the two it is. A client that changes the owner in an id has the id of no stored
    response.
    """
    if not isinstance(response_id, str):
        raise OpenAIError(400, f"{param} must be a string, got {type(response_id).__name__}", param=param)
    match = _ID.fullmatch(response_id)
    if match is None or match[1] != _owner(key):
        raise response_not_found(response_id, param)


def response_not_found(response_id: Any, param: str) -> OpenAIError:
    """The error of a response that no replica holds, or that another key has created."""
    return OpenAIError(
        404,
        f"the response {response_id!r:.100} is not here: it was not stored, its replica has ended, or another API key "
        "has created it",
        param=param,
    )


def _owner(key: str | None) -> str:
    return hashlib.blake2b(f"key {key}".encode() if key is not None else b"", digest_size=8).hexdigest()
