"""How the events of each API become an answer, against an endpoint that sends them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.drill.apis import APIS, Answer
from tests.lab.drill.load import run_load
from tests.serve_app.fake_endpoint import FakeEndpoint, raw

DELTA = {"type": "response.output_text.delta", "delta": "x"}
COMPLETED = {"type": "response.completed", "response": {"error": None}}
ERROR_OF_RESPONSES = {"type": "error", "sequence_number": 1, "code": "server_error", "message": "no", "param": None}
BLOCK = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}}
STOP = {"type": "message_stop"}
ERROR_OF_MESSAGES = {"type": "error", "error": {"type": "overloaded_error", "message": "no"}}
TOKEN = {"choices": [{"index": 0, "token_ids": [7]}]}
ERROR = {"error": {"message": "no", "type": "server_error"}}


def numbered(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


@pytest.fixture(name="answer")
def _answer(make_endpoint: Callable[..., FakeEndpoint]) -> Callable[..., Any]:
    """The answer to one request of an API whose events are these."""

    async def answer(api: str, events: list[Any], *, has_done: bool = False) -> Answer:
        chunks = [f"event: {event.get('type')}\ndata: {json.dumps(event)}\n\n".encode() for event in events]
        endpoint = make_endpoint(raw(*chunks, *([b"data: [DONE]\n\n"] if has_done else [])))
        (one,) = await run_load(endpoint.url, "m", rate=1.0, seconds=0.1, seed=1, salt="x", apis=[api])
        return one

    return answer


@pytest.mark.parametrize(
    ("api", "events", "has_done", "output"),
    [
        ("completions", [TOKEN, TOKEN], True, [7, 7]),
        ("generate", [TOKEN, TOKEN], True, [7, 7]),
        ("responses", numbered({"type": "response.created"}, DELTA, DELTA, COMPLETED), False, "xx"),
        ("responses", numbered(DELTA, {"type": "response.incomplete"}), False, "x"),
        ("messages", [{"type": "message_start"}, BLOCK, BLOCK, STOP], False, "xx"),
    ],
)
async def test_a_whole_stream_is_read_to_the_end_that_its_api_has(
    answer: Any, api: str, events: list[Any], has_done: bool, output: Any
) -> None:
    one = await answer(api, events, has_done=has_done)
    assert (one.output, one.is_ended, one.error) == (output, True, None)
    assert (await answer(api, events[:-1])).is_ended is False


@pytest.mark.parametrize(
    ("api", "events", "has_done", "error"),
    [
        ("completions", [TOKEN, ERROR], True, "no"),
        ("generate", [TOKEN, ERROR], True, "no"),
        ("responses", [*numbered(DELTA), ERROR_OF_RESPONSES], False, "no"),
        ("responses", numbered(DELTA, {"type": "response.failed"}), False, "response.failed"),
        ("messages", [BLOCK, ERROR_OF_MESSAGES], False, "no"),
        # An event is missing, or came twice.
        ("responses", [*numbered(DELTA), {**DELTA, "sequence_number": 2}, COMPLETED], False, "of event 1 is 2"),
        ("responses", [*numbered(DELTA), {**DELTA, "sequence_number": 0}, COMPLETED], False, "of event 1 is 0"),
    ],
)
async def test_a_stream_with_an_error_event_or_out_of_order_has_not_ended(
    answer: Any, api: str, events: list[Any], has_done: bool, error: str
) -> None:
    one = await answer(api, events, has_done=has_done)
    assert (one.is_ended, error in one.error) == (False, True)


async def test_the_apis_take_turns_and_each_gets_short_and_long_prompts(
    make_endpoint: Callable[..., FakeEndpoint],
) -> None:
    endpoint = make_endpoint(raw(b"data: [DONE]\n\n"))
    load = {"rate": 100.0, "seconds": 0.08, "seed": 1, "salt": "x"}
    answers = await run_load(endpoint.url, "m", **load, apis=list(APIS))
    assert [answer.error for answer in answers] == [None] * 8
    words = [len(body["input"].split()) for body in endpoint.bodies if "input" in body]
    said = [len(body["messages"][0]["content"].split()) for body in endpoint.bodies if "messages" in body]
    ids = [len(body["token_ids"]) for body in endpoint.bodies if "token_ids" in body]
    prompts = [len(body["prompt"]) for body in endpoint.bodies if "prompt" in body]
    assert sorted(words) == sorted(said) == sorted(ids) == sorted(prompts) == [40, 400]
