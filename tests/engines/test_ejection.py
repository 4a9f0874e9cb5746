"""A replica that runs but fails gets no traffic, and later comes back: its connections are cut while others serve."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import psutil
import pytest

from router.ray_actors import find_actor
from router.ray_health import board_key
from tests.engines.endpoint import WAIT_S, emulated_document, eventually, prompt_ids, replica_processes, samples, total
from tests.lab.drill.links import connections, cut

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

SICK_S, PER_S = 12.0, 8.0


@pytest.fixture(scope="module", name="app")
def _app() -> Iterator[Any]:
    from serve_app.sdk import deploy

    document = emulated_document(replicas=2)
    for role in ("prefill", "decode"):
        document["applications"][0]["args"]["groups"][0][role]["replicas"] = 2
    with deploy(document) as running:
        yield running


@contextmanager
def unreachable(victim: psutil.Process, callers: list[psutil.Process]) -> Iterator[None]:
    """While the context is open, each connection of a caller to the victim is cut at once."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.02):
            for caller in callers:
                with suppress(psutil.Error, OSError):
                    for link in connections(caller, victim):
                        cut(link)

    cutting = threading.Thread(target=run, daemon=True)
    cutting.start()
    try:
        yield
    finally:
        is_over.set()
        cutting.join()


async def ejected(app: Any) -> int:
    """Number of ejected decode replicas, by the health board."""
    board = find_actor(board_key(app.name))
    assert board is not None
    _, names, _, _ = await board.watch.remote("decode:g0", -1)
    return len(names)


def failed_over(app: Any) -> float:
    return total(app, "tandem_retried_total") + total(app, "tandem_resumed_total")


def decoded(app: Any) -> dict[str, float]:
    """Number of requests of each decode replica."""
    counts: dict[str, float] = {}
    for have, value in samples(app, "tandem_prefill_path_total"):
        counts[have["replica"]] = counts.get(have["replica"], 0.0) + value
    return counts


async def ask(app: Any, session: aiohttp.ClientSession, seed: int, input_tokens: int = 20) -> int:
    body = {"model": "llama-70b", "prompt": prompt_ids(input_tokens, seed=seed), "max_tokens": 4}
    async with session.post(f"{app.url}/v1/completions", json=body) as response:
        await response.read()
        return response.status


async def test_a_replica_that_fails_gets_no_traffic_and_comes_back(app: Any) -> None:
    async with aiohttp.ClientSession() as session:
        assert {await ask(app, session, seed) for seed in range(20)} == {200}
        before, failures = decoded(app), failed_over(app)
        assert len(before) == 2
        victim = replica_processes(app, "decode")[0]
        with unreachable(victim, replica_processes(app, "ingress")):
            began_s, asked = time.monotonic(), []
            while time.monotonic() - began_s < SICK_S:
                asked.append(asyncio.create_task(ask(app, session, 100 + len(asked))))
                await asyncio.sleep(1.0 / PER_S)
            assert set(await asyncio.gather(*asked)) == {200}
            assert await ejected(app) == 1
        # Three failures eject it. Requests of the second that it takes to tell all callers fail too, and so does a
        # probe after five seconds. Fewer fail if a connection is cut before the replica accepts a request.
        assert failed_over(app) - failures <= 3 + PER_S + 2
        alone = decoded(app)

        async def serve_both() -> bool:
            await asyncio.gather(*(ask(app, session, 1000 + seed) for seed in range(8)))
            now = decoded(app)
            return all(now[name] > alone[name] + 3 for name in alone)

        until_s = time.monotonic() + WAIT_S
        while not await serve_both():
            assert time.monotonic() < until_s
            await asyncio.sleep(1.0)
        assert await ejected(app) == 0
    await eventually(lambda: app.status().replicas["decode:g0"] == {"RUNNING": 2})
    assert victim.is_running()


async def test_a_prefill_replica_that_fails_gets_no_prompts_and_comes_back(app: Any) -> None:
    def remote() -> float:
        return total(app, "tandem_prefill_path_total", path="remote")

    async def ask_for(session: aiohttp.ClientSession, seconds: float, seed: int) -> int:
        asked, began_s = [], time.monotonic()
        while time.monotonic() - began_s < seconds:
            asked.append(asyncio.create_task(ask(app, session, seed + len(asked), input_tokens=600)))
            await asyncio.sleep(1.0 / PER_S)
        assert set(await asyncio.gather(*asked)) == {200}
        return len(asked)

    victim, other = replica_processes(app, "prefill")
    decode = replica_processes(app, "decode")
    async with aiohttp.ClientSession() as session:
        before, failures = remote(), total(app, "tandem_prefill_failures_total")
        assert await ask_for(session, 2.0, 5000) == remote() - before
        before = remote()
        with unreachable(victim, decode):
            asked = await ask_for(session, SICK_S, 6000)
            assert await ejected(app) == 1
        # As above; the other prefill replica computes each of these prompts.
        assert total(app, "tandem_prefill_failures_total") - failures <= 3 + PER_S + 2
        assert remote() - before >= 0.8 * asked
        # The victim serves again, while the other one is cut off.
        until_s = time.monotonic() + WAIT_S
        with unreachable(other, decode):
            while True:
                before, asked = remote(), await ask_for(session, 4.0, 7000 + 100 * round(time.monotonic()))
                if remote() - before >= 0.8 * asked:
                    break
                assert time.monotonic() < until_s
    await eventually(lambda: app.status().replicas["prefill:g0"] == {"RUNNING": 2})
