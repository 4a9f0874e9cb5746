"""What a router knows of each replica's queue."""

from hypothesis import given
from hypothesis import strategies as st

from router.in_flight import InFlight


def test_requests_count_from_begin_to_end() -> None:
    flying = InFlight()
    flying.begin("a", "1", 300)
    flying.begin("a", "2", 100)
    assert flying.view("a").queued_tokens == 400
    assert flying.view("b").queued_tokens == 0
    assert flying.end("a", "1")
    assert flying.view("a").queued_tokens == 100
    assert not flying.end("a", "1")
    assert not flying.end("b", "2")
    assert flying.view("a").queued_tokens == 100


def test_a_request_that_comes_back_before_its_first_end_is_known_still_counts() -> None:
    flying = InFlight()
    flying.begin("a", "1", 300)
    flying.begin("a", "1", 300)
    assert flying.end("a", "1")
    assert flying.view("a").queued_tokens == 300
    assert flying.end("a", "1") and not flying.end("a", "1")
    assert flying.view("a").queued_tokens == 0


def test_what_a_replica_answers_counts_where_it_is_more_than_ones_own() -> None:
    flying = InFlight()
    flying.begin("a", "1", 200)
    assert flying.view("a", answered_tokens=900).queued_tokens == 900
    assert flying.view("b", answered_tokens=30).queued_tokens == 30
    assert flying.view("a", answered_tokens=0).queued_tokens == 200  # it has not arrived there yet


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(1, 900)), max_size=40))
def test_nothing_is_left_when_all_have_ended(requests: list[tuple[str, int, int]]) -> None:
    flying = InFlight()
    for replica, number, tokens in requests:
        flying.begin(replica, str(number), tokens)
    for replica, number, _ in requests:
        assert flying.end(replica, str(number))
    for replica in "ab":
        assert flying.view(replica).queued_tokens == 0
        assert flying.view(replica, answered_tokens=0).queued_tokens == 0
