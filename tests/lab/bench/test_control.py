"""The benchmark of decisions runs on the router and the controller of today."""

import pytest

from tests.lab.bench.control import route_s, tick_s

pytestmark = pytest.mark.ray


def test_routing_decisions_and_ticks_are_timed() -> None:
    assert len(route_s(300)) == 300  # more than the replicas, so requests also complete
    assert len(tick_s(2)) == 2
    assert min(*route_s(1), *tick_s(1)) > 0.0
