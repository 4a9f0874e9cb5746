"""Which points are measured: the first sizes, those in doubt, and those beside a bend."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from autoscale.operators.graph import OperatorPrecision, operator_graph
from autoscale.operators.kinds import Work
from deployments.operator_profiler.series import Backends, Series, Sizes, series_of, steps
from deployments.operator_profiler.survey import next_places

MODELS = Path(__file__).parents[3] / "configs" / "operators" / "models"
SIZES = Sizes(max_batch_tokens=2048, max_running=128, longest_tokens=16_384)


def series(table: str = "pointwise", *, outer: tuple[int | None, ...] = (None,), in_logs: bool = False) -> Series:
    return Series(
        operator="one",
        table=table,
        key=("k",),
        outer=outer,
        inner=(1, 16, 256),
        in_logs=in_logs,
        calls=lambda tensors, first, second: [],
        work=lambda first, second: Work(flops=1.0, traffic_bytes=1.0),
    )


def test_all_sizes_come_first_and_each_is_measured_twice() -> None:
    one = series()
    assert next_places(one, {}) == [(None, 1), (None, 16), (None, 256)]
    assert next_places(one, {(None, 1): [1.0]}) == [(None, 16), (None, 256)]
    once = {(None, size): [float(size)] for size in one.inner}
    assert next_places(one, once) == [(None, 1), (None, 16), (None, 256)]


def test_a_line_is_complete_after_two_rounds_that_agree() -> None:
    assert next_places(series(), {(None, size): [float(size)] * 2 for size in (1, 16, 256)}) == []


def test_times_that_differ_are_measured_again() -> None:
    times = {(None, 1): [1.0, 1.0], (None, 16): [16.0, 19.0], (None, 256): [256.0, 256.0]}
    assert next_places(series(), times) == [(None, 16)]
    times[None, 16] += [16.2, 16.1]
    assert next_places(series(), times) == []


def test_sizes_on_both_sides_of_a_bend_are_added() -> None:
    flat = {(None, 1): [10.0] * 2, (None, 16): [10.0] * 2, (None, 256): [100.0] * 2}
    assert next_places(series(), flat) == [(None, 4), (None, 64)]
    assert next_places(series(), flat, frozenset({(None, 64)})) == [(None, 4)]


def test_products_get_sizes_that_graphs_pad_to() -> None:
    # 16 x 256 and 1 x 16 have 64 and 4 in their middle; the next ones, 8 x 16 and 32 x 64, are multiples of 8.
    times = {(None, size): [10.0] * 2 for size in (1, 4, 16, 64)} | {(None, 256): [100.0] * 2}
    assert next_places(series("gemm"), times) == [(None, 32), (None, 128)]


def test_bends_are_found_along_the_first_size_too() -> None:
    one = series("decode_attention", outer=(1, 8, 64))
    times = {(batch, size): [float(size) * (1 if batch < 64 else 50)] * 2 for batch in (1, 8, 64) for size in one.inner}
    added = next_places(one, times)
    assert {batch for batch, _ in added} == {3, 23}
    assert {size for _, size in added} == set(one.inner)


def test_curves_in_logarithms_are_judged_in_logarithms() -> None:
    square = {(0, size): [float(size) ** 2] * 2 for size in (1, 16, 256)}
    assert next_places(series("chunk_attention", outer=(0,), in_logs=True), square) == []
    assert next_places(series("chunk_attention", outer=(0,)), square) != []


def test_steps_end_at_the_largest_size() -> None:
    assert steps(1, 20, 4) == (1, 4, 16, 20)
    assert steps(7, 7, 4) == (7,)


def test_shapes_of_each_rank_are_measured_once() -> None:
    graph = operator_graph(json.loads((MODELS / "qwen2-0.5b.json").read_text()), OperatorPrecision())
    found = series_of(graph, (1, 2), SIZES, Backends())
    keys = [(each.table, *each.key) for each in found]
    assert len(keys) == len(set(keys))
    gemms = {each.key for each in found if each.table == "gemm"}
    # By hand: hidden 896, 14 heads and 2 KV heads of 64, intermediate 4864, vocabulary 151936; TP 2 halves outputs of
    # QKV, gate and up and the head, and inputs of O and down.
    assert gemms == {
        *(("bf16", n, k) for n, k in ((1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896))),
        *(("bf16", n, k) for n, k in ((576, 896), (896, 448), (4864, 896), (896, 2432), (75968, 896))),
    }
    assert ("decode_attention", "bf16", 7, 1, 64) in keys
    assert ("pointwise", "norm", 4 * 896) in keys


def test_no_point_is_beyond_the_longest_context() -> None:
    graph = operator_graph(json.loads((MODELS / "qwen2-0.5b.json").read_text()), OperatorPrecision())
    chunks = next(each for each in series_of(graph, (1,), SIZES, Backends()) if each.table == "chunk_attention")
    assert chunks.outer == (0, 2048, 8192, 14_336)
    assert all(past + new <= 16_384 for past, new in next_places(chunks, {}) if past is not None)
