"""The order of keys by the service that they have had (start-time fair queueing)."""

from router.fair_shares import FairShares


def test_turns_follow_the_papers_start_tags() -> None:
    """S = max(v, F of the key's last request), F = S + cost / share, v = S of the request in service.

    Source: Goyal, Vin, Cheng, eq. 1-4.
    """
    shares = FairShares()
    starts = []
    for key, cost in (("a", 10.0), ("a", 10.0), ("b", 5.0), ("b", 5.0)):
        starts.append(shares.start(key))
        shares.charge(key, starts[-1], cost)
    assert starts == [0.0, 10.0, 0.0, 5.0]
    shares.begin(10.0)
    assert shares.start("c") == 10.0  # a key that comes later is owed nothing
    assert shares.start("a") == 20.0
    assert shares.start("b") == 10.0


def test_a_wrong_charge_is_corrected_until_it_is_forgotten() -> None:
    shares = FairShares()
    shares.charge("a", 0.0, 10.0)
    shares.correct("a", 5.0)
    assert shares.start("a") == 15.0
    shares.correct("a", -15.0)
    assert shares.start("a") == 0.0
    shares.charge("a", 0.0, 10.0)
    shares.forget()
    shares.correct("a", 5.0)
    assert shares.start("a") == 0.0


def test_a_key_that_was_away_has_no_credit() -> None:
    shares = FairShares()
    shares.charge("a", 0.0, 10.0)
    shares.begin(50.0)
    assert shares.start("a") == 50.0
