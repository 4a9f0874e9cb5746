"""The choice between groups."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.groups import GroupLoad, choose_group


def choose(loads: dict[str, tuple[int, int]], replicas: dict[str, float] | None = None, seed: int = 0) -> str:
    of = {name: GroupLoad(requests=requests, prompt_tokens=tokens) for name, (requests, tokens) in loads.items()}
    return choose_group(of, replicas or dict.fromkeys(loads, 1.0), random.Random(seed))


@pytest.mark.parametrize(
    ("loads", "replicas", "chosen"),
    [
        ({"a": (3, 0), "b": (2, 0)}, {"a": 1, "b": 1}, "b"),
        ({"a": (3, 0), "b": (2, 0)}, {"a": 2, "b": 1}, "a"),
        # Equal numbers of requests, but more prompt tokens wait at a.
        ({"a": (4, 9000), "b": (4, 1000)}, {"a": 1, "b": 1}, "b"),
        # b has a third more requests (8/7 of the mean, a 6/7), and a three times the tokens (1.5 of the mean, b 0.5).
        ({"a": (6, 3000), "b": (8, 1000)}, {"a": 1, "b": 1}, "b"),
        ({"a": (6, 1100), "b": (8, 1000)}, {"a": 1, "b": 1}, "a"),
        ({"a": (1, 0), "asleep": (0, 0)}, {"a": 8, "asleep": 0}, "asleep"),
    ],
)
def test_the_group_with_the_least_work_is_chosen(
    loads: dict[str, tuple[int, int]], replicas: dict[str, float], chosen: str
) -> None:
    assert choose(loads, replicas) == chosen


def test_equal_groups_are_chosen_equally_often() -> None:
    idle = {"a": (0, 0), "b": (0, 0)}
    counted = Counter(choose(idle, seed=seed) for seed in range(400))
    assert min(counted.values()) > 150


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 50), st.integers(0, 10**6)), min_size=1),
    st.integers(1, 8),
)
def test_no_group_is_chosen_over_one_with_fewer_requests_and_fewer_tokens(
    loads: dict[str, tuple[int, int]], replicas: int
) -> None:
    chosen = choose(loads, dict.fromkeys(loads, replicas))
    requests, tokens = loads[chosen]
    assert not any(other[0] < requests and other[1] < tokens for other in loads.values())
