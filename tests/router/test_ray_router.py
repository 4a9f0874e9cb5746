"""The choice of the router inside Serve, and the requests that it counts as in flight."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from router.pool_router import ReplicaView
from router.prompt_keys import PromptKeys
from router.routing import Routing

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

    first = "chat" if work_tokens is None else SimpleNamespace(routing=Routing(work_tokens=work_tokens))
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


async def test_a_request_names_replicas_that_are_forbidden_and_those_that_it_avoids(router: Any) -> None:
    names = [replica(name) for name in "abc"]

    async def ranks(candidates: list[Any], routing: Routing) -> list[str]:
        request = pending("1")
        request.args[0] = SimpleNamespace(routing=routing)
        return [rank[0].replica_id.unique_id for rank in await router.choose_replicas(candidates, request)]

    assert await ranks(names, Routing(exclude=frozenset("ab"))) == ["c"]
    for _ in range(20):
        assert await ranks(names, Routing(exclude=frozenset("c"), avoid=frozenset("a"))) == ["b"]
    # A request that would avoid most of the pool avoids no replica.
    assert sorted(await ranks(names, Routing(exclude=frozenset("c"), avoid=frozenset("ab")))) == ["a", "b"]
    for _ in range(20):
        assert (await ranks(names[1:], Routing(avoid=frozenset("a"), probe="b")))[0] == "b"
        assert (await ranks(names, Routing(last_resort="b")))[-1] == "b"
        assert (await ranks(names, Routing(preferred="c")))[0] == "c"
        assert (await ranks(names, Routing(preferred="c", probe="b")))[:2] == ["b", "c"]
        assert (await ranks(names, Routing(preferred="c", last_resort="c")))[-1] == "c"
    assert "c" not in await ranks(names, Routing(preferred="c", exclude=frozenset("c")))


async def test_replicas_are_not_asked_for_their_queues_if_the_request_has_a_place(router: Any) -> None:
    router.initialize_state(asked_replicas=2)
    asked: list[str] = []
    candidates = [replica(name) for name in "ab"]
    for one in candidates:

        async def get_queue_len(*, deadline_s: float, name: str = one.replica_id.unique_id) -> int:
            asked.append(name)
            return 0

        one.get_queue_len = get_queue_len
    request = pending("1")
    request.args[0] = SimpleNamespace(routing=Routing(preferred="b"))
    ranks = await router.choose_replicas(candidates, request)
    assert [rank[0].replica_id.unique_id for rank in ranks] == ["b", "a"] and not asked
    await router.choose_replicas(candidates, pending("2"))
    assert sorted(asked) == ["a", "b"]


async def first_choice(router: Any, *replicas: Any) -> str:
    ranks = await router.choose_replicas(list(replicas))
    return str(ranks[0][0].replica_id.unique_id)


async def test_the_replica_with_fewer_tokens_in_flight_is_tried_first(router: Any) -> None:
    a, b = replica("a"), replica("b")
    router.record_choice(pending("1", 500), a.replica_id.unique_id)
    for number in range(3):
        router.record_choice(pending(f"2{number}", 100), b.replica_id.unique_id)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"b"}
    router.on_request_completed(a.replica_id, "1")
    assert {await first_choice(router, a, b) for _ in range(20)} == {"a"}


async def test_a_request_without_a_size_counts_one(router: Any) -> None:
    a, b = replica("a"), replica("b")
    router.record_choice(pending("1"), a.replica_id.unique_id)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"b"}


async def test_a_held_replica_gets_nothing_until_it_is_admitted_and_a_new_list_is_noticed(router: Any) -> None:
    from router.membership import Membership
    from router.ray_coordinator import MembershipFeed

    a, b, c = replica("a"), replica("b"), replica("c")
    router._feed = MembershipFeed("app")
    assert {await first_choice(router, a, b) for _ in range(30)} == {"a", "b"}
    now_s = time.monotonic()
    router._feed.membership = Membership(admitted=frozenset({"b"}), heard_s=now_s)
    assert {await first_choice(router, a, b) for _ in range(30)} == {"b"}
    router._feed.membership = Membership(admitted=frozenset({"b", "c"}), heard_s=now_s)
    assert {await first_choice(router, a, b, c) for _ in range(30)} == {"b", "c"}
    router._feed.membership = Membership(admitted=frozenset({"b"}), heard_s=now_s - 60.0)
    assert {await first_choice(router, a, b, c) for _ in range(60)} == {"a", "b", "c"}


def test_a_held_replica_is_not_among_those_that_get_requests(router: Any) -> None:
    from router.membership import Membership
    from router.ray_coordinator import MembershipFeed

    router._replicas = {one.replica_id: one for one in map(replica, "ab")}
    assert list(router.routed()) == ["a", "b"]
    router._feed = MembershipFeed("app")
    router._feed.membership = Membership(admitted=frozenset({"b"}), heard_s=time.monotonic())
    assert list(router.routed()) == ["b"]


async def test_the_same_list_again_costs_no_new_views_and_still_counts(router: Any) -> None:
    a, b = replica("a"), replica("b")
    candidates = [a, b]
    await router.choose_replicas(candidates)
    views = router._pool._views
    router.record_choice(pending("1", 500), a.replica_id.unique_id)
    ranks = [(await router.choose_replicas(candidates))[0][0] for _ in range(20)]
    assert router._pool._views is views
    assert {rank.replica_id.unique_id for rank in ranks} == {"b"}


async def test_requests_of_other_routers_count_if_replicas_are_asked(router: Any) -> None:
    router.initialize_state(asked_replicas=3)
    a, b, c = replica("a", 3), replica("b", 2), replica("c", 4)
    assert {await first_choice(router, a, b, c) for _ in range(20)} == {"b"}
    for number in range(2):
        router.record_choice(pending(str(number)), b.replica_id.unique_id)
    assert {await first_choice(router, a, b, c) for _ in range(20)} == {"b"}  # b's two requests are this router's own
    for number in range(2, 4):
        router.record_choice(pending(str(number)), b.replica_id.unique_id)
    assert {await first_choice(router, a, b, c) for _ in range(20)} == {"a"}  # the last two have not arrived at b yet


async def test_prefill_replicas_are_asked_for_their_tokens(router: Any) -> None:
    router.initialize_state(asked_replicas=2, asks_tokens=True)
    a, b = replica("a", 3), replica("b", 2)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"b"}
    router.record_choice(pending("1", 29), b.replica_id.unique_id)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"b"}  # 29 of its own are fewer than a's 30
    router.record_choice(pending("2", 2), b.replica_id.unique_id)
    assert {await first_choice(router, a, b) for _ in range(20)} == {"a"}


async def test_a_replica_that_does_not_answer_is_tried_last_and_none_is_lost(router: Any) -> None:
    router.initialize_state(asked_replicas=2)
    silent, busy, far = replica("silent", None), replica("busy", 9), replica("far")
    router.record_choice(pending("1", 500), far.replica_id.unique_id)
    ranks = await router.choose_replicas([silent, busy, far])
    assert [rank[0].replica_id.unique_id for rank in ranks] == ["busy", "far", "silent"]


async def test_a_replica_that_leaves_while_others_are_asked_is_not_chosen(router: Any) -> None:
    router.initialize_state(asked_replicas=2)
    gone, left = replica("gone"), replica("left", 5)
    choice = asyncio.create_task(router.choose_replicas([gone, left]))
    await asyncio.sleep(0)
    await router.choose_replicas([left])
    assert [rank[0].replica_id.unique_id for rank in await choice] == ["left"]


async def test_a_request_without_candidates_does_not_ask_again_at_once(router: Any) -> None:
    request = pending("1")
    assert not request.routing_context.should_backoff
    assert await router.choose_replicas([], request) == []
    assert request.routing_context.should_backoff


@pytest.fixture(name="serve_router")
async def _serve_router() -> Any:
    """Serve's own router (private) around Tandem's, without Serve's controller, metrics and actors."""
    from contextlib import nullcontext

    from ray.serve._private.common import DeploymentHandleSource, DeploymentID
    from ray.serve._private.router import AsyncioRouter

    from router.ray_router import TandemRouter

    serve = AsyncioRouter.__new__(AsyncioRouter)
    name = DeploymentID("decode:test_serve_router", "tandem")
    serve._request_router = TandemRouter(name, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    serve._request_router.initialize_state()
    serve.deployment_id, serve._event_loop = name, asyncio.get_running_loop()
    serve._enable_strict_max_ongoing_requests = True
    serve._request_router_initialized = asyncio.Event()
    serve._request_router_initialized.set()
    serve._metrics_manager = SimpleNamespace(
        wrap_queued_request=lambda *_: nullcontext(),
        inc_num_running_requests_for_replica=lambda *_: None,
        dec_num_running_requests_for_replica=lambda *_: None,
    )
    serve._resolve_args_with_metrics = lambda pending: asyncio.sleep(0)
    return serve


class Sent:
    """Stands for Serve's handle of a request that it has sent to a replica."""

    def __init__(self, has_accepted: Any) -> None:
        self._has_accepted = has_accepted
        self._callbacks: list[Any] = []

    def add_done_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)

    async def get_rejection_response(self) -> Any:
        from ray.serve._private.common import ReplicaQueueLengthInfo

        try:
            return ReplicaQueueLengthInfo(accepted=await self._has_accepted(), num_ongoing_requests=1)
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(None)


