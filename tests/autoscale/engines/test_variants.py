"""How much a replica of another variant is worth, by hand and by law."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.capacity import decode_batch
from autoscale.engines.profile import EngineProfile
from autoscale.engines.variants import TypicalLengthsConfig, Worth, aggregated_worth_at, worths
from autoscale.ratio import PdRatio
from autoscale.types import PoolKey
from kvtransfer.topology import Role

MakeProfile = Callable[..., EngineProfile]
P, D = Role.PREFILL, Role.DECODE
LENGTHS = TypicalLengthsConfig(input_tokens=1000, output_tokens=100)
TPOT_S = 0.05


def engine(prefill_s: float, step_s: float, max_running: int = 100) -> EngineProfile:
    """Seconds for 1000 prompt tokens, and of a decode step of one request and of a hundred."""
    return EngineProfile.model_validate(
        {
            "name": "test",
            "model": "test",
            "kv_tokens": 10_000_000,
            "max_batch_tokens": 8192,
            "max_running": max_running,
            "prefill": {"tokens": [0, 1000], "seconds": [0.0, prefill_s]},
            "decode": {"batch": [1, 100], "context_tokens": [1], "step_s": [[step_s], [step_s]]},
            "handoff": {"base_s": 0.0, "kv_bytes_per_token": 1.0, "bytes_per_s": 1e9},
            "start_s": 1.0,
            "flops_per_token": 1.0,
            "peak_flops": 1e12,
            "sources": [{"part": "prefill", "kind": "assumed", "text": "test"}],
        }
    )


def pair(group: str, profile: EngineProfile) -> dict[PoolKey, EngineProfile]:
    return {PoolKey(group, role): profile for role in Role}


def test_a_replica_is_worth_what_it_serves_beside_one_of_the_first_group() -> None:
    # Prompts take 0.1 and 0.2 s. A step of a full batch takes 0.02 and 0.04 s, both within the objective.
    known = worths({**pair("a", engine(0.1, 0.02)), **pair("b", engine(0.2, 0.04))}, (), "a", LENGTHS, TPOT_S)
    assert known[PoolKey("a", P)] == known[PoolKey("a", D)] == Worth(own=1.0)
    assert known[PoolKey("b", P)].own == pytest.approx(0.5)
    assert known[PoolKey("b", D)].own == pytest.approx(0.5)
    assert not known[PoolKey("b", D)].prompts


def test_an_engine_that_cannot_meet_the_objective_counts_as_one_request_at_a_time() -> None:
    known = worths({**pair("a", engine(0.1, 0.02)), **pair("b", engine(0.1, 0.06))}, (), "a", LENGTHS, TPOT_S)
    assert known[PoolKey("b", D)].own == pytest.approx((1 / 0.06) / (100 / 0.02))


def test_an_engine_that_computes_both_shares_its_time() -> None:
    # For each output token of each request it computes 0.1 s / 100 of a prompt: 0.001 s. With 30 requests a token takes
    # 0.02 + 30 x 0.001 = 0.05 s. So it serves 30 / 0.05 / 100 = 6 requests/s; a decode engine 50, a prefill engine 10.
    profile = engine(0.1, 0.02)
    assert decode_batch(profile, 1050.0, TPOT_S, 0.001) == 30
    known = worths({**pair("a", profile), PoolKey("both", D): profile}, ("both",), "a", LENGTHS, TPOT_S)
    assert known[PoolKey("both", D)].own == pytest.approx(6 / 50)
    assert known[PoolKey("both", D)].prompts == pytest.approx(6 / 10)


def test_aggregated_groups_are_compared_with_each_other() -> None:
    # The slow engine: 0.04 + b x 0.002 = 0.05 for b = 5, which is 5 / 0.05 / 100 = 1 request/s beside 6.
    profiles = {PoolKey("fast", D): engine(0.1, 0.02), PoolKey("slow", D): engine(0.2, 0.04)}
    known = worths(profiles, ("fast", "slow"), "fast", LENGTHS, TPOT_S)
    assert known == {PoolKey("fast", D): Worth(own=1.0), PoolKey("slow", D): Worth(own=pytest.approx(1 / 6))}


def test_without_profiles_an_aggregated_engine_shares_its_time_as_the_ratio_says() -> None:
    # At 1:2 one decode replica needs half a prefill replica: an engine of both does two thirds of the work.
    assert aggregated_worth_at(PdRatio(1, 2)) == Worth(own=pytest.approx(2 / 3), prompts=pytest.approx(1 / 3))
    assert aggregated_worth_at(PdRatio(1, 2), own=2.0) == Worth(own=2.0, prompts=1.0)


@given(factor=st.floats(1.01, 8.0), inputs=st.integers(1, 4000), outputs=st.integers(1, 2000))
def test_a_slower_engine_is_worth_less_at_any_length(factor: float, inputs: int, outputs: int) -> None:
    lengths = TypicalLengthsConfig(input_tokens=inputs, output_tokens=outputs)
    fast, slow = engine(0.1, 0.02), engine(0.1 * factor, 0.02 * factor)
    known = worths({**pair("a", fast), **pair("b", slow)}, (), "a", lengths, TPOT_S)
    assert all(0.0 < known[PoolKey("b", role)].own < 1.0 for role in Role)
