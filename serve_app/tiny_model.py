"""Builds the tiny model: a random Llama with its own tokenizer, the same bytes on every machine.

float32 on purpose: prefilling a random bfloat16 model again can change its greedy token, and tests compare texts.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_SEED = 20260101
_VOCAB = 1024
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _FFN = 256, 4, 4, 2, 64, 704
_CONTEXT = 8192
_SPECIAL = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_model(folder: Path, corpus: Path) -> None:
    """Write config, tokenizer and weights into ``folder``; does nothing where they already are.

    Args:
        folder: where the model goes.
        corpus: a text of a few kilobytes that the tokenizer's merges are learnt from.
    """
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, corpus.read_text())
    _write_config(folder)
    partial = folder / "model.safetensors.partial"
    save_file(_weights(), partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")


def _write_tokenizer(folder: Path, text: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    # Every id that the model can emit has to be text.
    if tokenizer.get_vocab_size() != _VOCAB:
        raise ValueError(
            f"the corpus yields {tokenizer.get_vocab_size()} tokens, the model has {_VOCAB}: use a longer text"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[0],
            "eos_token": _SPECIAL[1],
            "model_max_length": _CONTEXT,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _write_config(folder: Path) -> None:
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": _HIDDEN,
            "intermediate_size": _FFN,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "head_dim": _HEAD_DIM,
            "vocab_size": _VOCAB,
            "max_position_embeddings": _CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "dtype": "float32",
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    )
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(_SEED))

    def normal(rows: int, columns: int, std: float = 0.06) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)

    ones = np.ones(_HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": normal(_VOCAB, _HIDDEN, 1.0),
        "lm_head.weight": normal(_VOCAB, _HIDDEN, 0.1),
        "model.norm.weight": ones,
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": normal(_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.k_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.v_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.o_proj.weight": normal(_HIDDEN, _HEADS * _HEAD_DIM),
            prefix + "mlp.gate_proj.weight": normal(_FFN, _HIDDEN),
            prefix + "mlp.up_proj.weight": normal(_FFN, _HIDDEN),
            prefix + "mlp.down_proj.weight": normal(_HIDDEN, _FFN),
            prefix + "input_layernorm.weight": ones,
            prefix + "post_attention_layernorm.weight": ones,
        }
    return weights


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
