"""When the first token of an answer in one piece is known; vLLM's output side is a fake."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def _first_tokens(client: Any) -> Any:
    from deployments.vllm_seam.output_side import FirstTokens

    return FirstTokens(client)


def vllm() -> Any:
    return SimpleNamespace(output_processor=SimpleNamespace(external_req_ids={}, request_states={}))


def add(client: Any, request_id: str, *answers: str) -> None:
    client.output_processor.external_req_ids[request_id] = list(answers)
    for answer in answers:
        client.output_processor.request_states[answer] = SimpleNamespace(is_prefilling=True)


def test_a_request_has_its_first_token_when_one_of_its_answers_has() -> None:
    client = vllm()
    firsts, one, other = _first_tokens(client), asyncio.Event(), asyncio.Event()
    firsts.watch("one", one)
    firsts.watch("other", other)
    firsts.update()  # the engine does not have them yet
    add(client, "one", "one-0", "one-1")
    add(client, "other", "other-0")
    firsts.update()
    assert not one.is_set()
    client.output_processor.request_states["one-1"].is_prefilling = False
    firsts.update()
    assert (one.is_set(), other.is_set()) == (True, False)


def test_a_request_that_has_ended_is_not_watched() -> None:
    client = vllm()
    firsts, one = _first_tokens(client), asyncio.Event()
    firsts.watch("one", one)
    firsts.remove("one", one)
    firsts.remove("one", one)
    add(client, "one", "one-0")
    client.output_processor.request_states["one-0"].is_prefilling = False
    firsts.update()
    assert not one.is_set()


def test_two_requests_of_one_id_both_get_their_event_unless_one_has_ended() -> None:
    client = vllm()
    firsts, ended, one, other = _first_tokens(client), asyncio.Event(), asyncio.Event(), asyncio.Event()
    for event in (ended, one, other):
        firsts.watch("same", event)
    firsts.remove("same", ended)
    add(client, "same", "same-0")
    client.output_processor.request_states["same-0"].is_prefilling = False
    firsts.update()
    assert (ended.is_set(), one.is_set(), other.is_set()) == (False, True, True)


@pytest.mark.vllm
def test_vllm_has_the_names_that_tell_of_a_first_token() -> None:
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    processor = OutputProcessor(None, log_stats=False)
    assert processor.external_req_ids == {}
    assert processor.request_states == {}
    assert "is_prefilling" in RequestState.__init__.__code__.co_names
