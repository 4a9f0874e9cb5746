"""What is taken out of an answer, and what stays."""

import json
from typing import Any

from tests.lab.compat.answer import Answer, events
from tests.lab.compat.normal import frames, joined, normal, structure

STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def chunk(**choice: Any) -> str:
    return f"data: {json.dumps({'id': 'chatcmpl-0123456789abcdef', 'choices': [{'index': 0, **choice}]})}\n\n"


def test_ids_and_times_are_taken_out_and_equal_ids_stay_equal() -> None:
    text = '{"id": "a-0123456789abcdef", "created": 5, "call": "call_fedcba9876543210", "of": "0123456789abcdef"}'
    assert normal(Answer(digest="", status=200, text=text)).body == {
        "id": "a-<id 0>",
        "created": "<time>",
        "call": "call_<id 1>",
        "of": "<id 0>",
    }


def test_plain_numbers_and_words_are_no_ids() -> None:
    text = '"seed 9223372036854775808 and a decade of facade"'
    assert normal(Answer(digest="", status=400, text=text)).body == text.strip('"')


def test_a_stream_that_is_cut_otherwise_has_the_same_normal_form() -> None:
    coarse = chunk(delta={"content": "ab"}) + chunk(delta={"content": "c"}, finish_reason="stop") + "data: [DONE]\n\n"
    fine = "".join(chunk(delta={"content": each}) for each in "ab") + coarse[coarse.index("\n\n") + 2 :]
    assert normal(Answer(digest="", status=200, headers=STREAM, text=coarse)) == normal(
        Answer(digest="", status=200, headers=STREAM, text=fine)
    )


def test_a_stream_without_its_end_has_another_normal_form() -> None:
    whole = chunk(delta={"content": "ab"}) + "data: [DONE]\n\n"
    cut = whole.replace("data: [DONE]\n\n", "")
    assert normal(Answer(digest="", status=200, headers=STREAM, text=whole)) != normal(
        Answer(digest="", status=200, headers=STREAM, text=cut)
    )


def test_choices_are_joined_each_for_itself_in_any_order() -> None:
    pieces = [("", {"choices": [{"index": index, "text": text}]}) for index, text in ((0, "a"), (1, "x"), (0, "b"))]
    assert joined(pieces) == [{"choices": [{"index": 0, "text": "ab"}, {"index": 1, "text": "x"}]}]
    assert frames(pieces) == frames([pieces[1], pieces[0], pieces[2]])


def test_events_of_another_type_are_not_joined() -> None:
    pieces = [("x.delta", {"type": "x.delta", "delta": "a"}), ("x.done", {"type": "x.done", "text": "a"})]
    assert joined(pieces) == [data for _, data in pieces]
    assert joined(("", data) for _, data in pieces) == [data for _, data in pieces]
    assert [kind["event"] for kind in frames(pieces)["stream"]] == ["x.delta", "x.done"]


def test_comments_of_a_stream_are_left_out() -> None:
    text = ': keep alive\n\nevent: e\ndata: {"a": 1}\n\n'
    assert normal(Answer(digest="", status=200, headers=STREAM, text=text)).body == [{"a": 1}]
    assert events(text)[-1] == ("e", {"a": 1})


def test_the_structure_of_a_list_is_that_of_its_elements_once() -> None:
    assert structure({"a": [1, 2, None], "b": [{"c": 1.0}, {"c": 2.0}]}) == {
        "a": ["int", "null"],
        "b": [{"c": "float"}],
    }


def test_the_address_of_a_server_and_the_hash_of_its_engine_are_left_out() -> None:
    text = '{"system_fingerprint": "vllm-0.29.0-0123abcd", "at": "http://127.0.0.1:8000/v1"}'
    expected = {"system_fingerprint": "vllm-0.29.0", "at": "<server>/v1"}
    assert normal(Answer(digest="", status=200, text=text)).body == expected


def test_a_token_without_text_has_no_logprobs_in_a_stream() -> None:
    piece = {"logprobs": {"content": [{"token": "", "logprob": -1.0}, {"token": "a", "logprob": -2.0}]}}
    assert joined([("", piece)]) == [{"logprobs": {"content": [{"token": "a", "logprob": -2.0}]}}]


def test_a_piece_that_ends_its_choice_may_have_text() -> None:
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    with_text = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}
    middle = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
    assert frames([("", last)]) == frames([("", with_text)]) != frames([("", middle)])
