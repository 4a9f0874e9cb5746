"""What becomes of a request over decode replicas that answer, fail, are full or stand still."""

import asyncio
import logging
from typing import Any

import pytest

from tests.deployments.endpoint.pools import Clock, Pools, done, event, know, lost, whole

pytestmark = pytest.mark.ray

# Stands for the frame that says that the first token has come; its class can be imported only inside a test.
FIRST = "first"


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_an_answer_that_is_lost_twice_comes_from_a_third_replica(clock: Clock) -> None:
    made = Pools(clock)
    pool = made.handles["a"]
    pool.next = [("a0", [lost()]), ("a1", [lost()]), ("a2", [whole()])]
    assert await made.answer() == [whole()]
    assert [request.routing.exclude for request in pool.requests] == [set(), {"a0"}, {"a0", "a1"}]
    assert [request.sent for request in pool.requests] == [None] * 3
    assert made.reports() == [("a0", "error", True), ("a1", "error", True), ("a2", "error", False)]
    assert made.is_idle()


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_a_request_is_tried_again_no_more_often_than_configured(clock: Clock, retries: int) -> None:
    made = Pools(clock, retries=retries)
    made.handles["a"].next = [(f"a{number}", [lost()]) for number in range(9)]
    (frame,) = await made.answer()
    assert (frame.status, frame.error) == (503, "replica_lost")
    assert len(made.handles["a"].requests) == 1 + retries


async def test_a_stream_that_is_lost_twice_goes_on_and_its_client_does_not_notice(clock: Clock) -> None:
    made = Pools(clock)
    pool = made.handles["a"]
    pool.next = [("a0", [event(1), event(2), lost()]), ("a1", [event(3)]), ("a2", [event(4), done()])]
    assert await made.texts() == [*(event(token).text for token in (1, 2, 3, 4)), done().text]
    assert [None if request.sent is None else request.sent.outputs for request in pool.requests] == [
        None,
        ((1,), (2,)),
        ((1,), (2,), (3,)),
    ]
    assert [stream.is_cancelled for stream in pool.streams] == [True, False, False]
    assert [replica for replica, by, has_failed in made.reports() if has_failed] == ["a0", "a1"]


@pytest.mark.parametrize("began", [[], [event(1)]], ids=["nothing was sent", "a stream had begun"])
async def test_a_lost_request_waits_for_room_elsewhere_and_another_is_refused(clock: Clock, began: list[Any]) -> None:
    from deployments.wire.messages import FULL, failure

    full = failure(429, "no room", FULL)
    made = Pools(clock, retries=1)
    pool = made.handles["a"]
    pool.next = [("a0", [full])]
    assert await made.answer() == [full]
    pool.next = [("a0", [*began, lost()]), ("a1", [full]), ("a1", [full]), ("a1", [event(2), done()])]
    assert await made.texts() == [*(one.text for one in began), event(2).text, done().text]
    assert not pool.next


async def test_a_request_that_one_group_lost_goes_to_another_and_back_if_all_have_lost_it(clock: Clock) -> None:
    made = Pools(clock, "ab")
    made.handles["a"].next = [("a0", [lost()]), ("a1", [whole()])]
    made.handles["b"].next = [("b0", [lost()])]
    assert await made.answer() == [whole()]
    assert [request.routing.exclude for request in (*made.handles["a"].requests, *made.handles["b"].requests)] == [
        set(),
        {"a0", "b0"},
        {"a0"},
    ]
    assert made.reports("b") == [("b0", "error", True)]


