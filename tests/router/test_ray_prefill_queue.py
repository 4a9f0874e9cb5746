"""What decode replicas get from the prefill queue, also from one that hangs or is gone; the real actor runs here."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.router.test_ray_health import Handle, until

pytestmark = pytest.mark.ray

TWO = frozenset({"p0", "p1"})
# No other test in this process routes to a pool of this name, so the feeds know no replicas by themselves.
POOL = "prefill:test_ray_prefill_queue"


def made_queue(strategy: str = "fcfs") -> Any:
    from deployments.actors.prefill_queue import PrefillQueue
    from router.config import PrefillQueueConfig
    from router.prefill_scheduler import PrefillScheduler

    queue = PrefillQueue.__new__(PrefillQueue)  # its announcement needs a cluster
    queue._scheduler = PrefillScheduler(PrefillQueueConfig.model_validate({"strategy": strategy}))
    queue._replicas, queue._places, queue._heard_s, queue._lease_s = frozenset(), {}, {}, 30.0
    return queue


class Loose(Handle):
    """Runs calls whose answers nobody awaits, as Ray does."""

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._board, name)
        return type("Method", (), {"remote": staticmethod(lambda *args: asyncio.ensure_future(method(*args)))})


@pytest.fixture(name="announced")
def _announced(monkeypatch: Any) -> Iterator[list[Any]]:
    """The queues that have been started; callers find the last one, or none."""
    import ray

    from deployments.actors import prefill_queue
    from router import ray_actors, ray_prefill_queue

    queues: list[Any] = [made_queue()]
    monkeypatch.setattr(ray_actors, "find_actor", lambda key: Loose(queues[-1]) if queues else None)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(prefill_queue, "_WATCH_S", 0.05)
    for module in (ray_prefill_queue, prefill_queue):
        monkeypatch.setattr(module, "SILENCE_S", 0.3)
    return queues


@pytest.fixture(name="queue")
def _queue(announced: list[Any]) -> Any:
    return announced[0]


async def feed(announced: list[Any], caller: str = "d0") -> Any:
    from router.ray_prefill_queue import QueueFeed

    one = QueueFeed("app", POOL, caller)
    one.start()
    await until(lambda: one._queue is not None)
    return one


async def place(one: Any, tokens: int = 1000, timeout_s: float = 30.0, **more: Any) -> Any:
    known = {"waited_s": 0.0, "objective_s": 1.0, "replicas": TWO, "exclude": frozenset(), "overlap_tokens": {}, **more}
    return await one.place(tokens, timeout_s=timeout_s, **known)


async def test_a_prompt_goes_where_its_beginning_is_cached(announced: list[Any]) -> None:
    one = await feed(announced)
    for cached in ("p1", "p0"):
        found = await place(one, overlap_tokens={cached: 900})
        assert found.replica_id == cached
        one.end(found.prompt_id, is_computed=True)


async def test_a_prompt_waits_until_a_replica_has_room_whoever_asks(announced: list[Any]) -> None:
    one, other = await feed(announced), await feed(announced, "d1")
    first = await asyncio.gather(*(place(each) for each in (one, other, one, other)))
    assert sorted(each.replica_id for each in first) == ["p0", "p0", "p1", "p1"]
    late = asyncio.create_task(place(other))
    await asyncio.sleep(0.1)
    assert not late.done()
    one.end(first[0].prompt_id, is_computed=True)
    assert (await late).replica_id == first[0].replica_id


async def test_a_prompt_without_a_replica_is_told_so_at_once(announced: list[Any]) -> None:
    from router.ray_prefill_queue import PlaceOutcome

    one = await feed(announced)
    assert (await place(one, exclude=TWO)).outcome is PlaceOutcome.UNPLACED
    assert (await place(one, replicas=frozenset())).outcome is PlaceOutcome.UNPLACED
    assert (await place(one, exclude=frozenset({"p0"}))).replica_id == "p1"


async def test_a_new_decode_replica_that_knows_no_prefill_replica_frees_no_place(announced: list[Any]) -> None:
    from router.ray_prefill_queue import PlaceOutcome

    one, new = await feed(announced), await feed(announced, "d1")
    for _ in range(4):
        await place(one)
    assert (await place(new, replicas=frozenset())).outcome is PlaceOutcome.UNPLACED
    assert (await place(one, timeout_s=0.1)).outcome is PlaceOutcome.LATE  # all places are still taken


async def test_a_queue_with_too_many_prompts_sends_the_next_one_away(announced: list[Any], monkeypatch: Any) -> None:
    from deployments.actors import prefill_queue
    from router.ray_prefill_queue import PlaceOutcome

    monkeypatch.setattr(prefill_queue, "MOST_WAITING", 1)
    one = await feed(announced)
    for _ in range(4):
        await place(one)
    waits = asyncio.create_task(place(one))
    await asyncio.sleep(0.1)
    assert (await place(one)).outcome is PlaceOutcome.UNPLACED
    assert not waits.done()
    waits.cancel()


async def test_a_prompt_whose_client_has_gone_or_that_is_late_waits_no_longer(announced: list[Any], queue: Any) -> None:
    from router.ray_prefill_queue import PlaceOutcome

    one = await feed(announced)
    for _ in range(4):
        await place(one)
    gone = asyncio.create_task(place(one))
    await until(lambda: queue._scheduler.waiting == 1)
    gone.cancel()
    await until(lambda: queue._scheduler.waiting == 0)
    assert (await place(one, timeout_s=0.1)).outcome is PlaceOutcome.LATE
    await until(lambda: queue._scheduler.waiting == 0 and not queue._places)


async def test_without_a_queue_and_with_one_that_is_lost_a_prompt_is_sent_at_once(announced: list[Any]) -> None:
    from router.ray_prefill_queue import PlaceOutcome

    one = await feed(announced)
    for _ in range(4):
        await place(one)
    waits = asyncio.create_task(place(one))
    await asyncio.sleep(0.05)
    announced[-1].watch = lambda caller, replicas: asyncio.sleep(60.0)  # it hangs
    assert (await waits).outcome is PlaceOutcome.QUEUE_LOST
    announced.clear()
    await until(lambda: one._queue is None)
    assert (await place(one)).outcome is PlaceOutcome.QUEUE_LOST
    announced.append(made_queue())  # Serve has started another one
    await until(lambda: one._queue is not None)
    assert (await place(one)).outcome is PlaceOutcome.BOUND


async def test_a_queue_that_fails_a_call_sends_the_prompt_away(announced: list[Any], queue: Any) -> None:
    from router.ray_prefill_queue import PlaceOutcome

    async def broken(request: Any) -> str:
        raise RuntimeError("broken")

    one = await feed(announced)
    queue.place = broken
    assert (await place(one)).outcome is PlaceOutcome.QUEUE_LOST


async def test_places_of_a_decode_replica_that_is_gone_are_free_after_a_silence(
    announced: list[Any], queue: Any
) -> None:
    one, other = await feed(announced), await feed(announced, "d1")
    for _ in range(4):
        await place(one)
    waits = asyncio.create_task(place(other))
    sweeping = asyncio.create_task(queue._sweep())
    await asyncio.sleep(0.6)
    assert not waits.done()  # both are heard
    one._following.cancel()  # its process has died
    assert (await waits).replica_id in TWO
    assert set(queue._heard_s) == {"d1"}
    sweeping.cancel()


async def test_a_place_whose_end_is_never_reported_is_free_after_the_lease(announced: list[Any], queue: Any) -> None:
    queue._lease_s = 0.5
    one = await feed(announced)
    for _ in range(4):
        await place(one)
    waits = asyncio.create_task(place(one))
    sweeping = asyncio.create_task(queue._sweep())
    assert (await waits).replica_id in TWO
    sweeping.cancel()


async def test_a_queue_that_was_silent_still_learns_that_its_places_are_free(announced: list[Any], queue: Any) -> None:
    one, watch = await feed(announced), queue.watch
    held = [await place(one) for _ in range(4)]
    waits = asyncio.create_task(place(one))
    await asyncio.sleep(0.05)
    queue.watch = lambda caller, replicas: asyncio.sleep(60.0)
    await waits
    for each in held:
        one.end(each.prompt_id, is_computed=True)
    queue.watch = watch
    await until(lambda: not queue._scheduler._bound and not queue._scheduler.waiting)
    assert not one._queues


async def test_a_new_replica_gets_a_waiting_prompt_before_another_one_comes(queue: Any) -> None:
    from router.ray_prefill_queue import PlaceRequest

    def request(number: int) -> PlaceRequest:
        return PlaceRequest(
            prompt_id=f"d0:{number}", caller="d0", tokens=1000, waited_s=0.0, objective_s=1.0, replicas=TWO
        )

    places = [asyncio.create_task(queue.place(request(number))) for number in range(5)]
    await asyncio.sleep(0.05)
    assert not places[4].done()  # two for each replica
    watch = asyncio.create_task(queue.watch("d0", TWO | {"p2"}))
    assert await asyncio.wait_for(places[4], timeout=5.0) == "p2"
    await watch
