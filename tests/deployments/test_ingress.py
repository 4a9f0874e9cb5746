"""What the endpoint makes of a body, and of what decode replicas answer or do not; Serve's handles are fakes."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from router.groups import GroupLoad

pytestmark = pytest.mark.ray


# For a replica's word that the first token has come, whose class only these tests may import.
FIRST = "first"


class Clock:
    """The machine's, which replicas hurry on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.time = time.time

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


class Stream:
    """What a replica answers: frames, seconds before the next one, an error, or ``...`` for nothing any more."""

    def __init__(self, said: list[Any], clock: Clock) -> None:
        self._said, self._clock = said, clock
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for one in self._said:
            if isinstance(one, float):
                self._clock.ahead_s += one
            elif isinstance(one, Exception):
                raise one
            elif one is ...:
                await asyncio.sleep(60.0)
            else:
                yield one

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """Serve's handle of one pool: each request goes to the replica that is next, which answers so much."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.next: list[tuple[str, list[Any]]] = []
        self.asked: list[Any] = []
        self.streams: list[Stream] = []

    def remote(self, asked: Any) -> Stream:
        asked.routed_to, said = self.next.pop(0)
        self.asked.append(replace(asked))
        self.streams.append(Stream(said, self.clock))
        return self.streams[-1]


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from deployments.ingress import Ingress

    clock = Clock()
    monkeypatch.setitem(Ingress._attempt.__globals__, "time", clock)  # Serve's copy of them
    return clock


def endpoint(clock: Clock, groups: str = "a", *, retries: int = 2, timeout_s: float = 60.0) -> Any:
    """An endpoint without Serve, one pool a group; replicas are named after theirs."""
    from deployments.ingress import Ingress
    from deployments.waits import Waits
    from router.outliers import OutlierConfig
    from router.ray_health import HealthFeed

    class Endpoint(Ingress):  # type: ignore[misc]
        def __del__(self) -> None:
            """Serve awaits it."""

    made = Endpoint.__new__(Endpoint)
    made._groups = {name: Handle(clock) for name in groups}
    made._decode_replicas = dict.fromkeys(groups, 1)
    made._loads = {name: GroupLoad() for name in groups}
    made._membership, made._waking = None, 0
    made._rng = SimpleNamespace(random=lambda: 0.0)  # equals in the groups' order
    made._retries, made._timeout_s = retries, timeout_s
    made._services = {
        "m": SimpleNamespace(
            model_id="m",
            groups=tuple(groups),
            gate=SimpleNamespace(has_objective=False),
            slow_tpot_s=OutlierConfig().slow_tpot_s,
            most_prompt_tokens=None,
            can_sleep=False,
        )
    }
    made._health = {name: HealthFeed("nobody", f"decode:test_ingress:{name}", OutlierConfig()) for name in groups}
    for health in made._health.values():
        health._suspects = frozenset(f"{name}{number}" for name in groups for number in range(9))  # all is news
        for _ in range(20):
            health._usual.is_slow(0.02, OutlierConfig().slow_tpot_s)
    made._waits = Waits(lambda *_: True, lambda pool: False)
    return made


def event(token: int) -> Any:
    from deployments.frames import Frame

    return Frame(f"data: {token}\n\n", outputs=((token,),), tokens=1)


def whole(tokens: int = 20) -> Any:
    from deployments.frames import Frame

    return Frame("{}", outputs=(tuple(range(tokens)),), tokens=tokens)


def done() -> Any:
    from deployments.frames import DONE, Frame

    return Frame(DONE)


def lost() -> Exception:
    from ray.exceptions import RayError

    return RayError("gone")


def frames(made: Any, body: dict[str, Any] | None = None, ago_s: float = 0.0) -> Any:
    return made._frames(made._services["m"], "completions", body or {}, "r", time.monotonic() - ago_s, 7)


async def texts(made: Any) -> list[str]:
    return [frame.text for frame in await answer(made)]


async def answer(made: Any, body: dict[str, Any] | None = None, ago_s: float = 0.0) -> list[Any]:
    async with asyncio.timeout(10.0):
        return [frame async for frame in frames(made, body, ago_s)]


def seen(made: Any, group: str = "a") -> list[tuple[str, str, bool]]:
    """What the endpoint would tell the health board, in its order: of whom, by what, and whether it failed."""
    return [(one.replica_id, str(one.by), one.has_failed) for one in made._health[group]._seen]


async def test_an_answer_that_is_lost_twice_comes_from_a_third_replica(clock: Clock) -> None:
    made = endpoint(clock)
    pool = made._groups["a"]
    pool.next = [("a0", [lost()]), ("a1", [lost()]), ("a2", [whole()])]
    assert await answer(made) == [whole()]
    assert [asked.exclude for asked in pool.asked] == [set(), {"a0"}, {"a0", "a1"}]
    assert [asked.sent for asked in pool.asked] == [None] * 3
    assert seen(made) == [("a0", "error", True), ("a1", "error", True), ("a2", "error", False)]
    assert made._loads == {"a": GroupLoad()} and not made._waits._waits


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_a_request_ends_no_more_replicas_than_it_may(clock: Clock, retries: int) -> None:
    made = endpoint(clock, retries=retries)
    made._groups["a"].next = [(f"a{number}", [lost()]) for number in range(9)]
    (frame,) = await answer(made)
    assert (frame.status, frame.error) == (503, "replica_lost")
    assert len(made._groups["a"].asked) == 1 + retries


async def test_a_stream_that_is_lost_twice_goes_on_and_its_client_sees_nothing(clock: Clock) -> None:
    made = endpoint(clock)
    pool = made._groups["a"]
    pool.next = [("a0", [event(1), event(2), lost()]), ("a1", [event(3)]), ("a2", [event(4), done()])]
    assert await texts(made) == [*(event(token).text for token in (1, 2, 3, 4)), done().text]
    assert [None if asked.sent is None else asked.sent.outputs for asked in pool.asked] == [
        None,
        ((1,), (2,)),
        ((1,), (2,), (3,)),
    ]
    assert [stream.is_cancelled for stream in pool.streams] == [True, False, False]
    assert [replica for replica, by, has_failed in seen(made) if has_failed] == ["a0", "a1"]


@pytest.mark.parametrize("began", [[], [event(1)]], ids=["nothing was sent", "a stream had begun"])
async def test_who_was_lost_waits_for_room_elsewhere_and_who_was_not_is_refused(clock: Clock, began: list[Any]) -> None:
    from deployments.frames import FULL, failure

    full = failure(429, "no room", FULL)
    made = endpoint(clock, retries=1)
    pool = made._groups["a"]
    pool.next = [("a0", [full])]
    assert await answer(made) == [full]
    pool.next = [("a0", [*began, lost()]), ("a1", [full]), ("a1", [full]), ("a1", [event(2), done()])]
    assert await texts(made) == [*(one.text for one in began), event(2).text, done().text]
    assert not pool.next


async def test_what_a_group_has_lost_goes_to_another_and_comes_back_where_all_have(clock: Clock) -> None:
    made = endpoint(clock, "ab")
    made._groups["a"].next = [("a0", [lost()]), ("a1", [whole()])]
    made._groups["b"].next = [("b0", [lost()])]
    assert await answer(made) == [whole()]
    assert [asked.exclude for asked in (*made._groups["a"].asked, *made._groups["b"].asked)] == [
        set(),
        {"a0", "b0"},
        {"a0"},
    ]
    assert seen(made, "b") == [("b0", "error", True)]


@pytest.mark.parametrize("said", [[], [RuntimeError("Unexpected error (StatusCode.UNKNOWN): ?")], [ValueError("?")]])
async def test_whatever_ends_without_an_answer_is_lost_and_tried_again(
    clock: Clock, said: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = endpoint(clock)
    made._groups["a"].next = [("a0", said), ("a1", [whole()])]
    with caplog.at_level(logging.WARNING, "deployments.ingress"):
        assert await answer(made) == [whole()]
    assert seen(made) == [("a0", "error", True), ("a1", "error", False)]
    assert [type(error).__name__ in record.message for error, record in zip(said, caplog.records, strict=True)] == [
        True for _ in said
    ]


async def test_what_breaks_after_the_last_word_is_not_lost(clock: Clock) -> None:
    for last in (whole(), done()):
        made = endpoint(clock)
        made._groups["a"].next = [("a0", [last, lost()])]
        assert await answer(made) == [last]
        assert seen(made) == []


async def test_who_could_not_be_reached_is_told_of_as_soon_as_another_answers(clock: Clock) -> None:
    made = endpoint(clock)
    made._groups["a"].next = [("a1", [event(1), done()])]
    stream = frames(made)
    pool, remote = made._groups["a"], made._groups["a"].remote

    def refused(asked: Any) -> Any:
        asked.refused.add("a0")  # by the router
        return remote(asked)

    pool.remote = refused
    await anext(stream)
    assert seen(made) == [("a0", "error", True)]
    assert [frame.text async for frame in stream] == [done().text]
    assert seen(made) == [("a0", "error", True), ("a1", "error", False)]


SLOW = [one for token in range(12) for one in (event(token), 2.0)]


async def test_a_slow_stream_speaks_against_its_replica_however_it_ends(clock: Clock) -> None:
    made = endpoint(clock, timeout_s=0.5)
    slow = ("a0", "pace", True)
    made._groups["a"].next = [("a0", [*SLOW, done()]), ("a0", [*SLOW, ...]), ("a0", [*SLOW, ...])]
    await answer(made)
    assert seen(made) == [("a0", "error", False), slow]
    assert (await answer(made))[-1].error == "timeout"
    assert seen(made)[2:] == [slow]
    stream = frames(made)
    for _ in range(12):
        await anext(stream)
    await stream.aclose()  # its client has left
    assert seen(made)[3:] == [slow]


async def test_a_long_stream_is_judged_before_it_ends(clock: Clock) -> None:
    made = endpoint(clock)
    made._groups["a"].next = [("a0", [one for token in range(200) for one in (event(token), 2.0)])]
    stream = frames(made)
    for number in range(200):
        assert len(seen(made)) == (number > 64)
        await anext(stream)
    await stream.aclose()
    assert seen(made) == [("a0", "pace", True)]


async def test_a_slow_reader_and_an_answer_in_one_piece_show_no_pace(clock: Clock) -> None:
    made = endpoint(clock)
    made._groups["a"].next = [("a0", [*map(event, range(50)), done()]), ("a0", [30.0, whole()])]
    async for _ in frames(made):
        clock.ahead_s += 2.0
    await answer(made)
    assert seen(made) == [("a0", "error", False)] * 2


async def test_a_client_that_leaves_says_nothing_of_a_replica(clock: Clock) -> None:
    made = endpoint(clock)
    made._groups["a"].next = [("a0", [event(1), ...])]
    stream = frames(made)
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stream.aclose()
    assert seen(made) == []
    assert made._groups["a"].streams[0].is_cancelled and made._loads == {"a": GroupLoad()}


@pytest.mark.parametrize(
    ("body", "said", "is_blamed"),
    [
        ({"stream": True}, [...], True),
        ({"stream": True}, [FIRST, ...], False),
        ({}, [...], False),  # an answer in one piece may take longer
        ({"stream": False}, [FIRST, ...], False),
    ],
)
async def test_only_a_stream_that_hears_nothing_until_its_deadline_speaks_against_its_replica(
    clock: Clock, body: dict[str, Any], said: list[Any], is_blamed: bool
) -> None:
    from deployments.frames import Frame

    made = endpoint(clock, timeout_s=0.1)
    made._groups["a"].next = [("a0", [Frame("") if one is FIRST else one for one in said])]
    *_, frame = await answer(made, body)
    assert (frame.status, frame.error) == (408, "timeout")
    assert seen(made) == ([("a0", "error", True)] if is_blamed else [])


async def test_who_came_to_a_replica_late_does_not_speak_against_it(clock: Clock) -> None:
    made = endpoint(clock, timeout_s=60.0)
    made._groups["a"].next = [("a0", [...])]
    *_, frame = await answer(made, {"stream": True}, ago_s=59.9)
    assert frame.error == "timeout"
    assert seen(made) == []


async def test_who_finds_every_replica_full_is_refused_for_now(clock: Clock) -> None:
    from ray.serve.exceptions import BackPressureError

    from deployments.frames import FULL

    made = endpoint(clock)
    made._groups["a"].next = [("a0", [BackPressureError(num_queued_requests=1, max_queued_requests=1)])]
    (frame,) = await answer(made)
    assert (frame.status, frame.error) == (429, FULL)
    assert seen(made) == []


def know(monkeypatch: pytest.MonkeyPatch, **routed: list[str]) -> None:
    """Let this process know to which replicas of some groups requests go."""
    from router import known_pools

    routers = {
        f"decode:test_ingress:{group}": [SimpleNamespace(curr_replicas=dict.fromkeys(names), routed=names.copy)]
        for group, names in routed.items()
    }
    monkeypatch.setattr(known_pools, "_ROUTERS", routers)


async def test_a_group_of_which_the_plan_lets_nobody_serve_gets_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replicas are warm, or under observation: its own router, which knows of no other group, would send there."""
    from router.membership import Membership

    know(monkeypatch, a=["a0"], b=["b0"])
    made = endpoint(clock, "ab")

    def plan(*groups: str) -> None:
        pools = frozenset(f"decode:test_ingress:{group}" for group in groups)
        holds = Membership(admitted=frozenset(), heard_s=0.0, pools=pools)
        made._membership = SimpleNamespace(now=lambda: holds)

    service = made._services["m"]
    assert made._serving(service) == ["a", "b"]
    plan("b")
    assert made._serving(service) == ["b"]
    plan()  # a plan that lets nobody serve has lost touch
    assert made._serving(service) == ["a", "b"]
    made._membership = SimpleNamespace(now=lambda: None)
    assert made._serving(service) == ["a", "b"]


