"""Which replicas get no traffic, for how long, and how they return."""

import pytest

from router.ejection import Measure, Observation, OutlierConfig, Outliers, UsualPace, usable

CONFIG = OutlierConfig()


def see(
    outliers: Outliers, answers: str, *, measure: Measure = Measure.ERROR, at_s: float = 0.0, is_probe: bool = False
) -> None:
    """What callers see of one replica, in this order: ``x`` for a failure, ``.`` for an answer."""
    for answer in answers:
        outliers.observe(Observation("r", answer == "x", measure, is_probe), "pool", at_s)


def failing(*, measure: Measure = Measure.ERROR) -> Outliers:
    outliers = Outliers({"pool": CONFIG})
    see(outliers, "xxx", measure=measure)
    return outliers


@pytest.mark.parametrize(
    ("answers", "is_ejected"),
    [
        ("x", False),
        ("xx", False),
        ("xxx", True),
        ("xx.x", True),
        ("x.x.x", True),  # every other one
        ("..........x.x.x", True),  # answers before the first failure are not kept
        ("x.........xxx", True),
        ("x..x..x..x..x", False),  # a third
        ("xx....x", False),
        ("xx...x", True),
        ("xx..........x", False),  # the failures are too long ago
    ],
)
def test_a_replica_with_three_failures_in_half_of_its_last_answers_is_ejected(answers: str, is_ejected: bool) -> None:
    outliers = Outliers({"pool": CONFIG})
    see(outliers, answers)
    assert outliers.ejected(0.0) == ({"r"} if is_ejected else set())


def test_ten_answers_after_its_last_failure_a_replica_is_no_suspect() -> None:
    outliers = Outliers({"pool": CONFIG})
    see(outliers, "x.........")
    assert outliers.suspects() == {"r"}
    see(outliers, ".")
    assert outliers.suspects() == set()


def test_answers_without_a_pace_do_not_count_among_paces() -> None:
    outliers = Outliers({"pool": CONFIG})
    for _ in range(3):
        see(outliers, "x", measure=Measure.PACE)
        see(outliers, "....", measure=Measure.ERROR)
    assert outliers.ejected(0.0) == {"r"}
    outliers = Outliers({"pool": CONFIG})
    see(outliers, "x..x..x..x", measure=Measure.PACE)
    assert outliers.ejected(0.0) == set()


def test_after_the_ejection_one_request_at_a_time_may_probe() -> None:
    outliers = failing()
    assert outliers.due("pool", 4.9) == set() and not outliers.probe("r", 4.9)
    assert outliers.due("other", 5.0) == set()
    assert outliers.due("pool", 5.0) == {"r"}
    assert outliers.probe("r", 5.0)
    assert outliers.due("pool", 6.0) == set() and not outliers.probe("r", 6.0)
    assert outliers.ejected(6.0) == {"r"}
    assert outliers.probe("r", 65.0)  # the first probe had no result for a minute
    see(outliers, ".", is_probe=True)
    assert outliers.ejected(65.1) == outliers.suspects() == set()


def test_only_results_of_the_probe_count_for_an_ejected_replica() -> None:
    outliers = failing()
    see(outliers, ".x", at_s=1.0)
    assert outliers.probe("r", 5.0)
    see(outliers, "..........", at_s=5.1)  # answers to requests that were sent before
    assert outliers.ejected(5.1) == {"r"}
    see(outliers, "x", at_s=5.2, is_probe=True)
    see(outliers, ".", at_s=5.3, is_probe=True)  # the probe failed by its pace, and then ended well
    assert outliers.ejected(5.3) == {"r"}
    assert outliers.due("pool", 15.1) == set() and outliers.due("pool", 15.2) == {"r"}


def test_a_slow_replica_that_answers_the_probe_in_one_piece_is_back_until_it_is_slow_again() -> None:
    outliers = failing(measure=Measure.PACE)
    assert outliers.probe("r", 5.0)
    see(outliers, ".", at_s=5.1, is_probe=True)
    assert outliers.ejected(5.1) == set()
    see(outliers, "x", measure=Measure.PACE, at_s=5.2)
    assert outliers.ejected(5.2) == {"r"}
    assert outliers.due("pool", 15.1) == set()  # ejected for twice as long


def test_each_probe_that_fails_doubles_the_wait_up_to_a_minute() -> None:
    outliers, now_s, waits = failing(), 0.0, []
    for _ in range(7):
        since_s = now_s
        while not outliers.probe("r", now_s):
            now_s += 0.5
        waits.append(now_s - since_s)
        see(outliers, "x", at_s=now_s, is_probe=True)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]


def test_a_suspect_without_observations_is_forgotten() -> None:
    outliers = failing()
    assert outliers.ejected(601.0) == outliers.suspects() == set()


@pytest.mark.parametrize(
    ("ejected", "left"),
    [("", "abcd"), ("a", "bcd"), ("ab", "cd"), ("abc", "abcd"), ("abcd", "abcd"), ("xyz", "abcd")],
)
def test_if_most_of_a_pool_fails_no_replica_is_ejected(ejected: str, left: str) -> None:
    assert usable(list("abcd"), frozenset(ejected), 0.5) == list(left)


def test_the_only_replica_is_never_ejected() -> None:
    assert usable(["a"], {"a"}, 1.0) == ["a"]


def test_a_pace_is_slow_if_it_is_slow_for_its_pool() -> None:
    usual = UsualPace(CONFIG)
    assert not any(usual.is_slow(30.0, 2.0) for _ in range(9))  # nothing to compare with
    usual = UsualPace(CONFIG)
    assert not any(usual.is_slow(0.1, 2.0) for _ in range(50))
    assert not usual.is_slow(1.9, 2.0) and usual.is_slow(2.1, 2.0)
    usual = UsualPace(CONFIG)
    assert not any(usual.is_slow(1.0, 2.0) for _ in range(50))
    assert not usual.is_slow(4.9, 2.0) and usual.is_slow(5.1, 2.0)


def test_once_half_of_the_known_paces_are_slow_they_are_usual() -> None:
    usual = UsualPace(CONFIG)
    for _ in range(200):
        usual.is_slow(0.2, 2.0)
    # 101 are kept: slow is usual once 51 of them are.
    assert [usual.is_slow(10.0, 2.0) for _ in range(200)] == [True] * 51 + [False] * 149


def test_under_overload_all_are_slow_so_no_replica_is_ejected() -> None:
    usual, outliers, pool = UsualPace(CONFIG), Outliers({"pool": CONFIG}), list("abcd")
    for _ in range(200):
        usual.is_slow(0.2, 2.0)
    left = []
    for number in range(200):
        name = pool[number % 4]
        outliers.observe(Observation(name, usual.is_slow(10.0, 2.0), Measure.PACE), "pool", 0.0)
        left.append(usable(pool, outliers.ejected(0.0), 0.5))
    # Each replica is ejected at its third slow answer. After two of them half of the pool is out. After three it would
    # be more than half, so all replicas get traffic.
    assert [number for number, names in enumerate(left) if names != pool] == [8, 9]


def test_each_pool_has_the_bounds_of_its_own_service() -> None:
    outliers = Outliers({"strict": OutlierConfig(failures=1, ejection_s=1.0), "usual": OutlierConfig()})
    for pool in ("strict", "usual", "unknown"):
        outliers.observe(Observation(pool, True), pool, 0.0)
    assert outliers.ejected(0.0) == {"strict"}
    assert outliers.due("strict", 1.0) == {"strict"}
