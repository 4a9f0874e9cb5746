"""The room of replicas of unequal capacity, and counts in it; ``test_ratio`` has equal replicas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.ratio import PdRatio
from autoscale.room import PoolRoom, Room, joint_counts
from autoscale.types import PoolLimits
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE


def pair(capacity: float, *, present: int = 0, highest: int = 8, gpus: float = 1.0) -> list[PoolRoom]:
    """The pools of one group."""
    return [
        PoolRoom(
            role=role,
            limits=PoolLimits(lowest_replicas=1, highest_replicas=highest, gpus_per_replica=gpus, capacity=capacity),
            present=present,
        )
        for role in Role
    ]


def test_bounds_and_steps_are_in_standard_replicas() -> None:
    room = Room.of([*pair(1.0, present=2), *pair(0.5, present=1, highest=4)], None)
    assert room.lowest == {P: 1.5, D: 1.5}
    assert room.highest == {P: 10.0, D: 10.0}
    assert room.present == {P: 2.5, D: 2.5}
    assert room.step == {P: 0.5, D: 0.5}
    assert room.largest == {P: 1.0, D: 1.0}


def test_a_count_is_the_present_one_if_no_replica_fewer_is_enough() -> None:
    room = Room.of([*pair(1.0, present=2), *pair(0.4, present=2)], None)
    assert room.whole(D, 2.5) == pytest.approx(2.8)
    assert room.whole(D, 2.3) == pytest.approx(2.3)  # without a small one 2.4 remain
    assert room.whole(D, 2.9) == pytest.approx(2.9)


def test_only_replicas_that_are_present_and_may_leave_are_removals() -> None:
    room = Room.of([*pair(1.0, present=2), *pair(0.4, present=1)], None)  # the small one is the lowest count
    assert room.fewer == {P: 1.0, D: 1.0}
    assert room.whole(D, 1.9) == pytest.approx(2.4)


def test_a_shortfall_is_a_part_of_the_smallest_replica() -> None:
    room = Room.of([*pair(1.0, present=1), *pair(0.5, present=1)], None)
    counts = joint_counts({P: 0.0, D: 2.5}, PdRatio(4, 5), room, 1.0, shortfall_replicas=0.5)
    # 2.0 prefill replicas are at the ratio. Half of a slow one fewer is more than the 1.5 that are present.
    assert counts == {P: 1.75, D: 2.5}


def test_replicas_of_one_capacity_are_rounded_up_to_whole_ones() -> None:
    room = Room.of(
        [
            PoolRoom(role=role, limits=PoolLimits(lowest_replicas=1, highest_replicas=9, capacity=0.4), present=2)
            for role in Role
        ],
        None,
    )
    assert room.whole(D, 0.9) == pytest.approx(1.2)
    assert room.floor(D, 0.9) == pytest.approx(0.8)


def test_a_budget_counts_the_gpus_of_the_present_replicas_and_at_most_those_of_more() -> None:
    # Two fast replicas with 2 GPUs and two slow ones with 2 GPUs: 8 GPUs for 3 standard replicas.
    decode = [
        PoolRoom(
            role=D,
            limits=PoolLimits(lowest_replicas=0, highest_replicas=9, gpus_per_replica=2.0, capacity=capacity),
            present=2,
        )
        for capacity in (1.0, 0.5)
    ]
    room = Room.of([*decode, PoolRoom(role=P, limits=PoolLimits(lowest_replicas=0, highest_replicas=0))], 12)
    assert not room.is_over_budget({P: 0.0, D: 4.0})  # one more: at most two slow replicas with 4 GPUs
    assert room.is_over_budget({P: 0.0, D: 4.5})
    assert room.is_over_budget({P: 0.0, D: 3.0}, {P: 0.0, D: 1.5})


def test_an_aggregated_group_adds_to_both_roles() -> None:
    both = PoolRoom(
        role=D, limits=PoolLimits(lowest_replicas=1, highest_replicas=4, capacity=0.6, prompt_capacity=0.3), present=2
    )
    room = Room.of([*pair(1.0, present=1), both], None)
    assert room.lowest == {P: pytest.approx(1.3), D: pytest.approx(1.6)}
    assert room.highest == {P: pytest.approx(9.2), D: pytest.approx(10.4)}
    assert room.step == {P: 1.0, D: 0.6}


@given(
    capacities=st.lists(st.sampled_from([0.25, 0.47, 0.5, 1.0, 1.7]), min_size=2, max_size=3),
    present=st.integers(1, 4),
    ratio=st.sampled_from(["1:5", "1:3", "1:1", "2:1", "9:1"]).map(PdRatio.parse),
    wanted=st.tuples(st.floats(0.0, 40.0), st.floats(0.0, 40.0)),
    budget=st.one_of(st.none(), st.integers(8, 60)),
)
def test_counts_are_enough_or_as_many_as_the_room_holds(
    capacities: list[float], present: int, ratio: PdRatio, wanted: tuple[float, float], budget: int | None
) -> None:
    pools = [pool for capacity in capacities for pool in pair(capacity, present=present)]
    room, by_role = Room.of(pools, budget), dict(zip(Role, wanted, strict=True))
    counts = joint_counts(by_role, ratio, room, 1.0)
    if counts is None:
        return
    assert room.holds(counts)
    off_ratio = ratio.deviation(counts[P], counts[D])
    is_single_follower = counts[ratio.follower] <= room.step[ratio.follower] + 1e-9
    assert off_ratio <= max(capacities) + 1e-6 or is_single_follower
    is_free = (
        counts[ratio.leader] < room.highest[ratio.leader] and counts[ratio.follower] < room.highest[ratio.follower]
    )
    if budget is None and is_free:
        assert counts[ratio.leader] >= ratio.leaders(by_role) - 1e-6
