"""When a prefill replica that is told to go may end its engine."""

import asyncio
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


class Engine:
    """Workers that keep KV of so many prompts, one less at each question; to the first ``busy`` it does not answer."""

    def __init__(self, unread: int, *, is_dead: bool = False, busy: int = 0) -> None:
        self.unread, self.errored, self.busy = unread, is_dead, busy

    async def collective_rpc(self, method: str) -> list[int]:
        assert method == "tandem_unread_kv_requests"
        if self.errored:
            raise RuntimeError("the engine has died")
        if self.busy:
            self.busy -= 1
            await asyncio.sleep(60.0)
        self.unread -= 1
        return [0, self.unread + 1]


@pytest.fixture(name="told_to_go")
def _told_to_go(monkeypatch: pytest.MonkeyPatch) -> Any:
    from deployments.replicas import prefill
    from deployments.replicas.engine_host import EngineHost

    ends: list[int] = []

    async def end(self: Any) -> None:
        ends.append(self.engine._engine_client.unread if hasattr(self, "engine") else 0)

    monkeypatch.setattr(EngineHost, "__del__", end)
    monkeypatch.setattr(prefill, "_UNREAD_POLL_S", 0.01)
    monkeypatch.setattr(prefill, "ANSWER_S", 0.05)

    class Server(prefill.PrefillServer):  # type: ignore[misc]
        def __del__(self) -> None:
            """Of the garbage collector, which Serve has not."""

    async def told_to_go(engine: Engine | None, lease_s: float) -> list[int]:
        server = Server.__new__(Server)
        server._lease_s = lease_s
        if engine is not None:
            server.engine = type("Server", (), {"_engine_client": engine})()
        async with asyncio.timeout(30.0):
            await prefill.PrefillServer.__del__(server)
        return ends

    return told_to_go


async def test_an_engine_lives_until_its_kv_has_been_read(told_to_go: Any) -> None:
    assert await told_to_go(Engine(5), lease_s=60.0) == [-1]


async def test_an_engine_in_a_long_step_is_asked_again(told_to_go: Any) -> None:
    assert await told_to_go(Engine(5, busy=2), lease_s=60.0) == [-1]


async def test_an_engine_whose_kv_nobody_reads_lives_until_every_lease_has_ended(told_to_go: Any) -> None:
    (left,) = await told_to_go(Engine(10**6), lease_s=0.1)
    assert 0 < left < 10**6 - 5


async def test_a_dead_engine_keeps_nobody(told_to_go: Any) -> None:
    assert await told_to_go(Engine(5, is_dead=True), lease_s=60.0) == [5]


async def test_a_replica_whose_engine_never_started_ends_all_the_same(told_to_go: Any) -> None:
    assert await told_to_go(None, lease_s=60.0) == [0]
