"""The readiness gate, and which replicas leave first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.decide.gate import admissible, choose_victims
from autoscale.ratio import PdRatio
from autoscale.types import ReplicaStats
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE


def ready(prefill: int, decode: int) -> dict[Role, list[str]]:
    return {P: [f"p{i}" for i in range(prefill)], D: [f"d{i}" for i in range(decode)]}


def admitted(prefill: int, decode: int, before: str = "", ratio: str = "1:3", band: float = 1.0) -> tuple[int, int]:
    names = admissible(
        ready(prefill, decode),
        frozenset(before.split()),
        PdRatio.parse(ratio),
        PdRatio.parse(ratio).follower_share,
        band,
    )
    return sum(name[0] == "p" for name in names), sum(name[0] == "d" for name in names)


@pytest.mark.parametrize(
    ("is_ready", "ratio", "expected"),
    [
        ((1, 9), "1:3", (1, 6)),  # |1 - 6/3| = 1; three decode replicas wait
        ((3, 3), "1:3", (2, 3)),  # |2 - 3/3| = 1; one prefill replica waits
        ((3, 9), "1:3", (3, 9)),
        ((9, 1), "3:1", (6, 1)),
        ((3, 3), "3:1", (3, 2)),
        ((4, 1), "1:1", (2, 1)),
        ((0, 9), "1:3", (0, 3)),
        ((0, 1), "3:1", (0, 1)),
        ((0, 0), "1:1", (0, 0)),
    ],
)
def test_the_role_that_is_ahead_waits_for_the_other(
    is_ready: tuple[int, int], ratio: str, expected: tuple[int, int]
) -> None:
    assert admitted(*is_ready, ratio=ratio) == expected


def test_the_oldest_replicas_enter_first_and_admitted_ones_stay() -> None:
    ratio = PdRatio.parse("1:1")
    first = admissible(ready(1, 5), frozenset(), ratio, ratio.follower_share, 1.0)
    assert first == ["p0", "d0", "d1"]
    assert admissible(ready(1, 5), frozenset({"p0", "d3", "d4"}), ratio, ratio.follower_share, 1.0) == [
        "p0",
        "d3",
        "d4",
    ]
    assert admissible(ready(2, 5), frozenset({"p0", "d3", "d4"}), ratio, ratio.follower_share, 1.0) == [
        "p0",
        "p1",
        "d3",
        "d4",
        "d0",
    ]


def test_after_a_loss_admitted_replicas_stay_and_new_ones_of_the_other_role_wait() -> None:
    assert admitted(1, 9, before="p0 d0 d1 d2 d3 d4 d5 d6 d7") == (1, 8)
    assert admitted(9, 1, before="p0 d0", ratio="1:5") == (1, 1)


def test_the_last_replica_of_a_role_is_never_held() -> None:
    assert admitted(5, 1, ratio="1:5", band=0.5)[1] == 1
    assert admitted(1, 5, ratio="9:1", band=0.5)[0] == 1


@given(
    counts=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    old=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    ratio=st.sampled_from(["1:5", "1:3", "2:3", "1:1", "5:2", "9:1"]),
    band=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_the_gate_admits_as_many_replicas_as_the_band_allows(
    counts: tuple[int, int], old: tuple[int, int], ratio: str, band: float
) -> None:
    ratio_ = PdRatio.parse(ratio)
    names = ready(*counts)
    least = (min(old[0], counts[0]), min(old[1], counts[1]))
    before = frozenset(names[P][: least[0]] + names[D][: least[1]])
    got = admissible(names, before, ratio_, ratio_.follower_share, band)
    assert len(got) == len(set(got))
    assert before <= set(got) <= {*names[P], *names[D]}
    p, d = sum(name[0] == "p" for name in got), sum(name[0] == "d" for name in got)
    assert p >= min(1, counts[0])
    assert d >= min(1, counts[1])
    start = (max(least[0], min(1, counts[0])), max(least[1], min(1, counts[1])))
    reachable = [
        (a, b)
        for a in range(start[0], counts[0] + 1)
        for b in range(start[1], counts[1] + 1)
        if ratio_.deviation(a, b) <= band + 1e-9
    ]
    if reachable:
        assert (p, d) in reachable
        assert p + d == max(a + b for a, b in reachable)
    else:
        assert ratio_.deviation(p, d) <= ratio_.deviation(*start) + 1e-9


def stats(name: str, **shown: float) -> ReplicaStats:
    return ReplicaStats(replica_id=name, observed_s=0.0, **shown)


def test_held_replicas_leave_first_then_the_least_busy_then_the_youngest() -> None:
    replicas = [
        stats("busy", running_requests=9, waiting_requests=0),
        stats("old", running_requests=2, waiting_requests=1),
        stats("young", running_requests=3, waiting_requests=0),
        stats("queued", running_requests=3, waiting_requests=0, queued_prefill_tokens=100),
        stats("held", running_requests=50),
    ]
    serving = frozenset({"busy", "old", "young", "queued"})
    assert choose_victims(replicas, serving, 5) == ["held", "young", "old", "queued", "busy"]
    assert choose_victims(replicas, serving, 0) == []
    assert choose_victims(replicas, serving, -2) == []
