"""One router's choice, by the requests that it has sent and the loads that replicas report."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pool_router import (
    _LOAD_FACTOR,
    _SLACK_TOKENS,
    POLICIES,
    PoolRouter,
    ReplicaView,
    least_tokens,
    round_robin,
)
from router.prefix_map import PrefixMap
from router.prompt_keys import PromptKeys


def router(policy: str = "least_tokens", asked_replicas: int = 0) -> PoolRouter:
    made = PoolRouter(policy, asked_replicas, random.Random(1))
    made.set_replicas(["a", "b", "c"])
    return made


def names(views: list[object]) -> list[str]:
    return [view.replica_id for view in views]  # type: ignore[attr-defined]


def test_replicas_come_in_order_of_the_routers_own_tokens_in_flight() -> None:
    pool = router()
    for name, tokens in (("a", 30), ("b", 10), ("c", 20)):
        pool.begin(name, f"to {name}", tokens)
    assert names(pool.order()) == ["b", "c", "a"]
    pool.end("a", "to a")
    pool.end("a", "to a")  # a second end changes nothing
    assert names(pool.order()) == ["a", "b", "c"]


def test_round_robin_moves_on_with_every_request() -> None:
    pool = router("round_robin")
    assert {names(pool.order())[0] for _ in range(3)} == {"a", "b", "c"}


def test_a_replica_that_left_is_no_choice_and_one_that_is_back_still_has_its_tokens() -> None:
    pool = router()
    pool.begin("a", "1", 50)
    pool.set_replicas(["b"])
    assert names(pool.order()) == ["b"]
    pool.set_replicas(["a", "b"])
    assert names(pool.order()) == ["b", "a"]


@pytest.mark.parametrize(
    ("answers", "order"),
    [({"a": 0, "b": 3}, ["a", "b", "c"]), ({"a": 2, "b": 0}, ["b", "a", "c"]), ({"a": None, "b": 5}, ["b", "c", "a"])],
)
def test_the_best_few_are_ordered_anew_by_their_answers_and_the_silent_come_last(
    answers: dict[str, int | None], order: list[str]
) -> None:
    pool = router(asked_replicas=2)
    pool.begin("b", "1", 1)
    pool.end("b", "1")
    pool.begin("c", "2", 100)
    ordered = sorted(pool.order(), key=lambda view: (view.queued_tokens, view.replica_id))
    assert pool.ask(ordered) == ["a", "b"]
    assert names(pool.informed(ordered, answers)) == order


def test_no_replica_is_asked_if_there_is_no_choice() -> None:
    pool = router(asked_replicas=2)
    pool.set_replicas(["a"])
    assert pool.ask(pool.order()) == []


def tokens_in_flight(pool: PoolRouter, name: str) -> int:
    return next(view.queued_tokens for view in pool.order() if view.replica_id == name)


def test_requests_count_from_begin_to_end() -> None:
    pool = router()
    pool.begin("a", "1", 300)
    pool.begin("a", "2", 100)
    assert tokens_in_flight(pool, "a") == 400
    assert tokens_in_flight(pool, "b") == 0
    pool.end("a", "1")
    assert tokens_in_flight(pool, "a") == 100
    pool.end("a", "1")
    pool.end("b", "2")
    assert tokens_in_flight(pool, "a") == 100


def test_a_request_that_is_sent_again_before_its_first_end_is_known_still_counts() -> None:
    pool = router()
    pool.begin("a", "1", 300)
    pool.begin("a", "1", 300)
    pool.end("a", "1")
    assert tokens_in_flight(pool, "a") == 300
    pool.end("a", "1")
    pool.end("a", "1")
    assert tokens_in_flight(pool, "a") == 0


def test_a_reported_load_counts_if_it_is_more_than_the_routers_own() -> None:
    pool = router(asked_replicas=3)
    pool.begin("a", "1", 200)
    answered = pool.informed(pool.order(), {"a": 900, "b": 30, "c": 0})
    assert {view.replica_id: view.queued_tokens for view in answered} == {"a": 900, "b": 30, "c": 0}
    # The request has not arrived there yet.
    answered = pool.informed(pool.order(), {"a": 0, "b": 30, "c": 0})
    assert {view.replica_id: view.queued_tokens for view in answered} == {"a": 200, "b": 30, "c": 0}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(1, 900)), max_size=40))
def test_no_token_remains_when_all_requests_have_ended(requests: list[tuple[str, int, int]]) -> None:
    pool = router()
    for replica, number, tokens in requests:
        pool.begin(replica, str(number), tokens)
    for replica, number, _ in requests:
        pool.end(replica, str(number))
    assert not any(view.queued_tokens for view in pool.order())
    assert not pool._in_flight and not pool._tokens


VIEWS = st.lists(st.integers(0, 3), max_size=8).map(
    lambda queued: [ReplicaView(replica_id=f"r{i}", queued_tokens=tokens) for i, tokens in enumerate(queued)]
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(views=VIEWS, turn=st.integers(0, 100), seed=st.integers(0, 1000))
def test_every_policy_only_reorders_its_input(name: str, views: list[ReplicaView], turn: int, seed: int) -> None:
    before = list(views)
    ordered = POLICIES[name](views, {}, turn, random.Random(seed))
    assert views == before
    assert sorted(ordered, key=lambda view: view.replica_id) == before
    assert POLICIES[name](views, {}, turn, random.Random(seed)) == ordered


@given(views=VIEWS, seed=st.integers(0, 1000))
def test_fewest_queued_tokens_come_first(views: list[ReplicaView], seed: int) -> None:
    queued = [view.queued_tokens for view in least_tokens(views, {}, 0, random.Random(seed))]
    assert queued == sorted(queued)


def test_least_tokens_counts_tokens_and_not_turns(make_replicas: Callable[..., list[ReplicaView]]) -> None:
    rng = random.Random(7)
    for turn in range(20):
        ordered = least_tokens(make_replicas(300, 0, 20), {}, turn, rng)
        assert [view.replica_id for view in ordered] == ["r1", "r2", "r0"]


def test_ties_are_spread(make_replicas: Callable[..., list[ReplicaView]]) -> None:
    rng = random.Random(7)
    first = Counter(least_tokens(make_replicas(5, 5, 5, 9), {}, turn, rng)[0].replica_id for turn in range(300))
    # 100 expected each; 60 is more than four standard deviations (8.2) below.
    assert set(first) == {"r0", "r1", "r2"}
    assert min(first.values()) > 60


def test_round_robin_visits_each_replica_once_a_round(make_replicas: Callable[..., list[ReplicaView]]) -> None:
    views = make_replicas(9, 0, 4)[::-1]  # neither load nor the order of the candidates matters
    orders = [[view.replica_id for view in round_robin(views, {}, turn, random.Random(7))] for turn in range(4)]
    assert orders == [["r0", "r1", "r2"], ["r1", "r2", "r0"], ["r2", "r0", "r1"], ["r0", "r1", "r2"]]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_replica_gives_no_order(name: str) -> None:
    assert POLICIES[name]([], {}, 3, random.Random(7)) == []


def prompt(*keys: int) -> PromptKeys:
    """A prompt of pieces of 100 tokens, with 50 tokens after them."""
    return PromptKeys(keys=keys, piece_tokens=100, tokens=100 * len(keys) + 50)


def prefix_router(held: Mapping[str, Sequence[int]], **settings: Any) -> PoolRouter:
    """A router to ``a``, ``b`` and ``c``, which hold these pieces."""
    prefixes = PrefixMap(capacity_pieces=1000, sent_s=60.0)
    for name, keys in held.items():
        prefixes.store(name, keys)
    made = PoolRouter("prefix", settings.pop("asked_replicas", 0), random.Random(1), prefixes=prefixes, **settings)
    made.set_replicas(["a", "b", "c"])
    return made


def test_a_prompt_goes_where_the_fewest_tokens_are_left_to_compute() -> None:
    pool = prefix_router({"a": [1, 2, 3], "b": [1]})
    pool.begin("a", "x", 250)
    pool.begin("c", "y", 70)
    # To compute besides the prompt's 350 tokens: 250 - 300 at a, 0 - 100 at b, 70 at c.
    ordered = pool.order(prompt(1, 2, 3))
    assert [(view.replica_id, view.queued_tokens, view.overlap_tokens) for view in ordered] == [
        ("b", 0, 100),
        ("a", 250, 300),
        ("c", 70, 0),
    ]
    pool.end("a", "x")
    assert names(pool.order(prompt(1, 2, 3))) == ["a", "b", "c"]


def test_a_prefix_that_every_replica_holds_does_not_matter() -> None:
    pool, plain = prefix_router(dict.fromkeys("abc", (1, 2, 3))), prefix_router({})
    for each in (pool, plain):
        each.begin("a", "x", 20)
        each.begin("b", "y", 10)
        assert names(each.order(prompt(1, 2, 3))) == ["c", "b", "a"]


def test_a_request_in_a_queue_of_requests_is_worth_its_tokens() -> None:
    pool = prefix_router({"a": [1, 2, 3]}, request_tokens=200)
    pool.begin("a", "x", 1, prompt(1, 2, 3))
    assert names(pool.order(prompt(1, 2, 3)))[0] == "a"  # 200 - 300
    pool.begin("a", "y", 1, prompt(1, 2, 3))
    assert names(pool.order(prompt(1, 2, 3)))[-1] == "a"  # 400 - 300
    assert tokens_in_flight(pool, "a") == 400


def test_a_prompt_weighs_what_its_replica_must_compute_and_is_held_there_from_then_on() -> None:
    pool = prefix_router({"a": [1]})
    pool.begin("a", "x", 250, prompt(1, 2))
    assert tokens_in_flight(pool, "a") == 150
    pool.end("a", "x")
    pool.begin("a", "y", 250, prompt(1, 2))
    assert tokens_in_flight(pool, "a") == 50


def test_what_an_overloaded_replica_holds_does_not_count() -> None:
    pool = prefix_router({"a": range(100)})
    # The mean is a third of a's queue q: a is overloaded if q > 1.25 q / 3 + slack.
    limit = round(_SLACK_TOKENS / (1 - _LOAD_FACTOR / 3))
    pool.begin("a", "x", limit - 5)
    assert names(pool.order(prompt(*range(100))))[0] == "a"
    pool.begin("a", "y", 10)
    assert names(pool.order(prompt(*range(100))))[-1] == "a"


def test_half_of_the_asked_replicas_are_the_best_and_half_have_the_shortest_queues() -> None:
    pool = prefix_router({"a": [1, 2, 3], "b": [1, 2]}, asked_replicas=2)
    pool.begin("b", "x", 100)
    ordered = pool.order(prompt(1, 2, 3))
    assert names(ordered) == ["a", "b", "c"]
    assert pool.ask(ordered) == ["a", "c"]
    assert names(pool.informed(ordered, {"a": 200, "c": 0}, prompt(1, 2, 3))) == ["a", "c", "b"]
    assert names(pool.informed(ordered, {"a": 400, "c": 0}, prompt(1, 2, 3))) == ["c", "a", "b"]


@pytest.mark.parametrize("policy", ["least_tokens", "prefix"])
def test_a_session_stays_at_its_replica_unless_that_is_overloaded(policy: str) -> None:
    pool = router(policy, asked_replicas=2)
    place = pool.order(session="s")[0].replica_id
    pool.begin(place, "x", _SLACK_TOKENS)
    assert {pool.order(session="s")[0].replica_id for _ in range(5)} == {place}
    ordered = pool.order(session="s")
    answers = dict.fromkeys(pool.ask(ordered), 0)
    assert pool.informed(ordered, answers, session="s")[0].replica_id == place
    assert pool.informed(ordered, answers | {place: 100 * _SLACK_TOKENS}, session="s")[0].replica_id != place
    pool.begin(place, "y", 100 * _SLACK_TOKENS)
    assert pool.order(session="s")[0].replica_id != place


def test_a_replica_that_goes_while_queues_are_asked_has_no_session() -> None:
    pool = router(asked_replicas=3)
    ordered = pool.order(session="s")
    place = ordered[0].replica_id
    pool.set_replicas([name for name in "abc" if name != place])
    after = pool.informed(ordered, dict.fromkeys(pool.ask(ordered), 0), session="s")
    assert after[0].replica_id == pool.order(session="s")[0].replica_id != place
