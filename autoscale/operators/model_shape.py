"""The shape of a decoder, read from the fields of its Hugging Face config.json (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UnknownArchitectureError(ValueError):
    """No operator graph is known for the architecture of a config."""


class ModelConfigError(ValueError):
    """A field of a config is missing, or its value is impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a sparse layer.

    ``per_token``: experts that compute each token. ``intermediate``: width of one expert.
    ``shared_intermediate``: width of the expert that computes every token; 0: there is none.
    ``sparse_layers``: layers that have experts; the others are dense.
    """

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    sparse_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The vision encoder of Qwen2.5-VL: ``merge`` x ``merge`` patches become one token of the decoder."""

    layers: int
    full_attention_layers: int
    hidden: int
    heads: int
    intermediate: int
    output: int
    patch_elements: int
    merge: int
    window_patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What determines the operators of a decoder; numbers are of the whole model, over all GPUs."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norm: bool = False
    ties_embeddings: bool = False
    experts: Experts | None = None
    vision: VisionShape | None = None

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.layers - (self.experts.sparse_layers if self.experts else 0)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


# Architecture -> whether Q, K and V have a bias (None: where the field attention_bias says so, and then O has one too),
# and whether the heads of Q and K are normed. Source: the attention classes of transformers 5 (modeling_llama.py, ...).
_KNOWN: dict[str, tuple[bool | None, bool]] = {
    "LlamaForCausalLM": (None, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen2MoeForCausalLM": (True, False),
    "Qwen3ForCausalLM": (None, True),
    "Qwen3MoeForCausalLM": (None, True),
    "MixtralForCausalLM": (False, False),
    "Qwen2_5_VLForConditionalGeneration": (True, False),
}


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model that a config.json describes.

    Raises:
        UnknownArchitectureError: its architecture has no operator graph here.
        ModelConfigError: a field is missing, is no number, or contradicts another one.
    """
    architecture = _architecture(config)
    fixed_bias, has_head_norm = _KNOWN[architecture]
    # Newer files of Qwen2.5-VL keep the decoder's fields in text_config, older ones beside vision_config.
    nested = config.get("text_config")
    text: Mapping[str, Any] = {**config, **nested} if isinstance(nested, Mapping) else config
    hidden, heads = _number(text, "hidden_size"), _number(text, "num_attention_heads")
    shape = ModelShape(
        architecture=architecture,
        layers=_number(text, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(text, "num_key_value_heads", heads),
        head_dim=_number(text, "head_dim", hidden // heads),
        intermediate=_number(text, "intermediate_size"),
        vocab=_number(text, "vocab_size"),
        has_qkv_bias=bool(text.get("attention_bias", False)) if fixed_bias is None else fixed_bias,
        has_output_bias=bool(text.get("attention_bias", False)) if fixed_bias is None else False,
        has_mlp_bias=bool(text.get("mlp_bias", False)),
        has_head_norm=has_head_norm,
        ties_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        experts=_experts(architecture, text),
        vision=_vision(architecture, config),
    )
    if shape.heads % shape.kv_heads:
        raise ModelConfigError(f"{shape.heads} attention heads cannot share {shape.kv_heads} KV heads evenly")
    return shape


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UnknownArchitectureError(f"the config names no architecture: its field architectures is {names!r}")
    if names[0] not in _KNOWN:
        raise UnknownArchitectureError(f"architecture {names[0]} is not known: operator graphs are for {_listed()}")
    return names[0]


def _listed() -> str:
    return ", ".join(_KNOWN)


def _number(config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """A whole number of a config; the default stands for a missing field and for null."""
    value = config.get(name)
    if value is None:
        if default is None:
            raise ModelConfigError(f"the config has no field {name}")
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelConfigError(f"the config's {name} is {value!r}: expected a whole number of at least {least}")
    return value


def _experts(architecture: str, config: Mapping[str, Any]) -> Experts | None:
    layers = _number(config, "num_hidden_layers")
    if architecture == "MixtralForCausalLM":
        experts = Experts(
            count=_number(config, "num_local_experts"),
            per_token=_number(config, "num_experts_per_tok"),
            intermediate=_number(config, "intermediate_size"),
            shared_intermediate=0,
            sparse_layers=layers,
        )
    elif architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        experts = Experts(
            count=_number(config, "num_experts"),
            per_token=_number(config, "num_experts_per_tok"),
            intermediate=_number(config, "moe_intermediate_size"),
            shared_intermediate=(
                _number(config, "shared_expert_intermediate_size") if architecture.startswith("Qwen2") else 0
            ),
            sparse_layers=_sparse_layers(config, layers),
        )
    else:
        return None
    if experts.per_token > experts.count:
        raise ModelConfigError(
            f"{experts.per_token} experts for each token, but the config has {experts.count} experts"
        )
    return experts if experts.sparse_layers else None


def _sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers with experts: every ``decoder_sparse_step``-th one that is not named in ``mlp_only_layers``."""
    step = _number(config, "decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def _vision(architecture: str, config: Mapping[str, Any]) -> VisionShape | None:
    if architecture != "Qwen2_5_VLForConditionalGeneration":
        return None
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ModelConfigError("the config has no field vision_config")
    layers, patch = _number(vision, "depth"), _number(vision, "patch_size", 14)
    full = vision.get("fullatt_block_indexes", ())
    channels = _number(vision, "in_chans", _number(vision, "in_channels", 3))
    return VisionShape(
        layers=layers,
        full_attention_layers=len(set(full)),
        hidden=_number(vision, "hidden_size"),
        heads=_number(vision, "num_heads"),
        intermediate=_number(vision, "intermediate_size"),
        output=_number(vision, "out_hidden_size"),
        patch_elements=channels * _number(vision, "temporal_patch_size", 2) * patch**2,
        merge=_number(vision, "spatial_merge_size", 2),
        window_patches=(_number(vision, "window_size", 112) // patch) ** 2,
    )
