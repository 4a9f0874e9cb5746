"""The order in which replicas are tried."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import POLICIES, least_tokens, round_robin
from router.types import ReplicaView

VIEWS = st.lists(st.integers(0, 3), max_size=8).map(
    lambda queued: [ReplicaView(replica_id=f"r{i}", queued_tokens=tokens) for i, tokens in enumerate(queued)]
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(views=VIEWS, turn=st.integers(0, 100), seed=st.integers(0, 1000))
def test_every_policy_only_reorders_its_input(name: str, views: list[ReplicaView], turn: int, seed: int) -> None:
    before = list(views)
    ordered = POLICIES[name](views, turn, random.Random(seed))
    assert views == before
    assert sorted(ordered, key=lambda view: view.replica_id) == before
    assert POLICIES[name](views, turn, random.Random(seed)) == ordered


@given(views=VIEWS, seed=st.integers(0, 1000))
def test_fewest_queued_tokens_come_first(views: list[ReplicaView], seed: int) -> None:
    queued = [view.queued_tokens for view in least_tokens(views, 0, random.Random(seed))]
    assert queued == sorted(queued)


def test_least_tokens_counts_tokens_and_not_turns(make_replicas: Callable[..., list[ReplicaView]]) -> None:
    rng = random.Random(7)
    for turn in range(20):
        ordered = least_tokens(make_replicas(300, 0, 20), turn, rng)
        assert [view.replica_id for view in ordered] == ["r1", "r2", "r0"]


def test_ties_are_spread(make_replicas: Callable[..., list[ReplicaView]]) -> None:
    rng = random.Random(7)
    first = Counter(least_tokens(make_replicas(5, 5, 5, 9), turn, rng)[0].replica_id for turn in range(300))
    # 100 expected each; 60 is more than four standard deviations (8.2) below.
    assert set(first) == {"r0", "r1", "r2"}
    assert min(first.values()) > 60


def test_round_robin_visits_each_replica_once_a_round(make_replicas: Callable[..., list[ReplicaView]]) -> None:
    views = make_replicas(9, 0, 4)[::-1]  # neither load nor the order of the candidates matters
    orders = [[view.replica_id for view in round_robin(views, turn, random.Random(7))] for turn in range(4)]
    assert orders == [["r0", "r1", "r2"], ["r1", "r2", "r0"], ["r2", "r0", "r1"], ["r0", "r1", "r2"]]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_replica_gives_no_order(name: str) -> None:
    assert POLICIES[name]([], 3, random.Random(7)) == []
