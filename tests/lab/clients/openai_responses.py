"""The Responses API as OpenAI's SDK uses it."""

import json
import time
from collections.abc import Callable
from typing import Any

import openai
from pydantic import BaseModel

from tests.lab.clients.checks import Checks, Server, raises

QUESTION = "What does the licence say of contributions? " * 5
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"raining": {"type": "boolean"}}, "required": ["raining"]},
}
# A random model ends its JSON sooner if every allowed token is nearly as likely as another: greedy, it repeats blanks.
FREE: dict[str, Any] = {"temperature": 2, "max_output_tokens": 500, "extra_body": {"seed": 1}}
# A cancelled response has this long to end, in seconds.
_CANCEL_S = 10.0


class Weather(BaseModel):
    """A structured answer that a random model can finish."""

    raining: bool


def add_to(checks: Checks, client: Any, server: Server) -> None:
    """Add the checks of the Responses API to those of OpenAI's SDK."""

    def create(**more: Any) -> Any:
        return client.responses.create(
            **{"model": server.model, "input": QUESTION, "max_output_tokens": 8, "temperature": 0, **more}
        )

    @checks.add
    def response() -> None:
        answer = create()
        assert answer.object == "response" and answer.output_text, answer
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage.output_tokens == 8 and answer.usage.input_tokens > 50

    @checks.add
    def response_of_messages() -> None:
        turns = [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"role": "assistant", "content": "Good day"},
            {"role": "user", "content": "And now?"},
        ]
        plain = create(input=turns)
        assert plain.output_text
        assert create(input=turns, instructions="Be short.").usage.input_tokens > plain.usage.input_tokens

    @checks.add
    def response_stream() -> None:
        events = list(create(stream=True))
        kinds = [event.type for event in events]
        assert kinds[0] == "response.created", kinds
        assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == events[-1].response.output_text == create().output_text

    @checks.add
    def response_stream_helper() -> None:
        with client.responses.stream(model=server.model, input=QUESTION, max_output_tokens=8, temperature=0) as events:
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == create().output_text

    @checks.add
    def response_parse() -> None:
        answer = client.responses.parse(model=server.model, input=QUESTION, text_format=Weather, **FREE)
        assert isinstance(answer.output_parsed, Weather), answer

    @checks.add
    def response_tool() -> None:
        answer = create(tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}, **FREE)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [call.name for call in calls] == ["get_weather"], answer
        assert isinstance(json.loads(calls[0].arguments)["raining"], bool)
        result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"}
        back = create(input=[{"role": "user", "content": "Rain?"}, calls[0].model_dump(), result], tools=[TOOL])
        assert back.output

    @checks.add
    def stored_response() -> None:
        answer = create(store=True)
        again = client.responses.retrieve(answer.id)
        assert again.id == answer.id and again.output_text == answer.output_text
        after = create(previous_response_id=answer.id, input="And then?")
        assert after.usage.input_tokens > answer.usage.input_tokens
        raises(openai.BadRequestError, lambda: client.responses.cancel(answer.id))

    @checks.add
    def cancelled_response() -> None:
        answer = create(background=True, store=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
        assert answer.status in ("queued", "in_progress"), answer
        assert client.responses.cancel(answer.id).status == "cancelled"
        deadline_s = time.monotonic() + _CANCEL_S
        while (status := client.responses.retrieve(answer.id).status) != "cancelled":
            assert time.monotonic() < deadline_s, status

    @checks.add
    def absent_response() -> None:
        calls: list[Callable[[], Any]] = [
            lambda: client.responses.retrieve("resp_absent"),
            lambda: client.responses.cancel("resp_absent"),
            lambda: create(previous_response_id="resp_absent"),
        ]
        for call in calls:  # the error is about the response, and not about the route
            assert "'resp_absent'" in raises(openai.NotFoundError, call).message

    @checks.add
    def bad_response_requests() -> None:
        assert "absent" in raises(openai.NotFoundError, lambda: create(model="absent")).message
        raises(openai.BadRequestError, lambda: create(temperature=-1))
        raises(openai.BadRequestError, lambda: create(input="word " * 50_000))
