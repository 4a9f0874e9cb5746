"""The endpoint reads the fields that admission needs as vLLM's own request models would convert them."""

from typing import Any

import pytest

from deployments.endpoint.json_body import place_of
from deployments.endpoint.requested_answer import requested_answer
from deployments.wire.openai_errors import OpenAIError
from router.admission import Admission
from router.admission_config import AdmissionConfig, Priority

# JSON values near those that a field may have.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 10**30, 1.0, 0.0, 2.5, float("inf"), float("nan"), [], {}, [1]),
    *("", "x", "0", "1", "true", "True", "off", "yes", "y", "3", " 3 ", "+3", "1_0", "3.0", "3.5", "9" * 5000),
]
PROMPT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}


@pytest.mark.vllm
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("field", ["model", "stream", "n", "max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_a_field_has_the_value_that_vllm_gives_it(endpoint: str, field: str, value: Any) -> None:
    from deployments.replicas.openai_layer import parse_request, requested_max_tokens

    body = {**PROMPT, field: value}
    try:
        parsed = parse_request(endpoint, body, "id")
    except OpenAIError as refused:
        if endpoint == "completions" and field == "n" and value is None:
            return  # decode refuses it
        if field == "n" and refused.message.endswith("ask for at most 1024"):
            return  # a limit of Tandem's own, checked on decode
        with pytest.raises(OpenAIError) as refusal:
            requested_answer(endpoint, body)
        assert (refusal.value.status, refusal.value.param, refusal.value.message) == (400, field, refused.message)
        return
    answer = requested_answer(endpoint, body)
    assert (answer.model, bool(answer.stream), answer.n or 1) == (parsed.model, bool(parsed.stream), parsed.n or 1)
    limit = requested_max_tokens(parsed)
    if field in ("max_tokens", "max_completion_tokens") and limit is not None and limit > 0 and value is not None:
        assert answer.most_output_tokens == limit or (endpoint == "completions" and field == "max_completion_tokens")


@pytest.mark.parametrize(
    ("body", "most_output_tokens", "answers"),
    [
        ({"max_tokens": 5, "n": 3}, 5, 3),
        ({"max_tokens": "5", "n": 3.0}, 5, 3),
        ({"max_tokens": 5, "max_completion_tokens": 1}, 5, 1),  # a completion has no such field
        ({"max_tokens": -(10**400), "n": -(10**400)}, None, 1),
        ({"max_tokens": 10**400, "n": 10**400}, 10**400, 10_000),
        ({"max_tokens": 0, "n": 0}, 1, 1),  # with echo, the engine computes one token
        ({"max_tokens": None, "n": None}, None, 1),
        ({}, None, 1),
    ],
)
def test_admission_gets_only_valid_numbers(body: dict[str, Any], most_output_tokens: int | None, answers: int) -> None:
    place = place_of(requested_answer("completions", body), [100], None, Priority.NORMAL, None)
    assert (place.tokens, place.most_output_tokens, place.answers) == (100, most_output_tokens, answers)
    admission = Admission(AdmissionConfig(ttft_s=1.0), replicas=1, prefill_replicas=1, now_s=0.0)
    assert admission.arrive(place, 0.0) is None
    assert admission.passed(0.0) == [place]


def test_either_name_limits_the_length_of_a_chats_answer() -> None:
    def limit(**body: Any) -> int | None:
        return requested_answer("chat", body).most_output_tokens

    assert limit(max_tokens=5) == 5
    assert limit(max_tokens=5, max_completion_tokens=7) == 7
    assert limit(max_tokens=5, max_completion_tokens=None) == 5
    assert limit(max_tokens=5, max_completion_tokens=-1) is None  # decode refuses it


@pytest.mark.parametrize(
    ("value", "is_stream"), [("true", True), (1, True), ("off", False), (0.0, False), (None, False)]
)
def test_admission_knows_whether_the_answer_is_a_stream(value: Any, is_stream: bool) -> None:
    place = place_of(requested_answer("chat", {"stream": value}), [1], None, Priority.NORMAL, None)
    assert place.is_stream is is_stream


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"stream": "maybe"}, "stream: Input should be a valid boolean, unable to interpret input (bool_parsing"),
        ({"n": 2.5}, "n: Input should be a valid integer, got a number with a fractional part (int_from_float"),
        ({"model": 3}, "model: Input should be a valid string (string_type"),
    ],
)
def test_a_value_that_vllm_cannot_convert_is_refused_before_admission(body: dict[str, Any], fault: str) -> None:
    with pytest.raises(OpenAIError) as refused:
        requested_answer("completions", body)
    ((field, value),) = body.items()
    assert (refused.value.status, refused.value.param) == (400, field)
    assert refused.value.message == f"{fault}, got {value!r})"
