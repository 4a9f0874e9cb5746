"""Work of single operators, counted by hand, and laws that hold for all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.attention import Attention, VisionAttention
from autoscale.operators.collective import Collective
from autoscale.operators.experts import GroupedExperts
from autoscale.operators.gemm import Gemm
from autoscale.operators.kinds import Pass, Unit
from autoscale.operators.pointwise import Pointwise

ATTENTION = Attention(name="attention", copies=2, heads=8, kv_heads=2, head_dim=4, kv_dtype="bf16")


def test_a_product_reads_both_matrices_and_writes_one() -> None:
    gemm = Gemm(name="up", copies=1, columns=6, rows=4, dtype="fp8")
    work = gemm.work(Pass(prompts=1, new_tokens=3), 2)  # 3 x 4 times 4 x 3
    assert work.flops == 2 * 3 * 3 * 4
    assert work.traffic_bytes == (3 * 4 + 3 * 4) * 1 + 3 * 3 * 2


def test_attention_of_a_prompt_counts_pairs_of_a_triangle() -> None:
    work = ATTENTION.work(Pass(prompts=2, new_tokens=3, past_tokens=5), 1)
    pairs = 2 * (3 * 5 + 1 + 2 + 3)
    assert work.flops == 4 * pairs * 8 * 4
    kv_bytes = 2 * (5 + 3) * 2 * 2 * 4 * 2  # prompts, tokens, K and V, heads, width, bytes
    assert work.traffic_bytes == kv_bytes + 2 * (2 * 3 * 8 * 4) * 2


def test_decode_attention_reads_the_context_of_each_sequence() -> None:
    work = ATTENTION.work(Pass(decoding=3, context_tokens=10), 2)
    assert work.flops == 4 * 3 * 10 * 4 * 4
    assert work.traffic_bytes == 3 * 10 * 2 * 1 * 4 * 2 + 2 * (3 * 4 * 4) * 2


def test_a_chunked_prompt_has_the_flops_of_the_whole_one() -> None:
    whole = ATTENTION.work(Pass(prompts=1, new_tokens=100), 1).flops
    first = ATTENTION.work(Pass(prompts=1, new_tokens=60), 1).flops
    second = ATTENTION.work(Pass(prompts=1, new_tokens=40, past_tokens=60), 1).flops
    assert first + second == whole


def test_one_token_reads_only_the_experts_that_it_uses() -> None:
    experts = GroupedExperts(name="experts", copies=1, experts=8, per_token=2, hidden=4, intermediate=6, dtype="bf16")
    assert experts.active_experts(1) == pytest.approx(2.0)  # rounding
    assert experts.active_experts(1000) == pytest.approx(8.0)  # all, to rounding
    assert experts.work(Pass(decoding=1, context_tokens=1), 1).flops == 6 * 2 * 4 * 6
    assert experts.weights == 8 * 3 * 4 * 6


def test_an_all_reduce_sends_nearly_twice_its_message_and_nothing_on_one_gpu() -> None:
    reduce = Collective(name="reduce", copies=1, elements=10)
    step = Pass(decoding=3, context_tokens=1)
    assert reduce.message_bytes(step) == 3 * 10 * 2
    assert reduce.work(step, 4).traffic_bytes == 2 * 3 / 4 * 60
    assert reduce.work(step, 1).traffic_bytes == 0


def test_windows_bound_the_attention_of_an_image() -> None:
    step = Pass(prompts=1, new_tokens=64, image_tokens=64)
    sizes = {"name": "v", "copies": 1, "heads": 2, "head_dim": 4, "merge": 2}
    full = VisionAttention(**sizes, window_patches=None).work(step, 1)
    window = VisionAttention(**sizes, window_patches=64).work(step, 1)
    assert full.flops == 4 * 256 * 256 * 8
    assert window.flops == 4 * 256 * 64 * 8
    assert full.traffic_bytes == window.traffic_bytes


def test_the_head_computes_sequences_not_tokens() -> None:
    head = Gemm(name="head", copies=1, columns=10, rows=4, dtype="bf16", unit=Unit.SEQUENCE)
    assert head.work(Pass(prompts=2, new_tokens=50, decoding=3, context_tokens=1), 1).flops == 2 * 5 * 10 * 4
    assert head.rank_shape(4) == (3, 4)  # the vocabulary is padded


STEPS = st.builds(
    Pass,
    prompts=st.integers(0, 4),
    new_tokens=st.integers(1, 500),
    past_tokens=st.integers(0, 500),
    decoding=st.integers(0, 64),
    context_tokens=st.integers(1, 5000),
)
OPERATORS = (
    Gemm(name="up", copies=1, columns=64, rows=32, dtype="bf16"),
    Gemm(name="down", copies=1, columns=32, rows=64, dtype="fp8", splits_rows=True),
    Attention(name="attention", copies=1, heads=8, kv_heads=8, head_dim=16, kv_dtype="fp8"),
    Pointwise(
        name="act",
        copies=1,
        table="activation",
        reads=128,
        writes=64,
        flops_per_element=2.0,
        is_split=True,
        sizes=(64,),
    ),
    GroupedExperts(name="experts", copies=1, experts=8, per_token=2, hidden=32, intermediate=64, dtype="bf16"),
)


@given(step=STEPS)
def test_ranks_divide_the_arithmetic_and_read_no_more_each(step: Pass) -> None:
    for operator in OPERATORS:
        alone = operator.work(step, 1)
        for parallel in operator.parallel_sizes():
            rank = operator.work(step, parallel)
            assert rank.flops * parallel == pytest.approx(alone.flops)  # rounding
            assert rank.traffic_bytes <= alone.traffic_bytes


@given(step=STEPS)
def test_more_tokens_are_more_work(step: Pass) -> None:
    longer = Pass(
        prompts=step.prompts,
        new_tokens=step.new_tokens + 1,
        past_tokens=step.past_tokens,
        decoding=step.decoding + 1,
        context_tokens=step.context_tokens,
    )
    for operator in OPERATORS:
        assert operator.work(longer, 1).flops > operator.work(step, 1).flops
        assert operator.work(longer, 1).traffic_bytes > operator.work(step, 1).traffic_bytes
