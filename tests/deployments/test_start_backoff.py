"""Pools whose replicas end young, again and again."""

import pytest

pytestmark = pytest.mark.ray


def test_each_crash_beyond_two_doubles_the_wait_up_to_a_minute() -> None:
    from deployments.start_backoff import backoff_s

    assert [backoff_s(crashes) for crashes in range(12)] == [0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
