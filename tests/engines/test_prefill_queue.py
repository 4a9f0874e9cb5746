"""The prefill queue of an application on emulated engines: late binding, and a queue that is lost."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import ray

from router.ray_actors import find_actor
from router.ray_prefill_queue import queue_key
from tests.engines.endpoint import WAIT_S, emulated_document, eventually, prompt_ids, samples, total

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

LONG = 2500  # tokens; four of them fit into the KV of a decode replica
SPEED = 0.2  # an engine takes more than a second for a prompt


@pytest.fixture(scope="module", name="app")
def _app() -> Iterator[Any]:
    from serve_app.sdk import deploy

    document = emulated_document(replicas=1)
    args = document["applications"][0]["args"]
    for role in ("prefill", "decode"):
        args["groups"][0][role]["replicas"] = 2
        args["groups"][0][role]["emulator"]["time_factor"] = SPEED
    args["router"] = {"prefill_queue": {"strategy": "dopd"}}
    with deploy(document) as running:
        yield running


async def ask(app: Any, session: aiohttp.ClientSession, seed: int, input_tokens: int = LONG) -> int:
    body = {"model": "llama-70b", "prompt": prompt_ids(input_tokens, seed=seed), "max_tokens": 4}
    async with session.post(f"{app.url}/v1/completions", json=body) as response:
        await response.read()
        return response.status


def places(app: Any, outcome: str) -> float:
    return total(app, "tandem_prefill_places_total", outcome=outcome)


def callers(app: Any) -> set[str]:
    """Decode replicas whose prompts the queue has bound."""
    counts = samples(app, "tandem_prefill_places_total")
    return {have["replica"] for have, value in counts if have["outcome"] == "bound" and value}


async def test_prompts_of_all_decode_replicas_wait_until_a_prefill_replica_has_room(app: Any) -> None:
    async with aiohttp.ClientSession() as session:
        # The first prompt of a decode replica is sent at once: its router knows no replicas before.
        seed = 0
        while len(callers(app)) < 2:
            assert await ask(app, session, seed := seed + 1, input_tokens=300) == 200
        before, sent = places(app, "bound"), total(app, "tandem_prefill_path_total", path="remote")
        asked = [asyncio.create_task(ask(app, session, 100 + number)) for number in range(8)]
        await eventually(lambda: places(app, "bound") - before >= 4, within_s=WAIT_S)
        assert places(app, "bound") - before == 4  # two for each prefill replica
        assert not any(task.done() for task in asked)
        assert set(await asyncio.gather(*asked)) == {200}
        assert places(app, "bound") - before == 8
        assert total(app, "tandem_prefill_path_total", path="remote") - sent == 8


async def test_prompts_are_answered_while_the_queue_is_lost_and_wait_in_the_next_one(app: Any) -> None:
    key = queue_key(app.name, "prefill:g0")
    async with aiohttp.ClientSession() as session:
        asked = [asyncio.create_task(ask(app, session, 200 + number)) for number in range(8)]
        await asyncio.sleep(1.0)
        lost = find_actor(key)
        ray.kill(lost)
        assert set(await asyncio.gather(*asked)) == {200}
        assert places(app, "queue_lost") >= 1
        await eventually(lambda: find_actor(key) not in (None, lost), within_s=WAIT_S)
        before, seed = places(app, "bound"), 300
        while places(app, "bound") == before:
            assert await ask(app, session, seed, input_tokens=300) == 200
            seed += 1
    assert total(app, "tandem_prefill_failures_total") == 0
