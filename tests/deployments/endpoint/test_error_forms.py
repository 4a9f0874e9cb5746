"""Errors in the form of each API."""

import json

from deployments.endpoint.error_forms import error_body, error_event
from deployments.endpoint.routes import ErrorForm
from deployments.wire.openai_errors import OpenAIError

ERROR = OpenAIError(429, "too many requests", param="model", code="overloaded")


def test_anthropic_error_has_its_type_and_message() -> None:
    body = json.loads(error_body(ERROR.body(), 429, ErrorForm.ANTHROPIC))
    assert body == {"type": "error", "error": {"type": "rate_limit_error", "message": "too many requests"}}
    assert json.loads(error_body(ERROR.body(), 599, ErrorForm.ANTHROPIC))["error"]["type"] == "api_error"


def test_openai_error_stays_as_it_is() -> None:
    for form in (ErrorForm.OPENAI, ErrorForm.RESPONSES):
        assert error_body(ERROR.body(), 429, form) == ERROR.body()


def test_each_api_ends_a_stream_in_its_own_way() -> None:
    assert error_event(ERROR.body(), 429, ErrorForm.OPENAI, 3) == f"data: {ERROR.body()}\n\ndata: [DONE]\n\n"
    name, data = error_event(ERROR.body(), 429, ErrorForm.ANTHROPIC, 3).strip().split("\n")
    assert (name, json.loads(data.removeprefix("data: "))["error"]["type"]) == ("event: error", "rate_limit_error")
    name, data = error_event(ERROR.body(), 429, ErrorForm.RESPONSES, 3).strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "sequence_number": 3,
        "code": "overloaded",
        "message": "too many requests",
        "param": "model",
    }