@pytest.mark.parametrize("said", [[], [RuntimeError("Unexpected error (StatusCode.UNKNOWN): ?")], [ValueError("?")]])
async def test_a_call_that_ends_without_an_answer_is_lost_and_tried_again(
    clock: Clock, said: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = Pools(clock)
    made.handles["a"].next = [("a0", said), ("a1", [whole()])]
    with caplog.at_level(logging.WARNING, "deployments.endpoint.relay"):
        assert await made.answer() == [whole()]
    assert made.reports() == [("a0", "error", True), ("a1", "error", False)]
    assert [type(error).__name__ in record.message for error, record in zip(said, caplog.records, strict=True)] == [
        True for _ in said
    ]


async def test_a_call_that_breaks_after_the_last_frame_is_not_lost(clock: Clock) -> None:
    for last in (whole(), done()):
        made = Pools(clock)
        made.handles["a"].next = [("a0", [last, lost()])]
        assert await made.answer() == [last]
        assert made.reports() == []


async def test_an_unreached_replica_is_reported_as_soon_as_another_answers(clock: Clock) -> None:
    made = Pools(clock)
    made.handles["a"].next = [("a1", [event(1), done()])]
    stream = made.frames()
    pool, remote = made.handles["a"], made.handles["a"].remote

    def unreached(request: Any) -> Any:
        request.routing.choice.unreached.add("a0")  # by the router
        return remote(request)

    pool.remote = unreached  # type: ignore[method-assign]
    await anext(stream)
    assert made.reports() == [("a0", "error", True)]
    assert [frame.text async for frame in stream] == [done().text]
    assert made.reports() == [("a0", "error", True), ("a1", "error", False)]


SLOW = [one for token in range(12) for one in (event(token), 2.0)]


async def test_a_slow_stream_counts_against_its_replica_however_it_ends(clock: Clock) -> None:
    made = Pools(clock, timeout_s=0.5)
    slow = ("a0", "pace", True)
    made.handles["a"].next = [("a0", [*SLOW, done()]), ("a0", [*SLOW, ...]), ("a0", [*SLOW, ...])]
    await made.answer()
    assert made.reports() == [("a0", "error", False), slow]
    assert (await made.answer())[-1].error == "timeout"
    assert made.reports()[2:] == [slow]
    stream = made.frames()
    for _ in range(12):
        await anext(stream)
    await stream.aclose()  # its client has left
    assert made.reports()[3:] == [slow]


async def test_a_long_stream_is_judged_before_it_ends(clock: Clock) -> None:
    made = Pools(clock)
    made.handles["a"].next = [("a0", [one for token in range(200) for one in (event(token), 2.0)])]
    stream = made.frames()
    for number in range(200):
        assert len(made.reports()) == (number > 64)
        await anext(stream)
    await stream.aclose()
    assert made.reports() == [("a0", "pace", True)]


async def test_a_slow_reader_and_an_answer_in_one_piece_show_no_pace(clock: Clock) -> None:
    made = Pools(clock)
    made.handles["a"].next = [("a0", [*map(event, range(50)), done()]), ("a0", [30.0, whole()])]
    async for _ in made.frames():
        clock.ahead_s += 2.0
    await made.answer()
    assert made.reports() == [("a0", "error", False)] * 2


async def test_a_client_that_leaves_is_no_sign_for_or_against_a_replica(clock: Clock) -> None:
    made = Pools(clock)
    made.handles["a"].next = [("a0", [event(1), ...])]
    stream = made.frames()
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stream.aclose()
    assert made.reports() == []
    assert made.handles["a"].streams[0].is_cancelled and made.is_idle()


@pytest.mark.parametrize(
    ("body", "said", "is_blamed"),
    [
        ({"stream": True}, [...], True),
        ({"stream": True}, [FIRST, ...], False),
        ({}, [...], False),  # an answer in one piece may take longer
        ({"stream": False}, [FIRST, ...], False),
    ],
)
async def test_only_a_stream_without_any_frame_until_its_deadline_counts_against_its_replica(
    clock: Clock, body: dict[str, Any], said: list[Any], is_blamed: bool
) -> None:
    from deployments.wire.messages import Frame

    made = Pools(clock, timeout_s=0.1)
    made.handles["a"].next = [("a0", [Frame("") if one is FIRST else one for one in said])]
    *_, frame = await made.answer(body)
    assert (frame.status, frame.error) == (408, "timeout")
    assert made.reports() == ([("a0", "error", True)] if is_blamed else [])


async def test_a_request_that_came_late_is_no_sign_against_its_replica(clock: Clock) -> None:
    made = Pools(clock, timeout_s=60.0)
    made.handles["a"].next = [("a0", [...])]
    *_, frame = await made.answer({"stream": True}, ago_s=59.9)
    assert frame.error == "timeout"
    assert made.reports() == []


async def test_a_request_that_finds_every_replica_full_is_refused_for_now(clock: Clock) -> None:
    from ray.serve.exceptions import BackPressureError

    from deployments.wire.messages import FULL

    made = Pools(clock)
    made.handles["a"].next = [("a0", [BackPressureError(num_queued_requests=1, max_queued_requests=1)])]
    (frame,) = await made.answer()
    assert (frame.status, frame.error) == (429, FULL)
    assert made.reports() == []


async def test_a_full_group_is_no_reason_to_refuse_while_another_has_room(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve.exceptions import BackPressureError

    from deployments.wire.messages import full

    know(monkeypatch, a=["a0", "a1"], b=["b0"])
    made = Pools(clock, "ab")
    made.handles["a"].next = [("a0", [full("no room")]), ("a1", [full("no room")])]
    made.handles["b"].next = [("b0", [whole()])]
    assert await made.answer() == [whole()]
    # The same if Serve refuses for all replicas of the group.
    made.handles["a"].next = [(None, [BackPressureError(num_queued_requests=1, max_queued_requests=1)])]
    made.handles["b"].next = [("b0", [whole()])]
    assert await made.answer() == [whole()]
    # If all are full, the error says so, and no replica was asked twice.
    made.handles["a"].next = [("a0", [full("no room")]), ("a1", [full("no room")])]
    made.handles["b"].next = [("b0", [full("no room")])]
    (frame,) = await made.answer()
    assert frame.status == 429 and not made.handles["a"].next and not made.handles["b"].next


async def test_a_group_that_was_not_asked_yet_may_have_room(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.wire.messages import full

    know(monkeypatch, a=["a0"])
    made = Pools(clock, "ab")
    made.handles["a"].next, made.handles["b"].next = [("a0", [full("no room")])], [("b0", [whole()])]
    assert await made.answer() == [whole()]


async def test_a_held_replica_does_not_count_as_room(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.wire.messages import full

    know(monkeypatch, a=["a0"])  # beside a1, which gets no requests
    made = Pools(clock)
    made.handles["a"].next = [("a0", [full("no room")])]
    (frame,) = await made.answer()
    assert frame.status == 429


async def test_a_replica_that_is_asked_again_is_not_asked_for_ever(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments.wire.messages import full

    know(monkeypatch, a=["a0", "a1"])
    made = Pools(clock)
    # The router goes back to the replica that it should leave out if it finds no other.
    made.handles["a"].next = [("a0", [full("no room")]), ("a0", [full("no room")])]
    (frame,) = await made.answer()
    assert frame.status == 429 and not made.handles["a"].next


async def test_a_replica_that_is_full_has_passed_its_probe(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.wire.messages import full

    know(monkeypatch, a=["a0", "a1"])
    made = Pools(clock)
    made.handles["a"].next = [("a0", [full("no room")]), ("a1", [whole()])]
    await made.answer()
    assert made.reports()[0] == ("a0", "error", False)  # though the relay leaves it before its last frame


async def test_a_request_that_finds_one_replica_full_is_sent_to_another_at_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments import metrics
    from deployments.wire.messages import full

    names = ["a0", "a1", "a2"]
    know(monkeypatch, a=names)
    made = Pools(clock, retries=1)
    pool, counted = made.handles["a"], metrics.RETRIED._value.get()
    pool.next = [("a0", [full("no room")]), ("a1", [whole()])]
    assert await made.answer() == [whole()]
    assert metrics.RETRIED._value.get() == counted  # a full replica has lost no request
    assert [request.routing.exclude for request in pool.requests] == [set(), {"a0"}]
    pool.next = [(name, [full("no room")]) for name in names]  # each is asked once
    (frame,) = await made.answer()
    assert frame.status == 429 and not pool.next
    assert not any(has_failed for *_, has_failed in made.reports())
    # Full replicas use up no try: the request is lost after them and is tried again.
    pool.next = [("a0", [full("no room")]), ("a1", [lost()]), ("a2", [whole()])]
    assert await made.answer() == [whole()]
    assert metrics.RETRIED._value.get() == counted + 1


async def test_an_answer_that_no_replica_can_send_is_an_error_of_the_request(clock: Clock) -> None:
    from grpc import StatusCode
    from grpc.aio import AioRpcError, Metadata

    def error(details: str) -> AioRpcError:
        return AioRpcError(StatusCode.RESOURCE_EXHAUSTED, Metadata(), Metadata(), details=details)

    made = Pools(clock)
    made.handles["a"].next = [("a0", [error("Received message larger than max (67108900 vs. 67108864)")])]
    (frame,) = await made.answer()
    assert (frame.status, frame.error) == (400, "invalid_request") and "fewer answers or logprobs" in frame.text
    assert made.reports() == []
    made.handles["a"].next = [("a0", [error("Bandwidth exhausted")]), ("a1", [whole()])]
    assert await made.answer() == [whole()]


async def test_what_the_engine_found_of_a_prompt_is_told_to_its_router(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments.metrics import PREFIX_EXPECTED, PREFIX_FALSE_HITS, PREFIX_FOUND, ROUTED
    from deployments.wire.messages import PromptRoute
    from router import known_pools
    from router.pool_router import ReplicaView
    from router.prompt_keys import PromptKeys

    told: list[Any] = []
    monkeypatch.setattr(known_pools, "note_false_hit", lambda *arguments: told.append(arguments))
    counters = [each.labels("decode") for each in (PREFIX_EXPECTED, PREFIX_FOUND, PREFIX_FALSE_HITS)]
    counters.append(ROUTED.labels("decode", "prefix"))
    before = [each._value.get() for each in counters]
    made = Pools(clock)
    pool = made.handles["a"]
    # The prompt has 400 tokens, and its text counts as 200.
    route = PromptRoute(path="local", reason="cached", input_tokens=400, cached_tokens=101, block_tokens=32)
    pool.next = [("a0", [event(1)._replace(route=route), done()])]
    request = made.request()
    request.pieces = PromptKeys(keys=(1, 2, 3), piece_tokens=50, tokens=200)
    views = [ReplicaView(replica_id=name, overlap_tokens=tokens) for name, tokens in (("a0", 100), ("a1", 50))]
    remote = pool.remote

    def routed(sent: Any) -> Any:
        sent.routing.choice.considered = tuple(views)
        return remote(sent)

    pool.remote = routed  # type: ignore[method-assign]
    assert [frame.text async for frame in made.relay.frames(request)] == [event(1).text, done().text]
    assert pool.requests[0].reports_route
    assert pool.requests[0].routing.prompt == request.pieces
    found = (101 + 31) * 200 // 400  # 66 of the router's tokens, where it expected 100
    assert told == [("decode:test_endpoint:a", views[0], request.pieces, found)]
    assert [each._value.get() - was for each, was in zip(counters, before, strict=True)] == [100, found, 1, 1]
    assert request.prompt_route == route
    assert request.chosen.runners_up == (views[1],)
