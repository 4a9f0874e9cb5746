"""When an engine sleeps and wakes; the engine is a fake, which records what it was asked."""

import asyncio
from typing import Any

import pytest

from deployments.metrics import ENGINE_ASLEEP
from deployments.pool_config import EngineSleepConfig
from deployments.replicas.engine_sleep import EngineSleep

pytestmark = pytest.mark.vllm


class Engine:
    """An engine that says what it was asked, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self.fails = fails

    async def _called(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        await asyncio.sleep(0.0)
        if name == self.fails:
            raise RuntimeError(f"no {name}")

    async def sleep(self, level: int, mode: str) -> None:
        await self._called("sleep", level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._called("wake_up", tags)

    async def collective_rpc(self, method: str) -> None:
        await self._called("collective_rpc", method)


class Stand:
    """An ``EngineSleep`` that is due at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, level: int = 1, fails: str = "", is_idle: bool = True) -> None:
        monkeypatch.setattr("deployments.replicas.engine_sleep._POLL_S", 0.005)
        ENGINE_ASLEEP.set(0.0)  # one gauge for the whole process
        self.engine, self.is_idle, self.ended = Engine(fails), is_idle, 0
        config = EngineSleepConfig.model_construct(after_s=0.02, level=level)
        self.sleep = EngineSleep(self.engine, config, self._idle, self._end)
        self.task = asyncio.create_task(self.sleep.run())

    async def _idle(self) -> bool:
        return self.is_idle

    def _end(self) -> None:
        self.ended += 1

    async def until_asleep(self) -> None:
        async with asyncio.timeout(5.0):
            while not self.engine.calls:
                await asyncio.sleep(0.005)


async def test_an_idle_engine_sleeps_once_and_wakes_for_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    await stand.until_asleep()
    await asyncio.sleep(0.1)
    assert stand.engine.calls == [("sleep", 1, "wait")]
    assert ENGINE_ASLEEP._value.get() == 1.0
    async with stand.sleep.awake():
        assert stand.engine.calls[1:] == [("wake_up", None)]
        assert ENGINE_ASLEEP._value.get() == 0.0


async def test_requests_that_come_together_wake_the_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    await stand.until_asleep()

    async def request() -> None:
        async with stand.sleep.awake():
            await asyncio.sleep(0.01)

    await asyncio.gather(*(request() for _ in range(20)))
    assert [call for call in stand.engine.calls if call[0] == "wake_up"] == [("wake_up", None)]


async def test_weights_that_were_dropped_are_read_before_the_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, level=2)
    await stand.until_asleep()
    async with stand.sleep.awake():
        assert stand.engine.calls[1:] == [
            ("wake_up", ["weights"]),
            ("collective_rpc", "reload_weights"),
            ("wake_up", ["kv_cache"]),
        ]


async def test_an_engine_with_a_request_or_with_kv_for_decode_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, is_idle=False)
    await asyncio.sleep(0.1)
    assert stand.engine.calls == []
    async with stand.sleep.awake():
        stand.is_idle = True
        await asyncio.sleep(0.1)
        assert stand.engine.calls == []
    await stand.until_asleep()


async def test_an_engine_that_cannot_sleep_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, fails="sleep")
    await stand.until_asleep()
    assert ENGINE_ASLEEP._value.get() == 0.0
    async with stand.sleep.awake():
        assert stand.engine.calls == [("sleep", 1, "wait"), ("wake_up", None)]
    assert not stand.task.done()
    assert stand.ended == 0


async def test_a_replica_whose_engine_does_not_wake_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, fails="wake_up")
    await stand.until_asleep()
    with pytest.raises(RuntimeError, match="no wake_up"):
        async with stand.sleep.awake():
            raise AssertionError("a request runs on an engine that sleeps")
    assert stand.ended == 1


async def test_a_client_that_leaves_does_not_stop_the_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, level=2)
    await stand.until_asleep()

    async def request() -> None:
        async with stand.sleep.awake():
            pass

    leaving = asyncio.create_task(request())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    async with asyncio.timeout(5.0):
        while len([call for call in stand.engine.calls if call[0] == "sleep"]) < 2:  # it sleeps again
            await asyncio.sleep(0.005)
    assert stand.engine.calls[3] == ("wake_up", ["kv_cache"])
