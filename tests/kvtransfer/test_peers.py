"""Which prefill replicas a decode replica stays away from, and when it tries them again."""

import math

from kvtransfer.peers import Peers, StuckPulls, merged


def known(*names: str) -> Peers:
    peers = Peers()
    for name in names:
        peers.heard(name, 0.0)
    return peers


def test_one_failed_pull_keeps_prompts_away_from_that_replica_alone() -> None:
    peers = known("a", "b")
    assert peers.failed("a", 10.0)
    assert peers.broken(10.0) == {"a"}
    assert not peers.is_cut_off(10.0)
    assert peers.failed("b", 10.0)
    assert peers.is_cut_off(10.0)


def test_a_peer_without_news_for_a_minute_is_no_alternative() -> None:
    peers = known("a", "b")
    peers.failed("a", 60.0)
    assert not peers.is_cut_off(60.0)
    assert peers.is_cut_off(61.0)


def test_a_replica_that_is_cut_off_looks_once_a_minute_for_another_peer() -> None:
    peers = known("a")
    peers.failed("a", 0.0)
    looks = []
    for second in range(200):
        assert peers.is_cut_off(float(second))
        if peers.looks_around(float(second)):
            looks.append(second)
    assert looks == [60, 120, 180]
    peers.heard("b", 200.0)
    assert not peers.is_cut_off(200.0)
    assert peers.is_cut_off(261.0)
    assert not peers.looks_around(261.0)


def test_a_replica_without_known_peers_is_not_cut_off() -> None:
    assert not Peers().is_cut_off(0.0)


def test_failures_of_prompts_that_were_sent_before_do_not_lengthen_the_pause() -> None:
    peers = known("a")
    peers.failed("a", 10.0)
    assert [peers.failed("a", 10.5) for _ in range(5)] == [False] * 5
    assert peers.probe(11.0) == "a"


def test_one_prompt_at_a_time_probes_a_broken_link_after_a_pause_that_doubles() -> None:
    peers = known("a")
    peers.failed("a", 0.0)
    now_s, pauses = 0.0, []
    for _ in range(9):
        failed_s = now_s
        while (probed := peers.probe(now_s)) is None:
            now_s += 0.25
        assert probed == "a"
        assert peers.probe(now_s) is None
        pauses.append(now_s - failed_s)
        assert peers.failed("a", now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_kv_that_comes_repairs_a_link_and_its_next_pause_is_short() -> None:
    peers = known("a")
    peers.failed("a", 0.0)
    peers.probe(1.0)
    peers.failed("a", 1.0)
    peers.probe(3.0)
    assert peers.pulled("a", 3.5)
    assert not peers.pulled("a", 3.6)
    assert peers.broken(4.0) == frozenset()
    peers.failed("a", 5.0)
    assert peers.probe(6.0) == "a"


def test_after_a_probe_without_a_result_another_prompt_probes() -> None:
    peers = known("a")
    peers.failed("a", 0.0)
    assert peers.probe(1.0) == "a"
    peers.unknown("a", 2.0)
    assert peers.probe(2.5) is None
    assert peers.probe(3.0) == "a"
    assert peers.probe(62.9) is None
    assert peers.probe(63.0) == "a"  # the last probe has had no result for a minute


def test_replicas_that_stay_silent_are_forgotten() -> None:
    peers = known("a", "b")
    peers.failed("a", 0.0)
    peers.failed("b", 599.0)
    assert peers.broken(601.0) == {"b"}
    assert peers.is_cut_off(601.0)


def test_a_pull_is_stuck_once_it_was_seen_for_longer_than_its_time() -> None:
    stuck = StuckPulls(5.0)
    assert stuck.see({"r1": "e1"}, 0.0) == frozenset()
    assert stuck.see({"r1": "e1", "r2": "e2"}, 5.0) == frozenset()
    assert stuck.see({"r1": "e1", "r2": "e2"}, 5.1) == {"e1"}
    assert stuck.see({"r2": "e2"}, math.nextafter(10.0, 11.0)) == {"e2"}
    assert stuck.see({}, 20.0) == frozenset()
    assert stuck.see({"r2": "e2"}, 30.0) == frozenset()  # another pull of that name


def test_reports_of_all_workers_are_merged() -> None:
    assert merged([{"r1": "e1"}, {"r1": "e1", "r2": "e2"}, {}]) == {"r1": "e1", "r2": "e2"}
