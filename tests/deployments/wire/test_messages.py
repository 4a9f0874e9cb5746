"""A stream that another replica continues, and the messages between decode and prefill."""

import pickle

import pytest

from deployments.wire.messages import (
    Frame,
    NotResumableError,
    PrefillRequest,
    PrefillResult,
    SentAgain,
    SentFrames,
    Usage,
)

FRAMES = [
    'data: {"id":"r","created":100,"text":""}\n\n',
    'data: {"id":"r","created":100,"text":"a \\"created\\":7"}\n\n',
    'data: {"id":"r","created":100,"text":"b"}\n\n',
]


def again(frame: str) -> str:
    return frame.replace('"created":100', '"created":250')


def sent_of(frames: list[str]) -> SentFrames:
    sent = SentFrames()
    for number, frame in enumerate(frames):
        sent.add(frame, [(number,)])
    return sent


def test_a_stream_without_a_sent_frame_cannot_be_continued() -> None:
    assert SentFrames().sent() is None


@pytest.mark.parametrize("at", [1, 2, 3])
def test_frames_that_the_client_has_are_dropped_and_the_rest_have_the_first_answers_time(at: int) -> None:
    sent = sent_of(FRAMES[:at]).sent()
    assert sent is not None and sent.frames == at and sent.outputs == tuple((n,) for n in range(at))
    gate = SentAgain(sent)
    assert [gate.new_text(again(frame)) for frame in FRAMES] == [None] * at + FRAMES[at:]
    gate.check_end()


def test_a_second_answer_that_begins_otherwise_is_an_error() -> None:
    sent = sent_of(FRAMES[:2]).sent()
    assert sent is not None
    gate = SentAgain(sent)
    assert gate.new_text(again(FRAMES[0])) is None
    with pytest.raises(NotResumableError, match="began otherwise"):
        gate.new_text(again(FRAMES[2]))


def test_a_second_answer_that_is_shorter_than_the_sent_frames_is_an_error() -> None:
    sent = sent_of(FRAMES).sent()
    assert sent is not None
    gate = SentAgain(sent)
    gate.new_text(again(FRAMES[0]))
    with pytest.raises(NotResumableError, match="shorter"):
        gate.check_end()


def test_after_a_second_loss_the_stream_continues_after_all_sent_frames() -> None:
    sent = sent_of(FRAMES[:1])
    first = sent.sent()
    assert first is not None
    gate = SentAgain(first)
    assert gate.new_text(again(FRAMES[0])) is None
    text = gate.new_text(again(FRAMES[1]))
    assert text is not None
    sent.add(text, [(1,)])
    assert sent.sent() == sent_of(FRAMES[:2]).sent()


def test_the_latest_usage_that_a_frame_reported_is_in_the_record() -> None:
    first, last = Usage(cached_tokens=0), Usage(cached_tokens=0, created_tokens=96)
    sent, records = SentFrames(), []
    for frame, usage in zip(FRAMES, (first, last, None), strict=True):
        sent.add(frame, [], usage)
        records.append(sent.sent())
    assert [record.usage for record in records if record is not None] == [first, last, last]


def test_prefill_requests_and_results_survive_the_way_between_processes() -> None:
    request = PrefillRequest(request_id="r", token_ids=[5, 6], cache_salt="s", priority=2)
    result = PrefillResult(
        kv_transfer_params={"remote_port": 20000}, answered_at_s=1.0, backlog_tokens=7, replica_id="p0"
    )
    assert pickle.loads(pickle.dumps(request)) == request
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (Frame(""), True),  # prefill has the first token
        (Frame('{"data": []}'), True),  # the vectors of a pooling model
        (Frame("data: {}\n\n"), False),  # an event may come before the first token
        (Frame("", ends=True), False),
        (Frame('{"error": {}}', status=400, error="invalid_request"), False),
    ],
)
def test_a_frame_without_tokens_may_show_that_the_prompt_is_computed(frame: Frame, expected: bool) -> None:
    assert frame.reports_first is expected
