"""A virtual cluster by hand and at random."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.profile import EngineProfile
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.static import replay
from autoscale.trace import TraceRequest
from kvtransfer.topology import Role
from router.config import RouterConfig

MakeProfile = Callable[..., EngineProfile]
P, D = Role.PREFILL, Role.DECODE


def request(at_s: float, input_tokens: int, output_tokens: int) -> TraceRequest:
    return TraceRequest(at_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens)


def test_a_long_prompt_by_hand(make_profile: MakeProfile) -> None:
    profile = make_profile()
    (record,) = replay([request(5.0, 200, 3)], {P: 1, D: 1}, {P: profile, D: profile}, RouterConfig())
    # Two chunks of 100 tokens at 0.11 s, a handoff of 0.21 s, the last prompt token again at 0.011 s, two steps more.
    assert record.ttft_s == pytest.approx(0.11 + 0.11 + 0.21 + 0.011)
    assert record.tpot_s == pytest.approx(0.021)
    assert record.output_tokens == 3
    assert record.error is None


def test_a_short_prompt_is_prefilled_where_it_decodes(make_profile: MakeProfile) -> None:
    profile = make_profile()
    (record,) = replay([request(0.0, 100, 2)], {P: 1, D: 1}, {P: profile, D: profile}, RouterConfig())
    assert record.ttft_s == pytest.approx(0.11)


def test_requests_go_to_the_replica_with_the_least_to_do(make_profile: MakeProfile) -> None:
    profile = make_profile(max_running=1)
    trace = [request(0.0, 100, 5), request(0.01, 100, 5)]
    alone, beside = replay(trace, {P: 1, D: 2}, {P: profile, D: profile}, RouterConfig())
    assert beside.ttft_s == alone.ttft_s
    first, second = replay(trace, {P: 1, D: 1}, {P: profile, D: profile}, RouterConfig())
    assert second.ttft_s is not None
    assert first.ttft_s is not None
    assert second.ttft_s > first.ttft_s + 4 * 0.021


def test_routers_that_ask_find_the_prefill_replica_that_is_free(make_profile: MakeProfile) -> None:
    profiles = dict.fromkeys(Role, make_profile())
    # Pairs of prompts at one time; the decode replica of the second knows nothing of the first.
    trace = [request(2.0 * (number // 2), 200, 2) for number in range(60)]

    def waits(asked_replicas: int) -> int:
        records = replay(trace, {P: 2, D: 2}, profiles, RouterConfig(asked_replicas=asked_replicas))
        return sum((r.ttft_s or 0.0) > 0.6 for r in records)  # alone 0.441 s

    assert waits(2) == 0
    assert waits(0) > 5


def test_kv_that_does_not_fit_waits_on_the_decode_side(make_profile: MakeProfile) -> None:
    small = make_profile(kv_tokens=250)
    trace = [request(0.0, 200, 20), request(0.0, 200, 20)]
    first, second = sorted(
        replay(trace, {P: 2, D: 1}, {P: make_profile(), D: small}, RouterConfig()), key=lambda r: r.ttft_s or 0.0
    )
    assert second.first_token_s is not None
    assert first.last_token_s is not None
    assert second.first_token_s > first.last_token_s


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=40))
def test_every_request_ends_with_its_tokens_and_again_the_same_way(
    make_profile: MakeProfile, asked: list[tuple[float, int, int]]
) -> None:
    trace = [request(*entry) for entry in sorted(asked)]
    profiles = dict.fromkeys(Role, make_profile())
    records = replay(trace, {P: 2, D: 2}, profiles, RouterConfig(), seed=3)
    assert [r.output_tokens for r in records] == [r.output_tokens for r in trace]
    assert all(r.first_token_s is not None and r.first_token_s > r.sent_s for r in records)
    assert records == replay(trace, {P: 2, D: 2}, profiles, RouterConfig(), seed=3)


def test_nothing_is_left_behind(make_profile: MakeProfile) -> None:
    cluster = VirtualCluster(profiles=dict.fromkeys(Role, make_profile()), router=RouterConfig(), rng=random.Random(1))
    for role in Role:
        cluster.add(role, f"{role}-0")
    for number in range(50):
        cluster.submit(request(number * 0.1, 50 + 7 * number, 5))
    cluster.run()
    for replicas in cluster.serving.values():
        assert all(r.ongoing_requests == r.local_prefill_tokens == 0 for r in replicas)
        assert all(r.engine.kv_usage_frac == 0.0 and r.step is None for r in replicas)
