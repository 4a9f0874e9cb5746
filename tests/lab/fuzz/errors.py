"""The error that an answer or an event has, in the form of its API."""

import json
from dataclasses import dataclass
from typing import Any

from deployments.endpoint.routes import ErrorForm

# Anthropic's types of errors that are not the client's fault.
_SERVERS = ("api_error", "overloaded_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerError:
    """One error.

    Attributes:
        message: why; empty: it does not say.
        is_right: it has the form of its API.
        is_servers: it says that the server has failed.
        is_late: it says that the answer took longer than it may; a stream cannot say it by its status.
    """

    message: str
    is_right: bool
    is_servers: bool
    is_late: bool


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; ``None``: it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def error_of(text: str, form: ErrorForm) -> AnswerError | None:
    """The error of an answer; ``None``: it has none."""
    body = json_object(text) or {}
    if "error" not in body:
        return None
    error = body["error"]
    fields = error if isinstance(error, dict) else {}
    if form is ErrorForm.ANTHROPIC:
        return _error(fields, ("type",), is_right=body.get("type") == "error", servers=_SERVERS)
    return _error(fields, ("type", "param", "code"), is_right=True, servers=("server_error",))


def error_of_event(text: str, form: ErrorForm) -> AnswerError | None:
    """The error of an event of a stream; ``None``: it has none."""
    fields = json_object(text) or {}
    if form is ErrorForm.RESPONSES and fields.get("type") == "error":
        names = ("code", "param", "sequence_number")
        # Without a code of its own, an error has its type there.
        return _error({**fields, "type": fields.get("code")}, names, is_right=True, servers=("server_error",))
    return error_of(text, form)


def _error(fields: dict[str, Any], names: tuple[str, ...], *, is_right: bool, servers: tuple[str, ...]) -> AnswerError:
    message = str(fields.get("message") or "")
    is_late = "timeout" in (fields.get("code"), fields.get("type")) or fields.get("type") == "timeout_error"
    return AnswerError(
        message=message,
        is_right=is_right and bool(message) and fields.keys() >= {*names},
        is_servers=fields.get("type") in servers,
        is_late=is_late or "ingress.request_timeout_s" in message,
    )
