"""Distributions of lengths, and the mean request, by hand; and what the mean alone hides (DOPD Eq. 6-8, Jensen)."""

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.lengths import Lengths, MeanRequest
from autoscale.engines.profile import EngineProfile

MakeProfile = Callable[..., EngineProfile]
# 1 ms a token, and beyond 100 tokens 5 ms.
BENT = {"tokens": [0, 100, 1000], "seconds": [0.0, 0.1, 4.6]}


def test_requests_count_in_a_batch_once_for_each_output_token() -> None:
    lengths = Lengths.of_requests([(100, 10), (100, 10), (400, 30), (600, 50)])
    assert lengths.inputs == ((100.0, 0.5), (400.0, 0.25), (600.0, 0.25))
    assert lengths.input_tokens == pytest.approx(300.0)
    assert lengths.output_tokens == pytest.approx(25.0)
    # Of 100 steps of the four requests, 20 have the prompt 100, 30 have 400, 50 have 600.
    assert lengths.decoding_input_tokens == pytest.approx(0.2 * 100 + 0.3 * 400 + 0.5 * 600)
    # Half an answer, weighted by its steps: (2 x 10 x 5 + 30 x 15 + 50 x 25) / 100.
    assert lengths.context_tokens == pytest.approx(440.0 + 18.0)
    assert (lengths.longest_input_tokens, lengths.longest_output_tokens) == (600.0, 50.0)


def test_independent_lengths_have_the_mean_prompt_in_the_batch() -> None:
    lengths = Lengths.independent(((100.0, 0.5), (300.0, 0.5)), ((10.0, 0.5), (30.0, 0.5)))
    assert lengths.decoding_input_tokens == pytest.approx(200.0)
    assert lengths.context_tokens == pytest.approx(200.0 + (100 + 900) / 2 / (2 * 20))


def test_one_length_is_the_papers_mean_context() -> None:
    assert Lengths.fixed(1000.0, 150.0).context_tokens == pytest.approx(1075.0)  # ISL + OSL/2, Eq. 13


def test_scaled_lengths_keep_their_shape() -> None:
    lengths = Lengths.of_requests([(100, 10), (300, 30)]).scaled(400.0, 10.0)
    assert lengths.inputs == ((200.0, 0.5), (600.0, 0.5))
    assert lengths.outputs == ((5.0, 0.5), (15.0, 0.5))
    assert lengths.decoding_input_tokens == pytest.approx(0.25 * 200 + 0.75 * 600)


def test_the_mean_request_takes_the_mean_time_of_the_prompts(make_profile: MakeProfile) -> None:
    profile = make_profile(prefill=BENT)
    lengths = Lengths.independent(((30.0, 0.75), (1270.0, 0.25)), ((20.0, 1.0),))
    request = MeanRequest.of(lengths, profile)
    assert request.prefill_s == pytest.approx(0.75 * 0.03 + 0.25 * (0.1 + 1170 * 0.005))
    assert request.beyond_frac == pytest.approx(0.25)
    assert MeanRequest.of(lengths.means(), profile).prefill_s == pytest.approx(0.1 + 240 * 0.005)


def test_cached_tokens_at_the_begin_of_a_prompt_take_no_time(make_profile: MakeProfile) -> None:
    profile = make_profile(prefill=BENT)
    whole, cached = (MeanRequest.of(Lengths.fixed(200.0, 1.0), profile, cached_frac=frac) for frac in (0.0, 0.25))
    assert whole.prefill_s == pytest.approx(0.6)
    assert cached.prefill_s == pytest.approx(0.6 - 0.05)  # the first 50 tokens
    # A step has a fixed part and the last token, which a cache does not save.
    stepped = make_profile()
    assert MeanRequest.of(Lengths.fixed(200.0, 1.0), stepped, 1.0).prefill_s == pytest.approx(0.01 + 0.001)


def test_a_cached_prompt_takes_time_also_if_the_profile_has_no_fixed_part(make_profile: MakeProfile) -> None:
    # The line through both points is 0 at 67 tokens, and below 0 before them: 1.5 ms a token.
    profile = make_profile(prefill={"tokens": [100, 200], "seconds": [0.05, 0.2]})
    seconds = [
        MeanRequest.of(Lengths.fixed(200.0, 1.0), profile, cached_frac=frac).prefill_s for frac in (0.0, 0.9, 1.0)
    ]
    assert seconds == pytest.approx([0.2, 20 * 0.0015, 0.0015])


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_lengths_must_be_above_0(wrong: float) -> None:
    with pytest.raises(ValueError, match="output tokens: a length must be above 0"):
        Lengths.fixed(10.0, wrong)
    with pytest.raises(ValueError, match="input tokens: a length must be above 0"):
        Lengths.fixed(wrong, 10.0)


def test_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match="no input length is given"):
        Lengths.independent((), ((1.0, 1.0),))


_LENGTHS = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 500)), min_size=1, max_size=20)


@given(requests=_LENGTHS)
def test_the_mean_alone_never_needs_more_prefill_or_holds_more_kv_of_answers(
    make_profile: MakeProfile, requests: Sequence[tuple[int, int]]
) -> None:
    profile = make_profile(prefill=BENT)
    lengths = Lengths.of_requests(requests)
    # Jensen: E[C] >= C(E[ISL]) for a convex cost (Eq. 8). And E[O^2] >= E[O]^2.
    assert MeanRequest.of(lengths, profile).prefill_s >= MeanRequest.of(lengths.means(), profile).prefill_s * (1 - 1e-9)
    answers = lengths.context_tokens - lengths.decoding_input_tokens
    assert answers >= lengths.output_tokens / 2 * (1 - 1e-9)
