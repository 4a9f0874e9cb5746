"""Builds the tiny model: a random Llama with its own tokenizer, the same bytes on every machine.

Its type is float32: if a random bfloat16 model computes a prompt twice, the greedy token can differ, and tests compare
texts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# The text that the tokenizer is trained on, the project's licence. In a checkout it is a link, in the wheel a file.
CORPUS = Path(__file__).with_name("tiny_model_corpus.txt")
# Folder where the shipped configurations look for the model, relative to the working directory.
SOURCE = "./models/tiny"
# Seed of the weights. The number has no meaning, but another one changes every text that tests quote.
_SEED = 20260101
# Tokens of the vocabulary: few, so that the embedding stays small, and no more than the corpus yields.
_VOCAB = 1024
# Longest prompt and answer together, tokens; the examples use up to 4,096.
_CONTEXT = 8192
# Special tokens, with ids from 0: begin and end of a text, two for the chat template, two for a reasoning parser.
_SPECIAL = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# A ChatML template, in Jinja.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Name of the weights' file. It is written last: a folder with this file has a whole model.
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions of a Llama; the names in its config.json are in ``_write_config``."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 704


def build_tiny_model(folder: Path, corpus: Path = CORPUS, shape: Shape = Shape()) -> None:
    """Write config, tokenizer and weights into ``folder``; does nothing if the weights exist.

    ``corpus``: text of a few kilobytes that the tokenizer learns its merges from. Several processes may build into one
    folder at the same time.

    Raises:
        ValueError: the corpus cannot be read or is too short.
    """
    if (folder / _WEIGHTS).exists():
        return
    try:
        text = corpus.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{corpus}: cannot be read ({error}): install tandem-serve again") from None
    folder.mkdir(parents=True, exist_ok=True)
    # Each process builds in a folder of its own and then moves whole files: another process may already read the model.
    with TemporaryDirectory(dir=folder, prefix=".build-") as name:
        build = Path(name)
        _write_tokenizer(build, text)
        _write_config(build, shape)
        save_file(_weights(shape), build / _WEIGHTS, metadata={"format": "pt"})
        others = [path for path in build.iterdir() if path.name != _WEIGHTS]
        for path in (*others, build / _WEIGHTS):
            path.replace(folder / path.name)


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
    # The model can emit every id of its vocabulary, and an id that the tokenizer lacks would have no text.
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
    """Random weights by their names in a Llama's file.

    The order of the draws is part of the model: another order makes other weights.
    """
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
