"""Laws of the search for the highest rate of one split."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from autoscale.sim.split import SplitSimulator
from tests.autoscale.sim.conftest import LLAMA, lengths

# A user's search is exact to a per cent; the laws here show in runs of seconds.
pytestmark = pytest.mark.usefixtures("short_pressure_runs")


def test_prompts_that_share_blocks_are_drawn_with_their_neighbours() -> None:
    """A conversation's turns follow each other, so the next turn finds the blocks of the one before in the cache."""
    plain = lengths((3000, 3001), (50, 60))
    shared = [replace(request, hash_ids=(100 + n // 10, 200 + n)) for n, request in enumerate(plain)]
    test = SplitSimulator(LLAMA, shared, 0)
    trace = test.run(2, 1, 10.0).scenario.trace
    same = sum(a.hash_ids[0] == b.hash_ids[0] for a, b in pairwise(trace))
    assert same >= 0.85 * (len(trace) - 1)
    assert max(Counter(request.hash_ids for request in trace).values()) == 1


def test_a_rate_that_a_short_run_keeps_is_kept_in_a_longer_one() -> None:
    """Answers take 40 s, and runs 20 s: decode is full only after the time of an answer."""
    test = SplitSimulator(LLAMA, lengths((500, 501), (800, 801)), 0)
    found = test.find_highest_rate(1, 1)
    again = SplitSimulator(LLAMA, lengths((500, 501), (800, 801)), 0)
    again._run_s *= 3
    assert again.run(1, 1, 0.85 * found.requests_per_s).attainment_frac > 0.99


def test_the_search_ends_for_tiny_requests_too() -> None:
    found = SplitSimulator(LLAMA, lengths((1, 1), (1, 1)), 0).find_highest_rate(1, 1)
    assert 100.0 < found.requests_per_s < 1e6
