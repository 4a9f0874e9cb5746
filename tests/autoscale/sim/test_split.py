"""Laws of the search for the highest rate of one split."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from autoscale.sim.split import SplitSimulator
from tests.autoscale.sim.conftest import LLAMA, lengths

# Rates are searched to a per cent in live use; the laws here show in runs of seconds.
pytestmark = pytest.mark.usefixtures("short_pressure_runs")


def test_prompts_that_share_blocks_are_drawn_with_their_neighbours() -> None:
    """A conversation's turns follow each other, so what is cached of one serves the next."""
    plain = lengths((3000, 3001), (50, 60))
    shared = [replace(request, hash_ids=(100 + n // 10, 200 + n)) for n, request in enumerate(plain)]
    test = SplitSimulator(LLAMA, shared, 0)
    trace = test.run(2, 1, 10.0).scenario.trace
    same = sum(a.hash_ids[0] == b.hash_ids[0] for a, b in pairwise(trace))
    assert same >= 0.85 * (len(trace) - 1)
    assert max(Counter(request.hash_ids for request in trace).values()) == 1


def test_a_rate_that_is_kept_is_kept_for_longer_too() -> None:
    """Answers of 40 s in runs of 20 s: decode is as full as it gets only after as long."""
    test = SplitSimulator(LLAMA, lengths((500, 501), (800, 801)), 0)
    found = test.find_highest_rate(1, 1)
    again = SplitSimulator(LLAMA, lengths((500, 501), (800, 801)), 0)
    again._run_s *= 3
    assert again.run(1, 1, 0.85 * found.requests_per_s).attainment_frac > 0.99


def test_tiny_requests_end_the_search_too() -> None:
    found = SplitSimulator(LLAMA, lengths((1, 1), (1, 1)), 0).find_highest_rate(1, 1)
    assert 100.0 < found.requests_per_s < 1e6
