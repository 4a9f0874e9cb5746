"""Prompts of a decode replica in the prefill queue, which runs here; vLLM's client and Serve's handle are fakes."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.deployments.replicas.test_pd_generate import LONG, Client, Prefill, answered, decode, run, sent
from tests.router.test_ray_health import until
from tests.router.test_ray_prefill_queue import Loose, made_queue

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

KV_TOKENS = 10_000


@pytest.fixture(name="queue")
def _queue(monkeypatch: Any) -> Any:
    from router import known_pools, ray_actors

    queue = made_queue()
    monkeypatch.setattr(ray_actors, "find_actor", lambda key: Loose(queue))
    monkeypatch.setattr(ray_actors, "ray", SimpleNamespace(is_initialized=lambda: True))
    router = SimpleNamespace(curr_replicas={"p1": None, "p2": None}, routed=lambda: ["p1", "p2"])
    monkeypatch.setattr(known_pools, "_ROUTERS", {"prefill:g0": [router]})
    return queue


async def places(generate: Any, credit_wait_s: float = 30.0) -> Any:
    """Let a decode replica's prompts wait in the queue; returns its engine's load."""
    from autoscale.slo import SloConfig
    from deployments.replicas.prefill_places import PrefillPlaces
    from deployments.vllm_seam.engine_stats import EngineLoad
    from router.config import PrefillQueueConfig
    from router.ray_prefill_queue import QueueFeed

    feed = QueueFeed("app", "prefill:g0", "d0")
    feed.start()
    engine = SimpleNamespace(load=EngineLoad(), kv_tokens=KV_TOKENS)
    config = PrefillQueueConfig(strategy="fcfs", credit_wait_s=credit_wait_s)
    made = PrefillPlaces(feed, engine, config, SloConfig(), pool="prefill:g0", most_ejected_frac=0.5)
    generate._places = generate._remote.places = made
    await until(lambda: feed._queue is not None)
    return engine.load


def ids(number: int, length: int = len(LONG)) -> list[int]:
    return [number, *range(300, 299 + length)]


async def test_a_prompt_goes_to_the_replica_of_its_place_and_leaves_it_with_the_answer(queue: Any) -> None:
    client, prefill = Client(), Prefill()
    generate = decode(client, prefill)
    await places(generate)
    tasks = [asyncio.create_task(run(generate, ids(number), f"r{number}")) for number in range(5)]
    await sent(prefill, 4)  # two for each replica; the fifth one has no place
    assert sorted(request.routing.preferred for request in prefill.requests) == ["p1", "p1", "p2", "p2"]
    prefill.calls[0].set_result(answered())
    await sent(prefill, 5)
    assert prefill.requests[4].routing.preferred == prefill.requests[0].routing.preferred
    for call in prefill.calls[1:]:
        call.set_result(answered())
    await asyncio.gather(*tasks)
    await until(lambda: not queue._scheduler._bound)


async def test_a_prompt_that_one_replica_failed_gets_a_place_at_another(queue: Any) -> None:
    client, prefill = Client(), Prefill()
    generate = decode(client, prefill)
    await places(generate)
    task = asyncio.create_task(run(generate, LONG))
    await sent(prefill, 1)
    # The fake pool says that the first call went to p1, wherever its place was.
    prefill.calls[0].set_exception(RuntimeError("gone"))
    await sent(prefill, 2)
    assert prefill.requests[1].routing.preferred == "p2"
    prefill.calls[1].set_result(answered())
    await task
    await until(lambda: not queue._scheduler._bound)


async def test_a_client_that_leaves_gives_back_its_place_and_its_credit(queue: Any) -> None:
    client, prefill = Client(), Prefill()
    generate = decode(client, prefill)
    await places(generate)
    tasks = [asyncio.create_task(run(generate, ids(number), f"r{number}")) for number in range(5)]
    await sent(prefill, 4)
    await until(lambda: queue._scheduler.waiting == 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not queue._scheduler.waiting and not queue._scheduler._bound)
    assert generate._places._credit._promised_tokens == 0


async def test_a_prompt_waits_until_decode_will_have_room_for_its_kv(queue: Any) -> None:
    client, prefill = Client(), Prefill()
    generate = decode(client, prefill)
    load = await places(generate)
    load.kv_usage_frac = 0.95
    task = asyncio.create_task(run(generate, LONG))
    await asyncio.sleep(0.2)
    assert not prefill.calls
    load.kv_usage_frac = 0.5
    await sent(prefill, 1)
    prefill.calls[0].set_result(answered())
    await task
    assert client.requests == [("r", {"from": "p"})]


async def test_promises_of_prompts_on_their_way_count_and_end_with_the_first_token(queue: Any) -> None:
    client, prefill = Client(), Prefill()
    generate = decode(client, prefill)
    await places(generate)
    first = asyncio.create_task(run(generate, ids(1, length=4000), "a"))
    await sent(prefill, 1)
    second = asyncio.create_task(run(generate, ids(2, length=3900), "b"))
    await sent(prefill, 2)
    third = asyncio.create_task(run(generate, ids(3, length=3800), "c"))
    await asyncio.sleep(0.2)
    assert len(prefill.calls) == 2
    prefill.calls[0].set_result(answered())
    await sent(prefill, 3)
    for call in prefill.calls[1:]:
        call.set_result(answered())
    await asyncio.gather(first, second, third)


async def test_decode_computes_a_prompt_whose_kv_would_have_no_room(queue: Any) -> None:
    from deployments.metrics import PREFILL_PATH

    client, prefill = Client(), Prefill()
    generate = decode(client, prefill)
    load = await places(generate, credit_wait_s=0.1)
    load.kv_usage_frac = 1.0
    count = PREFILL_PATH.labels("local", "no_credit")._value
    before = count.get()
    await run(generate, LONG)
    assert client.requests == [("r", None)] and not prefill.calls
    assert count.get() == before + 1


async def test_a_prompt_larger_than_the_kv_of_decode_keeps_no_other_waiting(queue: Any) -> None:
    generate = decode(Client(), Prefill())
    await places(generate)
    credit = generate._places.credit
    assert not await asyncio.wait_for(credit("too long", KV_TOKENS + 1), timeout=5.0)
    assert await asyncio.wait_for(credit("short", KV_TOKENS), timeout=5.0)


async def test_a_prompt_that_gets_no_place_in_time_is_computed_by_decode(queue: Any) -> None:
    client, prefill = Client(), Prefill()
    generate = decode(client, prefill)
    await places(generate)
    tasks = [asyncio.create_task(run(generate, ids(number), f"r{number}")) for number in range(4)]
    await sent(prefill, 4)
    generate._remote._config = generate._remote._config.model_copy(update={"prefill_timeout_s": 0.3})
    await run(generate, LONG, "late")
    assert client.requests == [("late", None)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_prompts_wait_for_all_replicas_if_most_of_them_are_ejected(queue: Any) -> None:
    from router.routing import Routing

    generate = decode(Client(), Prefill())
    await places(generate)
    waiting, now_s = generate._places, time.monotonic()

    async def replica(*ejected: str) -> str | None:
        routing = Routing(avoid=frozenset(ejected))
        place = await waiting.place(100, routing, arrived_s=now_s, deadline_s=now_s + 30.0)
        return str(place.replica_id)

    assert [await replica("p1"), await replica("p1")] == ["p2", "p2"]
    assert [await replica("p1", "p2"), await replica("p1", "p2")] == ["p1", "p1"]
