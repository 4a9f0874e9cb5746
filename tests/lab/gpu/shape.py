"""A model folder with a real model's shape and no weights, for vLLM's ``load_format: dummy``."""

import json
import shutil
from pathlib import Path
from typing import Any

from serve_app.local.tiny_model import build_tiny_model

# Llama-3.1-8B, from its published config.json.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def build_shape(folder: Path, tiny: Path) -> None:
    """Write ``folder``: the shape, and the tiny model's tokenizer with as many entries as the shape has."""
    build_tiny_model(tiny)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    shutil.copy(tiny / "tokenizer_config.json", folder)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"<{token}>": token for token in range(len(vocabulary), LLAMA_8B["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
