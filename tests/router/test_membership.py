"""Which replicas may get requests, and that a silent coordinator stops none of them."""

from router.membership import Membership, obeyed, routable

NAMES = ["a", "b", "c"]


def plan(*admitted: str) -> Membership:
    return Membership(admitted=frozenset(admitted), heard_s=100.0)


def test_only_admitted_replicas_get_requests_and_unknown_ones_wait() -> None:
    assert routable(NAMES, frozenset({"c", "a", "gone"})) == ["a", "c"]


def test_without_a_plan_all_replicas_get_requests() -> None:
    assert obeyed(None, now_s=101.0, silence_s=10.0) is None
    assert routable(NAMES, None) == NAMES


def test_the_plan_of_a_coordinator_that_is_silent_too_long_is_not_obeyed() -> None:
    assert obeyed(plan("a"), now_s=110.0, silence_s=10.0) == plan("a")
    assert obeyed(plan("a"), now_s=110.1, silence_s=10.0) is None


def test_a_plan_that_admits_no_replica_here_is_not_obeyed() -> None:
    assert routable(NAMES, frozenset({"x"})) == NAMES
    assert routable(NAMES, frozenset()) == NAMES
    assert routable([], frozenset({"x"})) == []
