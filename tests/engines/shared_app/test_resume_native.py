"""Streams of vLLM's own application that are cut anywhere go on from another engine without a difference."""

import json
from functools import partial
from typing import Any

import pytest

from deployments.wire.messages import Frame, SentFrames
from tests.engines.endpoint import prompt_ids

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

TEXT = "You may obtain a copy of the License. " * 8
SCHEMA = {"type": "object", "properties": {"unit": {"enum": ["celsius", "kelvin"]}}, "required": ["unit"]}
MESSAGES = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 24, "temperature": 0.0}
RESPONSE = {"model": "tiny", "input": TEXT, "max_output_tokens": 24, "temperature": 0.0}
TOOL = {"name": "get_weather", "description": "weather", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/messages", MESSAGES),
    "a tool of messages": ("/v1/messages", {**MESSAGES, "tools": [TOOL], "tool_choice": {"type": "any"}}),
    "response": ("/v1/responses", RESPONSE),
    "a function of a response": ("/v1/responses", {**RESPONSE, "tools": [FUNCTION], "tool_choice": "required"}),
    "token ids": (
        "/inference/v1/generate",
        {
            "model": "tiny",
            "token_ids": prompt_ids(300, seed=9),
            "sampling_params": {"max_tokens": 24, "temperature": 0.0},
        },
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_stream_goes_on_from_every_cut(ask: Any, name: str) -> None:
    path, body = STREAMS[name]
    send = partial(ask, "native", {**body, "stream": True}, path=path, response_id="resp_1" if "resp" in path else None)
    frames: list[Frame] = send()
    assert [frame.error for frame in frames] == [None] * len(frames)
    assert frames[-1].is_last
    assert sum(len(output) for frame in frames for output in frame.outputs) > 10
    for at in range(1, len(frames) - 1):
        sent = SentFrames()
        for frame in frames[:at]:
            sent.add(frame.text, frame.outputs, frame.usage)
        rest = send(sent=sent.sent())
        assert [frame.error for frame in rest] == [None] * len(rest), (at, rest[-1].text)
        assert read([*frames[:at], *rest]) == read(frames), at
        assert rest[-1].is_last, at


def read(frames: list[Frame]) -> tuple[list[int], str, str, bool]:
    """What a client reads: token ids, text, the last event's type, and whether numbered events follow each other.

    Events may hold more or fewer tokens on the other replica, which depends on the moment.
    """
    events = [json.loads(part[6:]) for frame in frames for part in frame.text.split("\n") if part.startswith("data: {")]
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    ids = [token for frame in frames for output in frame.outputs for token in output]
    return ids, "".join(map(delta, events)), str(events[-1].get("type")), numbers == list(range(len(numbers)))


def delta(event: dict[str, Any]) -> str:
    """The text, arguments or token ids that an event adds."""
    part = event.get("delta", "")
    if isinstance(part, dict):
        return str(part.get("text") or part.get("partial_json") or "")
    if event.get("choices"):
        return "".join(f"{token}," for token in event["choices"][0]["token_ids"] or ())
    return str(part)