async def test_who_waits_for_a_model_to_wake_is_counted(clock: Clock) -> None:
    made = endpoint(clock)
    made._reads, made._waking, made._drains_until_s = 0, 3, 0.0
    made._services["m"].gate.here = 2
    assert await made.drain(0.0) == 5


async def test_a_full_group_is_no_reason_to_refuse_while_another_has_room(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve.exceptions import BackPressureError

    from deployments.frames import full

    know(monkeypatch, a=["a0", "a1"], b=["b0"])
    made = endpoint(clock, "ab")
    made._groups["a"].next = [("a0", [full("no room")]), ("a1", [full("no room")])]
    made._groups["b"].next = [("b0", [whole()])]
    assert await answer(made) == [whole()]
    # Whether the group's replicas said so, or Serve for all of them.
    made._groups["a"].next = [(None, [BackPressureError(num_queued_requests=1, max_queued_requests=1)])]
    made._groups["b"].next = [("b0", [whole()])]
    assert await answer(made) == [whole()]
    # Where all are full, that is said, and nobody was asked twice.
    made._groups["a"].next = [("a0", [full("no room")]), ("a1", [full("no room")])]
    made._groups["b"].next = [("b0", [full("no room")])]
    (frame,) = await answer(made)
    assert frame.status == 429 and not made._groups["a"].next and not made._groups["b"].next


async def test_a_group_that_was_never_asked_may_have_room(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.frames import full

    know(monkeypatch, a=["a0"])
    made = endpoint(clock, "ab")
    made._groups["a"].next, made._groups["b"].next = [("a0", [full("no room")])], [("b0", [whole()])]
    assert await answer(made) == [whole()]


async def test_a_replica_that_is_held_has_no_room_for_anybody(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.frames import full

    know(monkeypatch, a=["a0"])  # beside a1, to which nobody is routed
    made = endpoint(clock)
    made._groups["a"].next = [("a0", [full("no room")])]
    (frame,) = await answer(made)
    assert frame.status == 429


async def test_who_is_asked_again_is_not_asked_for_ever(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.frames import full

    know(monkeypatch, a=["a0", "a1"])
    made = endpoint(clock)
    # The router goes back to whom it was to leave out where it finds nobody else.
    made._groups["a"].next = [("a0", [full("no room")]), ("a0", [full("no room")])]
    (frame,) = await answer(made)
    assert frame.status == 429 and not made._groups["a"].next


async def test_a_replica_that_is_full_has_passed_its_probe(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.frames import full

    know(monkeypatch, a=["a0", "a1"])
    made = endpoint(clock)
    made._groups["a"].next = [("a0", [full("no room")]), ("a1", [whole()])]
    await answer(made)
    assert seen(made)[0] == ("a0", "error", False)  # though it is left before its last word


async def test_who_finds_one_replica_full_is_sent_to_another_at_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments import metrics
    from deployments.frames import full

    names = ["a0", "a1", "a2"]
    know(monkeypatch, a=names)
    made = endpoint(clock, retries=1)
    pool, counted = made._groups["a"], metrics.RETRIED._value.get()
    pool.next = [("a0", [full("no room")]), ("a1", [whole()])]
    assert await answer(made) == [whole()]
    assert metrics.RETRIED._value.get() == counted  # it has lost nobody
    assert [asked.exclude for asked in pool.asked] == [set(), {"a0"}]
    pool.next = [(name, [full("no room")]) for name in names]  # each is asked once
    (frame,) = await answer(made)
    assert frame.status == 429 and not pool.next
    assert not any(has_failed for *_, has_failed in seen(made))
    # One that is lost after all leaves as many tries as ever.
    pool.next = [("a0", [full("no room")]), ("a1", [lost()]), ("a2", [whole()])]
    assert await answer(made) == [whole()]
    assert metrics.RETRIED._value.get() == counted + 1


async def test_an_answer_that_no_replica_can_send_is_the_requests_fault(clock: Clock) -> None:
    from grpc import StatusCode
    from grpc.aio import AioRpcError, Metadata

    def error(details: str) -> AioRpcError:
        return AioRpcError(StatusCode.RESOURCE_EXHAUSTED, Metadata(), Metadata(), details=details)

    made = endpoint(clock)
    made._groups["a"].next = [("a0", [error("Received message larger than max (67108900 vs. 67108864)")])]
    (frame,) = await answer(made)
    assert (frame.status, frame.error) == (400, "invalid_request") and "fewer answers or logprobs" in frame.text
    assert seen(made) == []
    made._groups["a"].next = [("a0", [error("Bandwidth exhausted")]), ("a1", [whole()])]
    assert await answer(made) == [whole()]


async def test_who_drains_stays_closed_until_all_replicas_must_have_answered(clock: Clock) -> None:
    made = endpoint(clock)
    made._reads, made._drains_until_s = 0, 0.0
    made._services["m"].gate = SimpleNamespace(here=0)
    assert not made._is_draining()
    assert await made.drain(300.0) == 0
    clock.ahead_s += 200.0  # another replica has a stream yet
    assert made._is_draining()
    clock.ahead_s += 200.0  # and nobody has ended the application
    assert not made._is_draining()


async def test_an_endpoint_without_a_healthy_pool_says_when_to_look_again(clock: Clock) -> None:
    made = endpoint(clock)
    made._groups = {"a": None}  # which cannot be asked
    error = await made._look_for_health()
    assert (error.status, error.headers()["Retry-After"]) == (503, "5")


def with_door(clock: Clock, **limits: Any) -> Any:
    """An endpoint that reads requests, each of a key ``k``, which has these limits."""
    from deployments.config import IngressConfig
    from deployments.gate import Gate
    from deployments.request_body import Bodies
    from deployments.trim import Trim

    made = endpoint(clock)
    config = IngressConfig.model_validate({"api_keys_file": "/keys", "admission": {"key": limits}})
    made._config, made._bodies, made._reads = config, Bodies(config), 0
    made._trim = Trim()
    made._services["m"].gate = Gate(config.admission, replicas=1, prefill_replicas=1)
    return made


def asks(body: bytes | Exception, priority: str) -> Any:
    from fastapi import Request

    headers = [(b"x-tandem-priority", priority.encode())]

    async def receive() -> dict[str, Any]:
        if isinstance(body, Exception):
            raise body
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def respond(made: Any, body: bytes | Exception, priority: str = "normal") -> Any:
    return await made._respond("completions", asks(body, priority), "r", time.monotonic(), "k")


async def test_a_client_that_leaves_while_its_body_is_read_has_used_up_a_request(clock: Clock) -> None:
    from starlette.requests import ClientDisconnect

    from deployments.openai_errors import OpenAIError

    made = with_door(clock, requests_per_minute=12)  # two at once
    for _ in range(2):
        with pytest.raises(ClientDisconnect):
            await respond(made, ClientDisconnect())
    with pytest.raises(OpenAIError, match="requests of this key come faster than 12 a minute"):
        await respond(made, b"{}")
    assert not made._bodies.requests_by_key["k"] and not made._reads


async def test_a_body_without_room_is_counted_with_the_priority_that_its_request_asks_for(clock: Clock) -> None:
    from deployments import metrics
    from deployments.openai_errors import OpenAIError

    made = with_door(clock, max_requests=1)
    made._bodies.requests_by_key["k"] = 1
    counted = metrics.REFUSED.labels("key", "low")
    before = counted._value.get()
    with pytest.raises(OpenAIError, match="1 requests of this key are here"):
        await respond(made, b"{}", priority="low")
    assert counted._value.get() - before == 1


async def test_a_full_engine_is_a_refusal_that_says_when_to_come_again_and_is_counted(clock: Clock) -> None:
    from deployments import metrics
    from deployments.frames import full

    made = with_door(clock)
    made._groups["a"].next = [("a0", [full("no room")])]
    counted = metrics.REFUSED.labels("engine", "normal")
    before = counted._value.get()
    response = await respond(made, b'{"model": "m", "prompt": "x"}')
    assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
    assert json.loads(response.body)["error"]["code"] == "overloaded"
    assert counted._value.get() - before == 1
