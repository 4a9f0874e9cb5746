"""The smallest counts that serve a trace."""

from collections.abc import Callable

import pytest

from autoscale.engines.profile import EngineProfile
from autoscale.report import Slo
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role
from router.config import LengthConfig, RouterConfig
from tests.lab.stand.static_search import StaticCounts, StaticSearch

MakeProfile = Callable[..., EngineProfile]


@pytest.fixture(scope="module")
def search(make_profile: MakeProfile) -> StaticSearch:
    # Prefill takes about 0.22 s for a prompt, so five per second need two replicas. One decode replica is enough.
    trace = [TraceRequest(at_s=0.2 * number, input_tokens=200, output_tokens=4) for number in range(100)]
    profiles = dict.fromkeys(Role, make_profile(kv_tokens=10_000))
    slos = [Slo(ttft_s=1.0, tpot_s=0.2)] * len(trace)
    remote = RouterConfig(length=LengthConfig(local_max_tokens=0, local_cap_tokens=0))
    return StaticSearch(trace, slos, profiles, router=remote, highest_replicas=4)


class Known(StaticSearch):
    """A search whose attainments are known: these splits serve all requests, the others half."""

    splits = ((3, 4), (4, 2))

    def counts(self, prefill: int, decode: int) -> StaticCounts:
        share = 1.0 if (prefill, decode) in self.splits else 0.5
        return StaticCounts(prefill=prefill, decode=decode, attainment_frac=share)


def test_a_smaller_total_with_more_prefill_and_fewer_decode_replicas_is_found(make_profile: MakeProfile) -> None:
    profiles = dict.fromkeys(Role, make_profile())
    counts = Known([], [], profiles, router=RouterConfig(), highest_replicas=4).smallest(0.9)
    assert counts is not None
    assert (counts.prefill, counts.decode) == (4, 2)


def test_the_smallest_counts_are_found(search: StaticSearch) -> None:
    counts = search.smallest(0.99)
    assert counts is not None
    assert (counts.prefill, counts.decode) == (2, 1)
    assert search.best_of(2).attainment_frac < 0.5
    everything = [search.counts(p, d) for p in range(1, 5) for d in range(1, 5)]
    assert counts.replicas == min(c.replicas for c in everything if c.attainment_frac >= 0.99)


def test_a_share_that_no_counts_attain_gives_none(search: StaticSearch) -> None:
    assert search.smallest(1.01) is None
