"""The verdict on one answer."""

from typing import Any

import pytest

from tests.lab.drill.apis import Answer
from tests.lab.drill.verdict import VERDICTS, verdict


def answer(*ids: int, ended: bool = True, **fields: Any) -> Answer:
    return Answer(token_ids=list(ids), is_ended=ended, **fields)


@pytest.mark.parametrize(
    ("got", "what"),
    [
        (answer(1, 2, 3), None),
        (answer(1, 2), "truncated"),
        (answer(), "truncated"),
        (answer(1, 2, 2, 3), "duplicated"),
        (answer(1, 2, 4), "wrong_tokens"),
        (answer(2, 3), "wrong_tokens"),
        (answer(1, 2, 3, ended=False), "lost"),
        (answer(1, 2, ended=False, is_cut=True), "lost"),
        (answer(1, 4, ended=False), "wrong_tokens"),
    ],
)
def test_every_token_counts(got: Answer, what: str | None) -> None:
    assert verdict(got, [1, 2, 3], []) == what
    assert what is None or what in VERDICTS


@pytest.mark.parametrize(
    ("fronts_s", "span_s", "what"),
    [
        ([(95.0, 95.1)], (90.0, 95.5), "cut_at_front"),
        ([(80.0, 80.1), (95.0, 95.1)], (90.0, 96.0), "cut_at_front"),
        ([(95.0, 104.0)], (90.0, 104.0), "cut_at_front"),  # that took its time to end
        ([(95.0, 95.1)], (90.0, 110.0), "lost"),  # it lived on, on another front
        ([(95.0, 95.1)], (90.0, 94.0), "lost"),
        ([(80.0, 80.1), (102.0, 102.1)], (90.0, 101.0), "lost"),
        ([], (90.0, 95.5), "lost"),
    ],
)
def test_a_stream_is_cut_by_its_front_only_at_its_end(
    fronts_s: list[tuple[float, float]], span_s: tuple[float, float], what: str
) -> None:
    assert verdict(answer(1, ended=False, is_cut=True, span_s=span_s), [1, 2, 3], fronts_s) == what


def test_a_stream_with_a_wrong_token_is_wrong_even_if_a_front_cut_it() -> None:
    got = answer(7, ended=False, is_cut=True, span_s=(90.0, 95.5))
    assert verdict(got, [1, 2, 3], [(95.0, 95.1)]) == "wrong_tokens"


@pytest.mark.parametrize(
    ("text", "what"),
    [("a b c", None), ("a b", "truncated"), ("a b b c", "duplicated"), ("a x c", "wrong_tokens")],
)
def test_text_is_compared_as_token_ids_are(text: str, what: str | None) -> None:
    assert verdict(Answer(text=text, is_ended=True), "a b c", []) == what
