"""Profiles: times between and beyond their points, and files that are refused."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.profile import DecodeSurface, EngineProfile, PrefillCurve

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
H100 = PROFILES / "h100_llama70b_fp8_tp1.json"
MakeProfile = Callable[..., EngineProfile]


def load(name: str) -> EngineProfile:
    return EngineProfile.load(PROFILES / f"{name}.json")


def test_times_lie_on_a_line_between_points_and_on_the_nearest_line_beyond_them() -> None:
    curve = PrefillCurve(tokens=(100, 200, 400), seconds=(0.02, 0.03, 0.07))
    assert curve.seconds_for(150) == pytest.approx(0.025)
    assert curve.seconds_for(800) == pytest.approx(0.15)
    assert curve.seconds_for(0) == pytest.approx(0.01)
    assert curve.step_s == pytest.approx(0.01)
    assert curve.chunk_s(200, 400) == pytest.approx(0.04)
    assert [curve.covers(tokens) for tokens in (99, 100, 400, 401)] == [False, True, True, False]
    assert not any(curve.is_derived(tokens) for tokens in (99, 100, 400, 401))


def test_lengths_between_a_measured_and_a_derived_point_count_as_derived_and_covered() -> None:
    curve = PrefillCurve(tokens=(100, 200, 400), seconds=(0.02, 0.03, 0.07), derived_above_tokens=200)
    assert [curve.is_derived(tokens) for tokens in (100, 200, 201, 400, 401)] == [False, False, True, True, False]
    assert [curve.covers(tokens) for tokens in (201, 400, 401)] == [True, True, False]


def test_a_surface_is_interpolated_along_both_axes() -> None:
    surface = DecodeSurface(batch=(1, 11), context_tokens=(0, 100), step_s=((0.02, 0.03), (0.04, 0.05)))
    assert surface.seconds_for(6, 50) == pytest.approx(0.035)
    assert surface.seconds_for(21, 0) == pytest.approx(0.06)
    assert surface.covers(11, 100)
    assert not surface.covers(12, 100)


@given(batch=st.integers(1, 300), context=st.floats(1.0, 20_000.0), steps=st.integers(1, 500))
def test_a_line_equals_the_steps_one_by_one_until_it_bends(batch: int, context: float, steps: int) -> None:
    surface = EngineProfile.load(H100).decode
    first_s, more_s, bends_tokens = surface.line(batch, context)
    steps = min(steps, int(min(bends_tokens - context, 1e6)) + 1)
    one_by_one_s = math.fsum(surface.seconds_for(batch, context + step) for step in range(steps))
    assert steps * (first_s + more_s * (steps - 1) / 2) == pytest.approx(one_by_one_s)


def test_a_surface_of_one_batch_has_its_row_for_all() -> None:
    surface = DecodeSurface(batch=(1,), context_tokens=(0, 100), step_s=((0.02, 0.03),))
    assert surface.seconds_for(1, 50) == surface.seconds_for(2, 50) == pytest.approx(0.025)
    assert surface.covers(1, 50) and not surface.covers(2, 50)


def test_a_line_that_falls_below_half_of_the_least_point_stays_there() -> None:
    surface = DecodeSurface(batch=(1, 2), context_tokens=(0, 100), step_s=((0.1, 0.06), (0.1, 0.06)))
    assert surface.seconds_for(1, 1000) == pytest.approx(0.05)
    first_s, more_s, bends_tokens = surface.line(1, 110)
    assert first_s == pytest.approx(0.056)
    assert more_s == pytest.approx(-0.0004)
    assert bends_tokens == pytest.approx(125.0)
    assert surface.line(1, 200) == (0.05, 0.0, math.inf)


def test_the_h100_profile_shows_the_papers_table() -> None:
    profile = EngineProfile.load(H100)
    assert profile.prefill.seconds_for(1700) == pytest.approx(0.269)
    assert profile.decode.seconds_for(248, 1200) == pytest.approx(0.057)
    assert {source.kind for source in profile.sources} >= {"measured", "derived"}


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_profile_rises_with_context_and_no_step_beats_its_own_hardware(path: Path) -> None:
    profile = EngineProfile.load(path)
    assert profile.name == path.stem
    rows = profile.decode.step_s
    if profile.memory is None:  # the CPU's measured points are noisy
        return
    assert all(sooner <= later for row in rows for sooner, later in pairwise(row))
    assert all(fewer <= more for column in zip(*rows, strict=True) for fewer, more in pairwise(column))
    for tokens, seconds in zip(profile.prefill.tokens, profile.prefill.seconds, strict=True):
        assert profile.roofline_s(tokens) < seconds
    for batch, row in zip(profile.decode.batch, rows, strict=True):
        for context, seconds in zip(profile.decode.context_tokens, row, strict=True):
            if batch * context <= profile.kv_tokens:
                assert profile.roofline_s(batch, batch * context) < seconds


def test_one_gpu_derived_from_operators_lies_near_the_papers_table() -> None:
    derived, table = load("h100_llama70b_fp8_tp1_derived"), EngineProfile.load(H100)
    assert derived.prefill.is_derived(100)
    assert table.prefill.is_derived(4170) and not table.prefill.is_derived(1700)
    for tokens, band in {100: 0.28, 200: 0.22, 700: 0.03, 1200: 0.03, 1700: 0.03}.items():  # 10 ms outside the GPU
        assert derived.prefill.seconds_for(tokens) == pytest.approx(table.prefill.seconds_for(tokens), rel=band)
    assert derived.decode.seconds_for(248, 128) == pytest.approx(table.decode.seconds_for(248, 100), rel=0.2)
    for batch in (104, 200, 248):
        # The table grows with context by less than reading bf16 KV takes, so longer contexts cannot be compared.
        assert 1.0 < derived.decode.seconds_for(batch, 700) / table.decode.seconds_for(batch, 700) < 1.4


@pytest.mark.parametrize(
    ("tp", "implied_s"),
    [
        (2, {32742: 5.072, 65384: 14.804, 98026: 29.432, 114347: 38.337}),
        (4, {32742: 2.844, 65384: 7.945, 98026: 15.474, 114347: 20.136}),
        (8, {32742: 1.666, 65384: 4.456, 98026: 8.408, 114347: 10.866}),
    ],
)
def test_derived_times_of_long_prompts_agree_with_those_that_long_decodes_imply(
    tp: int, implied_s: dict[int, float]
) -> None:
    # Dynamo's decode sweep, concurrency 1: 500 tokens at its throughput, less 500 steps.
    prefill = load(f"h100_llama70b_fp8_tp{tp}").prefill
    assert prefill.derived_above_tokens == 16380
    for tokens, seconds in implied_s.items():
        assert prefill.is_derived(tokens)
        assert prefill.seconds_for(tokens) == pytest.approx(seconds, rel=0.03)  # 2 % of the fit, 1 % of the line


def test_splitwises_a100_is_slower_than_its_h100_everywhere() -> None:
    a100, h100 = load("a100_llama2_70b_tp4"), load("h100_llama2_70b_tp4")
    assert a100.prefill.tokens == h100.prefill.tokens and a100.decode.batch == h100.decode.batch
    assert all(slow > fast for slow, fast in zip(a100.prefill.seconds, h100.prefill.seconds, strict=True))
    for slow, fast in zip(a100.decode.step_s, h100.decode.step_s, strict=True):
        assert all(a > h for a, h in zip(slow, fast, strict=True))
    # Medians of the source's 15 runs.
    assert (a100.prefill.seconds_for(512), h100.prefill.seconds_for(512)) == pytest.approx((0.127, 0.0596), abs=1e-4)
    assert a100.kv_tokens == h100.kv_tokens == 457_760


def test_a_rooflines_time_is_arithmetic_or_memory_whichever_takes_longer(make_profile: MakeProfile) -> None:
    # Arithmetic takes 1 ms a token; memory takes 4 ms for the weights and 10 us for each token of KV.
    profile = make_profile(memory={"weight_bytes": 4e5, "peak_bytes_per_s": 1e8})
    assert profile.roofline_s(3) == pytest.approx(0.004)
    assert profile.roofline_s(90) == pytest.approx(0.09)
    assert profile.roofline_s(3, 1000) == pytest.approx(0.014)
    assert make_profile().roofline_s(3, 1000, steps=2) == pytest.approx(0.006)


@given(tokens=st.integers(0, 30), context=st.integers(0, 3000), more=st.integers(0, 30), steps=st.integers(1, 300))
def test_a_roofline_of_many_steps_is_the_sum_of_each(
    make_profile: MakeProfile, tokens: int, context: int, more: int, steps: int
) -> None:
    profile = make_profile(memory={"weight_bytes": 4e5, "peak_bytes_per_s": 1e8})
    one_by_one_s = math.fsum(profile.roofline_s(tokens, context + more * step) for step in range(steps))
    assert profile.roofline_s(tokens, context, more_tokens=more, steps=steps) == pytest.approx(one_by_one_s)


def test_a_decoding_engine_keeps_its_sms_as_busy_as_heteroscale_measured() -> None:
    profile = load("h100_llama70b_fp8_tp2")
    for batch in (1, 8, 47):
        busy = profile.roofline_s(batch, batch * 1000) / profile.decode.seconds_for(batch, 1000)
        assert 0.5 < busy < 0.65  # 53 to 62 % in its Figure 7, whatever the load


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_tokens": 0}, "kv_tokens: Input should be greater than 0"),
        ({"prefill": {"tokens": [1, 1], "seconds": [1, 2]}}, "prefill: prefill.tokens must rise"),
        ({"prefill": {"tokens": [1, 2], "seconds": [2, 1]}}, "must not fall with length"),
        ({"prefill": {"tokens": [1, 2], "seconds": [1]}}, "prefill.seconds: Tuple should have at least 2"),
        ({"decode": {"batch": [1, 2], "context_tokens": [1], "step_s": [[1]]}}, "needs 2 rows"),
        ({"sources": []}, "sources: Tuple should have at least 1"),
        ({"wheels": 4}, "wheels: Extra inputs"),
    ],
)
def test_a_wrong_profile_is_refused_by_file_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(H100.read_text()), **change}))
    with pytest.raises(ValueError, match=message) as caught:
        EngineProfile.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        EngineProfile.load(tmp_path / "none.json")


@pytest.mark.parametrize("is_used", [False, True])
def test_an_engine_of_half_the_speed_takes_twice_as_long_though_the_fast_one_was_used_before(is_used: bool) -> None:
    fast = load("h100_llama70b_fp8_tp2")
    if is_used:  # the profile stores what it has computed
        assert fast.decode.seconds_for(51, 1277) > 0.0
        assert fast.prefill.step_s > 0.0
    slow = fast.at_speed(0.5)
    assert slow.decode.seconds_for(51, 1277) == pytest.approx(2.0 * fast.decode.seconds_for(51, 1277))
    assert slow.prefill.step_s == pytest.approx(2.0 * fast.prefill.step_s)
    assert slow.prefill.seconds_for(1) == pytest.approx(2.0 * fast.prefill.seconds_for(1))
    assert slow.handoff == fast.handoff


def test_steps_beside_prompts_change_with_the_others(make_profile: MakeProfile) -> None:
    beside = {"batch": [1], "context_tokens": [100], "step_s": [[0.03]]}
    profile = make_profile(decode_beside_prompts=beside)
    for changed in (profile.with_steps(2.0), profile.at_speed(0.5)):
        assert changed.decode_beside_prompts is not None
        assert changed.decode_beside_prompts.seconds_for(1, 100) == 0.06
        assert changed.decode.seconds_for(1, 100) == 0.042
    assert make_profile().with_steps(2.0).decode_beside_prompts is None
    assert make_profile().at_speed(2.0).decode_beside_prompts is None
