"""When a replica ends for its engine's sake; the engine's client is a fake."""

import asyncio
import time
from typing import Any

import pytest

import deployments.engine_watch as engine_watch
from deployments.engine_watch import watch_engine


class Client:
    """An engine that answers after ``answer_s``."""

    errored = False

    def __init__(self, answer_s: float = 0.0) -> None:
        self.answer_s = answer_s
        self.asked = 0

    async def is_paused(self) -> bool:
        self.asked += 1
        await asyncio.sleep(self.answer_s)
        return False


@pytest.fixture(autouse=True)
def _fast(monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_watch, "_POLL_S", 0.01)
    monkeypatch.setattr(engine_watch, "_ASK_S", 0.05)


async def test_an_engine_that_answers_is_left_alone() -> None:
    client = Client(answer_s=0.1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await watch_engine(client, silence_s=0.9)
    assert client.asked > 2


async def test_the_death_of_an_engine_is_seen_at_once() -> None:
    client = Client()
    watch = asyncio.create_task(watch_engine(client, silence_s=60.0))
    await asyncio.sleep(0.1)
    assert not watch.done()
    client.errored = True
    await asyncio.wait_for(watch, 5.0)


async def test_an_engine_that_says_nothing_hangs() -> None:
    client, started_s = Client(answer_s=60.0), time.monotonic()
    await asyncio.wait_for(watch_engine(client, silence_s=0.4), 10.0)
    assert client.asked == 1
    assert time.monotonic() - started_s >= 0.4


async def test_an_engine_that_dies_while_it_is_asked_is_dead_and_no_error() -> None:
    class Dying(Client):
        async def is_paused(self) -> bool:
            self.errored = True
            raise RuntimeError("EngineDeadError")

    await asyncio.wait_for(watch_engine(Dying(), silence_s=60.0), 10.0)
