"""Pools that start replicas again and again."""

import pytest

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("ages_s", "replicas", "wait_s"),
    [
        ([], 1, 0.0),
        ([9.0, 100.0, 599.0], 1, 0.0),  # an update and two mishaps
        ([1.0, 2.0, 3.0, 4.0], 1, 1.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 1, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 600.0], 1, 1.0),  # too long ago to count
        ([1.0] * 40, 1, 60.0),
        ([1.0] * 40, 12, 0.0),  # a scale-out, and an update of all of them
        ([1.0] * 40, 8, 2.0),
    ],
)
def test_each_start_beyond_four_per_replica_doubles_the_wait(ages_s: list[float], replicas: int, wait_s: float) -> None:
    from deployments.start_backoff import backoff_s

    now_s = 1_000_000.0
    assert backoff_s([now_s - age_s for age_s in ages_s], replicas, now_s) == wait_s
