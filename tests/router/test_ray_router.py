"""What the router believes to be in flight, in whatever order Serve tells of it."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.ray


@pytest.fixture(name="router")
def _router() -> Any:
    from router.ray_router import TandemRouter

    router = TandemRouter.__new__(TandemRouter)  # Serve's own state needs a running controller
    router.initialize_state()
    return router


def pending(request_id: str, work_tokens: int | None = None, *, is_streaming: bool = True) -> Any:
    from ray.serve._private.common import RequestMetadata
    from ray.serve.request_router import PendingRequest

    first = "chat" if work_tokens is None else SimpleNamespace(work_tokens=work_tokens)
    metadata = RequestMetadata(request_id=request_id, internal_request_id=request_id, is_streaming=is_streaming)
    return PendingRequest(args=[first], kwargs={}, metadata=metadata)


def replica(name: str) -> Any:
    from ray.serve._private.common import DeploymentID
    from ray.serve.request_router import ReplicaID

    replica_id = ReplicaID(unique_id=name, deployment_id=DeploymentID(name="decode:g0"))
    return SimpleNamespace(replica_id=replica_id)


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
    views = router._views
    router.on_request_routed(pending("1", 500), a.replica_id, None)
    ranks = [(await router.choose_replicas(candidates))[0][0] for _ in range(20)]
    assert router._views is views
    assert {rank.replica_id.unique_id for rank in ranks} == {"b"}
