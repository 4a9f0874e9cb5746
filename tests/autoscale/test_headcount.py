"""Counting heads by hand."""

from collections.abc import Callable
from dataclasses import replace

from autoscale.headcount import (
    among,
    count_among,
    desired_replicas,
    ending_replicas,
    running_replicas,
    withdrawn_replicas,
)
from autoscale.types import ControllerState, PoolKey, Snapshot
from kvtransfer.topology import Role

MakeSnapshot = Callable[..., Snapshot]

P, D = Role.PREFILL, Role.DECODE


def test_heads_by_state(make_snapshot: MakeSnapshot) -> None:
    state = ControllerState(withdrawn={"d3": 990.0}, victims=("d2", "p1", "gone"))
    snapshot = make_snapshot(2, 4, state=state)
    prefill, decode = snapshot.pools
    snapshot = replace(snapshot, pools=(prefill, replace(decode, draining=("gone",))))
    assert running_replicas(snapshot, without=()) == {P: 2, D: 4}
    assert running_replicas(snapshot, without={"d0", "p1"}) == {P: 1, D: 3}
    assert withdrawn_replicas(snapshot) == {P: 0, D: 1}
    assert ending_replicas(snapshot) == {P: 1, D: 2}  # one runs still, one has stopped running but not gone
    assert count_among(decode, {"d1", "d3", "p0"}) == 2


def test_desired_counts_are_of_all_groups() -> None:
    desired = {PoolKey(group, role): 2 if role is D else 1 for group in ("a", "b") for role in Role}
    assert desired_replicas(desired) == {P: 2, D: 4}


def test_names_among_others_keep_their_order() -> None:
    assert among(["c", "a", "b"], {"b", "c"}) == ["c", "b"]
    assert among(["c"], ()) == []
