"""OpenAI's error shape."""

import json
from typing import Any

import pytest

from deployments.wire.openai_errors import OpenAIError, field_at_fault


def test_the_body_has_the_four_fields_that_the_client_reads() -> None:
    error = OpenAIError(400, "max_tokens must be at least 1, got 0", param="max_tokens", code="invalid_value")
    assert json.loads(error.body()) == {
        "error": {
            "message": "max_tokens must be at least 1, got 0",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "invalid_value",
        }
    }


def test_fields_that_were_not_given_are_null_and_not_absent() -> None:
    error = json.loads(OpenAIError(404, "no such model").body())["error"]
    assert error["param"] is None
    assert error["code"] is None


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_the_status_decides_the_type_of_the_error(status: int, kind: str) -> None:
    error = OpenAIError(status, "words")
    assert error.status == status
    assert json.loads(error.body())["error"]["type"] == kind


def test_message_survives_quotes_and_line_breaks() -> None:
    message = 'a "quoted"\nline \u2028 end'
    body = OpenAIError(500, message).body()
    assert "\n" not in body
    assert json.loads(body)["error"]["message"] == message
    assert str(OpenAIError(500, message)) == message


def test_a_refusal_does_not_send_back_megabytes() -> None:
    assert len(OpenAIError(404, "x" * 10_000_000).body()) < 3000
    assert json.loads(OpenAIError(404, "x" * 2000).body())["error"]["message"] == "x" * 2000


@pytest.mark.parametrize(
    ("message", "named", "sent", "field"),
    [
        ("n must be at least 1, got 0.", None, {"model": "m", "prompt": "x", "n": 0}, "n"),
        ("This model's maximum context length is 4096 tokens", "input_tokens", {"prompt": "x"}, "prompt"),
        ("too long", "input_text", {"messages": []}, "messages"),
        ("max_tokens must be at least 1", "max_tokens", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("max_tokens must be at least 1", "max_tokens", {"max_tokens": 0}, "max_tokens"),
        ("`tool_choice` without `tools`", "tool_choice", {"tool_choice": "a"}, "tool_choice"),
        (
            "presence_penalty must be in [-2, 2], got 3",
            None,
            {"presence_penalty": 3, "stream": True},
            "presence_penalty",
        ),
        ("use one kind of structured outputs constraint", None, {"structured_outputs": {}}, "structured_outputs"),
        ("seeds are signed", None, {"seed": 1, "n": 2}, None),
        ("the prompt cannot be served", None, {"prompt": "x"}, None),
        ("requested logprobs", "logprobs", {"top_logprobs": 1}, "logprobs"),
    ],
)
def test_the_field_at_fault_is_one_that_the_client_sent(
    message: str, named: str | None, sent: dict[str, Any], field: str | None
) -> None:
    assert field_at_fault(message, named, sent) == field