def serving(name: str, has_accepted: Any) -> Any:
    one = replica(name)
    one.sent = []

    def try_send_request(pending: Any, with_rejection: bool) -> Sent:
        assert with_rejection
        one.sent.append(Sent(has_accepted))
        return one.sent[-1]

    one.try_send_request = try_send_request
    one.actor_id, one.is_cross_language, one.max_ongoing_requests = None, False, 100
    return one


async def takes() -> bool:
    return True


async def is_full() -> bool:
    return False


async def is_cut_off() -> bool:
    from ray.exceptions import ActorUnavailableError

    raise ActorUnavailableError("its port refuses connections", b"x" * 16)


async def hangs() -> bool:
    await asyncio.sleep(60.0)
    return True


def queued(router: Any, name: str) -> int:
    return int(router._request_router._pool._tokens[name])


def asking(tokens: int = 7) -> Any:
    return pending("1", tokens)


def choice(request: Any) -> Any:
    return request.args[0].routing.choice


async def test_a_request_counts_at_its_replica_before_that_has_accepted_it(serve_router: Any) -> None:
    serve_router._request_router.update_replicas([serving("frozen", hangs)])
    request = asking()
    task = asyncio.create_task(serve_router.route_and_send_request(request, "response"))
    await asyncio.sleep(0.1)
    assert choice(request).replica_id == "frozen"
    assert queued(serve_router, "frozen") == 7
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert queued(serve_router, "frozen") == 0


