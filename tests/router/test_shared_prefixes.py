"""What routers get of a pool's pieces, whatever reports are lost and however late they ask."""

from hypothesis import given
from hypothesis import strategies as st

from router import shared_prefixes
from router.shared_prefixes import SILENCE_S, HeldReport, PoolNews, PoolPrefixes, packed, unpacked


def report(number: int, stored: list[int], removed: list[int] | None = None, whole: bool = False) -> HeldReport:
    return HeldReport(
        replica_id="a",
        number=number,
        is_whole=whole,
        capacity_pieces=100,
        stored=packed(stored),
        removed=packed(removed or []),
    )


def applied(known: dict[str, set[int]], news: PoolNews) -> None:
    """What a router does with news."""
    for one in news.reports:
        keys = known.setdefault(one.replica_id, set())
        if one.is_whole:
            keys.clear()
        keys.difference_update(unpacked(one.removed))
        keys.update(unpacked(one.stored))


def test_packed_keys_come_back() -> None:
    assert unpacked(packed([0, 1, 2**64 - 1])) == [0, 1, 2**64 - 1]


def test_a_replica_begins_with_the_whole_and_a_missing_report_asks_for_it_again() -> None:
    pool = PoolPrefixes(0)
    assert not pool.report(report(1, [1]), 0.0)
    assert pool.report(report(2, [1, 2], whole=True), 0.0)
    assert pool.report(report(3, [3], [1]), 0.0)
    assert not pool.report(report(5, [5]), 0.0)  # report 4 is missing
    assert pool.report(report(6, [7], whole=True), 0.0)
    known: dict[str, set[int]] = {}
    applied(known, pool.since(-1))
    assert known == {"a": {7}}


def test_a_router_without_news_gets_none() -> None:
    pool = PoolPrefixes(0)
    pool.report(report(1, [1], whole=True), 0.0)
    pool.report(report(2, []), 0.0)  # a sign of life
    news = pool.since(pool.version)
    assert news.reports == ()
    assert news.version == pool.version


def test_a_silent_replica_is_forgotten_and_its_routers_are_told() -> None:
    pool, known = PoolPrefixes(0), dict[str, set[int]]()
    pool.report(report(1, [1], whole=True), 0.0)
    news = pool.since(-1)
    applied(known, news)
    pool.drop_silent(SILENCE_S)
    assert pool.version == news.version
    pool.drop_silent(SILENCE_S + 1.0)
    applied(known, pool.since(news.version))
    assert known == {"a": set()}
    assert not pool.report(report(2, [2]), SILENCE_S + 1.0)


def test_versions_of_an_earlier_board_are_unknown() -> None:
    pool = PoolPrefixes(1000)
    pool.report(report(1, [1], whole=True), 0.0)
    for version in (-1, 7, 2000):
        known = {"a": {5}}
        applied(known, pool.since(version))
        assert known == {"a": {1}}


@given(st.lists(st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.booleans()), max_size=30))
def test_a_router_that_asks_at_times_knows_what_the_replica_holds(
    steps: list[tuple[set[int], set[int], bool]],
) -> None:
    pool, known, held, version = PoolPrefixes(0), dict[str, set[int]](), set[int](), -1
    pool.report(report(0, [], whole=True), 0.0)
    for number, (stored, removed, asks) in enumerate(steps, start=1):
        held = (held - removed) | stored
        assert pool.report(report(number, sorted(stored), sorted(removed - stored)), 0.0)
        if asks:
            news = pool.since(version)
            applied(known, news)
            version = news.version
            assert known == {"a": held}


def test_a_router_that_is_too_late_gets_the_whole_state() -> None:
    pool, known = PoolPrefixes(0), dict[str, set[int]]()
    pool.report(report(0, [], whole=True), 0.0)
    news = pool.since(-1)
    applied(known, news)
    most = shared_prefixes._MOST_CHANGE_KEYS
    for number in range(1, 4):
        pool.report(report(number, list(range(number * most, number * most + most // 2)), []), 0.0)
    late = pool.since(news.version)
    assert [one.is_whole for one in late.reports] == [True]
    applied(known, late)
    assert len(known["a"]) == 3 * (most // 2)
