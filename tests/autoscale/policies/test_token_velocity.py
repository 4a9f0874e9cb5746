"""TokenScale's velocities by hand."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.profile import EngineProfile
from autoscale.policies.token_velocity import (
    TokenVelocity,
    TokenVelocityConfig,
    network_velocity,
    prefill_velocity,
)
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, PoolKey, Snapshot, Traffic
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
# A link that is no bottleneck: 10 000 tokens/s.
FAST = {"base_s": 0.01, "kv_bytes_per_token": 1000, "bytes_per_s": 1e7}
MakeProfile = Callable[..., EngineProfile]


@pytest.fixture(scope="session")
def decide(make_snapshot: Callable[..., Snapshot], make_profile: MakeProfile) -> Callable[..., Decision]:
    """The decision for arrivals of 100 prompt and 50 output tokens each, by default without headroom."""

    def make(
        requests_per_s: float | None,
        counts: tuple[int, int] = (1, 1),
        *,
        now_s: float = 1000.0,
        memory: Mapping[str, tuple[float, ...]] | None = None,
        prefill: Mapping[str, Any] | None = None,
        stats: Mapping[Role, Mapping[str, Any]] | None = None,
        traffic: Mapping[str, Any] | None = None,
        admitted: tuple[str, ...] = (),
        **config: Any,
    ) -> Decision:
        lengths = {"input_tokens_mean": 100.0, "output_tokens_mean": 50.0, **(traffic or {})}
        desired = dict(zip((PoolKey("g0", role) for role in Role), counts, strict=True))
        snapshot = make_snapshot(
            *counts,
            now_s=now_s,
            stats=stats,
            traffic=Traffic(requests_per_s=requests_per_s, **lengths),
            state=ControllerState(desired=desired, memory=memory or {}, admitted=admitted),
        )
        profiles = {
            "prefill": make_profile(**{"start_s": 60.0, "handoff": FAST, **(prefill or {})}),
            "decode": make_profile(),
        }
        fields = {"headroom_frac": 0.0, **profiles, **config}
        return TokenVelocity(TokenVelocityConfig(**fields), ratio=PdRatio(1, 1), slo=SloConfig()).decide(snapshot)

    return make


Decide = Callable[..., Decision]
# Eight requests of 125 tokens and half a block each do not fit into 1000 tokens of KV; a step of seven takes 27 ms.
DECODE_TOKENS_PER_S = 7 / 0.027


def test_velocities_by_hand(make_profile: MakeProfile) -> None:
    profile = make_profile()
    assert prefill_velocity(profile, 100.0) == pytest.approx(1000.0)  # 1 ms a token
    assert network_velocity(profile) == 1000.0  # 1 MB/s for 1 kB a token
    flat = make_profile(prefill={"tokens": [0, 1000], "seconds": [0.01, 0.01]})
    assert prefill_velocity(flat, 100.0) == float("inf")


def test_each_stage_is_sized_for_the_tokens_that_arrive(decide: Decide) -> None:
    decision = decide(20.0)
    assert decision.wanted == pytest.approx({P: 2000.0 / 1000.0, D: 1000.0 / DECODE_TOKENS_PER_S})  # 2 and 3.86
    assert decision.ratio == PdRatio.of(decision.wanted)
    assert not decision.is_step
    assert decide(20.0, headroom_frac=0.25).wanted == pytest.approx({P: 2.5, D: 1.25 * 1000.0 / DECODE_TOKENS_PER_S})


def test_prefill_is_sized_by_the_network_if_that_is_slower(decide: Decide) -> None:
    slow = decide(20.0, prefill={"handoff": {**FAST, "bytes_per_s": 5e5}})  # 500 tokens/s
    assert slow.wanted is not None
    assert slow.wanted[P] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("decode", "seen_s", "config", "expected"),
    [
        (8, 970.0, {}, 1.0),  # half of a spare of 4.14 takes 2071 tokens/s, more than the 1000 of the burst
        (5, 970.0, {}, 2.0 - 0.5 * (5 - 1000.0 / DECODE_TOKENS_PER_S)),
        (5, 970.0, {"convertible_frac": 0.8}, 2.0 - 0.8 * (5 - 1000.0 / DECODE_TOKENS_PER_S)),
        (3, 970.0, {}, 2.0),  # nothing to spare
        (8, 970.0, {"convertible_frac": 0.0}, 2.0),
        (8, 940.0, {}, 2.0),  # the burst has lasted for a start: new prefill replicas could serve by now
        (8, 970.0, {"prefill_start_s": 20.0}, 2.0),
    ],
)
def test_decode_takes_the_burst_that_ends_before_prefill_could_start(
    decide: Decide, decode: int, seen_s: float, config: dict[str, float], expected: float
) -> None:
    memory = {"prompts_at_s": (seen_s,), "prompt_tokens_per_s": (1000.0,)}
    wanted = decide(20.0, (1, decode), memory=memory, **config).wanted
    assert wanted == pytest.approx({P: expected, D: 1000.0 / DECODE_TOKENS_PER_S})


def test_neither_a_fall_nor_the_first_observation_of_a_load_is_a_burst(decide: Decide) -> None:
    memory = {"prompts_at_s": (970.0,), "prompt_tokens_per_s": (3000.0,)}
    for before in (None, memory):
        decision = decide(20.0, (1, 8), memory=before)
        assert decision.wanted is not None
        assert decision.wanted[P] == pytest.approx(2.0)
        assert decision.memory == {"prompts_at_s": (1000.0,), "prompt_tokens_per_s": (2000.0,)}


@pytest.mark.parametrize(
    ("computed", "waiting", "since_s", "expected"),
    [
        (800.0, 3.0, 980.0, 2.5),
        (1600.0, 3.0, 980.0, 1.25),
        (800.0, 3.0, 981.0, 2.0),  # not busy for long enough: the average includes idle time
        (800.0, 0.0, 980.0, 2.0),
        (10.0, 3.0, 980.0, 4.0),  # prefill waits for decode: at least half of the profile's velocity counts
        (0.0, 3.0, 980.0, 4.0),
        (None, 3.0, 980.0, 2.0),
    ],
)
def test_the_velocity_of_busy_prefill_is_the_rate_that_it_computes_at(
    decide: Decide, computed: float | None, waiting: float, since_s: float, expected: float
) -> None:
    stats = {P: {"prefill_tokens_per_s": computed, "waiting_requests": waiting}}
    decision = decide(20.0, (2, 1), stats=stats, memory={"prefill_busy_since_s": (since_s,)})
    assert decision.wanted is not None
    assert decision.wanted[P] == pytest.approx(expected)
    assert decision.memory is not None
    assert decision.memory.get("prefill_busy_since_s") == ((since_s,) if waiting and computed is not None else None)


def test_no_replica_is_wanted_without_arrivals(decide: Decide) -> None:
    decision = decide(0.0, traffic={"input_tokens_mean": None, "output_tokens_mean": None})
    assert decision.wanted == {P: 0.0, D: 0.0}
    assert decision.ratio == PdRatio(1, 1)


@pytest.mark.parametrize(
    ("rate", "traffic", "reason"),
    [
        (None, {}, "no arrivals were observed"),
        (1.0, {"input_tokens_mean": None}, "the lengths of what arrives were not observed"),
        (1.0, {"output_tokens_mean": None}, "the lengths of what arrives were not observed"),
    ],
)
def test_without_observations_there_is_no_decision(
    decide: Decide, rate: float | None, traffic: dict[str, None], reason: str
) -> None:
    decision = decide(rate, traffic=traffic)
    assert (decision.wanted, decision.memory, decision.reason) == (None, None, reason)


def test_partly_observed_arrivals_remove_no_replica_and_are_not_remembered(decide: Decide) -> None:
    decision = decide(20.0, (4, 2), traffic={"is_whole": False})
    assert decision.wanted == pytest.approx({P: 4.0, D: 1000.0 / DECODE_TOKENS_PER_S})
    assert decision.memory is None


memories = st.lists(st.tuples(st.floats(900, 999), st.floats(0, 1e4)), max_size=8).map(
    lambda points: {
        "prompts_at_s": tuple(sorted(at for at, _ in points)),
        "prompt_tokens_per_s": tuple(sorted(n for _, n in points)),
    }
)


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.integers(1, 32), memories)
def test_more_arrivals_never_want_fewer_replicas_and_counts_are_bounded(
    decide: Decide, rate: float, more: float, decode: int, memory: dict[str, tuple[float, ...]]
) -> None:
    less = decide(rate, (1, decode), memory=memory)
    assert less == decide(rate, (1, decode), memory=memory)
    grown = decide(rate + more, (1, decode), memory=memory)
    assert less.wanted is not None
    assert grown.wanted is not None
    for role, most in ((P, rate * 100.0 / 1000.0), (D, rate * 50.0 / DECODE_TOKENS_PER_S)):
        # 1e-9: what floating point adds to a few hundred replicas.
        assert -1e-9 <= less.wanted[role] <= most + 1e-9
        assert grown.wanted[role] >= less.wanted[role] - 1e-9


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=10), st.floats(0.05, 10.0))
def test_memory_is_bounded_however_often_it_decides(decide: Decide, rates: list[float], interval_s: float) -> None:
    memory: Mapping[str, tuple[float, ...]] = {}
    for tick in range(200):
        # The load rises a little in each tick, which makes the longest series.
        decision = decide(rates[tick % len(rates)] + tick, (1, 4), now_s=1000.0 + tick * interval_s, memory=memory)
        assert decision.memory is not None
        memory = decision.memory
        assert len(memory["prompts_at_s"]) == len(memory["prompt_tokens_per_s"]) <= 65
        assert memory["prompts_at_s"][0] > 1000.0 + tick * interval_s - 60.0
        assert list(memory["prompt_tokens_per_s"]) == sorted(set(memory["prompt_tokens_per_s"]))
