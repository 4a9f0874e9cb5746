"""Pools whose replicas crash soon after their start, again and again; Ray's store and Serve are fakes."""

import asyncio
import json
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.ray


def test_each_crash_beyond_two_doubles_the_wait_up_to_a_minute() -> None:
    from deployments.serve_seam.start_backoff import backoff_s

    assert [backoff_s(crashes) for crashes in range(12)] == [0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


class World:
    """Ray's store of crash notes, and the sleeps of a replica; each sleep lasts until the test ends it."""

    def __init__(self) -> None:
        self.notes: dict[bytes, bytes] = {}
        self.slept: list[float] = []
        self.wakes = asyncio.Event()

    def crashed(self, count: int) -> None:
        for number in range(count):
            self.notes[f"tandem:starts:app:decode:g0:{number}".encode()] = json.dumps(time.time()).encode()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.wakes.wait()
        self.wakes.clear()

    async def until_asleep(self) -> None:
        async with asyncio.timeout(30.0):
            while not self.slept:
                await asyncio.sleep(0)

    async def wake(self, task: asyncio.Task[Any]) -> None:
        self.wakes.set()
        async with asyncio.timeout(30.0):
            await task


@pytest.fixture(name="world")
async def _world(monkeypatch: pytest.MonkeyPatch) -> World:
    from deployments.serve_seam import start_backoff

    world = World()
    store = SimpleNamespace(
        put=world.notes.__setitem__,
        get=world.notes.get,
        delete=lambda key: world.notes.pop(key, None),
        keys=lambda prefix: [key for key in world.notes if key.startswith(prefix)],
    )
    context = SimpleNamespace(app_name="app", deployment="decode:g0", replica_id=SimpleNamespace(unique_id="me"))
    monkeypatch.setattr(start_backoff, "ray_kv", store)
    monkeypatch.setattr(start_backoff, "serve", SimpleNamespace(get_replica_context=lambda: context))
    monkeypatch.setattr(start_backoff, "is_alive", lambda app, deployment, replica_id: replica_id == "me")
    monkeypatch.setattr(
        start_backoff,
        "asyncio",
        SimpleNamespace(sleep=world.sleep, to_thread=asyncio.to_thread, create_task=asyncio.create_task),
    )
    return world


async def test_a_replica_that_is_killed_while_it_waits_is_no_crash(world: World) -> None:
    from deployments.serve_seam.start_backoff import StartBackoff

    world.crashed(4)
    waiting = asyncio.create_task(StartBackoff().wait())
    await world.until_asleep()
    assert world.slept == [2.0]
    assert len(world.notes) == 4  # it has no note of its own
    await world.wake(waiting)
    assert len(world.notes) == 5


async def test_a_replica_that_is_killed_after_twenty_seconds_of_service_is_no_crash(world: World) -> None:
    from deployments.serve_seam.start_backoff import StartBackoff

    start = StartBackoff()
    await start.wait()
    start.ready()
    await world.until_asleep()
    assert world.slept == [20.0]
    assert len(world.notes) == 1
    assert start._settling is not None
    await world.wake(start._settling)
    assert world.notes == {}


@pytest.mark.parametrize("fails", [False, True])
async def test_a_start_that_fails_is_a_crash_and_one_that_was_called_off_is_none(world: World, fails: bool) -> None:
    from deployments.serve_seam.start_backoff import StartBackoff

    start = StartBackoff()
    await start.wait()
    with suppress(RuntimeError), start.failure_is_crash():
        if fails:
            raise RuntimeError("no such model")
    start.leave()  # Serve calls it in every replica that it ends
    assert len(world.notes) == fails