async def test_a_request_that_cannot_be_sent_goes_to_another_replica_and_names_the_first(serve_router: Any) -> None:
    cut_off, well = serving("cut off", is_cut_off), serving("well", takes)
    serve_router._request_router.update_replicas([cut_off, well])
    serve_router._request_router.record_choice(asking(5), "well")  # so the other replica is preferred
    requests = [asking() for _ in range(5)]
    for request in requests:
        async with asyncio.timeout(30.0):
            await serve_router.route_and_send_request(request, "response")
        assert choice(request).replica_id == "well"
    assert [choice(request).unreached for request in requests] == [{"cut off"}, *[set()] * 4]  # tried last from then on
    assert len(cut_off.sent) == 1 and queued(serve_router, "cut off") == 0
    assert queued(serve_router, "well") == 5 + 7 * 5


async def test_without_another_replica_a_request_that_cannot_be_sent_fails(serve_router: Any) -> None:
    from ray.serve.exceptions import RayServeException

    serve_router._request_router.update_replicas([serving("cut off", is_cut_off)])
    request = asking()
    with pytest.raises(RayServeException, match="cut off of decode:test_serve_router cannot be reached"):
        async with asyncio.timeout(30.0):
            await serve_router.route_and_send_request(request, "response")
    assert choice(request).replica_id == "cut off"
    assert queued(serve_router, "cut off") == 0


async def test_a_full_replica_is_asked_again_and_has_not_failed(serve_router: Any) -> None:
    answers = iter([False] * 3 + [True])

    async def is_full_at_first() -> bool:
        return next(answers)

    one = serving("a", is_full_at_first)
    serve_router._request_router.update_replicas([one])
    request = asking()
    async with asyncio.timeout(30.0):
        await serve_router.route_and_send_request(request, "response")
    assert (choice(request).replica_id, choice(request).unreached, len(one.sent)) == ("a", set(), 4)
    assert queued(serve_router, "a") == 7


