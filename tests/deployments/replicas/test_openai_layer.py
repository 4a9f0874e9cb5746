"""Which fields and values of a body are refused before vLLM reads it."""

import json
from pickle import UnpicklingError
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


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat", {"functions": [{"name": "f"}], "function_call": "auto", "web_search_options": {}}),
        ("chat", {"audio": {"voice": "a"}, "modalities": ["text", "audio"]}),
        ("completions", {"best_of": 2, "n": 2}),
    ],
)
def test_fields_of_openai_that_vllm_ignores_are_ignored(endpoint: str, fields: dict[str, Any]) -> None:
    request = parse_request(endpoint, {"model": "m", "messages": [MESSAGE], "prompt": "x", **fields}, "id")
    assert request.n == fields.get("n", 1)
    assert not (fields.keys() - {"n"}) & (request.model_extra or {}).keys()


@pytest.mark.parametrize("n", [16_384, "16384", 16_384.0])
def test_answers_are_counted_after_vllm_has_converted_their_number(n: Any) -> None:
    with pytest.raises(OpenAIError, match="at most 1024"):
        parse_request("completions", {"prompt": "x", "n": n}, "id")


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("seed", -(2**63) - 1, "greater_than_equal"),
        ("temperature", "hot", "float_parsing"),
        ("stop", 3, "string_type"),
        ("cache_salt", "", "string_too_short"),
    ],
)
def test_the_refusal_of_a_value_has_pydantics_name_of_the_fault(field: str, value: Any, fault: str) -> None:
    with pytest.raises(OpenAIError) as refused:
        parse_request("completions", {"prompt": "x", field: value}, "id")
    assert (refused.value.status, refused.value.param) == (400, field)
    assert f"({fault}, got {value!r:.100})" in refused.value.message


HANDOFF = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [1]}


def test_a_chat_may_give_its_prompt_as_token_ids_and_no_other_transfer_parameter() -> None:
    body = {"messages": [MESSAGE], "prompt": "x", "kv_transfer_params": {**HANDOFF, "prompt_token_ids": [301, 302]}}
    assert parse_request("chat", body, "id").kv_transfer_params == {"prompt_token_ids": [301, 302]}
    assert parse_request("completions", body, "id").kv_transfer_params is None
    for without in (HANDOFF, {**HANDOFF, "prompt_token_ids": []}, {"prompt_token_ids": None}, "x", [1]):
        assert parse_request("chat", {**body, "kv_transfer_params": without}, "id").kv_transfer_params is None


@pytest.mark.parametrize("ids", ["abc", [-1], ["301"], [301, True], [1.0], {"a": 1}, 7, [[301]]])
def test_a_chats_token_ids_that_would_break_the_engine_are_refused(ids: Any) -> None:
    with pytest.raises(OpenAIError, match=r"kv_transfer_params\.prompt_token_ids: ") as refused:
        parse_request("chat", {"messages": [MESSAGE], "kv_transfer_params": {"prompt_token_ids": ids}}, "id")
    assert (refused.value.status, refused.value.param) == (400, "kv_transfer_params")


def test_no_reference_to_ids_is_left_in_what_the_engine_gets() -> None:
    """vLLM's renderer takes the ids out; the engine's parameters then have no entry for the handoff."""
    from vllm.renderers.online_renderer import _reused_prompt_token_ids

    body = {"messages": [MESSAGE], "kv_transfer_params": {**HANDOFF, "prompt_token_ids": [301]}}
    request = parse_request("chat", body, "id")
    assert _reused_prompt_token_ids(request) == [301]
    assert not (request.to_sampling_params(1, {}).extra_args or {}).get("kv_transfer_params")


@pytest.mark.parametrize("error", [UnpicklingError("Unsupported operand 0"), EOFError(), RuntimeError("no zip file")])
def test_bytes_that_are_no_tensor_are_the_clients_fault(error: Exception) -> None:
    from deployments.replicas.openai_layer import failure_frame

    frame = failure_frame(error, "id", ("model", "prompt_embeds"))
    assert (frame.status, frame.error) == (400, "invalid_request")
    assert json.loads(frame.text)["error"]["param"] == "prompt_embeds"
    assert failure_frame(error, "id", ("model", "prompt")).status == 500


def test_the_name_of_an_image_does_not_reach_vllm() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:x"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [{**part, "uuid": "mine"}]}]}
    assert list(parse_request("chat", body, "id").messages[0]["content"]) == [part]
