"""Measured times are a form with few terms, and their own where they differ from it."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.form import (
    Form,
    Place,
    Terms,
    decode_surface,
    fitted,
    ladder,
    prefill_curve,
    prompt_terms,
    step_terms,
    term_weights,
)

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def prompt_s(tokens: int) -> float:
    return 0.01 * math.ceil(tokens / 2048) + 1e-4 * tokens + 2e-8 * tokens**2


def prompts(**changed: float) -> dict[Place, float]:
    """Times by length; ``changed``: factors, by ``at_`` and the length."""
    return {(tokens, 0): prompt_s(tokens) * changed.get(f"at_{tokens}", 1.0) for tokens in LENGTHS}


def confirmed(terms: Terms, seconds: dict[Place, float]) -> Form:
    """The form of times that repeats confirm."""
    return fitted(terms, seconds, seconds.keys())


def test_terms_count_chunks_tokens_and_attention() -> None:
    assert prompt_terms(2048)((2048, 0)) == (1.0, 2048.0, 2048.0**2)
    assert prompt_terms(2048)((3000, 0)) == (2.0, 3000.0, 9e6)
    assert step_terms((4, 100)) == (1.0, 4.0, 400.0)


def test_the_weights_of_an_engine_are_found() -> None:
    form = confirmed(prompt_terms(2048), prompts())
    assert form.weights == pytest.approx((0.01, 1e-4, 2e-8), rel=1e-3)
    assert form.seconds((3000, 0)) == pytest.approx(prompt_s(3000), rel=1e-3)


def test_a_time_that_is_far_off_does_not_move_the_form() -> None:
    form = confirmed(prompt_terms(2048), prompts(at_256=3.0, at_1024=2.0))
    for tokens in (16, 100, 2000, 4000):
        assert form.seconds((tokens, 0)) == pytest.approx(prompt_s(tokens), rel=0.03)


def test_no_term_takes_time_away() -> None:
    falling = [(1.0, float(tokens)) for tokens in LENGTHS]
    assert term_weights(falling, [1.0 / tokens for tokens in LENGTHS])[1] == 0.0


def test_a_correction_is_a_line_over_the_logarithm_of_the_axis() -> None:
    # Four exact places and one of twice the form: halfway to the next one in ratio, the factor is the root of two.
    form = confirmed(prompt_terms(8192), prompts(at_512=2.0))
    assert form.correction(512, 0) == pytest.approx(math.log(2.0), rel=0.02)
    between = form.seconds((724, 0)) / prompt_s(724)  # 724 is 512 times the root of two
    assert between == pytest.approx(math.sqrt(2.0), rel=0.06)
    assert form.seconds((1024, 0)) == pytest.approx(prompt_s(1024), rel=0.06)


def test_a_difference_within_the_tolerance_is_noise() -> None:
    form = confirmed(prompt_terms(2048), prompts(at_512=1.04))
    assert set(form.corrections[512].values()) == {0.0}


def test_a_time_that_no_repeat_confirms_is_noise() -> None:
    times = prompts(at_512=2.0, at_64=2.0)
    form = fitted(prompt_terms(2048), times, [(512, 0)])
    assert form.corrections[512][0] > 0.6 and form.corrections[64][0] == 0.0


def test_a_row_is_corrected_on_a_line_over_its_contexts() -> None:
    places = {(batch, context): 0.01 + 1e-6 * batch * context for batch in (1, 2, 4, 8) for context in (100, 1100)}
    places[4, 1100] *= math.e
    form = confirmed(step_terms, places)
    assert form.correction(4, 600) == pytest.approx(0.5, abs=0.05)
    assert form.correction(4, 5000) == pytest.approx(1.0, abs=0.05)  # as at the longest measured one


def test_a_curve_has_a_point_on_each_side_of_the_longest_prompt_of_a_step() -> None:
    curve = prefill_curve(confirmed(prompt_terms(2000), prompts()), 2000)
    assert {2000, 2001} <= set(curve.tokens) and curve.tokens[0] == 16 and curve.tokens[-1] == 4096
    assert all(later / sooner < 1.5 for sooner, later in pairwise(curve.tokens))


def test_a_curve_does_not_fall_where_a_longer_prompt_was_faster() -> None:
    curve = prefill_curve(confirmed(prompt_terms(8192), prompts(at_512=3.0)), 8192)
    assert list(curve.seconds) == sorted(curve.seconds)
    assert curve.seconds_for(512) == curve.seconds_for(1024) == pytest.approx(3.0 * prompt_s(512), rel=0.02)


def test_an_engine_for_one_request_has_a_surface_of_one_row() -> None:
    surface = decode_surface(confirmed(step_terms, {(1, 64): 0.0101, (1, 4000): 0.02}))
    assert surface.batch == (1,)
    assert surface.seconds_for(1, 64) == pytest.approx(0.0101, rel=0.02)
    assert surface.seconds_for(1, 2000) == pytest.approx(0.015, rel=0.02)


def test_a_ladder_has_both_ends_and_equal_ratios() -> None:
    assert ladder(1, 32, 2.0) == (1, 2, 4, 8, 16, 32)
    assert ladder(5, 5, 2.0) == (5,)
    assert ladder(64, 4000, 2.0) == (64, 127, 254, 506, 1008, 2008, 4000)


@given(seconds=st.lists(st.floats(1e-4, 10.0), min_size=len(LENGTHS), max_size=len(LENGTHS)))
def test_any_times_are_a_curve_that_goes_through_them_or_near(seconds: list[float]) -> None:
    measured = {(tokens, 0): each for tokens, each in zip(LENGTHS, seconds, strict=True)}
    form = confirmed(prompt_terms(2048), measured)
    for place, each in measured.items():
        assert form.seconds(place) == pytest.approx(each, rel=0.06)
    prefill_curve(form, 2048)
