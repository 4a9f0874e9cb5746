"""Which engines are fit for a role, and which pairs of them."""

from collections.abc import Callable
from typing import Any

import pytest

from autoscale.engines.candidates import (
    Candidate,
    Need,
    NoEngineError,
    check_alike,
    decode_candidates,
    fit_pairs,
    prefill_candidates,
)
from autoscale.engines.lengths import Lengths
from autoscale.engines.profile import EngineProfile

MakeProfile = Callable[..., EngineProfile]


def need(longest: float = 500.0, **changes: Any) -> Need:
    values = {"lengths": Lengths.fixed(90.0, 20.0), "longest_input_tokens": longest, "ttft_s": 1.1, "tpot_s": 0.05}
    return Need(**{**values, **changes})


def test_prefill_takes_the_fewest_gpus_that_serve_the_longest_prompt_in_time(make_profile: MakeProfile) -> None:
    # 500 tokens: 0.51 s of prefill and 0.51 s of hand-over; 0.01 + 0.2 s and 0.51 s with the faster engines.
    fast = {"tokens": [0, 1000], "seconds": [0.01, 0.41]}
    one = make_profile(gpus=1, gpu="H100")
    two, four = (make_profile(gpus=n, gpu="H100", prefill=fast) for n in (2, 4))
    chosen = prefill_candidates([four, one, two], need())
    assert [each.refusal for each in chosen] == [
        "1 GPUs of this type are enough for the longest prompt",
        None,
        "1 GPUs of this type are enough for the longest prompt",
    ]
    assert [each.longest_s for each in chosen] == pytest.approx([0.72, 1.02, 0.72])
    chosen = prefill_candidates([one, two, four], need(ttft_s=0.8))
    assert chosen[0].refusal == "the longest prompt, 500 tokens, takes 1.02 s, more than ttft_s 0.8"
    assert [each.refusal is None for each in chosen] == [False, True, False]


def test_each_gpu_type_has_its_own_smallest_prefill_engine(make_profile: MakeProfile) -> None:
    engines = [make_profile(gpus=n, gpu=kind) for n, kind in ((2, "A100"), (4, "A100"), (1, "H100"))]
    assert [each.refusal is None for each in prefill_candidates(engines, need())] == [True, False, True]


def test_the_longest_prompt_and_its_answer_must_fit_the_kv(make_profile: MakeProfile) -> None:
    profile = make_profile()  # 1000 tokens of KV
    (prefill,), (decode,) = (
        judge([profile], need(990.0, ttft_s=9.0)) for judge in (prefill_candidates, decode_candidates)
    )
    assert prefill.refusal is None
    assert decode.refusal == "the longest request, 1010 tokens, does not fit its KV of 1000 tokens"
    (prefill,) = prefill_candidates([profile], need(1001.0, ttft_s=9.0))
    assert prefill.refusal == "the longest prompt, 1001 tokens, does not fit its KV of 1000 tokens"


def test_a_decode_engine_that_misses_the_objective_alone_is_refused(make_profile: MakeProfile) -> None:
    (decode,) = decode_candidates([make_profile()], need(tpot_s=0.02))
    assert decode.refusal == "a step with one request takes 0.021 s, more than tpot_s 0.02"


def test_if_no_engine_is_fit_the_message_names_each_and_what_to_do(make_profile: MakeProfile) -> None:
    fit, unfit = (Candidate(profile=make_profile(), longest_s=1.0, refusal=refusal) for refusal in (None, "too slow"))
    with pytest.raises(NoEngineError, match=r"no prefill engine is fit \(by hand: too slow\): give"):
        fit_pairs([unfit], [fit])
    with pytest.raises(NoEngineError, match="no decode engine is fit"):
        fit_pairs([fit], [unfit])


def test_one_tensor_parallel_size_must_divide_the_other(make_profile: MakeProfile) -> None:
    def engines(*sizes: int) -> list[Candidate]:
        return [Candidate(profile=make_profile(gpus=n, gpu="H100"), longest_s=1.0) for n in sizes]

    pairs = fit_pairs(engines(2, 4), engines(1, 3, 4))
    assert [(p.gpus, d.gpus) for p, d in pairs] == [(2, 1), (2, 4), (4, 1), (4, 4)]
    with pytest.raises(NoEngineError, match="prefill engines of 2 GPUs and decode engines of 3 GPUs cannot"):
        fit_pairs(engines(2), engines(3))


def test_profiles_of_another_model_or_kv_type_are_refused(make_profile: MakeProfile) -> None:
    check_alike([make_profile(), make_profile()])
    with pytest.raises(NoEngineError, match="profile by hand is of 'none', and by hand is of 'other'"):
        check_alike([make_profile(), make_profile(model="other")])
    fp8 = make_profile(handoff={"base_s": 0.0, "kv_bytes_per_token": 500, "bytes_per_s": 1e6})
    with pytest.raises(NoEngineError, match="has 1000 bytes of KV per token, and by hand has 500"):
        check_alike([make_profile(), fp8])
