"""How a replica notices that its engine dies, hangs or does not start."""

import asyncio
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


def _engine_host() -> Any:
    from deployments.replicas import engine_host

    return engine_host


LOG = """\
(EngineCore pid=17) INFO 11-21 10:15:30 [core.py:99] ValueError: not a line of the traceback
(EngineCore pid=17) Traceback (most recent call last):
(EngineCore pid=17)     raise ValueError(
(EngineCore pid=17) ValueError: To serve at least one request, 0.02 GiB is needed
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_exception_of_the_engine_core_is_the_cause() -> None:
    assert _engine_host().engine_error(LOG) == "ValueError: To serve at least one request, 0.02 GiB is needed"


def test_the_exception_of_the_last_start_is_the_cause_even_with_a_dotted_name() -> None:
    again = LOG + "(Worker pid=18) torch.OutOfMemoryError: tried to allocate 2 GiB\n"
    assert _engine_host().engine_error(again) == "torch.OutOfMemoryError: tried to allocate 2 GiB"


def test_a_log_without_an_engine_names_no_cause() -> None:
    assert _engine_host().engine_error("RuntimeError: Engine core initialization failed.\n") is None


class Client:
    """An engine that answers after ``answer_s``."""

    errored = False

    def __init__(self, answer_s: float = 0.0) -> None:
        self.answer_s = answer_s
        self.pings = 0

    async def is_paused(self) -> bool:
        self.pings += 1
        await asyncio.sleep(self.answer_s)
        return False


@pytest.fixture(autouse=True)
def _fast(monkeypatch: Any) -> None:
    from deployments.replicas import engine_host

    monkeypatch.setattr(engine_host, "_POLL_S", 0.01)
    monkeypatch.setattr(engine_host, "_PING_S", 0.05)


async def test_an_engine_that_answers_does_not_end_its_replica() -> None:
    client = Client(answer_s=0.1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await _engine_host().watch_engine(client, silence_s=0.9)
    assert client.pings > 2


async def test_the_death_of_an_engine_is_noticed_at_once() -> None:
    client = Client()
    watch = asyncio.create_task(_engine_host().watch_engine(client, silence_s=60.0))
    await asyncio.sleep(0.1)
    assert not watch.done()
    client.errored = True
    await asyncio.wait_for(watch, 30.0)


async def test_an_engine_that_does_not_answer_counts_as_hanging() -> None:
    client, started_s = Client(answer_s=60.0), time.monotonic()
    await asyncio.wait_for(_engine_host().watch_engine(client, silence_s=0.4), 30.0)
    assert client.pings == 1
    assert time.monotonic() - started_s >= 0.4


async def test_an_engine_that_goes_to_sleep_or_wakes_need_not_answer() -> None:
    is_changing, client = [True], Client(answer_s=60.0)
    watch = asyncio.create_task(_engine_host().watch_engine(client, 0.2, lambda: is_changing[0]))
    await asyncio.sleep(0.6)
    assert not watch.done()
    is_changing[0] = False
    await asyncio.wait_for(watch, 30.0)


async def test_an_engine_that_dies_during_a_ping_is_dead_without_an_error() -> None:
    class Dying(Client):
        async def is_paused(self) -> bool:
            self.errored = True
            raise RuntimeError("EngineDeadError")

    await asyncio.wait_for(_engine_host().watch_engine(Dying(), silence_s=60.0), 30.0)
