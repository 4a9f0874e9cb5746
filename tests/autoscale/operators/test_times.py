"""Where times come from: measured points, neighbours, or a roofline that says so."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.attention import Attention
from autoscale.operators.collective import Collective
from autoscale.operators.costs import SourceKind
from autoscale.operators.curves import Curve
from autoscale.operators.gemm import Gemm
from autoscale.operators.gemm_times import GemmTimes, gemm_work, graph_batch, padded_curve
from autoscale.operators.gpu import GPUS, UnknownGpuError, gpu_named
from autoscale.operators.kinds import Operator, Pass
from autoscale.operators.pointwise import Pointwise
from autoscale.operators.roofline import ATTENTION, GEMM, gpu_roofline_s
from autoscale.operators.tables import OperatorTables, tables_of
from autoscale.operators.times import OperatorTimes

H100, RTX = GPUS["H100"], GPUS["RTX-PRO-6000"]
HEADS = ("bf16", 8, 2, 128)
ATTENTION_8_2 = Attention(name="attention", copies=1, heads=8, kv_heads=2, head_dim=128, kv_dtype="bf16")


def gemm_of(columns: int, rows: int, dtype: str = "bf16") -> Gemm:
    return Gemm(name="gemm", copies=1, columns=columns, rows=rows, dtype=dtype)


def prompt(tokens: int) -> Pass:
    return Pass(prompts=1, new_tokens=tokens)


def decode(batch: int, context: int) -> Pass:
    return Pass(decoding=batch, context_tokens=context)


def test_a_measured_product_is_read_from_its_curve() -> None:
    rows = (("bf16", 64.0, 32.0, 1.0, 2e-6), ("bf16", 64.0, 32.0, 3.0, 4e-6))
    times = OperatorTimes(RTX, tables_of({"gemm": rows}))
    timed = times.time(gemm_of(64, 32), prompt(2), 1)
    assert timed.seconds == pytest.approx(3e-6)  # rounding
    assert timed.source.kind is SourceKind.INTERPOLATED
    assert timed.source.text == "bf16 products 64 x 32"
    assert times.time(gemm_of(64, 32), prompt(3), 1).source.kind is SourceKind.MEASURED
    assert times.time(gemm_of(64, 32), prompt(9), 1).source.kind is SourceKind.EXTRAPOLATED


def test_a_product_between_four_measured_ones_has_their_mean_efficiency() -> None:
    # Each corner takes its roofline times 2 or 3; in the middle of the logarithms, the geometric mean.
    excess = {(512, 512): 2.0, (2048, 512): 2.0, (512, 2048): 3.0, (2048, 2048): 3.0}
    plain = GemmTimes(H100, {})
    measured = {
        shape: Curve.of({16.0: factor * plain.roofline_s("bf16", 16.0, *shape)}) for shape, factor in excess.items()
    }
    found = GemmTimes(H100, {"bf16": measured}).curve("bf16", 1024, 1024)
    assert found.kind is SourceKind.INTERPOLATED
    assert found.curve is not None
    wanted = plain.roofline_s("bf16", 16.0, 1024, 1024) * 6**0.5
    assert found.curve.at(16).value == pytest.approx(wanted)  # rounding


def test_a_product_beyond_all_measured_ones_says_whose_efficiency_it_has() -> None:
    plain = GemmTimes(H100, {})
    measured = {(512, 512): Curve.of({16.0: 3 * plain.roofline_s("bf16", 16.0, 512, 512)})}
    found = GemmTimes(H100, {"bf16": measured}).curve("bf16", 4096, 1024)
    assert (found.kind, found.text) == (
        SourceKind.ROOFLINE,
        "roofline with the efficiency of bf16 products 512 x 512",
    )
    assert found.curve is not None
    assert found.curve.at(16).value == pytest.approx(3 * plain.roofline_s("bf16", 16.0, 4096, 1024))  # rounding


def test_a_gpu_without_products_has_a_roofline() -> None:
    timed = OperatorTimes(H100, OperatorTables.empty()).time(gemm_of(4096, 4096), decode(1, 1), 1)
    assert timed.seconds == gpu_roofline_s(gemm_work("bf16", 1, 4096, 4096), H100, "bf16", GEMM)
    # 33.6 MB at 3.35 TB/s, of which a part is reached, and a launch.
    assert timed.seconds > 33.6e6 / 3.35e12
    assert timed.source.kind is SourceKind.ROOFLINE


def test_attention_of_unmeasured_heads_scales_the_nearest_ones() -> None:
    rows = (((*HEADS, 4.0, 1000.0, 50e-6)), ((*HEADS, 8.0, 1000.0, 100e-6)))
    times = OperatorTimes(RTX, tables_of({"decode_attention": rows}))
    assert times.time(ATTENTION_8_2, decode(6, 1000), 1).seconds == pytest.approx(75e-6)  # rounding
    half = times.time(ATTENTION_8_2, decode(4, 1000), 2)
    work = ATTENTION_8_2.work(decode(4, 1000), 2), ATTENTION_8_2.work(decode(4, 1000), 1)
    ratio = gpu_roofline_s(work[0], RTX, "bf16", ATTENTION) / gpu_roofline_s(work[1], RTX, "bf16", ATTENTION)
    assert half.seconds == pytest.approx(50e-6 * ratio)  # rounding
    assert half.source.kind is SourceKind.ROOFLINE
    assert "8 heads, 2 KV heads" in half.source.text


def test_a_chunk_takes_the_difference_of_two_prompts() -> None:
    rows = tuple((*HEADS, 1.0, float(n), (10 + n * n / 1e4) * 1e-6) for n in (100, 200, 300))
    times = OperatorTimes(H100, tables_of({"prompt_attention": rows}))
    chunk = times.time(ATTENTION_8_2, Pass(prompts=1, new_tokens=100, past_tokens=200), 1)
    assert chunk.seconds == pytest.approx(11e-6)  # 19 - 14 us is less than what 100 tokens alone take


def test_a_long_past_costs_more_than_the_chunk_alone() -> None:
    rows = tuple((*HEADS, 1.0, float(n), (10 + n * n / 1e2) * 1e-6) for n in (100, 200, 300))
    times = OperatorTimes(H100, tables_of({"prompt_attention": rows}))
    chunk = times.time(ATTENTION_8_2, Pass(prompts=1, new_tokens=100, past_tokens=200), 1)
    assert chunk.seconds == pytest.approx((900 - 400) * 1e-6)  # rounding


def test_measured_chunks_are_read_by_what_came_before() -> None:
    rows = tuple((*HEADS, past, new, (1 + past + new) * 1e-6) for past in (0.0, 100.0) for new in (10.0, 30.0))
    times = OperatorTimes(H100, tables_of({"chunk_attention": rows}))
    chunk = times.time(ATTENTION_8_2, Pass(prompts=1, new_tokens=20, past_tokens=50), 1)
    share = math.log(2) / math.log(3)
    past_0_us, past_100_us = 11 * (31 / 11) ** share, 111 * (131 / 111) ** share
    assert chunk.seconds == pytest.approx((past_0_us + past_100_us) / 2 * 1e-6)  # rounding
    # Four prompts have as many pairs as one of twice the length.
    four = times.time(ATTENTION_8_2, Pass(prompts=4, new_tokens=10), 1)
    assert four.seconds == pytest.approx(past_0_us * 1e-6)  # rounding
    assert four.source.kind is SourceKind.EXTRAPOLATED


def test_mixed_batches_take_their_measured_excess() -> None:
    rows = {
        "chunk_attention": tuple((*HEADS, 0.0, new, new * 1e-7) for new in (64.0, 128.0)),
        "decode_attention": tuple((*HEADS, batch, 1000.0, batch * 1e-6) for batch in (10.0, 20.0)),
        # 64 tokens alone take 6.4 us, 10 sequences 10 us; together 32.8 us: twice the sum.
        "mixed_attention": ((*HEADS, 64.0, 10.0, 1000.0, 32.8e-6),),
    }
    times = OperatorTimes(RTX, tables_of(rows))
    mixed = times.time(ATTENTION_8_2, Pass(prompts=1, new_tokens=64, decoding=10, context_tokens=1000), 1)
    assert mixed.seconds == pytest.approx(32.8e-6)  # rounding
    longer = times.time(ATTENTION_8_2, Pass(prompts=1, new_tokens=90, decoding=10, context_tokens=1000), 1)
    assert longer.seconds == pytest.approx(2 * 19e-6)  # rounding


def test_without_mixed_measurements_both_parts_are_added() -> None:
    rows = {
        "chunk_attention": ((*HEADS, 0.0, 64.0, 7e-6),),
        "decode_attention": ((*HEADS, 10.0, 1000.0, 5e-6),),
    }
    times = OperatorTimes(RTX, tables_of(rows))
    mixed = times.time(ATTENTION_8_2, Pass(prompts=1, new_tokens=64, decoding=10, context_tokens=1000), 1)
    assert mixed.seconds == pytest.approx(12e-6)  # rounding


def test_a_row_of_another_width_takes_the_time_of_its_elements() -> None:
    act = Pointwise(name="act", copies=1, table="act", reads=6, writes=2, flops_per_element=1.0, is_split=True)
    times = OperatorTimes(H100, tables_of({"pointwise": (("act", 4.0, 10.0, 1e-6), ("act", 4.0, 20.0, 2e-6))}))
    assert times.time(act, decode(10, 1), 2).seconds == pytest.approx(1e-6)  # width 4
    assert times.time(act, decode(10, 1), 1).seconds == pytest.approx(2e-6)  # width 8: as 20 rows of 4
    assert times.time(act, decode(10, 1), 1).source.kind is SourceKind.INTERPOLATED


def test_collectives_are_nothing_on_one_gpu() -> None:
    reduce = Collective(name="reduce", copies=1, elements=100)
    times = OperatorTimes(H100, tables_of({"all_reduce": ((2.0, 200.0, 5e-6), (2.0, 400.0, 6e-6))}))
    assert times.time(reduce, decode(2, 1), 1).seconds == 0.0
    assert times.time(reduce, decode(2, 1), 2).seconds == pytest.approx(6e-6)  # 400 bytes
    gather = Collective(name="gather", copies=1, elements=100, adds=False)
    assert times.time(gather, decode(2, 1), 2).seconds == pytest.approx(5e-6)  # as a reduce of 200 bytes
    four = times.time(reduce, decode(2, 1), 4)
    # Each of 4 ranks sends 3/4 of 400 bytes twice, at three quarters of 450 GB/s, after 5 us.
    assert four.seconds == pytest.approx(5e-6 + 600 / (0.75 * 450e9))  # rounding
    assert four.source.kind is SourceKind.ROOFLINE


@given(m=st.integers(1, 5000), n=st.integers(1, 60_000), k=st.integers(1, 60_000))
def test_any_product_has_a_time_above_0(m: int, n: int, k: int) -> None:
    measured = {(512, 512): Curve.of({1.0: 3e-6, 512.0: 9e-6}), (4096, 4096): Curve.of({1.0: 2e-5, 512.0: 5e-5})}
    times = GemmTimes(H100, {"bf16": measured})
    curve = times.curve("bf16", n, k).curve
    assert curve is not None
    assert curve.at(m).value > 0


def test_an_operator_of_another_kind_is_refused() -> None:
    class Other:
        name, copies, weight_bytes = "other", 1, 0.0

    other: Operator = Other()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="no time is known for an operator of type Other"):
        OperatorTimes(H100, OperatorTables.empty()).time(other, decode(1, 1), 1)


def test_a_gpu_is_found_by_its_name() -> None:
    assert gpu_named("h100_sxm") is H100
    assert gpu_named("RTX PRO 6000").name == "RTX-PRO-6000"
    with pytest.raises(UnknownGpuError, match="'B300' is not known: give one of H100, H200"):
        gpu_named("B300")


def test_batches_of_a_graph_are_padded() -> None:
    assert [graph_batch(batch) for batch in (1, 2, 3, 5, 8, 9, 250, 257, 512, 513)] == [
        *(1, 2, 4, 8, 8, 16, 256, 272, 512, 513)
    ]


def test_a_decode_batch_takes_no_longer_than_a_larger_graph() -> None:
    # 4 rows are slower than 8, which is noise; 5 rows are no graph.
    points = {1.0: 10.0, 2.0: 11.0, 4.0: 14.0, 5.0: 9.0, 8.0: 12.0, 16.0: 13.0, 1024.0: 5.0}
    padded = padded_curve(Curve.of(points))
    assert padded.axis == (1.0, 2.0, 4.0, 8.0, 16.0, 1024.0)
    assert padded.values == (10.0, 11.0, 12.0, 12.0, 13.0, 5.0)
    rows = tuple(("bf16", 64.0, 32.0, m, value * 1e-6) for m, value in points.items())
    times = OperatorTimes(RTX, tables_of({"gemm": rows}))
    assert times.time(gemm_of(64, 32), decode(3, 1), 1).seconds == pytest.approx(12e-6)  # rounding
    assert times.time(gemm_of(64, 32), prompt(5), 1).seconds == pytest.approx(9e-6)  # prompts are not padded


def test_arithmetic_lowers_the_clock_of_a_gpu_at_its_power_limit() -> None:
    rows = tuple(("bf16", 4096.0, 4096.0, m, 1e-4) for m in (1.0, 4096.0))
    times, cool = OperatorTimes(H100, tables_of({"gemm": rows})), OperatorTimes(RTX, tables_of({"gemm": rows}))
    assert times.time(gemm_of(4096, 4096), prompt(4096), 1).seconds == pytest.approx(1.11e-4)  # arithmetic is the bound
    assert cool.time(gemm_of(4096, 4096), prompt(4096), 1).seconds == pytest.approx(1e-4)  # not measured there
    # One token: memory is the bound, of which arithmetic is 1/295 (989e12 FLOP/s, 3.35e12 B/s, 1 FLOP for each byte).
    assert times.time(gemm_of(4096, 4096), decode(1, 1), 1).seconds == pytest.approx(1e-4, rel=1e-3)


def test_decode_attention_runs_at_the_lower_clock_too() -> None:
    rows = {"decode_attention": ((*HEADS, 4.0, 1000.0, 50e-6),)}
    assert OperatorTimes(H100, tables_of(rows)).time(ATTENTION_8_2, decode(4, 1000), 1).seconds == pytest.approx(56e-6)
    assert OperatorTimes(RTX, tables_of(rows)).time(ATTENTION_8_2, decode(4, 1000), 1).seconds == pytest.approx(50e-6)
