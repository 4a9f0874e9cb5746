"""When a prefill replica that Serve ends may end its engine, and what it reports."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


class Engine:
    """Workers with the KV of ``unread`` prompts, one less after each answer; the first ``busy`` calls get no answer."""

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


@pytest.fixture(name="ends_engine")
def _ends_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    from deployments.replicas import engine_host, prefill
    from deployments.replicas.engine_host import EngineHost

    ends: list[int] = []

    async def end(self: Any) -> None:
        ends.append(self.engine._engine_client.unread if hasattr(self, "engine") else 0)

    monkeypatch.setattr(EngineHost, "__del__", end)
    monkeypatch.setattr(prefill, "_UNREAD_POLL_S", 0.01)
    monkeypatch.setattr(engine_host, "ANSWER_S", 0.05)

    class Server(prefill.PrefillServer):  # type: ignore[misc]
        def __del__(self) -> None:
            """Do nothing: the garbage collector calls this, and Serve awaits it."""

    async def ends_engine(engine: Engine | None, lease_s: float) -> list[int]:
        server = Server.__new__(Server)
        server._lease_s = lease_s
        if engine is not None:
            server.engine = type("Server", (), {"_engine_client": engine})()
        async with asyncio.timeout(30.0):
            await prefill.PrefillServer.__del__(server)
        return ends

    return ends_engine


async def test_an_engine_lives_until_its_kv_has_been_read(ends_engine: Any) -> None:
    assert await ends_engine(Engine(5), lease_s=60.0) == [-1]


async def test_an_engine_in_a_long_step_gets_another_call(ends_engine: Any) -> None:
    assert await ends_engine(Engine(5, busy=2), lease_s=60.0) == [-1]


async def test_an_engine_whose_kv_is_not_read_lives_until_every_lease_has_ended(ends_engine: Any) -> None:
    (unread,) = await ends_engine(Engine(10**6), lease_s=0.1)
    assert 0 < unread < 10**6 - 5


async def test_a_dead_engine_delays_nothing(ends_engine: Any) -> None:
    assert await ends_engine(Engine(5, is_dead=True), lease_s=60.0) == [5]


async def test_a_replica_whose_engine_never_started_ends_too(ends_engine: Any) -> None:
    assert await ends_engine(None, lease_s=60.0) == [0]


async def test_the_queue_and_the_load_of_a_report_are_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.replicas import prefill
    from deployments.vllm_seam.engine_stats import EngineLoad

    load = EngineLoad(waiting_requests=1)

    class Server(prefill.PrefillServer):  # type: ignore[misc]
        def __del__(self) -> None:
            """Do nothing: the garbage collector calls this, and Serve awaits it."""

    class Stepping:
        async def collective_rpc(self, method: str) -> list[int]:
            load.waiting_requests = 0  # the workers answer after a step, which computes the queue
            return [0]

        def get_num_queued_tokens(self) -> int:
            return 1000 * load.waiting_requests

    server = Server.__new__(Server)
    server._has_gpus = False
    server.engine = type("Server", (), {"_engine_client": Stepping()})()
    monkeypatch.setattr(prefill, "engine_stats", lambda: type("Stats", (), {"load": load})())
    report = await server.record_autoscaling_stats()
    assert (report["waiting_requests"], report["queued_prefill_tokens"]) == (0, 0)


async def test_an_answer_says_what_the_engine_had_and_the_replica_holds_the_prompt_from_then_on() -> None:
    from deployments.replicas import prefill
    from deployments.replicas.cache_watch import CacheWatch, piece_keys
    from deployments.wire.messages import PrefillRequest
    from router.routing import Routing

    class Server(prefill.PrefillServer):  # type: ignore[misc]
        def __del__(self) -> None:
            """Do nothing: the garbage collector calls this, and Serve awaits it."""

    class Computing:
        async def generate(self, *_: Any, **__: Any) -> Any:
            yield SimpleNamespace(
                kv_transfer_params={"from": "p"}, metrics=None, num_cached_tokens=16, num_cache_creation_tokens=24
            )

        def get_num_queued_tokens(self) -> int:
            return 0

    server = Server.__new__(Server)
    server.engine = SimpleNamespace(_engine_client=Computing())
    server.replica_id, server._cache = "p", CacheWatch(block_tokens=8, max_blocks=100, piece_tokens=16)
    ids = list(range(40))
    pieces = piece_keys(ids, 16)
    for prompt, held in ((None, []), (pieces, sorted(pieces.keys))):
        request = PrefillRequest(request_id="r", token_ids=ids, routing=Routing(prompt=prompt))
        (answer,) = [one async for one in server.prefill(request)]
        assert (answer.cached_tokens, answer.created_tokens, answer.block_tokens) == (16, 24, 8)
        assert sorted(server._cache.pieces.take().stored) == held
