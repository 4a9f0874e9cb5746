"""Who may be routed to, and that a silent coordinator stops nobody."""

from router.membership import Membership, routable

NAMES = ["a", "b", "c"]


def plan(*admitted: str, heard_s: float = 100.0) -> Membership:
    return Membership(admitted=frozenset(admitted), heard_s=heard_s)


def test_only_admitted_replicas_get_requests_and_unknown_ones_wait() -> None:
    assert routable(NAMES, plan("c", "a", "gone"), now_s=101.0, silence_s=10.0) == ["a", "c"]


def test_without_a_plan_all_do() -> None:
    assert routable(NAMES, None, now_s=101.0, silence_s=10.0) == NAMES


def test_a_coordinator_that_is_silent_too_long_is_not_waited_for() -> None:
    assert routable(NAMES, plan("a"), now_s=110.0, silence_s=10.0) == ["a"]
    assert routable(NAMES, plan("a"), now_s=110.1, silence_s=10.0) == NAMES


def test_a_plan_that_admits_nobody_here_is_not_obeyed() -> None:
    assert routable(NAMES, plan("x"), now_s=101.0, silence_s=10.0) == NAMES
    assert routable(NAMES, plan(), now_s=101.0, silence_s=10.0) == NAMES
    assert routable([], plan("x"), now_s=101.0, silence_s=10.0) == []
