"""Laws of the search for the highest good rate."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.pressure.rate_search import RateSearch, answer_s
from autoscale.traces.trace import TraceRequest


def searched(
    knee: float, *, first: float = 1.0, most: float = math.inf, **options: float
) -> tuple[RateSearch, list[float]]:
    """A search in which every rate up to the knee is good, and the rates that it tried."""
    settings = {"factor": 2.0, "bisections": 8, "tolerance_frac": 0.01, **options}
    search, tried = RateSearch(first, most=most, **settings), []  # type: ignore[arg-type]
    while (rate := search.next_rate) is not None:
        tried.append(rate)
        search.add(rate, is_good=rate <= knee)
    return search, tried


@given(knee=st.floats(0.2, 5000.0), first=st.floats(0.1, 100.0), factor=st.floats(1.1, 4.0))
def test_a_knee_is_found_within_the_tolerance(knee: float, first: float, factor: float) -> None:
    search, tried = searched(knee, first=first, factor=factor, bisections=20, tolerance_frac=0.02)
    assert search.good <= knee
    assert knee / search.good < 1 / 0.98 or knee < first * 2**-20
    assert len(tried) <= 21 + math.log(max(1.0, knee / first), factor) + 1


@given(knee=st.floats(0.01, 1000.0), most=st.floats(0.5, 50.0))
def test_no_rate_above_the_limit_or_above_a_bad_rate_is_tried(knee: float, most: float) -> None:
    search, tried = searched(knee, most=most)
    assert max(tried) <= most
    for number, rate in enumerate(tried):
        assert all(rate < bad for bad in tried[:number] if bad > knee)
    assert search.is_capped == (knee >= most)


def test_a_search_without_a_good_rate_ends_at_zero() -> None:
    search, tried = searched(0.0, bisections=4)
    assert (search.good, tried) == (0.0, [1.0, 0.5, 0.25, 0.125, 0.0625])


def test_the_rates_of_a_search_by_hand() -> None:
    search, tried = searched(5.0, bisections=2)
    assert tried == [1.0, 2.0, 4.0, 8.0, 6.0, 5.0]
    assert (search.good, search.bad) == (5.0, 6.0)


def test_an_answer_is_as_long_as_decode_spends_on_it() -> None:
    answers = [TraceRequest(at_s=0.0, input_tokens=1, output_tokens=tokens) for tokens in (10, 30)]
    assert answer_s(answers, 0.1) == pytest.approx(2.5)  # 25 tokens: (10 * 10 + 30 * 30) / 40
