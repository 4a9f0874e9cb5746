"""Costs of a model's operators, as planners read them."""

import pytest

from autoscale.operators.costs import OperatorCosts, Phase, SourceKind
from autoscale.operators.gpu import GPUS
from autoscale.operators.graph import operator_graph
from autoscale.operators.measured_costs import ModelCosts, OperatorWorkError
from autoscale.operators.tables import OperatorTables
from autoscale.operators.times import OperatorTimes
from tests.autoscale.operators.test_graph import config_of

LLAMA = operator_graph(config_of("llama-3.1-8b"))
TIMES = OperatorTimes(GPUS["H100"], OperatorTables.empty())
PREFILL, DECODE = ModelCosts(LLAMA, TIMES, Phase.PREFILL), ModelCosts(LLAMA, TIMES, Phase.DECODE)


def test_it_is_what_planners_expect() -> None:
    costs: OperatorCosts = PREFILL
    assert costs.names[0] == "embedding"
    assert costs.names[-1] == "sampler"
    assert costs.copies("qkv_proj") == 32


def test_time_is_that_of_all_copies() -> None:
    step_s = DECODE.time_s("qkv_proj", parallel=1, length_tokens=100, batch=4)
    (operator,) = [each for each in LLAMA.operators if each.name == "qkv_proj"]
    assert step_s == 32 * TIMES.time(operator, DECODE._pass(100, 4), 1).seconds
    names_s = [DECODE.time_s(name, parallel=1, length_tokens=100, batch=4) for name in DECODE.names]
    assert DECODE.pass_s(parallel=1, length_tokens=100, batch=4) == sum(names_s)


def test_only_attention_depends_on_the_context() -> None:
    for name in DECODE.names:
        short = DECODE.time_s(name, parallel=1, length_tokens=100, batch=8)
        long = DECODE.time_s(name, parallel=1, length_tokens=8000, batch=8)
        assert (short < long) if name == "attention" else (short == long)


def test_weights_add_up_to_the_model() -> None:
    assert sum(map(PREFILL.weight_bytes, PREFILL.names)) == 2 * 8_030_261_248


def test_attention_holds_the_kv_of_all_layers() -> None:
    # 1,000 tokens of 128 KiB; and of one layer the new tokens' Q, K, V and output.
    kv_bytes = 1000 * 131_072
    activations = 2 * 1000 * (32 + 16 + 32) * 128
    size = {"parallel": 1, "length_tokens": 1000, "batch": 1}
    assert PREFILL.transient_bytes("attention", **size) == kv_bytes + activations
    assert DECODE.transient_bytes("attention", **size) == kv_bytes + activations / 1000
    assert PREFILL.transient_bytes("o_proj", **size) == 2 * 1000 * (4096 + 4096)


def test_copied_kv_heads_are_held_twice() -> None:
    qwen = ModelCosts(operator_graph(config_of("qwen3-30b-a3b")), TIMES, Phase.DECODE)
    four = qwen.transient_bytes("attention", parallel=4, length_tokens=1000, batch=1)
    eight = qwen.transient_bytes("attention", parallel=8, length_tokens=1000, batch=1)
    assert eight - four == 1000 * qwen_kv_bytes()


def qwen_kv_bytes() -> int:
    return 2 * 48 * 4 * 128 * 2


def test_output_is_what_the_next_operator_reads() -> None:
    assert PREFILL.output_bytes("o_proj", length_tokens=100, batch=3) == 2 * 300 * 4096
    assert DECODE.output_bytes("o_proj", length_tokens=100, batch=3) == 2 * 3 * 4096


def test_every_time_says_where_it_comes_from() -> None:
    source = DECODE.source("qkv_proj", parallel=1, length_tokens=100, batch=4)
    assert source.kind is SourceKind.ROOFLINE
    assert "H100" in source.text


def test_decode_leaves_out_the_vision_encoder() -> None:
    graph = operator_graph(config_of("qwen2.5-vl-32b"))
    prompts = ModelCosts(graph, TIMES, Phase.PREFILL, image_tokens=500)
    assert prompts.names[0] == "vision_patch_embedding"
    assert prompts.time_s("vision_qkv_proj", parallel=1, length_tokens=600, batch=1) > 0
    assert not any(name.startswith("vision") for name in ModelCosts(graph, TIMES, Phase.DECODE).names)
    text = ModelCosts(graph, TIMES, Phase.PREFILL)
    assert text.time_s("vision_qkv_proj", parallel=1, length_tokens=600, batch=1) == 0.0


def test_impossible_work_is_named() -> None:
    with pytest.raises(OperatorWorkError, match="no operator is named 'mlp'"):
        PREFILL.copies("mlp")
    with pytest.raises(OperatorWorkError, match="0 sequences of 5 tokens"):
        PREFILL.time_s("qkv_proj", parallel=1, length_tokens=5, batch=0)
    with pytest.raises(OperatorWorkError, match="qkv_proj cannot be divided over 3 GPUs: its shape allows 1, 2, 4, 8"):
        PREFILL.time_s("qkv_proj", parallel=3, length_tokens=5, batch=1)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen2-57b-a14b", "qwen3-30b-a3b"])
def test_experts_dominate_a_sparse_model(name: str) -> None:
    costs = ModelCosts(operator_graph(config_of(name)), TIMES, Phase.DECODE)
    parts = {each: costs.time_s(each, parallel=1, length_tokens=500, batch=8) for each in costs.names}
    assert max(parts, key=lambda each: parts[each]) == "experts"
