"""One router's choice, by what it has sent and what replicas answer."""

import random

import pytest

from router.pool_router import PoolRouter


def router(policy: str = "least_tokens", asked_replicas: int = 0) -> PoolRouter:
    made = PoolRouter(policy, asked_replicas, random.Random(1))
    made.set_replicas(["a", "b", "c"])
    return made


def names(views: list[object]) -> list[str]:
    return [view.replica_id for view in views]  # type: ignore[attr-defined]


def test_the_fewest_tokens_of_its_own_come_first_until_they_have_ended() -> None:
    pool = router()
    for name, tokens in (("a", 30), ("b", 10), ("c", 20)):
        pool.begin(name, f"to {name}", tokens)
    assert names(pool.order()) == ["b", "c", "a"]
    pool.end("a", "to a")
    pool.end("a", "to a")  # twice changes nothing
    assert names(pool.order()) == ["a", "b", "c"]


def test_round_robin_moves_on_with_every_request() -> None:
    pool = router("round_robin")
    assert {names(pool.order())[0] for _ in range(3)} == {"a", "b", "c"}


def test_who_has_left_is_no_choice_and_who_is_back_still_has_its_tokens() -> None:
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


def test_nobody_is_asked_where_there_is_no_choice() -> None:
    pool = router(asked_replicas=2)
    pool.set_replicas(["a"])
    assert pool.ask(pool.order()) == []
