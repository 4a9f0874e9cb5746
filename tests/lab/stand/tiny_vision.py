"""Builds a tiny random model that reads images: PaddleOCR-VL, the smallest kind with M-RoPE and without torchvision.

Its text part has the tokenizer of the tiny model. Its vision part sees each patch of 14 x 14 pixels, and four patches
become one token. All weights are random but the same in each build with one version of torch.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from serve_app.local.tiny_model import build_tiny_model

_IMAGE_TOKENS = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>")  # vLLM writes these into a prompt
_TEXT_VOCAB = 1024  # tokens of the tiny model, with ids from 0
_SEED = 20260101  # the number has no meaning
_PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 224 * 224}  # an image has 1 to 64 tokens
_CONTEXT = 4096


def build_tiny_vision(folder: Path) -> None:
    """Write config, tokenizer, processor and weights into ``folder``; does nothing if the folder exists."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as name:
        build = Path(name) / "model"
        build_tiny_model(build)  # for its tokenizer; the weights are replaced
        _add_image_tokens(build)
        _write_json(build / "preprocessor_config.json", _processor_config())
        _write_model(build)
        build.rename(folder)


def _add_image_tokens(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(_IMAGE_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"extra_special_tokens": {"image_token": _IMAGE_TOKENS[-1]}, "processor_class": "PaddleOCRVLProcessor"}
    _write_json(folder / "tokenizer_config.json", config)


def _processor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "processor_class": "PaddleOCRVLProcessor",
        "size": _PIXELS,
        "patch_size": 14,
        "temporal_patch_size": 1,
        "merge_size": 2,
    }


def _write_model(folder: Path) -> None:
    import torch
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    text = {
        "vocab_size": _TEXT_VOCAB + len(_IMAGE_TOKENS),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": _CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    vision = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 224,
    }
    config = PaddleOCRVLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=_TEXT_VOCAB,
        vision_end_token_id=_TEXT_VOCAB + 1,
        image_token_id=_TEXT_VOCAB + 2,
        dtype="float32",
        tie_word_embeddings=False,
    )
    torch.manual_seed(_SEED)
    model: Any = PaddleOCRVLForConditionalGeneration(config)  # type: ignore[no-untyped-call]
    for name, weight in model.named_parameters():
        if weight.dim() > 1:  # larger than transformers' own, so that answers depend on the image
            torch.nn.init.normal_(weight.data, std=1.0 if "embed_tokens" in name else 0.1)
    model.save_pretrained(folder)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
