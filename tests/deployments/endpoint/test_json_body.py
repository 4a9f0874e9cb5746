"""Which bodies are refused before they are parsed, the memory that a body counts for, and what admission learns."""

import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from deployments.endpoint import json_body
from deployments.endpoint.json_body import check_content_type, json_object, place_of, prompt_tokens
from deployments.endpoint.requested_answer import requested_answer
from deployments.wire.openai_errors import OpenAIError
from router.admission import QueuedRequest
from router.admission_config import Priority


def charged(raw: bytes) -> int:
    taken: list[int] = []
    json_object(raw, taken.append)
    return sum(taken, start=len(raw))


def refused(raw: bytes) -> OpenAIError:
    with pytest.raises(OpenAIError) as refusal:
        json_object(raw, lambda count: None)
    assert refusal.value.status == 400
    return refusal.value


def many(thing: Callable[[int], str], count: int, ends: str = "[]") -> bytes:
    return ('{"x":' + ends[0] + ",".join(map(thing, range(count))) + ends[1] + "}").encode()


# Each is a body that would take long without a bound of its own.
HEAVY: dict[str, tuple[Callable[[int], str], str]] = {
    "lists": (lambda i: "[]", "[]"),
    "objects": (lambda i: '{"a":0}', "[]"),
    "texts": (lambda i: f'"k{i}"', "[]"),
    "keys": (lambda i: f'"k{i}":{i}', "{}"),
    "fractions": (lambda i: f"1.{i}", "[]"),
    "exponents": (lambda i: f"{i}e-310", "[]"),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_body_that_takes_long_to_parse_is_refused_before_it_is_parsed(name: str) -> None:
    thing, ends = HEAVY[name]
    raw = many(thing, 250_000, ends)
    assert "more than 150000" in refused(raw).message
    assert "more than 150000" in refused(raw[:-1]).message  # the broken JSON behind it was not read
    json_object(many(thing, 60_000, ends), lambda count: None)


def test_a_million_token_ids_pass_and_many_more_do_not() -> None:
    assert len(json_object(many(str, 1_000_000), lambda count: None)["x"]) == 1_000_000
    assert "1299999 values, more than 1200000" in refused(many(str, 1_300_000)).message


@pytest.mark.parametrize("number", ["9" * 25, "-" + "1" * 4000, "0." + "3" * 25, "1e" + "0" * 25])
def test_a_number_that_takes_long_to_read_is_refused(number: str) -> None:
    assert "more than 24 digits" in refused(f'{{"x": {number}}}'.encode()).message


@pytest.mark.parametrize("number", ["9" * 24, "1e999", "0.00012345678901234567", "-1.7976931348623157e308"])
def test_a_number_that_a_client_may_send_passes(number: str) -> None:
    assert json_object(f'{{"x": {number}}}'.encode(), lambda count: None) == {"x": json.loads(number)}


@pytest.mark.parametrize("text", [",[{" * 300_000, "1.e" * 300_000, "0" * 50, '\\"[' * 300_000, "\\", '"', "\\" * 999])
def test_values_inside_texts_are_not_counted(text: str) -> None:
    body = {"a\\": text, "b": text}
    assert json_object(json.dumps(body).encode(), lambda count: None) == body


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_body_may_be_nested_99_deep(opening: str) -> None:
    closing = "]" if opening == "[" else "}"

    def nested(depth: int) -> bytes:
        return f'{{"x":{opening * depth}0{closing * depth}}}'.encode()

    json_object(nested(99), lambda count: None)
    assert "more than 100 deep" in refused(nested(100)).message
    assert "more than 100 deep" in refused(nested(60_000)).message


@pytest.mark.parametrize("half", [r"\ud800", r"a\udFFFb", r"\ud800\ud800", r"\udc00\ud800"])
def test_half_a_surrogate_pair_is_refused(half: str) -> None:
    for raw in (f'{{"x":"{half}"}}', f'{{"{half}":1}}'):
        assert "half a surrogate pair" in refused(raw.encode()).message
    assert json_object(rb'{"x":"\ud83d\ude00"}', lambda count: None) == {"x": "😀"}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b'"text"', "got str"),
        (b"[" * 100, "not valid JSON"),
        (b"[" * 100_000, "nested more than 100 deep"),
        (b"]" * 100_000, "not valid JSON"),
        (b'{"x":"\xff"}', "byte 6 is 0xff"),
        (b'{"x":"\xed\xa0\x80"}', "byte 6 is 0xed"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_with_status_400(raw: bytes, said: str) -> None:
    assert said in refused(raw).message


@pytest.mark.parametrize(
    "raw",
    [
        many(lambda i: str(i + 300), 50_000),
        many(lambda i: '{"a":0}', 10_000),
        many(lambda i: f'{{"k{i}":{i + 300}}}', 10_000),
        many(lambda i: f'"k{i}":{i + 300}', 40_000, "{}"),
        many(lambda i: f'"k{i}"', 20_000),
        many(lambda i: "[]", 20_000),
        many(lambda i: "[1.5]", 10_000),
        many(lambda i: f'{{"a":{i + 300},"b":{i + 300},"c":{i + 300},"d":{i + 300},"e":{i + 300},"f":1}}', 5_000),
        b'{"x":"' + b"a" * 1_000_000 + "😀".encode() + b'"}',
        b'{"x":"' + b"a" * 1_000_000 + rb"\ud83d\ude00" + b'"}',
        b'{"x":"' + b"a" * 1_000_000 + rb"\u8a9e" + b'"}',
        b'{"x":"' + "語".encode() * 300_000 + b'"}',
    ],
)
def test_a_body_counts_for_the_memory_that_it_takes_and_not_for_much_more(raw: bytes) -> None:
    gc.collect()
    tracemalloc.start()
    body = json_object(raw, lambda count: None)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert body
    # The call itself holds up to 1 KiB.
    assert held_bytes - 1024 <= charged(raw) <= max(4 * held_bytes, len(raw))


def test_the_memory_of_a_body_counts_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullError(Exception):
        pass

    def full(count: int) -> None:
        raise FullError

    monkeypatch.setattr(json_body.json, "loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(FullError):
        json_object(b'{"x":[{}]}', full)


def test_an_ordinary_body_counts_for_about_its_length() -> None:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x, [y] " * 1000}], "n": 1}).encode()
    assert len(raw) <= charged(raw) < len(raw) + 3000


def test_the_heaviest_bodies_are_parsed_in_less_than_a_second() -> None:
    # 0.1 s and less on a core of its own; much longer without the bounds.
    for raw in (
        many(lambda i: f'"{i:x>100}":{i}', 140_000, "{}"),
        many(lambda i: "0.123456789012345678901234", 140_000),
        many(lambda i: "9" * 24, 1_140_000),
    ):
        began_s = time.thread_time()
        json_object(raw, lambda count: None)
        assert time.thread_time() - began_s < 1.0


@pytest.mark.parametrize("value", ["application/json", "application/json; charset=utf-8", "Application/JSON;x"])
def test_a_body_that_is_sent_as_json_passes(value: str) -> None:
    check_content_type(value)


@pytest.mark.parametrize(
    "value", [None, "", "text/plain", "text/plain;application/json", "application/x-www-form-urlencoded"]
)
def test_a_content_type_that_any_web_page_may_send_is_refused(value: str | None) -> None:
    with pytest.raises(OpenAIError, match="send the body as application/json") as refusal:
        check_content_type(value)
    assert refusal.value.status == 415


TEXT = "four" * 100  # 100 tokens


def asked(endpoint: str, most_prompt_tokens: int | None = None, **body: Any) -> QueuedRequest:
    answer, prompts = requested_answer(endpoint, body), prompt_tokens(endpoint, body)
    return place_of(answer, prompts, None, Priority.NORMAL, most_prompt_tokens)


def test_a_prompt_of_token_ids_counts_in_place_of_a_chats_messages() -> None:
    ids = {"kv_transfer_params": {"prompt_token_ids": [1] * 70}}
    assert asked("chat", messages=[{"content": TEXT}], **ids).tokens == 70
    assert asked("completions", prompt=TEXT, **ids).tokens == 100
    for none in ({"prompt_token_ids": []}, {"prompt_token_ids": "x" * 999}, {}, "x", None):
        assert asked("chat", messages=[{"content": TEXT}], kv_transfer_params=none).tokens == 104


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


def test_no_prompt_counts_for_more_than_the_longest_allowed_one() -> None:
    assert asked("completions", 50, prompt=[TEXT, "x", TEXT]).tokens == 101
    assert asked("chat", 50, messages=[{"content": TEXT}]).tokens == 50
