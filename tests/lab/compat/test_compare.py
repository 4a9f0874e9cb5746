"""What counts as a difference, and which rule explains one."""

from typing import Any

from tests.lab.compat.compare import LOGPROB_TOLERANCE, Difference, _holds_in_order, differences
from tests.lab.compat.expected import Expected, rule_of
from tests.lab.compat.normal import Normal
from tests.lab.compat.shape import bare


def answer(body: Any, status: int = 200, **headers: str) -> Normal:
    return Normal(status=status, headers=headers, body=body, frames={})


def found(vllm: Any, tandem: Any, **others: Any) -> list[tuple[str, str]]:
    return [(each.kind, each.where) for each in differences(answer(vllm), answer(tandem), **others)]


def test_equal_answers_have_no_difference() -> None:
    assert found({"a": [1, "x", None]}, {"a": [1, "x", None]}) == []


def test_keys_types_and_values_are_compared_at_every_depth() -> None:
    both = found({"a": [{"b": 1}]}, {"a": [{"c": 1}]})
    assert sorted(both) == [("extra", "body.a[].c"), ("missing", "body.a[].b")]
    assert found({"a": 1}, {"a": 1.0}) == [("type", "body.a")]
    assert found({"a": 1}, {"a": True}) == [("type", "body.a")]
    assert found({"a": "x"}, {"a": "y"}) == [("value", "body.a")]
    assert found([1, 2], [1]) == [("value", "body")]


def test_logprobs_alone_have_a_tolerance() -> None:
    near = -1.0 + LOGPROB_TOLERANCE / 2
    assert found({"logprob": -1.0}, {"logprob": near}) == []
    assert found({"logprob": -1.0}, {"logprob": near + LOGPROB_TOLERANCE}) == [("value", "body.logprob")]
    assert found({"score": -1.0}, {"score": near}) == [("value", "body.score")]


def test_values_that_are_left_to_chance_have_only_their_types_compared() -> None:
    assert found({"a": "x"}, {"a": "y"}, is_determined=False) == []
    assert found({"a": "x"}, {"a": 1}, is_determined=False) == [("value", "body.a")]


def test_of_two_statuses_only_the_status_is_told() -> None:
    vllm, tandem = answer({"error": {"message": "no"}}, 404, allow="GET"), answer({})
    assert differences(vllm, tandem) == [Difference(kind="status", where="", vllm="404 no", tandem="200 {}")]


def test_headers_are_compared_by_name_and_value() -> None:
    both = differences(answer(1, a="x", b="y"), answer(1, a="z"))
    assert [(each.where, each.vllm, each.tandem) for each in both] == [("a", "x", "z"), ("b", "y", "")]


def test_frames_tell_the_first_kind_of_event_that_differs() -> None:
    def stream(*kinds: str) -> Normal:
        frames = {"stream": [{"event": kind, "data": {}} for kind in kinds]}
        return Normal(status=200, headers={}, body=[], frames=frames)

    (one,) = differences(stream("a", "b", "c"), stream("a", "c"))
    assert (one.kind, one.where) == ("frame", "stream, kind 1 of its events")


def test_a_rule_explains_what_all_its_patterns_match() -> None:
    rule = Expected(reason="r", kind="header", where="x-.*", route="/a", vllm="", shape="GET .*")
    difference = Difference(kind="header", where="x-a", tandem="1")
    assert rule_of(bare("GET /a", "GET", "/a"), difference, [rule]) == rule
    assert rule_of(bare("PUT /a", "PUT", "/a"), difference, [rule]) is None
    assert rule_of(bare("GET /b", "GET", "/b"), difference, [rule]) is None
    assert rule_of(bare("GET /a", "GET", "/a"), Difference(kind="header", where="x-a", vllm="2"), [rule]) is None


def test_an_answer_that_is_cut_off_differs_from_a_whole_one() -> None:
    cut = Normal(status=200, headers={}, body="x", frames={}, is_cut=True)
    (one,) = differences(cut, answer("x"))
    assert (one.kind, one.vllm, one.tandem) == ("cut", "cut off", "whole")


def test_an_answer_that_waited_for_a_time_out_is_slow() -> None:
    slow = Normal(status=200, headers={}, body="x", frames={}, seconds=30.1)
    assert [each.kind for each in differences(answer("x"), slow)] == ["slow"]
    assert differences(slow, answer("x")) == []


def test_one_list_may_lack_pieces_of_the_other_and_none_may_differ() -> None:
    assert _holds_in_order(["a", "c"], ["a", "b", "c"]) and _holds_in_order(["a", "b", "c"], ["a", "c"])
    assert not _holds_in_order(["c", "a"], ["a", "b", "c"])
    assert not _holds_in_order(["a", "x"], ["a", "b", "c"])
    assert not _holds_in_order([], ["a"])