def test_the_router_can_be_pickled_by_value_as_serve_does(monkeypatch: Any) -> None:
    from ray import cloudpickle

    from router import ray_router

    cloudpickle.register_pickle_by_value(ray_router)
    try:
        pickled = cloudpickle.dumps(ray_router.TandemRouter)
    finally:
        cloudpickle.unregister_pickle_by_value(ray_router)
    monkeypatch.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})  # as in another process
    sent = cloudpickle.loads(pickled)
    assert sent is not ray_router.TandemRouter
    calls = []
    router = sent.__new__(sent)
    router._unreached_s = {}
    router._replica_queue_len_cache = SimpleNamespace(invalidate_key=calls.append)
    router._queue_len_gauge_last_update = {}
    router.on_replica_actor_unavailable(replica("a").replica_id)
    assert len(calls) == 1 and router._unreached() == {"a"}


@pytest.fixture(name="prefix_router")
async def _prefix_router(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A router of a decode pool by prefixes; no board answers."""
    import ray
    from ray.serve._private.common import DeploymentID

    from router.ray_router import TandemRouter

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    router = TandemRouter.__new__(TandemRouter)
    router._deployment_id = DeploymentID("decode:test_prefix_router", "tandem")
    router.initialize_state(policy="prefix", follows_prefixes=True, request_tokens=500, sent_s=60.0)
    return router


def routed(routing: Routing) -> Any:
    request = pending("1")
    request.args[0] = SimpleNamespace(routing=routing)
    return request


PROMPT = PromptKeys(keys=(1, 2, 3), piece_tokens=100, tokens=400)


async def test_the_replica_that_holds_the_prompt_is_first_and_its_choice_is_explained(prefix_router: Any) -> None:
    candidates = [replica(name) for name in "abcd"]
    await prefix_router.choose_replicas(candidates, routed(Routing()))
    prefix_router._pool.prefixes.store("c", PROMPT.keys[:2])
    routing = Routing(prompt=PROMPT)
    ranks = await prefix_router.choose_replicas(candidates, routed(routing))
    prefix_router.record_choice(routed(routing), ranks[0][0].replica_id.unique_id)
    chosen = routing.chosen()
    assert chosen is not None
    assert (chosen.replica.replica_id, chosen.replica.overlap_tokens, chosen.reason) == ("c", 200, "prefix")
    assert len(chosen.runners_up) == 2
    assert prefix_router._pool.prefixes.overlap_tokens(PROMPT) == {"c": 300}  # it will soon hold all


async def test_a_session_has_its_replica_and_says_so(prefix_router: Any) -> None:
    candidates = [replica(name) for name in "abcd"]
    names = set()
    for _ in range(5):
        routing = Routing(session="s1")
        ranks = await prefix_router.choose_replicas(candidates, routed(routing))
        routing.choice.replica_id = ranks[0][0].replica_id.unique_id
        chosen = routing.chosen()
        assert chosen is not None
        assert chosen.reason == "session"
        names.add(chosen.replica.replica_id)
    assert len(names) == 1


async def test_a_false_hit_is_corrected_and_the_computed_prompt_is_known(prefix_router: Any) -> None:
    from router import known_pools

    prefixes = prefix_router._pool.prefixes
    other = PromptKeys(keys=(1, 2, 9), piece_tokens=100, tokens=400)
    prefixes.store("a", (1, 2, 3))
    seen = ReplicaView(replica_id="a", overlap_tokens=200)
    known_pools.note_false_hit("decode:test_prefix_router", seen, other, 100)
    assert prefixes.false_hits == 1
    assert prefixes.overlap_tokens(other) == {"a": 300}


async def test_pieces_of_a_replica_that_has_gone_are_forgotten(prefix_router: Any) -> None:
    candidates = [replica(name) for name in "ab"]
    await prefix_router.choose_replicas(candidates, routed(Routing()))
    prefix_router._pool.prefixes.store("a", PROMPT.keys)
    await prefix_router.choose_replicas(candidates[1:], routed(Routing()))
    assert prefix_router._pool.prefixes.pieces("a") == 0


@pytest.mark.parametrize("asked_replicas", [0, 4])
async def test_a_session_whose_replica_is_ejected_has_one_other_replica(router: Any, asked_replicas: int) -> None:
    router.initialize_state(asked_replicas=asked_replicas)
    candidates = [replica(f"r{number}") for number in range(10)]

    async def first(avoid: frozenset[str]) -> str:
        request = pending("1")
        request.args[0] = SimpleNamespace(routing=Routing(session="s", avoid=avoid))
        return str((await router.choose_replicas(candidates, request))[0][0].replica_id.unique_id)

    place = await first(frozenset())
    others = {await first(frozenset({place})) for _ in range(10)}
    assert len(others) == 1 and place not in others
