"""The tiny model: the same bytes everywhere, and text for every id that it can emit."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from serve_app.local import tiny_model
from serve_app.local.tiny_model import build_tiny_model

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}

BUILD_ELSEWHERE = """
import hashlib, json, sys
from pathlib import Path
from serve_app.local.tiny_model import build_tiny_model
folder = Path(sys.argv[1])
build_tiny_model(folder)
print(json.dumps({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.iterdir() if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def config(model: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((model / "config.json").read_text())
    return loaded


def test_another_process_and_folder_give_the_same_bytes(
    model: Path, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    mine = digests(model)
    assert set(mine) == FILES
    assert run_python(BUILD_ELSEWHERE, str(tmp_path / "deep" / "er")) == mine


def test_weights_and_tokenizer_are_the_same_on_every_machine(model: Path) -> None:
    mine = digests(model)
    assert mine["model.safetensors"] == "413c8b463b050caa0dcf15c7096f9760abbb2faa4b7f42e6fbd2dda49d6254b3"
    assert mine["tokenizer.json"] == "813c09d3ed596ee498fd8bbb71cda6f204672279a9101602c8c9248b4775c7b5"


def test_every_id_that_the_model_can_emit_is_text(model: Path, tokenizer: Tokenizer) -> None:
    size = config(model)["vocab_size"]
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    assert [token for token in range(size) if not tokenizer.decode([token], skip_special_tokens=False)] == []


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    text = "Größe, 漢字, 🙂\n\t  two spaces\x00"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_prompts_of_the_load_generator_hold_no_special_token(tokenizer: Tokenizer) -> None:
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    assert special == set(range(6))
    assert tokenizer.get_vocab_size() >= 1000


def test_config_is_a_full_attention_llama_in_float32_with_room_for_the_examples(model: Path) -> None:
    got = config(model)
    assert (got["architectures"], got["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert got["max_position_embeddings"] >= 4096
    assert not {"sliding_window", "layer_types", "rope_scaling", "attention_chunk_size"} & set(got)


def test_end_of_text_is_the_same_token_for_model_generation_and_tokenizer(model: Path, tokenizer: Tokenizer) -> None:
    names = json.loads((model / "tokenizer_config.json").read_text())
    generation = json.loads((model / "generation_config.json").read_text())
    for key in ("bos", "eos"):
        ids = {config(model)[f"{key}_token_id"], generation[f"{key}_token_id"]}
        assert ids == {tokenizer.token_to_id(names[f"{key}_token"])}


def test_weights_have_the_shapes_of_the_config_and_are_finite_float32(model: Path) -> None:
    got, weights = config(model), load_file(model / "model.safetensors")
    hidden, heads, head_dim = got["hidden_size"], got["num_attention_heads"], got["head_dim"]
    keys = got["num_key_value_heads"] * head_dim
    layer = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (got["intermediate_size"], hidden),
        "mlp.up_proj": (got["intermediate_size"], hidden),
        "mlp.down_proj": (hidden, got["intermediate_size"]),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    expected = {
        "model.embed_tokens.weight": (got["vocab_size"], hidden),
        "lm_head.weight": (got["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    } | {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(got["num_hidden_layers"])
        for name, shape in layer.items()
    }
    assert {name: tensor.shape for name, tensor in weights.items()} == expected
    assert {tensor.dtype for tensor in weights.values()} == {np.dtype(np.float32)}
    assert all(np.isfinite(tensor).all() for tensor in weights.values())


def test_an_existing_model_is_left_alone_and_half_a_build_is_replaced(tmp_path: Path, root: Path, model: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    for folder in (whole, half):
        folder.mkdir()
    (whole / "model.safetensors").write_text("somebody's own")
    (half / ".build-x").mkdir()
    (half / ".build-x" / "model.safetensors").write_text("the power went")
    (half / "tokenizer.json").write_text("{}")
    build_tiny_model(whole)
    build_tiny_model(half)
    assert [path.read_text() for path in whole.iterdir()] == ["somebody's own"]
    assert digests(half) == digests(model)


def test_two_builds_at_a_time_end_with_one_whole_model(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two lanes of the engine tests, or two `tandem serve`, may begin in the same checkout.
    folder, real, is_inner = tmp_path / "tiny", tiny_model.save_file, []

    def save(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        if not is_inner:
            is_inner.append(True)
            build_tiny_model(folder)  # the other process begins and ends meanwhile

    monkeypatch.setattr(tiny_model, "save_file", save)
    build_tiny_model(folder)
    assert is_inner and digests(folder) == digests(model)


def test_text_too_short_for_the_vocabulary_is_refused_and_leaves_no_model(tmp_path: Path) -> None:
    corpus = tmp_path / "short.txt"
    corpus.write_text("two words")
    with pytest.raises(ValueError, match=r"yields \d+ tokens, the model has 1024: use a longer text"):
        build_tiny_model(tmp_path / "tiny", corpus)
    assert not list(tmp_path.glob("tiny/*"))
