"""What of a body is refused before it is parsed, and what it is charged for."""

import gc
import json
import time
import tracemalloc
from collections.abc import Callable

import pytest

from deployments import json_body
from deployments.json_body import check_content_type, json_object
from deployments.openai_errors import OpenAIError


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
def test_what_takes_long_to_parse_is_refused_before_it_is_parsed(name: str) -> None:
    thing, ends = HEAVY[name]
    raw = many(thing, 250_000, ends)
    assert "more than 150000" in refused(raw).message
    assert "more than 150000" in refused(raw[:-1]).message  # broken JSON, which nobody noticed
    json_object(many(thing, 60_000, ends), lambda count: None)


def test_a_million_token_ids_pass_and_many_more_do_not() -> None:
    assert len(json_object(many(str, 1_000_000), lambda count: None)["x"]) == 1_000_000
    assert "1299999 values, more than 1200000" in refused(many(str, 1_300_000)).message


@pytest.mark.parametrize("number", ["9" * 25, "-" + "1" * 4000, "0." + "3" * 25, "1e" + "0" * 25])
def test_a_number_that_takes_long_to_read_is_refused(number: str) -> None:
    assert "more than 24 digits" in refused(f'{{"x": {number}}}'.encode()).message


@pytest.mark.parametrize("number", ["9" * 24, "1e999", "0.00012345678901234567", "-1.7976931348623157e308"])
def test_a_number_that_somebody_may_send_passes(number: str) -> None:
    assert json_object(f'{{"x": {number}}}'.encode(), lambda count: None) == {"x": json.loads(number)}


@pytest.mark.parametrize("text", [",[{" * 300_000, "1.e" * 300_000, "0" * 50, '\\"[' * 300_000, "\\", '"', "\\" * 999])
def test_what_stands_in_texts_is_not_counted(text: str) -> None:
    body = {"a\\": text, "b": text}
    assert json_object(json.dumps(body).encode(), lambda count: None) == body


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_body_is_no_deeper_than_can_be_sent_on(opening: str) -> None:
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
def test_what_is_no_json_object_is_a_400(raw: bytes, said: str) -> None:
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
def test_a_body_is_charged_for_all_that_it_takes_and_not_for_much_more(raw: bytes) -> None:
    gc.collect()
    tracemalloc.start()
    body = json_object(raw, lambda count: None)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert body
    # A little is of the call itself.
    assert held_bytes - 1024 <= charged(raw) <= max(4 * held_bytes, len(raw))


def test_a_body_is_charged_for_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullError(Exception):
        pass

    def full(count: int) -> None:
        raise FullError

    monkeypatch.setattr(json_body.json, "loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(FullError):
        json_object(b'{"x":[{}]}', full)


def test_an_ordinary_body_is_charged_about_its_length() -> None:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x, [y] " * 1000}], "n": 1}).encode()
    assert len(raw) <= charged(raw) < len(raw) + 3000


def test_the_heaviest_bodies_are_parsed_in_moments() -> None:
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
def test_what_says_that_it_is_json_passes(value: str) -> None:
    check_content_type(value)


@pytest.mark.parametrize(
    "value", [None, "", "text/plain", "text/plain;application/json", "application/x-www-form-urlencoded"]
)
def test_what_a_page_of_another_site_may_send_unasked_is_refused(value: str | None) -> None:
    with pytest.raises(OpenAIError, match="send the body as application/json") as refusal:
        check_content_type(value)
    assert refusal.value.status == 415
