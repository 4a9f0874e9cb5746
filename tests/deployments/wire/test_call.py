"""When a call of a replica ends, and what that shows of the replica; Serve's handle is a fake."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.wire.call import CallWatch
from deployments.wire.messages import DecodeRequest, Frame
from router.routing import Choice, Routing

pytestmark = pytest.mark.ray


def call(choice: Choice, pieces: AsyncIterator[Frame], deadline_s: float, watch: Any = None) -> Any:
    """A call of ``decode:g0``; its health report is ``call.health._feed._unsent``."""
    from deployments.wire.call import PoolCaller
    from router.ejection import OutlierConfig
    from router.ray_health import HealthFeed

    class Stream:
        def __aiter__(self) -> AsyncIterator[Frame]:
            return pieces

        def cancel(self) -> None:
            """Do nothing: a fake stream needs no cancel."""

    caller: Any = PoolCaller(
        SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda request: Stream())),  # type: ignore[arg-type]
        "respond",
        health=HealthFeed("nobody", "decode:g0", OutlierConfig()),
        watch=watch or CallWatch(lambda *_: True, lambda _: False),
        is_whole=lambda frame: frame.is_last,
    )
    request = DecodeRequest(
        endpoint="chat", body=b"{}", request_id="r", id_seed="s", arrived_at_s=0.0, routing=Routing(choice=choice)
    )
    return caller.call(request, time.monotonic() + deadline_s)


async def frames(*after_s: float) -> AsyncGenerator[Frame, None]:
    """One frame after each of these times."""
    for seconds in after_s:
        await asyncio.sleep(seconds)
        yield Frame("data: 1")


async def waited(
    replica_id: str | None,
    is_alive: Any,
    *,
    frame_s: float = 60.0,
    deadline_s: float = 1.0,
    stranded: str | None = None,
) -> str | None:
    """How a call ends whose first frame comes after ``frame_s``; the watch checks it once it has waited 50 ms."""
    from deployments.wire.call import CallError

    watch = CallWatch(is_alive, lambda pool: pool == stranded, quiet_s=0.05, check_s=0.01)
    watching = asyncio.create_task(watch.run())
    with call(Choice(replica_id), frames(frame_s), deadline_s, watch) as one:
        try:
            await one.piece()
        except CallError as error:
            return error.failure
        finally:
            watching.cancel()
    return None


async def test_a_call_of_a_replica_that_is_gone_ends_long_before_its_deadline() -> None:
    asked_about: list[tuple[str, str]] = []

    def is_alive(deployment: str, replica_id: str) -> bool:
        asked_about.append((deployment, replica_id))
        return False

    started_s = time.monotonic()
    assert await waited("r1", is_alive, deadline_s=60.0) == "lost"
    assert time.monotonic() - started_s < 30.0
    assert asked_about == [("decode:g0", "r1")]


@pytest.mark.parametrize("replica_id", ["r1", None])
async def test_a_replica_that_lives_or_is_unknown_is_waited_for_until_the_deadline(replica_id: str | None) -> None:
    assert await waited(replica_id, lambda *_: replica_id is not None, deadline_s=0.3) == "late"


@pytest.mark.parametrize(("stranded", "end"), [("decode:g0", "lost"), ("decode:g1", "late")])
async def test_a_call_of_a_pool_without_replicas_goes_elsewhere_if_another_pool_has_some(
    stranded: str, end: str
) -> None:
    deadline_s = 60.0 if end == "lost" else 0.3
    assert await waited(None, lambda *_: True, deadline_s=deadline_s, stranded=stranded) == end


async def test_a_replica_that_does_not_answer_twice_in_a_row_stands_still() -> None:
    answers = iter([TimeoutError, True, TimeoutError, TimeoutError])
    given = []

    def is_alive(*_: str) -> bool:
        given.append(next(answers))
        if given[-1] is TimeoutError:
            raise TimeoutError
        return True

    assert await waited("r1", is_alive, deadline_s=60.0) == "lost"
    assert len(given) == 4


async def test_a_replica_that_hangs_does_not_delay_the_check_of_others() -> None:
    hangs = threading.Event()

    def is_alive(_: str, replica_id: str) -> bool:
        if replica_id == "hangs":
            hangs.wait(5.0)
            raise TimeoutError
        return False

    watch = CallWatch(is_alive, lambda _: False, quiet_s=0.0, check_s=0.01)
    watching = asyncio.create_task(watch.run())
    with (
        call(Choice("hangs"), frames(60.0), 60.0, watch) as hanging,
        call(Choice("gone"), frames(60.0), 60.0, watch) as gone,
    ):
        tasks = [asyncio.create_task(one.piece()) for one in (hanging, gone)]
        await asyncio.sleep(0.1)
        hangs.set()
        async with asyncio.timeout(30.0):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
    watching.cancel()
    assert [getattr(end, "failure", None) for end in ends] == ["lost", "lost"]
    assert not watch.calls


async def test_without_knowledge_or_a_long_wait_no_call_is_lost() -> None:
    def blind(*_: str) -> bool:
        raise ConnectionError("the store is away")

    for is_alive, frame_s in ((blind, 0.3), (lambda *_: False, 0.01)):
        assert await waited("r1", is_alive, frame_s=frame_s) is None


async def test_a_call_does_not_wait_while_its_client_reads() -> None:
    with call(Choice("r1"), frames(0.0, 0.0), 60.0) as one:
        assert (await one.piece()).text == "data: 1"
        await asyncio.sleep(0.05)
        assert one.quiet_s() == 0.0
        one.lose()
        assert (await one.piece()).text == "data: 1"


@pytest.mark.parametrize("deadline_s", [0.02, 60.0])
async def test_a_deadline_that_passes_while_a_client_reads_ends_the_next_wait_and_cancels_nothing_else(
    deadline_s: float,
) -> None:
    from deployments.wire.call import CallError

    with call(Choice("r1"), frames(0.0, 0.0), deadline_s) as one:
        await one.piece()
        await asyncio.sleep(0.1)
        if deadline_s > 1.0:
            assert await one.piece() is not None
        else:
            with pytest.raises(CallError, match="the deadline has passed"):
                await one.piece()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_deadline_within_a_wait_leaves_the_task_as_it_was() -> None:
    assert await waited("r1", lambda *_: True, deadline_s=0.02) == "late"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0.0)


@pytest.mark.parametrize("also_late", [False, True])
async def test_a_client_that_leaves_cancels_even_if_its_time_is_up_at_the_same_moment(also_late: bool) -> None:
    with call(Choice("r1"), frames(60.0), 60.0) as one:
        task = asyncio.create_task(one.piece())
        await asyncio.sleep(0.01)
        if also_late:
            one.lose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def said(*ends: Frame | Exception) -> AsyncGenerator[Frame, None]:
    for one in ends:
        if isinstance(one, Exception):
            raise one
        yield one


@pytest.mark.parametrize("begun", [[], [Frame("data: 1")], [Frame("")]])
@pytest.mark.parametrize("error", [None, ConnectionError("gone")])
async def test_an_answer_that_is_not_whole_counts_against_its_replica(
    begun: list[Frame], error: Exception | None
) -> None:
    from deployments.wire.call import CallError

    with call(Choice("r1"), said(*begun, *([] if error is None else [error])), 60.0) as one:
        for _ in begun:
            await one.piece()
        with pytest.raises(CallError, match="it broke off" if error is None else "ConnectionError: gone") as raised:
            await one.piece()
    assert (raised.value.failure, raised.value.__cause__) == ("lost", error)
    assert [(one.replica_id, one.has_failed) for one in one.health._feed._unsent] == [("r1", True)]


@pytest.mark.parametrize("whole", [Frame("{}"), Frame("data: [DONE]\n\n")])
@pytest.mark.parametrize("error", [None, ConnectionError("gone"), TimeoutError()])
async def test_an_error_after_a_whole_answer_is_its_end(whole: Frame, error: Exception | None) -> None:
    with call(Choice("r1"), said(whole, *([] if error is None else [error])), 60.0) as one:
        assert await one.piece() == whole
        assert await one.piece() is None
    assert one.health._feed._unsent == []


class WaitingCall:
    """A call of ``decode:g0`` that has waited for a minute."""

    pool = "decode:g0"

    def __init__(self, replica_id: str) -> None:
        self.choice = Choice(replica_id)
        self.is_lost = False

    def quiet_s(self) -> float:
        return 60.0

    def lose(self) -> None:
        self.is_lost = True


async def test_a_call_that_was_sent_elsewhere_while_its_replica_was_asked_is_not_lost() -> None:
    stays: Any = WaitingCall("gone")
    leaves: Any = WaitingCall("gone")
    questions: list[str] = []

    def is_alive(_: str, replica_id: str) -> bool:
        leaves.choice.replica_id = "other"  # the router chooses another replica meanwhile
        questions.append(replica_id)
        return replica_id == "other"

    watch = CallWatch(is_alive, lambda _: False, check_s=0.01)
    for one in (stays, leaves):
        watch.calls.add(one)
    watching = asyncio.create_task(watch.run())
    async with asyncio.timeout(30.0):
        while "other" not in questions:
            await asyncio.sleep(0.01)
    watching.cancel()
    assert (stays.is_lost, leaves.is_lost) == (True, False)
