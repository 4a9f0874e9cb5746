"""Predictions for measured operating points, and the file that has them."""

import random
from pathlib import Path

import pytest

from autoscale.engines.operating_points import OperatingPoint, load_operating_points, mean_error_frac, predicted
from autoscale.engines.profile import EngineProfile

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
TP2 = EngineProfile.load(PROFILES / "h100_llama70b_fp8_tp2.json")


def test_one_request_at_a_time_takes_what_the_profile_says() -> None:
    point = OperatingPoint(input_tokens=1000, output_tokens=101, concurrency=1)
    found = predicted(TP2, point, random.Random(0))
    assert found.ttft_mean_s == pytest.approx(TP2.prefill.seconds_for(1000))
    assert found.ttft_median_s == pytest.approx(found.ttft_mean_s)
    assert found.tpot_s == pytest.approx(TP2.decode.seconds_for(1, 1049.5), rel=1e-6)
    assert not found.is_extrapolated


def test_prompts_that_come_together_wait_for_each_other_and_hold_up_those_that_decode() -> None:
    alone, many = (
        predicted(TP2, OperatingPoint(input_tokens=4000, output_tokens=50, concurrency=number), random.Random(0))
        for number in (1, 16)
    )
    assert many.ttft_mean_s > 1.5 * alone.ttft_mean_s
    assert many.tpot_s > TP2.decode.seconds_for(16, 4025.0)


def test_the_same_seed_gives_the_same_prediction() -> None:
    point = OperatingPoint(input_tokens=1000, output_tokens=100, shortest_frac=0.5, concurrency=8)
    assert predicted(TP2, point, random.Random(3)) == predicted(TP2, point, random.Random(3))


def test_a_request_that_never_fits_is_an_error() -> None:
    point = OperatingPoint(input_tokens=TP2.kv_tokens, output_tokens=100, concurrency=1)
    with pytest.raises(ValueError, match="do not fit the engine's KV"):
        predicted(TP2, point, random.Random(0))


def test_a_point_beyond_the_profile_is_marked() -> None:
    point = OperatingPoint(input_tokens=20, output_tokens=20, concurrency=1)
    assert predicted(TP2, point, random.Random(0)).is_extrapolated


def test_the_mean_error_has_no_sign_and_leaves_out_what_was_not_measured() -> None:
    assert mean_error_frac([(1.0, 1.1), (2.0, 1.6), (None, 5.0)]) == pytest.approx(0.15)
    assert mean_error_frac([(None, 5.0)]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no operating points after its first line"),
        ("input_tokens,output_tokens,concurrency\n", "no operating points after its first line"),
        ("input_tokens,concurrency\n5,5\n", "line 2: output_tokens: Field required"),
        ("input_tokens,output_tokens,concurrency,ttft\n5,5,5,5\n", "line 2: ttft: Extra inputs are not permitted"),
        ("input_tokens,output_tokens,concurrency\n5,5,many\n", "line 2: concurrency: Input should be a valid integer"),
        ("input_tokens,output_tokens,concurrency,tpot_s\n5,5,5,0\n", "line 2: tpot_s: Input should be greater than 0"),
        ("input_tokens,output_tokens,concurrency\n5,5,5,5\n", "line 2: more values than columns"),
    ],
)
def test_a_wrong_file_is_named_with_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_operating_points(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_operating_points(tmp_path / "none.csv")


def test_values_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("input_tokens,output_tokens,concurrency,ttft_s,tpot_s\n5,6,7,,0.5\n")
    (point,) = load_operating_points(path)
    assert (point.ttft_s, point.tpot_s, point.shortest_frac) == (None, 0.5, 1.0)
