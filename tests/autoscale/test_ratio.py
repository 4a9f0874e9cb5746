"""The P/D ratio and joint rounding."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoscale.ratio import PdRatio
from autoscale.room import Room, joint_counts
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
ratios = st.sampled_from(
    ["1:5", "1:4", "1:3", "2:5", "1:2", "2:3", "1:1", "3:2", "2:1", "3:1", "5:2", "5:1", "9:1"]
).map(PdRatio.parse)


def room(lowest: tuple[int, int] = (1, 1), highest: tuple[int, int] = (64, 64), budget: int | None = None) -> Room:
    return Room(
        lowest={P: lowest[0], D: lowest[1]},
        highest={P: highest[0], D: highest[1]},
        most_gpus_per_replica={P: 2, D: 4},
        budget_gpus=budget,
    )


@pytest.mark.parametrize(
    ("given_as", "written"),
    [
        ("1:3", "1:3"),
        ("2:6", "1:3"),
        (0.5, "1:2"),
        (1 / 3, "1:3"),
        (3, "3:1"),
        ("0.25", "1:4"),
        ("9:1", "9:1"),
        (0.2, "1:5"),
    ],
)
def test_a_ratio_is_read_as_people_write_it(given_as: object, written: str) -> None:
    assert str(PdRatio.parse(given_as)) == written


@pytest.mark.parametrize(
    "wrong", ["", ":", "1:0", "0:0", "a:b", "1:3:5", None, True, [], float("nan"), float("inf"), -1, "1.5:2"]
)
def test_an_invalid_ratio_is_refused_with_what_to_give(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"no P/D ratio: give|is impossible: between 1:5 and 9:1"):
        PdRatio.parse(wrong)


@pytest.mark.parametrize("beyond", ["1:6", "10:1", 0.1, 0.001, 100])
def test_a_ratio_beyond_1_to_5_or_9_to_1_is_refused(beyond: object) -> None:
    with pytest.raises(ValueError, match="impossible: between 1:5 and 9:1"):
        PdRatio.parse(beyond)


counts = st.floats(0.1, 500.0)


@given(counts, counts)
def test_at_their_own_ratio_counts_want_no_more_of_either_role(prefill: float, decode: float) -> None:
    wanted = {P: prefill, D: decode}
    ratio = PdRatio.of(wanted, {P: 0.1, D: 0.1})
    # 1e-9 is the tolerance with which counts are rounded up.
    assert ratio.leaders(wanted) == pytest.approx(wanted[ratio.leader], abs=1e-9)
    assert wanted[ratio.leader] * ratio.follower_share == pytest.approx(wanted[ratio.follower], abs=1e-9)
    assert PdRatio.stored(ratio.exact()) == ratio


def test_a_ratio_of_counts_is_written_for_people() -> None:
    assert str(PdRatio.of({P: 4.0, D: 10.0})) == "2:5"
    assert str(PdRatio.of({P: 0.5, D: 1.0}, {P: 0.5, D: 0.5})) == "1:2"
    assert str(PdRatio.of({P: 0.2, D: 3.0})) == "1:3"  # there is at least one replica
    assert str(PdRatio.of({P: 1.4714, D: 2.4262})) == "1.47:2.43"
    assert PdRatio.of({P: 1.4714, D: 2.4262}).unit() == {P: 3, D: 5}


def test_deviation_is_counted_in_replicas_of_the_smaller_role() -> None:
    assert PdRatio(1, 3).deviation(1, 6) == pytest.approx(1.0)  # |1 - 6/3|
    assert PdRatio(3, 1).deviation(9, 2) == pytest.approx(1.0)  # |9/3 - 2|
    assert PdRatio(1, 1).deviation(4, 4) == 0


@pytest.mark.parametrize(
    ("ratio", "wanted", "expected"),
    [
        ("1:3", (0.0, 7.0), (3, 7)),  # 7/3 = 2.33 prefill, rounded up
        ("1:3", (0.0, 9.0), (3, 9)),
        ("1:3", (2.0, 1.0), (2, 6)),  # two prefill replicas need six decode replicas
        ("3:1", (0.0, 1.2), (4, 2)),  # 3.6 prefill
        ("1:1", (2.5, 3.5), (4, 4)),
        ("9:1", (0.0, 1.0), (9, 1)),
        ("1:5", (0.1, 0.1), (1, 1)),
    ],
)
def test_joint_rounding_by_hand(ratio: str, wanted: tuple[float, float], expected: tuple[int, int]) -> None:
    counts = joint_counts({P: wanted[0], D: wanted[1]}, PdRatio.parse(ratio), room(), band_replicas=1.0)
    assert counts == {P: expected[0], D: expected[1]}


def test_a_budget_that_binds_takes_from_both() -> None:
    # 12 decode and 4 prefill would take 56 GPUs; 28 hold 6 and 2.
    assert joint_counts({P: 0, D: 12.0}, PdRatio(1, 3), room(budget=28), band_replicas=1.0) == {P: 2, D: 6}


def test_a_bound_of_one_role_bounds_the_other() -> None:
    assert joint_counts({P: 0, D: 12.0}, PdRatio(1, 3), room(highest=(2, 64)), band_replicas=1.0) == {P: 2, D: 9}
    assert joint_counts({P: 0, D: 1.0}, PdRatio(1, 3), room(lowest=(3, 1)), band_replicas=1.0) == {P: 3, D: 6}


def test_without_a_pair_in_the_band_there_is_no_answer() -> None:
    assert joint_counts({P: 1, D: 1}, PdRatio(1, 5), room(lowest=(4, 1), highest=(8, 8)), band_replicas=1.0) is None


@given(
    ratio=ratios,
    wanted=st.tuples(st.floats(0, 200), st.floats(0, 200)),
    lowest=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    more=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    budget=st.none() | st.integers(0, 300),
    band=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_counts_are_in_the_room_and_at_the_ratio_under_every_budget(
    ratio: PdRatio,
    wanted: tuple[float, float],
    lowest: tuple[int, int],
    more: tuple[int, int],
    budget: int | None,
    band: float,
) -> None:
    limits = room(lowest, (lowest[0] + more[0], lowest[1] + more[1]), budget)

    def is_single_follower(p: int, d: int) -> bool:
        """Whether there is one follower, which is in every band, though the ratio asks for less."""
        of = {P: p, D: d}
        return of[ratio.follower] == 1 and of[ratio.leader] * ratio.follower_share < 1.0

    counts = joint_counts({P: wanted[0], D: wanted[1]}, ratio, limits, band_replicas=band)
    pairs = [
        {P: p, D: d}
        for p in range(limits.lowest[P], limits.highest[P] + 1)
        for d in range(limits.lowest[D], limits.highest[D] + 1)
        if limits.holds({P: p, D: d}) and (ratio.deviation(p, d) <= band + 1e-9 or is_single_follower(p, d))
    ]
    if counts is None:
        assert pairs == []
        return
    assert counts in pairs
    leader, follower = ratio.leader, ratio.follower
    asked = {P: wanted[0], D: wanted[1]}
    need = max(asked[leader], asked[follower] / ratio.follower_share)
    most = max(pair[leader] for pair in pairs)
    assert counts[leader] >= min(need - 1e-6, most)


@given(ratio=ratios, wanted=st.floats(0, 60), extra=st.integers(0, 100), budget=st.integers(6, 300))
def test_a_larger_budget_or_wanted_count_never_means_fewer_replicas(
    ratio: PdRatio, wanted: float, extra: int, budget: int
) -> None:
    def total(wanted_leaders: float, gpus: int) -> int:
        counts = joint_counts(
            {ratio.leader: wanted_leaders, ratio.follower: 0.0}, ratio, room(budget=gpus), band_replicas=1.0
        )
        return 0 if counts is None else counts[ratio.leader]

    assert total(wanted, budget + extra) >= total(wanted, budget)
    assert total(wanted + extra, budget) >= total(wanted, budget)


@given(ratio=ratios, leaders=st.integers(1, 60))
def test_counts_at_the_ratio_stay(ratio: PdRatio, leaders: int) -> None:
    followers = math.ceil(leaders * ratio.follower_share - 1e-9)
    wanted = {ratio.leader: float(leaders), ratio.follower: leaders * ratio.follower_share}
    assume(followers <= 64)
    assert joint_counts(wanted, ratio, room(), band_replicas=1.0) == {ratio.leader: leaders, ratio.follower: followers}


@pytest.mark.parametrize(
    ("decode", "shortfall", "expected"),
    [(4, 0.0, (2, 4)), (4, 0.5, (1, 4)), (5, 0.5, (2, 5)), (4, 0.3, (2, 4)), (6, 0.5, (2, 6)), (7, 0.5, (2, 7))],
)
def test_rounding_may_leave_the_follower_short(decode: int, shortfall: float, expected: tuple[int, int]) -> None:
    counts = joint_counts(
        {P: 0.0, D: float(decode)}, PdRatio(1, 3), room(), band_replicas=1.0, shortfall_replicas=shortfall
    )
    assert counts == {P: expected[0], D: expected[1]}
