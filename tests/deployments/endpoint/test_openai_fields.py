"""The prompts of each API's body, as the endpoint estimates and routes them."""

import pytest

from deployments.endpoint.json_body import place_of, prompt_tokens
from deployments.endpoint.openai_fields import openai_fields as fields_of_route
from deployments.endpoint.prompt_pieces import prompt_pieces
from deployments.endpoint.requested_answer import requested_answer
from deployments.endpoint.routes import CHAT, COMPLETIONS, NATIVE, Work
from router.admission import QueuedRequest
from router.admission_config import Priority

TEXT = "It was the best of times, it was the worst of times. " * 20


ROUTES = {route.name: route for route in (CHAT, COMPLETIONS, *NATIVE)}


def openai_fields(route: str, body: dict[str, object]) -> tuple[str, dict[str, object]]:
    return fields_of_route(ROUTES[route], body)


def place(endpoint: str, fields: dict[str, object], most_prompt_tokens: int | None = None) -> QueuedRequest:
    answer = requested_answer(endpoint, fields, is_checked=False)
    return place_of(answer, prompt_tokens(endpoint, fields), None, Priority.NORMAL, most_prompt_tokens)


def pieces(route: str, body: dict[str, object]) -> tuple[int, ...]:
    endpoint, fields = openai_fields(route, body)
    found = prompt_pieces(endpoint, fields, model="m", tokens=0, piece_tokens=16)
    return () if found is None else tuple(found.keys)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("responses", {"input": TEXT}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]}),
        ("messages", {"messages": [{"role": "user", "content": TEXT}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}),
    ],
)
def test_same_conversation_has_the_pieces_of_a_chat(route: str, body: dict[str, object]) -> None:
    chat = pieces("chat", {"messages": [{"role": "user", "content": TEXT}]})
    assert len(chat) > 10
    assert pieces(route, body) == chat


def test_instructions_and_system_come_first() -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]}
    assert openai_fields("responses", {"instructions": "Be brief.", "input": "hi"})[1]["messages"] == chat["messages"]
    assert openai_fields("messages", {"system": "Be brief.", "messages": [{"role": "user", "content": "hi"}]}) == (
        "chat",
        chat,
    )


def test_token_ids_count_exactly() -> None:
    endpoint, fields = openai_fields("generate", {"token_ids": [7] * 300, "sampling_params": {"max_tokens": 9, "n": 2}})
    found = place(endpoint, fields)
    assert (found.tokens, found.most_output_tokens, found.answers) == (300, 9, 2)


def test_each_conversation_of_a_batch_is_a_prompt() -> None:
    conversations = [[{"role": "user", "content": TEXT}], [{"role": "user", "content": "hi"}]]
    endpoint, fields = openai_fields("chat_batch", {"messages": conversations, "max_tokens": 3})
    long, short = prompt_tokens(endpoint, fields)
    assert long > len(TEXT) // 5
    assert short < 20


@pytest.mark.parametrize(
    ("route", "body", "texts"),
    [
        ("embeddings", {"input": ["a", "b", "c"]}, 3),
        ("embeddings", {"input": [[1, 2], [3]]}, 2),
        ("embeddings", {"input": [1, 2, 3]}, 1),
        ("embeddings", {"messages": [{"role": "user", "content": "a"}]}, 1),
        ("embeddings", {"messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]}, 2),
        ("score", {"text_1": "a", "text_2": ["b", "c"]}, 3),
        ("rerank", {"query": "a", "documents": ["b", "c", {"content": [{"type": "text", "text": "d"}]}]}, 4),
    ],
)
def test_each_text_of_a_pooling_model_is_a_prompt(route: str, body: dict[str, object], texts: int) -> None:
    assert len(prompt_tokens(*openai_fields(route, body))) == texts


def test_limits_of_each_api_are_read() -> None:
    for route, body in (
        ("responses", {"input": "a", "max_output_tokens": 5}),
        ("messages", {"messages": [], "max_tokens": 5}),
        ("chat_batch", {"messages": [[]], "max_completion_tokens": 5}),
    ):
        endpoint, fields = openai_fields(route, body)
        assert place(endpoint, fields).most_output_tokens == 5, route


@pytest.mark.parametrize("route", [route.name for route in (CHAT, COMPLETIONS, *NATIVE) if route.work is not Work.NONE])
@pytest.mark.parametrize("value", [None, 0, "", "x", [], {}, [None], [[1, "a"]], {"a": [1]}, [{"content": [3]}], True])
def test_values_of_any_type_pass(route: str, value: object) -> None:
    names = ("input", "messages", "system", "instructions", "token_ids", "sampling_params", "query", "items", "tools")
    body = dict.fromkeys((*names, "documents", "text_1", "prompt", "max_tokens", "n", "cache_salt"), value)
    endpoint, fields = openai_fields(route, body)
    assert place(endpoint, fields, 100).tokens >= 0
    prompt_pieces(endpoint, fields, model="m", tokens=0, piece_tokens=16)
