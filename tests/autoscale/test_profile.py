"""Profiles: what lies between their points, and what is no profile."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.profile import DecodeSurface, EngineProfile, PrefillCurve

H100 = Path(__file__).parents[2] / "configs" / "profiles" / "h100_llama70b_fp8_tp1.json"


def test_between_points_a_line_and_beyond_them_the_nearest_one() -> None:
    curve = PrefillCurve(tokens=(100, 200, 400), seconds=(0.02, 0.03, 0.07))
    assert curve.seconds_for(150) == pytest.approx(0.025)
    assert curve.seconds_for(800) == pytest.approx(0.15)
    assert curve.seconds_for(0) == pytest.approx(0.01)
    assert curve.step_s == pytest.approx(0.01)
    assert curve.chunk_s(200, 400) == pytest.approx(0.04)
    assert [curve.covers(tokens) for tokens in (99, 100, 400, 401)] == [False, True, True, False]


def test_a_surface_is_read_along_both_axes() -> None:
    surface = DecodeSurface(batch=(1, 11), context_tokens=(0, 100), step_s=((0.02, 0.03), (0.04, 0.05)))
    assert surface.seconds_for(6, 50) == pytest.approx(0.035)
    assert surface.seconds_for(21, 0) == pytest.approx(0.06)
    assert surface.covers(11, 100)
    assert not surface.covers(12, 100)


@given(batch=st.integers(1, 300), context=st.floats(1.0, 20_000.0), steps=st.integers(1, 500))
def test_a_line_is_every_step_up_to_where_it_bends(batch: int, context: float, steps: int) -> None:
    surface = EngineProfile.load(H100).decode
    first_s, more_s, bends_tokens = surface.line(batch, context)
    steps = min(steps, int(min(bends_tokens - context, 1e6)) + 1)
    one_by_one_s = math.fsum(surface.seconds_for(batch, context + step) for step in range(steps))
    assert steps * (first_s + more_s * (steps - 1) / 2) == pytest.approx(one_by_one_s)


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


@pytest.mark.parametrize(
    ("change", "said"),
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
def test_what_is_no_profile_is_refused_by_file_and_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(H100.read_text()), **change}))
    with pytest.raises(ValueError, match=said) as caught:
        EngineProfile.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        EngineProfile.load(tmp_path / "none.json")
