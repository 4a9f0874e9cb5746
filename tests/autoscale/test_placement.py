"""Spreading a service over its groups."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.placement import place
from autoscale.ratio import PdRatio, Room, joint_counts
from autoscale.types import PoolKey, PoolStats
from kvtransfer.topology import LinkTier, Role

P, D = Role.PREFILL, Role.DECODE


def pools(
    bounds: Sequence[tuple[int, int]],
    tiers: Sequence[LinkTier] = (LinkTier.S1,) * 3,
    costs: Sequence[float] = (0.0,) * 4,
) -> list[PoolStats]:
    return [
        PoolStats(
            key=PoolKey(f"g{i}", role),
            replicas=(),
            target_replicas=1,
            lowest_replicas=low,
            highest_replicas=high,
            link_tier=tiers[i],
            cost=costs[i],
        )
        for i, (low, high) in enumerate(bounds)
        for role in Role
    ]


def test_one_group_gets_everything() -> None:
    current = {PoolKey("g0", P): 1, PoolKey("g0", D): 3}
    assert place({P: 2, D: 6}, current, pools([(1, 9)]), PdRatio(1, 3)) == {PoolKey("g0", P): 2, PoolKey("g0", D): 6}


def test_the_emptiest_group_grows_and_its_followers_with_it() -> None:
    current = {PoolKey("g0", P): 2, PoolKey("g0", D): 6, PoolKey("g1", P): 1, PoolKey("g1", D): 3}
    placed = place({P: 4, D: 12}, current, pools([(1, 9), (1, 9)]), PdRatio(1, 3))
    assert placed == {PoolKey("g0", P): 2, PoolKey("g0", D): 6, PoolKey("g1", P): 2, PoolKey("g1", D): 6}


def test_near_groups_grow_first_and_far_ones_shrink_first() -> None:
    groups = pools([(1, 9), (1, 9)], tiers=(LinkTier.S2, LinkTier.S0))
    current = {PoolKey("g0", P): 1, PoolKey("g0", D): 1, PoolKey("g1", P): 2, PoolKey("g1", D): 2}
    grown = place({P: 5, D: 5}, current, groups, PdRatio(1, 1))
    assert grown == {PoolKey("g0", P): 1, PoolKey("g0", D): 1, PoolKey("g1", P): 4, PoolKey("g1", D): 4}
    current = {PoolKey("g0", P): 3, PoolKey("g0", D): 3, PoolKey("g1", P): 4, PoolKey("g1", D): 4}
    shrunk = place({P: 5, D: 5}, current, groups, PdRatio(1, 1))
    assert shrunk == {PoolKey("g0", P): 1, PoolKey("g0", D): 1, PoolKey("g1", P): 4, PoolKey("g1", D): 4}


def decode_counts(total: int, current: Sequence[int]) -> list[int]:
    """Experiment 2 of WVA: A100s at 1.0 and H100s at 2.5, each group with a prefill replica that none of them needs."""
    groups = pools([(1, 4), (1, 4)], tiers=(LinkTier.S2, LinkTier.S0), costs=(1.0, 2.5))
    before = {PoolKey(f"g{i}", role): current[i] if role is D else 1 for i in range(2) for role in Role}
    placed = place({P: 2, D: total}, before, groups, PdRatio(2, max(2, total)))
    return [placed[PoolKey(f"g{i}", D)] for i in range(2)]


@pytest.mark.parametrize(
    ("total", "current", "expected"),
    [
        (2, (1, 1), [1, 1]),
        (4, (1, 1), [3, 1]),  # though KV travels least in the dearer group
        (5, (1, 1), [4, 1]),
        (6, (4, 1), [4, 2]),  # only when no A100 is left
        (8, (4, 2), [4, 4]),
        (7, (4, 4), [4, 3]),  # the dearest goes first
        (4, (4, 3), [3, 1]),
        (5, (2, 3), [2, 3]),  # nothing moves where the total stays
    ],
)
def test_the_cheapest_variant_grows_first_and_the_dearest_goes_first(
    total: int, current: tuple[int, int], expected: list[int]
) -> None:
    assert decode_counts(total, current) == expected


@pytest.mark.parametrize(
    ("decode", "prefill", "grown"),
    [
        # One prefill replica for three of decode: 2 + 9/3 against 2 + 3/3.
        ((2.0, 2.0), (9.0, 3.0), "g1"),
        # 2 + 6/3 against 4 + 3/3, though a whole pair costs 8 against 7.
        ((2.0, 4.0), (6.0, 3.0), "g0"),
    ],
)
def test_what_a_leader_costs_includes_its_share_of_a_follower(
    decode: tuple[float, float], prefill: tuple[float, float], grown: str
) -> None:
    prices = {P: prefill, D: decode}
    priced = [replace(pool, cost=prices[pool.key.role][int(pool.key.group[1])]) for pool in pools([(1, 9), (1, 9)])]
    current = {PoolKey(group, role): 1 for group in ("g0", "g1") for role in Role}
    placed = place({P: 3, D: 7}, current, priced, PdRatio(1, 3))
    assert {key for key, count in placed.items() if count > 1} == {PoolKey(grown, P), PoolKey(grown, D)}


def test_a_full_group_is_passed_over_and_too_much_is_an_error() -> None:
    current = {PoolKey("g0", P): 1, PoolKey("g0", D): 1, PoolKey("g1", P): 1, PoolKey("g1", D): 1}
    placed = place({P: 5, D: 5}, current, pools([(1, 2), (1, 9)]), PdRatio(1, 1))
    assert placed == {PoolKey("g0", P): 2, PoolKey("g0", D): 2, PoolKey("g1", P): 3, PoolKey("g1", D): 3}
    with pytest.raises(ValueError, match="9 decode replicas do not fit the bounds of 2 groups"):
        place({P: 2, D: 9}, current, pools([(1, 2), (1, 2)]), PdRatio(1, 1))


@given(
    ratio=st.sampled_from(["1:5", "1:3", "1:1", "2:1", "9:1"]).map(PdRatio.parse),
    leaders=st.tuples(st.integers(3, 60), st.integers(3, 60)),
    tiers=st.lists(st.sampled_from(LinkTier), min_size=1, max_size=4),
    costs=st.tuples(*[st.sampled_from([0.0, 1.0, 2.5])] * 4),
)
def test_totals_are_kept_and_groups_are_near_the_ratio(
    ratio: PdRatio, leaders: tuple[int, int], tiers: list[LinkTier], costs: tuple[float, ...]
) -> None:
    groups = len(tiers)
    room = Room(
        lowest=dict.fromkeys(Role, groups), highest=dict.fromkeys(Role, 500), gpus_per_replica=dict.fromkeys(Role, 1)
    )
    bounds = pools([(1, 500)] * groups, tiers, costs)
    placed = {PoolKey(f"g{i}", role): 1 for i in range(groups) for role in Role}
    for count in leaders:
        wanted = joint_counts({ratio.leader: float(count), ratio.follower: 0.0}, ratio, room, band_replicas=1.0)
        assert wanted is not None
        placed = place(wanted, placed, bounds, ratio)
        assert {role: sum(n for key, n in placed.items() if key.role is role) for role in Role} == wanted
        for i in range(groups):
            deviation = ratio.deviation(placed[PoolKey(f"g{i}", P)], placed[PoolKey(f"g{i}", D)])
            # Every replica of every group may serve: the gate's band is one replica.
            assert deviation <= 1.0 + 1e-9


def test_a_near_group_gets_no_more_leaders_than_followers_can_be_had_for() -> None:
    groups = pools([(1, 12)] * 4, tiers=(LinkTier.S0, LinkTier.S2, LinkTier.S2, LinkTier.S2))
    current = {PoolKey(f"g{i}", role): 1 for i in range(4) for role in Role}
    placed = place({P: 4, D: 12}, current, groups, PdRatio(1, 3))
    # Each group keeps one of the four prefill replicas, which serves six decode replicas at most.
    assert [placed[PoolKey(f"g{i}", P)] for i in range(4)] == [1, 1, 1, 1]
    assert [placed[PoolKey(f"g{i}", D)] for i in range(4)] == [6, 2, 2, 2]
