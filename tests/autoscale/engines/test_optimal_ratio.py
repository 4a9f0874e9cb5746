"""DOPD's Eq. 11-14 by hand, and the two ratios that its section VI validates.

M' (m_prime) is the memory of a GPU that holds neither weights nor KV.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.engines.capacity import Limit
from autoscale.engines.lengths import Lengths
from autoscale.engines.optimal_ratio import DecodeMemoryConfig, optimal_ratio
from autoscale.engines.profile import EngineProfile
from kvtransfer.topology import Role
from tests.lab.papers.dopd_testbed import MEMORY_TP2, engine

MakeProfile = Callable[..., EngineProfile]
PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
TABLE_1 = engine(Role.DECODE)
H100_TP2 = MEMORY_TP2.model_dump()
# The KV of a prompt takes no time that counts.
FAST_LINK = {"base_s": 0.01, "kv_bytes_per_token": 1000, "bytes_per_s": 1e9}


def test_the_equations_by_hand(make_profile: MakeProfile) -> None:
    profile = make_profile(max_running=50)
    # Eq. 11: (100 - 10) 2 - 80 = 100. Eq. 12: 0.05 x 0.5 x 2 x 3000 - 80 = 70 (150 as printed). Both in kB.
    memory = DecodeMemoryConfig(
        gpu_bytes=100e3, other_bytes=10e3, model_bytes=80e3, gpus=2, bytes_per_s=3e6, read_frac=0.5
    )
    assert memory.room_bytes == pytest.approx(100e3)
    assert memory.readable_bytes(0.05) == pytest.approx(70e3)
    # Eq. 13: 70 kB / ((4 + 2/2) 1 kB) = 14. Eq. 14: 14 x 0.014 s / (0.034 s x 2).
    best = optimal_ratio(profile, profile, Lengths.fixed(4.0, 2.0), tpot_s=0.05, memory=memory)
    assert best.decode_concurrency == 14
    assert best.decode_step_s == pytest.approx(0.034)
    assert best.prefill_per_decode == pytest.approx(14 * 0.014 / (0.034 * 2))
    # With more time the memory is the limit: 100 kB / 5 kB.
    assert optimal_ratio(profile, profile, Lengths.fixed(4.0, 2.0), tpot_s=0.1, memory=memory).decode_concurrency == 20


def test_without_hardware_the_profile_says_how_many_requests_fit(make_profile: MakeProfile) -> None:
    profile = make_profile(handoff=FAST_LINK)
    # 90 + 20/2 tokens: nine fit in 1000 with half a block each, eight may run, and a step of eight takes 28 ms.
    best = optimal_ratio(profile, profile, Lengths.fixed(90.0, 20.0), tpot_s=0.05)
    assert best.decode_concurrency == 8
    assert best.prefill_per_decode == pytest.approx(8 * 0.1 / (0.028 * 20))
    assert not best.is_extrapolated
    assert optimal_ratio(profile, profile, Lengths.fixed(90.0, 20.0), tpot_s=0.025).decode_concurrency == 5  # 25 ms


def test_a_point_outside_of_either_profile_is_extrapolated(make_profile: MakeProfile) -> None:
    whole = make_profile()
    short_prompts = make_profile(prefill={"tokens": [0, 50], "seconds": [0.01, 0.06]})
    small_batches = make_profile(decode={"batch": [1, 4], "context_tokens": [100], "step_s": [[0.021], [0.024]]})
    assert optimal_ratio(short_prompts, whole, Lengths.fixed(90.0, 20.0), tpot_s=0.05).is_extrapolated
    assert optimal_ratio(whole, small_batches, Lengths.fixed(90.0, 20.0), tpot_s=0.05).is_extrapolated


@pytest.mark.parametrize(
    ("input_tokens", "output_tokens", "expected", "is_extrapolated"),
    [(1000, 150, 4.58, False), (3000, 300, 3.18, True)],  # Table I ends at 1,700 tokens
)
def test_the_papers_two_ratios_come_from_one_m_prime(
    input_tokens: int, output_tokens: int, expected: float, is_extrapolated: bool
) -> None:
    best = optimal_ratio(TABLE_1, TABLE_1, Lengths.fixed(input_tokens, output_tokens), tpot_s=0.05, memory=MEMORY_TP2)
    # 4.56 and 3.18. The second needs times beyond the table, and the paper's own points there are unknown.
    assert best.prefill_per_decode == pytest.approx(expected, rel=0.08)
    assert best.is_extrapolated is is_extrapolated


def test_the_same_m_prime_leaves_the_kv_that_vllm_has_on_two_h100() -> None:
    measured = EngineProfile.load(PROFILES / "h100_llama70b_fp8_tp2.json")
    room = MEMORY_TP2.room_bytes / measured.handoff.kv_bytes_per_token
    assert room == pytest.approx(measured.kv_tokens, rel=0.01)


@pytest.mark.parametrize("m_prime_gb", [4.0, 8.0, 9.0])
def test_both_ratios_hold_for_any_m_prime_nearby(m_prime_gb: float) -> None:
    memory = DecodeMemoryConfig.model_validate({**H100_TP2, "other_bytes": m_prime_gb * 1e9})
    for input_tokens, output_tokens, expected in ((1000, 150, 4.58), (3000, 300, 3.18)):
        best = optimal_ratio(TABLE_1, TABLE_1, Lengths.fixed(input_tokens, output_tokens), tpot_s=0.05, memory=memory)
        assert best.prefill_per_decode == pytest.approx(expected, rel=0.08)


@given(inputs=st.floats(1, 1e5), outputs=st.floats(1, 1e4), tpot=st.floats(0.022, 1.0), more=st.floats(1.0, 10.0))
def test_both_roles_serve_as_much_at_the_ratio_and_longer_prompts_need_more_prefill_per_request(
    inputs: float, outputs: float, tpot: float, more: float
) -> None:
    for room in (None, MEMORY_TP2):
        best = optimal_ratio(TABLE_1, TABLE_1, Lengths.fixed(inputs, outputs), tpot_s=tpot, memory=room)
        assert 1 <= best.decode_concurrency <= TABLE_1.max_running
        batch_requests_per_s = best.decode_concurrency / (best.decode_step_s * outputs)
        link_requests_per_s = 25e9 / (inputs * 327_680)
        decode_requests_per_s = min(batch_requests_per_s, link_requests_per_s)
        assert best.decode_requests_per_s == pytest.approx(decode_requests_per_s)
        assert (best.decode_limit is Limit.LINK) == (link_requests_per_s < batch_requests_per_s)
        prefill_requests_per_s = 1.0 / TABLE_1.prefill.seconds_for(inputs)
        assert best.prefill_per_decode * prefill_requests_per_s == pytest.approx(decode_requests_per_s)
        longer = optimal_ratio(TABLE_1, TABLE_1, Lengths.fixed(inputs * more, outputs), tpot_s=tpot, memory=room)
        assert TABLE_1.prefill.seconds_for(inputs * more) >= TABLE_1.prefill.seconds_for(inputs)
        assert longer.decode_concurrency <= best.decode_concurrency


def test_each_limit_of_decode_is_named(make_profile: MakeProfile) -> None:
    profile = make_profile(handoff=FAST_LINK, max_running=50, kv_tokens=1000)
    # 90 + 20/2 + half a block: nine fit, and a step of nine takes 29 ms.
    cases: list[tuple[EngineProfile, float, Limit, int]] = [
        (profile, 0.05, Limit.KV_MEMORY, 9),
        (profile, 0.025, Limit.TPOT, 5),
        (make_profile(handoff=FAST_LINK), 0.05, Limit.MAX_RUNNING, 8),
        (make_profile(max_running=50), 0.05, Limit.LINK, 9),  # 1 MB/s: 11 requests/s of 90 kB, against 15.5
    ]
    for decode, tpot_s, limit, batch in cases:
        best = optimal_ratio(profile, decode, Lengths.fixed(90.0, 20.0), tpot_s=tpot_s)
        assert (best.decode_limit, best.decode_concurrency) == (limit, batch)
    # By memory: 100 kB hold 14 requests of 5 kB at 70 kB/s, and 20 with more time; the third has a small max_running.
    memory = DecodeMemoryConfig(
        gpu_bytes=100e3, other_bytes=10e3, model_bytes=80e3, gpus=2, bytes_per_s=3e6, read_frac=0.5
    )
    for max_running, tpot_s, limit in (
        (50, 0.05, Limit.TPOT),
        (50, 0.1, Limit.KV_MEMORY),
        (8, 0.1, Limit.MAX_RUNNING),
    ):
        decode = make_profile(handoff=FAST_LINK, max_running=max_running)
        best = optimal_ratio(decode, decode, Lengths.fixed(4.0, 2.0), tpot_s=tpot_s, memory=memory)
        assert best.decode_limit is limit


def test_a_slow_link_lowers_the_ratio(make_profile: MakeProfile) -> None:
    # Prefill needs no more replicas than the link of decode can take prompts from: 11.1/s, each 0.1 s.
    best = optimal_ratio(make_profile(), make_profile(), Lengths.fixed(90.0, 20.0), tpot_s=0.05)
    assert best.prefill_per_decode == pytest.approx(1e6 / 90e3 * 0.1)


def test_a_profile_whose_prefill_takes_no_time_is_refused(make_profile: MakeProfile) -> None:
    instant = make_profile(prefill={"tokens": [0, 1000], "seconds": [0.0, 0.0]})
    with pytest.raises(ValueError, match="by hand: 10 tokens take no time"):
        optimal_ratio(instant, make_profile(), Lengths.fixed(10.0, 10.0), tpot_s=0.05)


def test_weights_that_cannot_be_read_in_time_are_refused() -> None:
    # 70.6 GB at 0.5 x 2 x 3.35 TB/s.
    with pytest.raises(ValueError, match=r"tpot_s is 0\.02, but reading the weights alone takes 0\.0211 s"):
        MEMORY_TP2.readable_bytes(0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 0}, "greater than or equal to 1"),
        ({"gpus": 1, "other_bytes": 20e9}, "1 GPUs with 6e\\+10 bytes each leave no room for KV"),
        ({"read_frac": 1.1}, "less than or equal to 1"),
        ({"wheels": 4}, "Extra inputs"),
    ],
)
def test_hardware_that_holds_no_kv_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DecodeMemoryConfig.model_validate({**H100_TP2, **change})
