"""Which fields and values of a body are refused before vLLM reads it."""

from typing import Any

import pytest

from deployments.wire.openai_errors import OpenAIError

pytestmark = pytest.mark.vllm


def parse_request(endpoint: str, body: dict[str, Any], request_id: str) -> Any:
    """The function under test; it imports vLLM, so only tests that run may import it."""
    from deployments.replicas.openai_layer import parse_request as parse

    return parse(endpoint, body, request_id)


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("chat", {"messages": [MESSAGE] * 10_001}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_001}]}, "messages"),
        ("chat", {"messages": [MESSAGE], "tools": [{}] * 1001}, "tools"),
        ("chat", {"messages": [MESSAGE], "n": 1025}, "n"),
        ("completions", {"prompt": "x", "n": 16_384}, "n"),
        ("completions", {"prompt": [[1]] * 1025}, "prompt"),
        ("completions", {"prompt": ["x"] * 32, "n": 33}, "prompt"),
    ],
)
def test_more_parts_than_a_client_may_need_are_refused(endpoint: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(OpenAIError, match="at most") as refused:
        parse_request(endpoint, {"model": "m", **fields}, "id")
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat", {"messages": [MESSAGE] * 10_000, "n": 1024, "prompt": [[1]] * 2000}),
        ("completions", {"prompt": [1] * 100_000, "n": 1024}),
        ("completions", {"prompt": [[1]] * 1024}),
        ("completions", {"prompt": ["x"] * 32, "n": 32}),
    ],
)
def test_as_many_parts_as_a_client_may_need_pass(endpoint: str, fields: dict[str, Any]) -> None:
    assert parse_request(endpoint, {"model": "m", **fields}, "id").n == fields.get("n", 1)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_field_that_vllm_does_not_know_is_not_kept_while_the_request_runs(endpoint: str) -> None:
    body = {"model": "m", "messages": [MESSAGE], "prompt": "x", "cache_salt": "s", "mine": ["x" * 1000]}
    request = parse_request(endpoint, body, "id")
    assert not request.model_extra or "mine" not in request.model_extra
    assert request.cache_salt == "s"
    assert "mine" in body


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_client_overtakes_no_other_in_the_engine(endpoint: str) -> None:
    body = {"model": "m", "messages": [MESSAGE], "prompt": "x", "priority": -100}
    assert parse_request(endpoint, body, "id").priority == 0


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("value", [32.5, -33, 1e308, -(2**63) - 1, "nan", "-inf"])
def test_a_length_penalty_that_no_float_can_hold_is_refused(endpoint: str, value: Any) -> None:
    body = {"model": "m", "messages": [MESSAGE], "prompt": "x", "use_beam_search": True, "length_penalty": value}
    with pytest.raises(OpenAIError, match="length_penalty") as refused:
        parse_request(endpoint, body, "id")
    assert (refused.value.status, refused.value.param) == (400, "length_penalty")


@pytest.mark.parametrize("value", [-32, 0.0, 32])
def test_a_length_penalty_that_passes_gives_every_sequence_a_score(value: float) -> None:
    from vllm.entrypoints.generate.beam_search.utils import get_beam_search_score

    body = {"model": "m", "prompt": "x", "use_beam_search": True, "length_penalty": value}
    penalty = parse_request("completions", body, "id").length_penalty
    assert isinstance(get_beam_search_score([1] * 10_000_000, -1e6, 0, penalty), float)


def test_logprobs_that_a_beam_search_does_not_have_are_refused() -> None:
    body = {"model": "m", "prompt": "x", "use_beam_search": True, "echo": True, "logprobs": 0}
    with pytest.raises(OpenAIError, match="leave out") as refused:
        parse_request("completions", body, "id")
    assert (refused.value.status, refused.value.param) == (400, "logprobs")
    for name in ("use_beam_search", "echo", "logprobs"):
        assert parse_request("completions", {key: value for key, value in body.items() if key != name}, "id")
