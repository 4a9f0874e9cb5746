"""Bounds of bodies, by the field and not by the route."""

from typing import Any

import pytest

from deployments.replicas.body_bounds import check_bounds, is_beam_search
from deployments.wire.openai_errors import OpenAIError

MESSAGE = {"role": "user", "content": "x"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}] * 5001}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [MESSAGE] * 10_001}, "messages"),  # a chat, Anthropic messages, /tokenize, render
        ({"messages": [[MESSAGE] * 5001] * 2}, "messages"),  # a batch
        ({"messages": [PARTS, PARTS]}, "messages"),
        ({"messages": [[PARTS], [PARTS]]}, "messages"),
        ({"input": [MESSAGE] * 10_001}, "input"),  # a response
        ({"input": [PARTS, PARTS]}, "input"),
        ({"input": "x", "tools": [{}] * 1001}, "tools"),
        ({"documents": ["x"] * 1001}, "documents"),
        ({"length_penalty": 33}, "length_penalty"),
        ({"length_penalty": "nan"}, "length_penalty"),
        ({"prompt": "x", "use_beam_search": "true", "echo": True, "logprobs": 0}, "logprobs"),
    ],
)
def test_a_field_beyond_its_bound_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(OpenAIError) as refused:
        check_bounds(fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [MESSAGE] * 10_000, "tools": [{}] * 1000, "documents": ["x"] * 1000},
        {"messages": [[MESSAGE] * 5000] * 2},
        {"input": ["x"] * 20_000},  # texts of an embedding: the number of answers bounds them
        {"input": [7] * 100_000},  # token ids
        {"messages": [PARTS, MESSAGE]},
        {"length_penalty": None, "use_beam_search": None},
        {"messages": [MESSAGE], "use_beam_search": True, "echo": True, "logprobs": True},  # a chat echoes its last turn
        {"messages": 7, "tools": "x", "length_penalty": "long", "use_beam_search": []},  # vLLM refuses the types
    ],
)
def test_what_is_within_the_bounds_or_of_a_wrong_type_passes(fields: dict[str, Any]) -> None:
    check_bounds(fields)


@pytest.mark.parametrize(("value", "expected"), [(True, True), ("true", True), (1, True), (False, False), ("x", False)])
def test_a_beam_search_is_what_vllm_takes_for_one(value: Any, expected: bool) -> None:
    assert is_beam_search({"use_beam_search": value}) is expected
