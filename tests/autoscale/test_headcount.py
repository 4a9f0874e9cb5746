"""Counts of replicas by their state, by hand."""

from collections.abc import Callable
from dataclasses import replace

from autoscale.headcount import Census, count_among, desired_replicas
from autoscale.types import ControllerState, PoolKey, Snapshot
from kvtransfer.topology import Role

MakeSnapshot = Callable[..., Snapshot]

P, D = Role.PREFILL, Role.DECODE


def test_replicas_are_counted_by_their_state(make_snapshot: MakeSnapshot) -> None:
    state = ControllerState(withdrawn={"d3": 990.0}, victims=("d2", "p1", "gone"))
    snapshot = make_snapshot(2, 4, state=state)
    prefill, decode = snapshot.pools
    snapshot = replace(snapshot, pools=(prefill, replace(decode, draining=("gone",))))
    census = Census.of(snapshot.pools, state)
    assert census.running == {P: 1, D: 3}  # without replicas that have to stop
    assert census.withdrawn == {P: 0, D: 1}
    assert census.ending == {P: 1, D: 2}  # one still runs; one runs no more, but has not gone
    assert count_among(decode, {"d1", "d3", "p0"}) == 2


def test_desired_counts_are_of_all_groups() -> None:
    desired = {PoolKey(group, role): 2 if role is D else 1 for group in ("a", "b") for role in Role}
    assert desired_replicas(desired) == {P: 2, D: 4}
