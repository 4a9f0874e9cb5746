"""FLOPs and bytes by hand, bursts, common windows, and a dry run of the whole measurement."""

import csv
import json
import math
from pathlib import Path

import pytest

from tests.lab.operators import points as plan
from tests.lab.operators.shapes import MODELS, Point, UnsupportedShapeError, gemm_shape, rank_of, work_of
from tests.lab.operators.tables import POINT_COLUMNS, cell_text, point_key

MODEL = "llama-3-8b"


def test_gemm_work_by_hand() -> None:
    point = Point(model=MODEL, operator="gate_up_proj", role="both", tokens=2)
    # 2 x 14336 outputs of 4096 inputs; weights, two rows in, two rows out, two bytes each
    assert work_of(point) == (2 * 2 * 28672 * 4096, 2 * (28672 * 4096 + 2 * 4096 + 2 * 28672))


def test_fp8_halves_what_is_read_and_not_what_is_written() -> None:
    point = Point(model=MODEL, operator="o_proj", role="both", tokens=3, tp=4, dtype="fp8")
    assert work_of(point)[1] == 1024 * 4096 + 3 * 1024 + 2 * 3 * 4096


def test_bias_of_qwen2_counts() -> None:
    flops, moved = work_of(Point(model="qwen2-7b", operator="qkv_proj", role="both", tokens=1))
    columns = (28 + 2 * 4) * 128
    assert (flops, moved) == (2 * columns * 3584 + columns, 2 * (columns * 3584 + 3584 + 2 * columns))


def test_prefill_attention_counts_the_causal_half() -> None:
    point = Point(model=MODEL, operator="attention", role="prefill", tokens=2 * 4, batch=2, context=0)
    # 1 + 2 + 3 + 4 pairs of each sequence; Q K and P V, a multiplication and an addition each
    assert work_of(point) == (4 * 2 * 10 * 4096, 2 * 2 * 8 * 4096 + 8 * 4096)


def test_chunk_looks_at_all_tokens_before_it() -> None:
    point = Point(model=MODEL, operator="attention", role="prefill", tokens=2, batch=1, context=5)
    assert work_of(point)[0] == 4 * (6 + 7) * 4096


def test_decode_attention_reads_the_context_once() -> None:
    point = Point(model=MODEL, operator="attention", role="decode", tokens=64, batch=64, context=2048)
    # 2 x 8 heads x 128 x 2 bytes = 4096 bytes of KV per token
    assert work_of(point) == (4 * 64 * 2048 * 4096, 64 * 2048 * 4096 + 2 * 2 * 64 * 4096)


def test_ranks_share_the_weights() -> None:
    model = MODELS[MODEL]
    whole = [math.prod(gemm_shape(rank_of(model, 1), name)) for name in plan.LAYER_GEMMS]
    eighth = [math.prod(gemm_shape(rank_of(model, 8), name)) for name in plan.LAYER_GEMMS]
    assert whole == [8 * size for size in eighth]
    # The published size of a layer, without its two norms.
    assert sum(whole) == 218_103_808


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="28 heads, not divisible by tp 8"):
        rank_of(MODELS["qwen2-7b"], 8)


def test_plan_has_each_point_once_and_work_for_it() -> None:
    points = plan.full_plan()
    assert len({point_key(point) for point in points}) == len(points)
    for point in points:
        if (point.model, point.tp) != ("qwen2-7b", 8):
            assert min(work_of(point)) >= 0


def test_nan_is_never_written() -> None:
    with pytest.raises(ValueError, match="nan"):
        cell_text(math.nan)
    assert cell_text(None) == ""


def test_bursts_use_each_variant_equally_often() -> None:
    timing = pytest.importorskip("deployments.operator_profiler.timing")
    assert timing.calls_per_burst(10.0, 7, 3000.0) == 252
    assert timing.calls_per_burst(10_000.0, 7, 3000.0) == 7


def test_only_whole_bursts_inside_the_window_count() -> None:
    pairs = pytest.importorskip("tests.lab.operators.pairs")
    assert pairs.mean_inside([0, 10, 20, 32, 50], 5, 40) == (11.0, 2)
    with pytest.raises(ValueError, match="only 1"):
        pairs.mean_inside([0, 10, 20], 5, 25)


def test_green_contexts_take_eights_of_sms() -> None:
    shares = pytest.importorskip("tests.lab.operators.shares")
    assert [shares.green_sms(percent, 132) for percent in (1, 10, 50, 100)] == [8, 16, 64, 132]


def test_dry_run_writes_all_tables(tmp_path: Path) -> None:
    measure = pytest.importorskip("tests.lab.operators.measure")
    measure.main(["--device", "cpu", "--quick", "--out", str(tmp_path), "--budget-s", "240"])
    rows = {}
    for path in tmp_path.glob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            rows[path.stem] = list(csv.DictReader(file))
    assert set(rows) == {"operators", "pairs", "power", "shares", "links", "skipped"}
    assert all(rows.values())
    assert not [cell for table in rows.values() for row in table for cell in row.values() if cell in ("nan", "inf")]
    assert all(float(row["p10_us"]) <= float(row["median_us"]) <= float(row["p90_us"]) for row in rows["operators"])
    reasons = {tuple(row[name] for name in POINT_COLUMNS) for row in rows["skipped"] if row["part"] == "operators"}
    done = {tuple(row[name] for name in POINT_COLUMNS) for row in rows["operators"]}
    assert {point_key(point) for point in plan.quick_plan()} == done | reasons
    assert {row["operator"] for row in rows["operators"]} >= {"attention", "top_p", "rope", "lm_head", "down_proj"}
    facts = json.loads((tmp_path / "metadata.json").read_text(encoding="utf-8"))
    assert list(facts["parts"]) == sorted(measure.PARTS)
