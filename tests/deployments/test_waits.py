"""When a wait for a replica's next frame ends."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from deployments.frames import DecodeRequest, Frame
from deployments.waits import Wait, Waits


def asked(replica_id: str | None) -> DecodeRequest:
    return DecodeRequest(endpoint="chat", body={}, request_id="r", arrived_at_s=0.0, routed_to=replica_id)


async def frames(*after_s: float) -> AsyncGenerator[Frame, None]:
    """One frame after each of these times."""
    for seconds in after_s:
        await asyncio.sleep(seconds)
        yield Frame("said")


async def waited(
    replica_id: str | None,
    is_alive: Any,
    *,
    frame_s: float = 60.0,
    deadline_s: float = 1.0,
    stranded: str | None = None,
) -> tuple[Wait, bool]:
    """A wait for a frame that comes after ``frame_s``, and whether it timed out; asked about after 50 ms."""
    waits = Waits(is_alive, lambda pool: pool == stranded, quiet_s=0.05, every_s=0.01)
    watching = asyncio.create_task(waits.run())
    wait = Wait("decode:g0", asked(replica_id), time.monotonic() + deadline_s)
    waits.add(wait)
    try:
        await wait.piece(frames(frame_s))
    except TimeoutError:
        return wait, True
    finally:
        waits.remove(wait)
        watching.cancel()
    return wait, False


async def test_a_wait_for_a_replica_that_is_gone_ends_long_before_its_deadline() -> None:
    seen: list[tuple[str, str]] = []

    def is_alive(deployment: str, replica_id: str) -> bool:
        seen.append((deployment, replica_id))
        return False

    started_s = time.monotonic()
    wait, has_timed_out = await waited("r1", is_alive, deadline_s=60.0)
    assert time.monotonic() - started_s < 30.0
    assert has_timed_out
    assert wait.is_lost
    assert seen == [("decode:g0", "r1")]


@pytest.mark.parametrize("replica_id", ["r1", None])
async def test_one_that_lives_or_is_unknown_is_waited_for_until_the_deadline(replica_id: str | None) -> None:
    wait, has_timed_out = await waited(replica_id, lambda *_: replica_id is not None, deadline_s=0.3)
    assert has_timed_out
    assert not wait.is_lost


@pytest.mark.parametrize(("stranded", "is_lost"), [("decode:g0", True), ("decode:g1", False)])
async def test_who_waits_for_a_pool_without_replicas_goes_elsewhere_if_there_is_another(
    stranded: str, is_lost: bool
) -> None:
    wait, _ = await waited(None, lambda *_: True, deadline_s=60.0 if is_lost else 0.3, stranded=stranded)
    assert wait.is_lost is is_lost


async def test_who_answers_nothing_twice_in_a_row_hangs() -> None:
    said = iter([TimeoutError, True, TimeoutError, TimeoutError])
    seen = []

    def is_alive(*_: str) -> bool:
        seen.append(next(said))
        if seen[-1] is TimeoutError:
            raise TimeoutError
        return True

    wait, _ = await waited("r1", is_alive, deadline_s=60.0)
    assert wait.is_lost
    assert len(seen) == 4


async def test_one_that_hangs_does_not_keep_others_from_being_looked_after() -> None:
    hangs = threading.Event()

    def is_alive(_: str, replica_id: str) -> bool:
        if replica_id == "hangs":
            hangs.wait(5.0)
            raise TimeoutError
        return False

    waits = Waits(is_alive, lambda _: False, quiet_s=0.0, every_s=0.01)
    watching = asyncio.create_task(waits.run())
    lost = {name: Wait("decode:g0", asked(name), time.monotonic() + 60.0) for name in ("hangs", "gone")}
    for wait in lost.values():
        waits.add(wait)

    tasks = [asyncio.create_task(wait.piece(frames(60.0))) for wait in lost.values()]
    await asyncio.sleep(0.1)
    hangs.set()
    async with asyncio.timeout(10.0):
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    watching.cancel()
    assert all(isinstance(end, TimeoutError) for end in ends)
    assert all(wait.is_lost for wait in lost.values())


async def test_blind_or_quick_nobody_is_lost() -> None:
    def blind(*_: str) -> bool:
        raise ConnectionError("the store is away")

    for is_alive, frame_s in ((blind, 0.3), (lambda *_: False, 0.01)):
        _, has_timed_out = await waited("r1", is_alive, frame_s=frame_s)
        assert not has_timed_out


async def test_a_client_that_reads_slowly_is_no_wait() -> None:
    wait = Wait("decode:g0", asked("r1"), time.monotonic() + 60.0)
    coming = frames(0.0, 0.0)
    assert (await wait.piece(coming)).text == "said"
    await asyncio.sleep(0.05)
    assert wait.quiet_s() == 0.0
    wait.lose()
    assert not wait.is_lost
    await wait.piece(coming)
    with pytest.raises(StopAsyncIteration):
        await wait.piece(coming)
    wait.close()


async def test_a_deadline_that_passes_while_nobody_waits_ends_the_next_wait_and_cancels_nothing_else() -> None:
    wait = Wait("decode:g0", asked("r1"), time.monotonic() + 0.02)
    coming = frames(0.0, 0.0)
    await wait.piece(coming)
    await asyncio.sleep(0.1)  # where a client reads
    with pytest.raises(TimeoutError):
        await wait.piece(coming)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_deadline_within_a_wait_leaves_the_task_as_it_was() -> None:
    wait = Wait("decode:g0", asked("r1"), time.monotonic() + 0.02)
    with pytest.raises(TimeoutError):
        await wait.piece(frames(60.0))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0.0)


@pytest.mark.parametrize("also_late", [False, True])
async def test_a_client_that_leaves_cancels_even_if_its_time_is_up_at_the_same_moment(also_late: bool) -> None:
    wait = Wait("decode:g0", asked("r1"), time.monotonic() + 60.0)
    task = asyncio.create_task(wait.piece(frames(60.0)))
    await asyncio.sleep(0.01)
    if also_late:
        wait.lose()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait.close()


async def test_who_was_sent_elsewhere_while_its_replica_was_asked_is_not_lost() -> None:
    moved = asked("gone")

    def is_alive(_: str, replica_id: str) -> bool:
        moved.routed_to = "other"  # the router's, which runs meanwhile
        return replica_id == "other"

    waits = Waits(is_alive, lambda _: False, quiet_s=0.05, every_s=0.01)
    watching = asyncio.create_task(waits.run())
    wait = Wait("decode:g0", moved, time.monotonic() + 60.0)
    waits.add(wait)
    assert (await wait.piece(frames(0.5))).text == "said"
    assert moved.routed_to == "other"
    watching.cancel()
    waits.remove(wait)
