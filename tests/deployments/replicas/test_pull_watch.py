"""Repair of broken links by a decode replica; vLLM's client is a fake with the answers of its workers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class Engine:
    """Workers that pull, and drop links."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.is_dropped = True
        self.answers_late = 0
        self.forgotten: list[str] = []
        self.released: list[str] = []
        self.polls = 0

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "tandem_pulls":
            self.polls += 1
            for name in args[0] if args else ():
                self.failed.pop(name, None)
            report = [[dict(self.running), dict(self.failed)]]
            if self.answers_late:
                self.answers_late -= 1
                raise TimeoutError
            return report
        self.forgotten += args
        self.running = {name: engine for name, engine in self.running.items() if engine not in args}
        return [True, self.is_dropped]

    async def notify_kv_transfer_request_rejected(self, request_id: str, params: dict[str, Any]) -> None:
        self.released.append(params.get("remote_request_id", "a step"))


@pytest.fixture(name="engine")
def _engine() -> Engine:
    return Engine()


@pytest.fixture(name="watch")
async def _watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    from deployments.replicas import pull_watch

    monkeypatch.setattr(pull_watch, "_POLL_S", 0.01)
    watch = pull_watch.PullWatch(engine, pull_timeout_s=0.2)
    await watch.start()
    yield watch
    watch._task.cancel()


def handed_over(name: str, number: int = 1) -> Any:
    from deployments.wire.messages import PrefillResult

    params = {"remote_engine_id": f"e{number}", "remote_request_id": name}
    return PrefillResult(kv_transfer_params=params, answered_at_s=0.0, backlog_tokens=0, replica_id=f"p{number}")


async def until(watch: Any, engine: Engine, *broken: str) -> None:
    async with asyncio.timeout(30.0):
        while watch.peers.broken(0.0) != set(broken):
            await asyncio.sleep(0.01)
        polls = engine.polls
        while engine.polls < polls + 2 and watch._has_work.is_set():
            await asyncio.sleep(0.01)


async def test_a_failed_pull_drops_the_link_and_frees_unread_kv(watch: Any, engine: Engine) -> None:
    for name, number in (("r1", 1), ("r2", 2)):
        watch.begin(handed_over(name, number)).has_first = True  # vLLM has computed the first token
    engine.failed = {"r1": "e1"}
    await until(watch, engine, "p1")
    assert engine.forgotten == ["e1"]
    assert engine.released == ["r1"]
    watch.begin(handed_over("r3")).has_first = True
    await until(watch, engine)


async def test_a_pull_that_takes_too_long_is_ended_with_its_link(watch: Any, engine: Engine) -> None:
    watch.begin(handed_over("r1")).has_ended = True  # also if its client has left: its blocks would be lost
    engine.running = {"r1": "e1"}
    await asyncio.sleep(0.1)
    assert engine.forgotten == []
    await until(watch, engine, "p1")
    assert engine.forgotten == ["e1"]
    assert engine.released == ["r1"]


async def test_a_failure_counts_though_its_first_report_came_too_late(watch: Any, engine: Engine) -> None:
    engine.failed, engine.answers_late = {"r1": "e1"}, 2
    watch.begin(handed_over("r1")).has_first = True
    await until(watch, engine, "p1")
    assert engine.forgotten == ["e1"]
    watch.begin(handed_over("r2")).has_first = True
    await until(watch, engine)
    assert engine.failed == {}
    assert engine.forgotten == ["e1"]


async def test_a_link_that_could_not_be_dropped_is_dropped_later(watch: Any, engine: Engine) -> None:
    engine.is_dropped, engine.failed = False, {"r1": "e1"}
    watch.begin(handed_over("r1"))
    await until(watch, engine, "p1")
    assert len(engine.forgotten) >= 2
    engine.is_dropped = True
    await until(watch, engine, "p1")
    tries = len(engine.forgotten)
    await asyncio.sleep(0.1)
    assert len(engine.forgotten) == tries
    assert engine.released == ["r1"]


async def test_a_request_that_ends_before_its_kv_has_come_does_not_mend_the_link(watch: Any, engine: Engine) -> None:
    engine.failed = {"r1": "e1"}
    watch.begin(handed_over("r1"))
    await until(watch, engine, "p1")
    watch.begin(handed_over("r2")).has_ended = True
    await asyncio.sleep(0.1)
    assert watch.peers.broken(0.0) == {"p1"}


async def test_an_idle_engine_gets_a_step_in_which_it_frees_unread_kv(
    watch: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments.replicas import pull_watch

    monkeypatch.setattr(pull_watch, "_HANDSHAKE_S", 0.05)
    await watch.release("r1", {"remote_request_id": "p1"})
    assert engine.released == ["p1"]
    await asyncio.sleep(0.2)
    assert engine.released == ["p1", "a step"]


async def test_an_engine_without_pulls_is_not_polled(watch: Any, engine: Engine) -> None:
    watch.begin(handed_over("r1")).has_first = True
    await asyncio.sleep(0.1)
    polls = engine.polls
    await asyncio.sleep(0.1)
    assert engine.polls == polls
