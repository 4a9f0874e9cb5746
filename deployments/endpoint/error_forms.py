"""Errors in the form of the API that a client speaks: OpenAI's, its Responses API's, or Anthropic's (pure)."""

import json
from typing import Any

from deployments.endpoint.routes import ErrorForm
from deployments.wire.messages import DONE

# Anthropic's types by HTTP status; others: ``api_error``.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(body: str, status: int, form: ErrorForm) -> str:
    """The body of an error response; ``body``: the same in OpenAI's form."""
    return _anthropic(body, status) if form is ErrorForm.ANTHROPIC else body


def error_event(body: str, status: int, form: ErrorForm, sequence_number: int) -> str:
    """The events that end a stream with an error.

    Args:
        body: the error, in OpenAI's form.
        status: the HTTP status that it would have without a stream.
        form: the stream's API.
        sequence_number: number of events before it, from 0.
    """
    if form is ErrorForm.ANTHROPIC:
        return f"event: error\ndata: {_anthropic(body, status)}\n\n"
    if form is ErrorForm.RESPONSES:
        error = _fields(body)
        event = {
            "type": "error",
            "sequence_number": sequence_number,
            "code": error["code"] or error["type"],
            "message": error["message"],
            "param": error["param"],
        }
        return f"event: error\ndata: {json.dumps(event)}\n\n"
    return f"data: {body}\n\n{DONE}"


def _anthropic(body: str, status: int) -> str:
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": _fields(body)["message"]}})


def _fields(body: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(body)["error"]
    return fields
