"""What admission is told of a body before a decode replica has looked at it."""

from typing import Any

import pytest

from deployments.asked import asked_of, check_types
from deployments.openai_errors import OpenAIError
from router.admission import Admission, AdmissionConfig, Asked, Priority

TEXT = "four" * 100  # 100 tokens


def asked(endpoint: str, most_prompt_tokens: int | None = None, **body: Any) -> Asked:
    return asked_of(endpoint, body, None, Priority.NORMAL, most_prompt_tokens)


@pytest.mark.parametrize(
    ("body", "most_output_tokens", "answers"),
    [
        ({"max_tokens": 5, "n": 3}, 5, 3),
        ({"max_tokens": 5, "max_completion_tokens": 1}, 5, 1),  # a completion has no such field
        ({"max_tokens": -(10**400), "n": -(10**400)}, None, 1),
        ({"max_tokens": 10**400, "n": 10**400}, 10**400, 10_000),
        ({"max_tokens": "5", "n": "3"}, None, 1),
        ({"max_tokens": 0, "n": 0}, None, 1),
        ({}, None, 1),
    ],
)
def test_admission_hears_only_numbers_that_make_sense(
    body: dict[str, Any], most_output_tokens: int | None, answers: int
) -> None:
    place = asked("completions", prompt=TEXT, **body)
    assert (place.tokens, place.most_output_tokens, place.answers) == (100, most_output_tokens, answers)
    admission = Admission(AdmissionConfig(ttft_s=1.0), replicas=1, prefill_replicas=1, now_s=0.0)
    assert admission.arrive(place, 0.0) is None
    assert admission.passed(0.0) == [place]


def test_a_chat_says_how_long_its_answer_may_be_by_either_name() -> None:
    assert asked("chat", max_tokens=5).most_output_tokens == 5
    assert asked("chat", max_tokens=5, max_completion_tokens=7).most_output_tokens == 7
    assert asked("chat", max_tokens=5, max_completion_tokens=None).most_output_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "tokens", "answers"),
    [
        (TEXT, 100, 2),
        ([1, 2, 3], 3, 2),
        ([TEXT, TEXT], 200, 4),
        ([[1, 2, 3], [4]], 4, 4),
        (["x"] * 1024, 1024, 2048),
        ("\u4e2d" * 100, 75, 2),  # three bytes each
        ("", 1, 2),
        ([], 1, 2),
        ([None, {"a": 1}], 2, 4),
        (None, 1, 2),
    ],
)
def test_all_prompts_of_a_completion_count(prompt: Any, tokens: int, answers: int) -> None:
    place = asked("completions", prompt=prompt, n=2, user="A" * 30_000)
    assert (place.tokens, place.answers) == (tokens, answers)


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        ([{"role": "user", "content": TEXT}], 104),
        ([{"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": TEXT}]}], 204),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "A" * 30_000}}]}], 4),
        ([{"role": "user", "content": "", "name": "A" * 30_000}], 4),
        ([{"role": "assistant", "content": None, "tool_calls": [{"arguments": TEXT}]}], 106),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": TEXT}]}], 104),
        ([{"role": "assistant", "content": [{"type": "thinking", "thinking": TEXT}]}], 104),
        ([{"role": "assistant", "content": [{"type": "whatever is next", "words": [TEXT]}]}], 104),
        ([{"role": "assistant", "content": "", "reasoning": TEXT}], 104),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "A" * 30_000}}]}], 4),
        ([{"role": "user", "content": TEXT}] * 10, 1040),
        (TEXT, 1),
        ([TEXT, None], 1),
        (None, 1),
    ],
)
def test_only_the_texts_of_a_chat_count(messages: Any, tokens: int) -> None:
    assert asked("chat", messages=messages, prompt=[0] * 5000, user="A" * 30_000).tokens == tokens


def test_tools_are_in_a_chats_prompt() -> None:
    assert asked("chat", messages=[], tools=[{"name": "four", "description": TEXT}]).tokens == 104
    assert asked("chat", messages=[], chat_template_kwargs={"four": TEXT}).tokens == 101


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"stream": 1}, "stream must be true or false (got 1)"),
        ({"stream": "true"}, "stream must be true or false (got 'true')"),
        ({"n": "16384"}, "n must be a whole number (got '16384')"),
        ({"n": 5000.0}, "n must be a whole number (got 5000.0)"),
        ({"n": True}, "n must be a whole number (got True)"),
    ],
)
def test_what_vllm_would_take_for_something_else_is_refused(body: dict[str, Any], said: str) -> None:
    with pytest.raises(OpenAIError) as refused:
        check_types(body)
    assert (refused.value.status, str(refused.value)) == (400, said)


@pytest.mark.parametrize(
    "body", [{}, {"stream": None, "n": None}, {"stream": False, "n": 2}, {"stream": True, "n": -1}]
)
def test_what_means_the_same_to_both_is_not(body: dict[str, Any]) -> None:
    check_types(body)


def test_no_prompt_counts_for_more_than_is_taken() -> None:
    assert asked("completions", 50, prompt=[TEXT, "x", TEXT]).tokens == 101
    assert asked("chat", 50, messages=[{"content": TEXT}]).tokens == 50
