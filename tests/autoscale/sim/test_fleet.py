"""Replicas of a virtual cluster that start and stop."""

import random

import pytest

from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.fleet import Fleet, VirtualPool
from kvtransfer.topology import Role
from router.config import RouterConfig
from tests.autoscale.sim.conftest import KEYS, PROFILE


@pytest.mark.parametrize(("is_victim", "stays"), [(False, "running"), (True, "starting")])
def test_victims_stop_first_and_then_replicas_that_have_not_started(is_victim: bool, stays: str) -> None:
    key = KEYS[Role.DECODE]
    cluster = VirtualCluster({key: PROFILE}, RouterConfig(), random.Random(0))
    pool = VirtualPool(lowest_replicas=0, highest_replicas=9, start_s=5.0)
    fleet = Fleet(cluster, {key: pool}, on_ready=lambda: None)
    fleet.begin(key, 1)
    fleet.scale(key, 2)
    running, starting = fleet.here[key]
    fleet.scale(key, 1, victims=[running.replica_id] if is_victim else [])
    assert (running.is_stopping, starting.is_stopping) == (stays != "running", stays != "starting")
