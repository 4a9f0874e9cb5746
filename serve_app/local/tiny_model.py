"""Builds the tiny model: a random Llama with its own tokenizer, the same bytes on every machine.

float32 on purpose: prefilling a random bfloat16 model again can change its greedy token, and tests compare texts.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# The licence's text: a link in a checkout, a file of the wheel.
CORPUS = Path(__file__).with_name("tiny_model_corpus.txt")
# Where the shipped configurations look for the model.
SOURCE = "./models/tiny"
_SEED = 20260101
_VOCAB = 1024
_CONTEXT = 8192
_SPECIAL = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions of a Llama, in its own words."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 704


def build_tiny_model(folder: Path, corpus: Path = CORPUS, shape: Shape = Shape()) -> None:
    """Write config, tokenizer and weights into ``folder``; does nothing if they exist.

    The tokenizer learns its merges from ``corpus``, a few kilobytes; raises ValueError if it is missing or too short.
    """
    if (folder / "model.safetensors").exists():
        return
    try:
        text = corpus.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{corpus}: cannot be read ({error}): install tandem-serve again") from None
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, text)
    _write_config(folder, shape)
    partial = folder / "model.safetensors.partial"
    save_file(_weights(shape), partial, metadata={"format": "pt"})
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


def _write_config(folder: Path, shape: Shape) -> None:
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
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


def _weights(shape: Shape) -> dict[str, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(_SEED))

    def normal(rows: int, columns: int, std: float = 0.06) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)

    ones = np.ones(shape.hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": normal(_VOCAB, shape.hidden, 1.0),
        "lm_head.weight": normal(_VOCAB, shape.hidden, 0.1),
        "model.norm.weight": ones,
    }
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = {
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": normal(*size) for name, size in matrices.items()}
        weights |= {f"{prefix}.{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")}
    return weights


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
