"""Who gets no traffic, for how long, and how they return."""

import pytest

from router.outliers import OutlierConfig, Outliers, UsualPace, usable

CONFIG = OutlierConfig()


def failing(times: int, *, at_s: float = 0.0) -> Outliers:
    outliers = Outliers(CONFIG)
    for number in range(times):
        outliers.failed("r", "pool", f"caller {number}", at_s)
    return outliers


@pytest.mark.parametrize(("failures", "ejected"), [(1, set()), (2, set()), (3, {"r"}), (4, {"r"})])
def test_the_third_failure_in_a_row_ejects_whoever_saw_it(failures: int, ejected: set[str]) -> None:
    assert failing(failures).ejected(0.0) == ejected


def test_an_answer_between_failures_begins_the_row_anew() -> None:
    outliers = failing(2)
    outliers.answered("r", "another", 0.0)
    for _ in range(2):
        outliers.failed("r", "pool", "caller", 0.0)
    assert outliers.ejected(0.0) == set()
    outliers.failed("r", "pool", "caller", 0.0)
    assert outliers.ejected(0.0) == {"r"}


def test_after_the_ejection_one_caller_at_a_time_may_try() -> None:
    outliers = failing(3)
    assert outliers.probes("a", "pool", 4.9) == set()
    assert outliers.probes("b", "other", 5.0) == set()
    assert outliers.probes("a", "pool", 5.0) == {"r"}
    assert outliers.probes("b", "pool", 6.0) == outliers.probes("a", "pool", 6.0) == set()
    assert outliers.ejected(6.0) == {"r"}
    assert outliers.probes("b", "pool", 65.0) == {"r"}  # nothing was heard of the first
    outliers.answered("r", "b", 65.1)
    assert outliers.ejected(65.1) == outliers.suspects() == set()


def test_only_the_probe_says_anything_of_an_ejected_replica() -> None:
    outliers = failing(3)
    outliers.answered("r", "late", 1.0)
    outliers.failed("r", "pool", "late", 1.0)
    assert outliers.probes("a", "pool", 5.0) == {"r"}
    outliers.answered("r", "late", 5.1)
    assert outliers.ejected(5.1) == {"r"}


def test_each_probe_that_fails_doubles_the_wait_up_to_a_minute() -> None:
    outliers, now_s, waits = failing(3), 0.0, []
    for _ in range(7):
        since_s = now_s
        while not outliers.probes("a", "pool", now_s):
            now_s += 0.5
        waits.append(now_s - since_s)
        outliers.failed("r", "pool", "a", now_s)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]


def test_who_is_not_heard_of_is_forgotten() -> None:
    outliers = failing(3)
    assert outliers.ejected(601.0) == outliers.suspects() == set()


@pytest.mark.parametrize(
    ("ejected", "left"),
    [("", "abcd"), ("a", "bcd"), ("ab", "cd"), ("abc", "abcd"), ("abcd", "abcd"), ("xyz", "abcd")],
)
def test_where_most_of_a_pool_fails_nobody_is_ejected(ejected: str, left: str) -> None:
    assert usable(list("abcd"), frozenset(ejected), 0.5) == list(left)


def test_the_only_replica_is_never_ejected() -> None:
    assert usable(["a"], {"a"}, 1.0) == ["a"]


def test_slow_is_what_is_slow_for_its_pool() -> None:
    usual = UsualPace(CONFIG)
    assert not any(usual.is_slow(30.0, 2.0) for _ in range(9))  # nothing to compare with
    usual = UsualPace(CONFIG)
    assert not any(usual.is_slow(0.1, 2.0) for _ in range(50))
    assert not usual.is_slow(1.9, 2.0) and usual.is_slow(2.1, 2.0)
    usual = UsualPace(CONFIG)
    assert not any(usual.is_slow(1.0, 2.0) for _ in range(50))
    assert not usual.is_slow(4.9, 2.0) and usual.is_slow(5.1, 2.0)


def test_under_overload_everything_is_slow_and_so_nothing_is() -> None:
    usual = UsualPace(CONFIG)
    for _ in range(50):
        usual.is_slow(0.2, 2.0)
    assert sum(usual.is_slow(10.0, 2.0) for _ in range(200)) < 60
