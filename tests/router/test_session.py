"""The replica of a session."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.session import SessionPlaces

NAMES = [f"replica-{i}" for i in range(8)]


def places(names: list[str]) -> SessionPlaces:
    made = SessionPlaces()
    made.set_replicas(names)
    return made


def test_two_routers_agree_in_whatever_order_they_know_the_replicas() -> None:
    one, other = places(NAMES), places(NAMES[::-1])
    sessions = [f"s{i}" for i in range(200)]
    assert [one.replica_of(s, NAMES) for s in sessions] == [other.replica_of(s, reversed(NAMES)) for s in sessions]


@given(session=st.text(), gone=st.sampled_from(NAMES))
def test_only_the_sessions_of_a_replica_that_left_move(session: str, gone: str) -> None:
    known = places(NAMES)
    before = known.replica_of(session, NAMES)
    after = known.replica_of(session, [name for name in NAMES if name != gone])
    assert after == before or before == gone


def test_sessions_are_spread() -> None:
    known = places(NAMES)
    counts = Counter(known.replica_of(f"session {i}", NAMES) for i in range(8000))
    # 1000 expected each, with a standard deviation of 30.
    assert all(count == pytest.approx(1000, abs=150) for count in counts.values())
    # So are the sessions of a replica that left.
    left = [s for s in map("session {}".format, range(8000)) if known.replica_of(s, NAMES) == NAMES[0]]
    moved = Counter(known.replica_of(s, NAMES[1:]) for s in left)
    assert all(moved[name] == pytest.approx(len(left) / 7, abs=50) for name in NAMES[1:])


def test_no_replica_has_a_session_if_there_is_none() -> None:
    with pytest.raises(ValueError):
        places([]).replica_of("s", [])
