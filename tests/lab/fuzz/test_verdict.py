"""The verdicts on answers of vLLM's other APIs, on what leaks, and on pages of other sites."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.fuzz.requests import PAGE_ORIGIN
from tests.lab.fuzz.verdict import verdict
from tests.lab.fuzz.wire import Reply, Request, post

COMPLETIONS, RESPONSES, MESSAGES = (
    post(path, b"{}", kind="json") for path in ("/v1/completions", "/v1/responses", "/v1/messages")
)
CREATED, COMPLETED = "response.created", "response.completed"
FAILED = {"code": None, "message": "no", "param": None}
START, STOP = {"type": "message_start"}, {"type": "message_stop"}


def openais(message: str = "no") -> str:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return json.dumps({"error": error})


def anthropics(kind: str = "invalid_request_error", message: str = "no") -> str:
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}})


def typed(*events: dict[str, Any]) -> str:
    """A stream whose events have their type as a name too."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def numbered(*kinds: str, first: int = 0, **more: Any) -> str:
    """A stream of the Responses API; ``more``: fields of the last event."""
    events = [{"type": kind, "sequence_number": first + number} for number, kind in enumerate(kinds)]
    return typed(*events[:-1], {**events[-1], **more})


def ended(error: str) -> str:
    """A stream of messages that an error ends."""
    return f"{typed(START)}event: error\ndata: {error}\n\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (numbered(CREATED, COMPLETED), None),
        (numbered(CREATED, "response.incomplete"), None),
        (numbered(CREATED, COMPLETED, first=7), None),  # a stored response from its middle
        (numbered(CREATED, "error", **FAILED), None),
        (numbered(CREATED, "error"), "shape"),
        (numbered(CREATED, "error", **{**FAILED, "code": "server_error"}), "five_xx"),
        (numbered(CREATED, "error", **{**FAILED, "code": "timeout"}), "hang"),
        (numbered(CREATED, "response.in_progress"), "shape"),
        (numbered(CREATED) + numbered(COMPLETED), "shape"),  # a number came twice
        (numbered(CREATED) + numbered(COMPLETED, first=2), "shape"),  # a number is missing
        (numbered(CREATED, COMPLETED).replace("event: response.c", "event: x"), "shape"),
        ("data: {}\n\ndata: [DONE]\n\n", "shape"),
        (json.dumps({"id": "resp_1", "error": None}), None),
        (json.dumps({"id": "resp_1", "error": {"code": "x"}}), "shape"),
    ],
)
def test_a_stream_of_responses_counts_its_events_and_has_an_end(text: str, what: str | None) -> None:
    assert verdict(RESPONSES, Reply(status=200, text=text)) == what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (typed(START, STOP), None),
        (typed(START), "shape"),
        (ended(anthropics()), None),
        (ended(anthropics("api_error")), "five_xx"),
        (ended(anthropics("timeout_error")), "hang"),
        (ended(openais()), "shape"),
        (f"{typed(START)}data: {anthropics()}\n\ndata: [DONE]\n\n", "shape"),
    ],
)
def test_a_stream_of_messages_has_its_own_end(text: str, what: str | None) -> None:
    assert verdict(MESSAGES, Reply(status=200, text=text)) == what


@pytest.mark.parametrize("text", [typed(START, STOP), "data: {}\n\ndata: [DONE]\n\ndata: [DONE]\n\n"])
def test_a_stream_of_completions_has_no_other_end(text: str) -> None:
    assert verdict(COMPLETIONS, Reply(status=200, text=text)) == "shape"


@pytest.mark.parametrize(
    ("sent", "text", "what"),
    [
        (MESSAGES, anthropics(), None),
        (MESSAGES, openais(), "shape"),
        (MESSAGES, anthropics(message=""), "shape"),
        (RESPONSES, openais(), None),
        (RESPONSES, anthropics(), "shape"),
        (COMPLETIONS, anthropics(), "shape"),
    ],
)
def test_an_error_has_the_form_of_its_route(sent: Request, text: str, what: str | None) -> None:
    assert verdict(sent, Reply(status=400, text=text)) == what


ECHOED = post("/v1/chat/completions/derender", b'{"kv_transfer_params": {"a": 1}}', kind="json")


@pytest.mark.parametrize(
    ("sent", "status", "text", "what"),
    [
        (COMPLETIONS, 200, '{"id": "x", "kv_transfer_params": null}', None),
        (COMPLETIONS, 200, '{"id": "x", "kv_transfer_params": {"a": 1}}', "leak"),
        (COMPLETIONS, 200, 'data: {"ec_transfer_params":{}}\n\ndata: [DONE]\n\n', "leak"),
        (COMPLETIONS, 400, openais("remote_engine_id is missing"), "leak"),
        (COMPLETIONS, 400, openais("Traceback (most recent call last)"), "leak"),
        (COMPLETIONS, 400, openais("/opt/site-packages/vllm/x.py"), "leak"),
        # An answer may repeat what its client has sent, but no more.
        (ECHOED, 200, '{"id": "x", "kv_transfer_params": {"a": 1}}', None),
        (ECHOED, 200, '{"id": "x", "kv_transfer_params": {"remote_host": "h"}}', "leak"),
    ],
)
def test_what_only_tandems_processes_may_see_is_a_leak(sent: Request, status: int, text: str, what: str | None) -> None:
    assert verdict(sent, Reply(status=status, text=text)) == what


def test_a_body_that_says_it_is_no_json_may_not_be_accepted() -> None:
    sent = replace(COMPLETIONS, kind="media")
    assert verdict(sent, Reply(status=200, text='{"id": "x"}')) == "media"
    assert verdict(sent, Reply(status=415, text=openais())) is None


ALLOWED = {"access-control-allow-origin": PAGE_ORIGIN}


@pytest.mark.parametrize(
    ("origin", "reply", "what"),
    [
        (PAGE_ORIGIN, Reply(status=200, text="OK", headers=ALLOWED), None),
        (PAGE_ORIGIN, Reply(status=400, text="Disallowed CORS method", headers=ALLOWED), None),
        (PAGE_ORIGIN, Reply(status=200, text="OK"), "cors"),
        ("https://evil.example", Reply(status=400, text="Disallowed CORS origin"), None),
        ("https://evil.example", Reply(status=400, text="no", headers=ALLOWED), "cors"),
        ("https://evil.example", Reply(status=400, text="<html>"), "shape"),
    ],
)
def test_pages_of_one_site_alone_may_call_the_endpoint(origin: str, reply: Reply, what: str | None) -> None:
    line = f"OPTIONS / HTTP/1.1\r\nOrigin: {origin}\r\n\r\n"
    asked = Request(route="/v1/models", kind="preflight", parts=(line.encode(),), has_key=False)
    assert verdict(asked, reply) == what


def test_no_other_answer_lets_a_page_read_it() -> None:
    assert verdict(COMPLETIONS, Reply(status=200, text='{"id": "x"}', headers=ALLOWED)) == "cors"
