"""What the router believes to be in flight, in whatever order Serve tells of it."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.ray


@pytest.fixture(name="router")
def _router() -> Any:
    from ray.serve._private.common import DeploymentID

    from router.ray_router import TandemRouter

    router = TandemRouter.__new__(TandemRouter)  # Serve's own state needs a running controller
    router._deployment_id = DeploymentID("decode:test_ray_router", "tandem")
    router.initialize_state()
    return router


def pending(request_id: str, work_tokens: int | None = None, *, is_streaming: bool = True) -> Any:
    from ray.serve._private.common import RequestMetadata
    from ray.serve.request_router import PendingRequest

    first = "chat" if work_tokens is None else SimpleNamespace(work_tokens=work_tokens)
    metadata = RequestMetadata(request_id=request_id, internal_request_id=request_id, is_streaming=is_streaming)
    return PendingRequest(args=[first], kwargs={}, metadata=metadata)


def replica(name: str, queue: int | None = 0) -> Any:
    """A candidate that says how many requests it has, and ten times as many tokens; with ``None`` it never answers."""
    from ray.serve._private.common import DeploymentID
    from ray.serve.request_router import ReplicaID

    async def get_queue_len(*, deadline_s: float) -> int:
        await asyncio.sleep(60.0 if queue is None else 0.0)
        return queue or 0

    async def record_routing_stats() -> dict[str, int]:
        return {"queued_tokens": 10 * await get_queue_len(deadline_s=0.0)}

    replica_id = ReplicaID(unique_id=name, deployment_id=DeploymentID(name="decode:g0"))
    actor = SimpleNamespace(record_routing_stats=SimpleNamespace(remote=record_routing_stats))
    return SimpleNamespace(replica_id=replica_id, get_queue_len=get_queue_len, _actor_handle=actor)


async def test_a_request_says_where_it_must_not_go_and_what_it_avoids(router: Any) -> None:
    names = [replica(name) for name in "abc"]
    asked = pending("1", 5)
    asked.args[0] = SimpleNamespace(exclude=frozenset("ab"), avoid=frozenset(), routed_to=None)
    ranks = await router.choose_replicas(names, asked)
    assert [rank[0].replica_id.unique_id for rank in ranks] == ["c"]
    asked.args[0] = SimpleNamespace(exclude=frozenset("c"), avoid=frozenset("a"), routed_to=None)
    for _ in range(20):
        ranks = await router.choose_replicas(names, asked)
        assert [rank[0].replica_id.unique_id for rank in ranks] == ["b"]
    asked.args[0].avoid = frozenset("ab")  # most of the pool: then nobody is avoided
    ranks = await router.choose_replicas(names, asked)
    assert sorted(rank[0].replica_id.unique_id for rank in ranks) == ["a", "b"]
    asked.args[0].avoid, asked.args[0].probe = frozenset("a"), "b"
    for _ in range(20):
        ranks = await router.choose_replicas(names[1:], asked)
        assert ranks[0][0].replica_id.unique_id == "b"
    router.on_request_routed(asked, names[1].replica_id, None)
    assert asked.args[0].routed_to == "b"


async def first_choice(router: Any, *replicas: Any) -> str:
    ranks = await router.choose_replicas(list(replicas))
    return str(ranks[0][0].replica_id.unique_id)


async def test_the_replica_with_fewer_tokens_in_flight_is_tried_first(router: Any) -> None:
    a, b = replica("a"), replica("b")
    router.on_request_routed(pending("1", 500), a.replica_id, None)
    for number in range(3):
        router.on_request_routed(pending(f"2{number}", 100), b.replica_id, None)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"b"}
    router.on_request_completed(a.replica_id, "1")
    assert {await first_choice(router, a, b) for _ in range(20)} == {"a"}


async def test_a_plain_call_told_of_after_its_end_leaves_nothing_behind(router: Any) -> None:
    a, b = replica("a"), replica("b")
    for number in range(50):
        router.on_request_completed(a.replica_id, str(number))
        router.on_request_routed(pending(str(number), is_streaming=False), a.replica_id, None)
    assert {await first_choice(router, a, b) for _ in range(50)} == {"a", "b"}


async def test_a_request_that_a_replica_first_refused_counts_once_it_is_taken(router: Any) -> None:
    a, b = replica("a"), replica("b")
    router.on_request_completed(a.replica_id, "1")  # refused
    router.on_request_routed(pending("1", 100), a.replica_id, None)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"b"}
    router.on_request_completed(a.replica_id, "1")
    assert {await first_choice(router, a, b) for _ in range(50)} == {"a", "b"}


async def test_a_request_without_a_size_counts_one(router: Any) -> None:
    a, b = replica("a"), replica("b")
    router.on_request_routed(pending("1"), a.replica_id, None)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"b"}


async def test_a_held_replica_gets_nothing_until_it_is_admitted_and_a_new_list_is_noticed(router: Any) -> None:
    from router.membership import Membership

    a, b, c = replica("a"), replica("b"), replica("c")
    router._feed = SimpleNamespace(membership=None)
    assert {await first_choice(router, a, b) for _ in range(30)} == {"a", "b"}
    now_s = time.monotonic()
    router._feed.membership = Membership(admitted=frozenset({"b"}), heard_s=now_s)
    assert {await first_choice(router, a, b) for _ in range(30)} == {"b"}
    router._feed.membership = Membership(admitted=frozenset({"b", "c"}), heard_s=now_s)
    assert {await first_choice(router, a, b, c) for _ in range(30)} == {"b", "c"}
    router._feed.membership = Membership(admitted=frozenset({"b"}), heard_s=now_s - 60.0)
    assert {await first_choice(router, a, b, c) for _ in range(60)} == {"a", "b", "c"}


async def test_the_same_list_again_costs_no_new_views_and_still_counts(router: Any) -> None:
    a, b = replica("a"), replica("b")
    candidates = [a, b]
    await router.choose_replicas(candidates)
    views = router._pool._views
    router.on_request_routed(pending("1", 500), a.replica_id, None)
    ranks = [(await router.choose_replicas(candidates))[0][0] for _ in range(20)]
    assert router._pool._views is views
    assert {rank.replica_id.unique_id for rank in ranks} == {"b"}


async def test_what_other_routers_send_counts_where_replicas_are_asked(router: Any) -> None:
    router.initialize_state(asked_replicas=3)
    a, b, c = replica("a", 3), replica("b", 2), replica("c", 4)
    assert {await first_choice(router, a, b, c) for _ in range(20)} == {"b"}
    for number in range(2):
        router.on_request_routed(pending(str(number)), b.replica_id, None)
    assert {await first_choice(router, a, b, c) for _ in range(20)} == {
        "b"
    }  # the two that it has are this router's own
    for number in range(2, 4):
        router.on_request_routed(pending(str(number)), b.replica_id, None)
    assert {await first_choice(router, a, b, c) for _ in range(20)} == {"a"}  # they have not arrived yet


async def test_prefill_is_asked_for_its_tokens(router: Any) -> None:
    router.initialize_state(asked_replicas=2, asks_tokens=True)
    a, b = replica("a", 3), replica("b", 2)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"b"}
    router.on_request_routed(pending("1", 29), b.replica_id, None)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"b"}  # 29 of its own are fewer than a's 30
    router.on_request_routed(pending("2", 2), b.replica_id, None)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"a"}


async def test_one_that_does_not_answer_is_tried_last_and_none_is_lost(router: Any) -> None:
    router.initialize_state(asked_replicas=2)
    silent, busy, far = replica("silent", None), replica("busy", 9), replica("far")
    router.on_request_routed(pending("1", 500), far.replica_id, None)
    ranks = await router.choose_replicas([silent, busy, far])
    assert [rank[0].replica_id.unique_id for rank in ranks] == ["busy", "far", "silent"]


async def test_one_that_leaves_while_others_are_asked_is_not_chosen(router: Any) -> None:
    router.initialize_state(asked_replicas=2)
    gone, left = replica("gone"), replica("left", 5)
    choice = asyncio.create_task(router.choose_replicas([gone, left]))
    await asyncio.sleep(0)
    await router.choose_replicas([left])
    assert [rank[0].replica_id.unique_id for rank in await choice] == ["left"]


async def test_an_answer_that_serves_nobody_is_not_asked_for_again_at_once(router: Any) -> None:
    request = pending("1")
    assert not request.routing_context.should_backoff
    assert await router.choose_replicas([], request) == []
    assert request.routing_context.should_backoff
