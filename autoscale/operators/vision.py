"""The operators of the vision encoder of Qwen2.5-VL, which prefill passes through before the decoder (pure).

It is computed in bf16: quantised checkpoints leave it as it is. Source: modeling_qwen2_5_vl.py of transformers 5.
"""

from functools import partial

from autoscale.operators.attention import VisionAttention
from autoscale.operators.collective import Collective
from autoscale.operators.gemm import Gemm
from autoscale.operators.kinds import Operator, Unit
from autoscale.operators.model_shape import ModelShape, VisionShape
from autoscale.operators.pointwise import Pointwise


def vision_operators(shape: ModelShape) -> tuple[Operator, ...]:
    """The encoder's operators in their order; none for a model without one."""
    vision = shape.vision
    if vision is None:
        return ()
    return (
        _linear(vision, "vision_patch_embedding", 1, vision.patch_elements, vision.hidden, has_bias=False, split=False),
        *_block(vision),
        *_merger(vision),
    )


def _linear(
    vision: VisionShape,
    name: str,
    copies: int,
    rows: int,
    columns: int,
    *,
    has_bias: bool = True,
    split: bool = True,
    splits_rows: bool = False,
    merged: bool = False,
) -> Gemm:
    """A linear operator for each patch, or for each merged token."""
    return Gemm(
        name=name,
        copies=copies,
        columns=columns,
        rows=rows,
        dtype="bf16",
        unit=Unit.PATCH,
        merge=1 if merged else vision.merge,
        has_bias=has_bias,
        is_split=split,
        splits_rows=splits_rows,
    )


def _pointwise(vision: VisionShape, name: str, table: str, reads: int, writes: int, weights: int = 0) -> Pointwise:
    is_norm = table == "norm"
    return Pointwise(
        name=name,
        copies=vision.layers,
        table=table,
        reads=reads,
        writes=writes,
        flops_per_element=2.0,
        is_split=not is_norm,
        unit=Unit.PATCH,
        merge=vision.merge,
        weights=weights,
        sizes=() if is_norm else (vision.heads,),
    )


def _attention(vision: VisionShape, name: str, copies: int, window_patches: int | None) -> tuple[Operator, ...]:
    if not copies:
        return ()
    return (
        VisionAttention(
            name=name,
            copies=copies,
            heads=vision.heads,
            head_dim=vision.hidden // vision.heads,
            merge=vision.merge,
            window_patches=window_patches,
        ),
    )


def _block(vision: VisionShape) -> tuple[Operator, ...]:
    hidden, layers, width = vision.hidden, vision.layers, vision.intermediate
    full = vision.full_attention_layers
    all_reduce = partial(Collective, copies=layers, elements=hidden, unit=Unit.PATCH, merge=vision.merge)
    return (
        _pointwise(vision, "vision_attention_norm", "norm", 2 * hidden, 2 * hidden, hidden),
        _linear(vision, "vision_qkv_proj", layers, hidden, 3 * hidden),
        _pointwise(vision, "vision_rotary", "rotary", 2 * hidden, 2 * hidden),
        *_attention(vision, "vision_window_attention", layers - full, vision.window_patches),
        *_attention(vision, "vision_full_attention", full, None),
        _linear(vision, "vision_o_proj", layers, hidden, hidden, splits_rows=True),
        all_reduce(name="vision_attention_all_reduce"),
        _pointwise(vision, "vision_mlp_norm", "norm", 2 * hidden, 2 * hidden, hidden),
        _linear(vision, "vision_gate_up_proj", layers, hidden, 2 * width),
        _pointwise(vision, "vision_activation", "activation", 2 * width, width),
        _linear(vision, "vision_down_proj", layers, width, hidden, splits_rows=True),
        all_reduce(name="vision_mlp_all_reduce"),
    )


def _merger(vision: VisionShape) -> tuple[Operator, ...]:
    """Joins merge x merge patches to one token of the decoder, by two linear operators with a GELU between them."""
    joined = vision.hidden * vision.merge**2
    norm = Pointwise(
        name="vision_merger_norm",
        copies=1,
        table="norm",
        reads=vision.hidden,
        writes=vision.hidden,
        flops_per_element=2.0,
        is_split=False,
        unit=Unit.PATCH,
        merge=vision.merge,
        weights=vision.hidden,
    )
    return (
        norm,
        _linear(vision, "vision_merger_up", 1, joined, joined, merged=True),
        _linear(vision, "vision_merger_down", 1, joined, vision.output, splits_rows=True, merged=True),
        Collective(name="vision_merger_all_reduce", copies=1, elements=vision.output, unit=Unit.PATCH),
    )
