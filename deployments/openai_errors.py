"""OpenAI's error shape, made in one place."""

import json
from typing import Any


class OpenAIError(Exception):
    """A request that cannot be served, in the words of OpenAI's API.

    Attributes:
        status: HTTP status.
        message: what is wrong, the value, and what to do.
        param: the field at fault, if one is.
        code: OpenAI's machine-readable code, if it has one.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    def body(self) -> str:
        """The JSON body."""
        return error_body(self.message, kind=self.kind, param=self.param, code=self.code)


def error_body(message: str, *, kind: str, param: str | None, code: Any) -> str:
    """``{"error": {...}}`` as the official client reads it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
