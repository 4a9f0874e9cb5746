"""Operators of known models: their parameters, their shapes, and configs that cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from autoscale.operators.attention import Attention
from autoscale.operators.gemm import Gemm
from autoscale.operators.graph import OperatorGraph, OperatorPrecision, operator_graph
from autoscale.operators.kinds import Pass
from autoscale.operators.model_shape import ModelConfigError, UnknownArchitectureError

MODELS = Path(__file__).parents[3] / "configs" / "operators" / "models"

# Published parameters, billions, from the models' cards and safetensors indexes.
PARAMETERS_BILLION = {
    "llama-3-8b": 8.030,
    "llama-3.1-8b": 8.030,
    "llama-3.1-70b": 70.554,
    "qwen2-0.5b": 0.494,
    "qwen2-1.5b": 1.544,
    "qwen2-7b": 7.616,
    "qwen2-72b": 72.706,
    "qwen2-57b-a14b": 57.409,
    "qwen2.5-vl-32b": 33.453,
    "qwen3-30b-a3b": 30.532,
    "qwen3-32b": 32.762,
    "mixtral-8x7b": 46.703,
}


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return config


def graph_of(name: str, precision: OperatorPrecision | None = None) -> OperatorGraph:
    return operator_graph(config_of(name), precision)


def gemm(graph: OperatorGraph, name: str) -> Gemm:
    (found,) = [each for each in graph.operators if each.name == name]
    assert isinstance(found, Gemm)
    return found


def test_all_shipped_models_have_a_known_size() -> None:
    assert {path.stem for path in MODELS.glob("*.json")} == set(PARAMETERS_BILLION)


@pytest.mark.parametrize("name", sorted(PARAMETERS_BILLION))
def test_parameters_are_those_of_the_published_model(name: str) -> None:
    # The published figures have three decimals.
    assert graph_of(name).weights / 1e9 == pytest.approx(PARAMETERS_BILLION[name], abs=6e-4)


def test_llama_8b_has_exactly_its_parameters() -> None:
    assert graph_of("llama-3.1-8b").weights == 8_030_261_248


def test_norms_of_heads_are_counted() -> None:
    # As the safetensors index of Qwen3-32B says.
    assert graph_of("qwen3-32b").weights == 32_762_123_264


def test_names_are_unique_in_every_model() -> None:
    for name in PARAMETERS_BILLION:
        names = [each.name for each in graph_of(name).operators]
        assert len(names) == len(set(names))


def test_a_70b_layer_has_the_products_that_its_tables_name() -> None:
    graph = graph_of("llama-3.1-70b")
    # The README of the measured products names these (n, k) for tensor parallel size t.
    for t in (1, 2, 4, 8):
        assert gemm(graph, "qkv_proj").rank_shape(t) == (10240 // t, 8192)
        assert gemm(graph, "o_proj").rank_shape(t) == (8192, 8192 // t)
        assert gemm(graph, "gate_up_proj").rank_shape(t) == (57344 // t, 8192)
        assert gemm(graph, "down_proj").rank_shape(t) == (8192, 28672 // t)


def test_few_kv_heads_are_copied_to_more_ranks() -> None:
    graph = graph_of("qwen3-30b-a3b")  # 32 heads, 4 KV heads
    assert gemm(graph, "qkv_proj").rank_shape(8) == ((4 + 2) * 128, 2048)
    (attention,) = [each for each in graph.operators if isinstance(each, Attention)]
    assert attention.rank_heads(8) == (4, 1)


def test_heads_may_be_wider_than_hidden_divided_by_heads() -> None:
    graph = graph_of("qwen3-32b")  # 64 heads of 128, hidden 5,120
    assert gemm(graph, "qkv_proj").rank_shape(1) == ((64 + 16) * 128, 5120)
    assert gemm(graph, "o_proj").rank_shape(1) == (5120, 8192)


def test_only_sizes_that_divide_all_shapes_are_allowed() -> None:
    assert graph_of("qwen2-7b").parallel_sizes() == (1, 2, 4)  # 28 heads
    assert graph_of("llama-3.1-70b").parallel_sizes() == (1, 2, 4, 8)
    assert graph_of("qwen2-0.5b").parallel_sizes() == (1, 2)  # 14 heads


def test_fp8_halves_linear_weights_but_no_embeddings() -> None:
    wide = graph_of("llama-3.1-70b")
    narrow = graph_of("llama-3.1-70b", OperatorPrecision(weights="fp8", kv="fp8"))
    embeddings = 2 * 128256 * 8192
    norms = (2 * 80 + 1) * 8192
    assert wide.weight_bytes == 2.0 * wide.weights
    assert narrow.weight_bytes == narrow.weights + embeddings + norms
    assert narrow.weights == wide.weights
    assert wide.kv_bytes_per_token == 2 * narrow.kv_bytes_per_token == 327_680


def test_layers_without_experts_are_dense() -> None:
    config = config_of("qwen3-30b-a3b")
    copies = {each.name: each.copies for each in operator_graph(config).operators}
    assert copies["experts"] == copies["attention"] == 48
    assert "gate_up_proj" not in copies
    # Every second layer has experts, layers 1, 3, ...; of these, 1 and 3 are dense too.
    mixed = operator_graph(config | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 3, 4]})
    copies = {each.name: each.copies for each in mixed.operators}
    assert (copies["experts"], copies["gate_up_proj"]) == (22, 26)


def test_flops_of_a_prompt_are_twice_the_weights_that_compute_it() -> None:
    graph = graph_of("llama-3.1-8b")
    prompt = Pass(prompts=1, new_tokens=100)
    layers = [each for each in graph.operators if isinstance(each, Gemm) and each.name != "lm_head"]
    flops = sum(each.work(prompt, 1).flops * each.copies for each in layers)
    assert flops == 2 * 100 * sum(each.weights * each.copies for each in layers)
    # The head computes the last token of each prompt only.
    assert gemm(graph, "lm_head").work(prompt, 1).flops == 2 * 128256 * 4096


def test_an_image_passes_the_encoder_once_for_four_patches_a_token() -> None:
    graph = graph_of("qwen2.5-vl-32b")
    prompt = Pass(prompts=2, new_tokens=600, image_tokens=500)
    assert gemm(graph, "vision_qkv_proj").work(prompt, 1).flops == 2 * (2 * 500 * 4) * 3840 * 1280
    assert gemm(graph, "vision_merger_down").work(prompt, 1).flops == 2 * (2 * 500) * 5120 * 5120
    assert gemm(graph, "vision_qkv_proj").work(Pass(decoding=3, context_tokens=9), 1).flops == 0


def test_an_unknown_architecture_is_named_with_those_known() -> None:
    with pytest.raises(UnknownArchitectureError, match=r"GPT2LMHeadModel is not known: .*LlamaForCausalLM"):
        operator_graph({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(UnknownArchitectureError, match="names no architecture"):
        operator_graph({"hidden_size": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "no field hidden_size"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5"),
        ({"num_key_value_heads": 5}, "32 attention heads cannot share 5 KV heads"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        operator_graph(config_of("llama-3.1-8b") | change)


def test_an_unknown_data_type_is_named() -> None:
    with pytest.raises(ModelConfigError, match="'int4' is not known: give one of bf16, fp8"):
        OperatorPrecision(weights="int4")


def test_more_chosen_experts_than_there_are_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="9 experts for each token, but the config has 8"):
        operator_graph(config_of("mixtral-8x7b") | {"num_experts_per_tok": 9})
