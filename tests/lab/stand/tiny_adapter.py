"""Builds random LoRA adapters of the tiny model, in the form of PEFT: the same bytes on every machine."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from serve_app.local.tiny_model import Shape


def build_adapter(folder: Path, *, seed: int, rank: int = 8, shape: Shape | None = None) -> Path:
    """Write adapter_config.json and adapter_model.safetensors into ``folder``; its weights change every answer."""
    shape = Shape() if shape is None else shape
    rng = np.random.Generator(np.random.PCG64(seed))
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    weights = {}
    for layer in range(shape.layers):
        for name, output in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = rng.standard_normal((rank, shape.hidden), dtype=np.float32) * 0.1
            weights[f"{prefix}.lora_B.weight"] = rng.standard_normal((output, rank), dtype=np.float32) * 0.1
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "target_modules": sorted(outputs), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
