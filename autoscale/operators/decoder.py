"""The operators of a decoder, from its shape: embedding, one class for all layers, and the head (pure)."""

from autoscale.operators.attention import Attention
from autoscale.operators.collective import Collective
from autoscale.operators.experts import GroupedExperts
from autoscale.operators.gemm import Gemm
from autoscale.operators.kinds import Operator, Unit, wide_dtype
from autoscale.operators.model_shape import Experts, ModelShape
from autoscale.operators.pointwise import Pointwise

# Bytes of one logit: samplers read float32.
_LOGIT_BYTES = 4.0


def decoder_operators(shape: ModelShape, dtype: str, kv_dtype: str) -> tuple[Operator, ...]:
    """All operators in the order of one pass; ``dtype``: of the weights of linear operators."""
    return (
        *_embedding(shape),
        *_attention_block(shape, dtype, kv_dtype),
        *_mlp(shape, dtype),
        *_expert_block(shape, dtype),
        *_head(shape, wide_dtype(dtype)),
    )


def _embedding(shape: ModelShape) -> tuple[Operator, ...]:
    hidden = shape.hidden
    return (
        Pointwise(
            name="embedding",
            copies=1,
            table="embedding",
            reads=hidden,
            writes=hidden,
            flops_per_element=0.0,
            is_split=False,
            weights=shape.vocab * hidden,
        ),
        # Ranks hold parts of the vocabulary, and add up what they found.
        Collective(name="embedding_all_reduce", copies=1, elements=hidden),
    )


def _norm(name: str, copies: int, hidden: int) -> Pointwise:
    # Input and residual are read, both are written.
    return Pointwise(
        name=name,
        copies=copies,
        table="norm",
        reads=2 * hidden,
        writes=2 * hidden,
        flops_per_element=2.0,
        is_split=False,
        weights=hidden,
    )


def _attention_block(shape: ModelShape, dtype: str, kv_dtype: str) -> tuple[Operator, ...]:
    layers, hidden, head_dim = shape.layers, shape.hidden, shape.head_dim
    columns, rotated = shape.heads * head_dim, (shape.heads + shape.kv_heads) * head_dim
    head_norm = Pointwise(
        name="qk_norm",
        copies=layers,
        table="qk_norm",
        reads=rotated,
        writes=rotated,
        flops_per_element=2.0,
        is_split=True,
        weights=2 * head_dim,
        sizes=(shape.heads,),
    )
    rotary = Pointwise(
        name="rotary",
        copies=layers,
        table="rotary",
        reads=rotated,
        writes=rotated,
        flops_per_element=1.5,
        is_split=True,
        sizes=(shape.heads,),
    )
    return (
        _norm("input_norm", layers, hidden),
        Gemm(
            name="qkv_proj",
            copies=layers,
            columns=columns,
            rows=hidden,
            kv_heads=shape.kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            has_bias=shape.has_qkv_bias,
        ),
        *((head_norm,) if shape.has_head_norm else ()),
        rotary,
        Attention(
            name="attention",
            copies=layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=head_dim,
            kv_dtype=kv_dtype,
        ),
        Gemm(
            name="o_proj",
            copies=layers,
            columns=hidden,
            rows=columns,
            splits_rows=True,
            dtype=dtype,
            has_bias=shape.has_output_bias,
        ),
        Collective(name="attention_all_reduce", copies=layers, elements=hidden),
        _norm("mlp_norm", layers, hidden),
    )


def _dense(prefix: str, copies: int, hidden: int, width: int, dtype: str, has_bias: bool) -> tuple[Operator, ...]:
    """Gate and up as one operator, their activation, and down."""
    return (
        Gemm(
            name=f"{prefix}gate_up_proj",
            copies=copies,
            columns=2 * width,
            rows=hidden,
            dtype=dtype,
            has_bias=has_bias,
        ),
        Pointwise(
            name=f"{prefix}activation",
            copies=copies,
            table="activation",
            reads=2 * width,
            writes=width,
            flops_per_element=2.0,
            is_split=True,
            sizes=(width,),
        ),
        Gemm(
            name=f"{prefix}down_proj",
            copies=copies,
            columns=hidden,
            rows=width,
            splits_rows=True,
            dtype=dtype,
            has_bias=has_bias,
        ),
    )


def _mlp(shape: ModelShape, dtype: str) -> tuple[Operator, ...]:
    """The MLP of dense layers."""
    copies, hidden = shape.dense_layers, shape.hidden
    if not copies:
        return ()
    return (
        *_dense("", copies, hidden, shape.intermediate, dtype, shape.has_mlp_bias),
        Collective(name="mlp_all_reduce", copies=copies, elements=hidden),
    )


def _expert_block(shape: ModelShape, dtype: str) -> tuple[Operator, ...]:
    """Router, choice of experts, experts and the shared expert of sparse layers."""
    experts = shape.experts
    if experts is None:
        return ()
    copies, hidden = experts.sparse_layers, shape.hidden
    return (
        Gemm(name="router", copies=copies, columns=experts.count, rows=hidden, dtype=wide_dtype(dtype), is_split=False),
        Pointwise(
            name="expert_choice",
            copies=copies,
            table="expert_choice",
            reads=experts.count,
            writes=2 * experts.per_token,
            flops_per_element=4.0,
            is_split=False,
        ),
        GroupedExperts(
            name="experts",
            copies=copies,
            experts=experts.count,
            per_token=experts.per_token,
            hidden=hidden,
            intermediate=experts.intermediate,
            dtype=dtype,
        ),
        *_shared_expert(experts, hidden, dtype),
        Collective(name="experts_all_reduce", copies=copies, elements=hidden),
    )


def _shared_expert(experts: Experts, hidden: int, dtype: str) -> tuple[Operator, ...]:
    width, copies = experts.shared_intermediate, experts.sparse_layers
    if not width:
        return ()
    gate = Gemm(name="shared_gate", copies=copies, columns=1, rows=hidden, dtype=wide_dtype(dtype), is_split=False)
    return (*_dense("shared_", copies, hidden, width, dtype, False), gate)


def _head(shape: ModelShape, dtype: str) -> tuple[Operator, ...]:
    hidden, vocab = shape.hidden, shape.vocab
    # A tied head reads the weights of the embedding, which hold them.
    head: Operator = Gemm(
        name="lm_head",
        copies=1,
        columns=vocab,
        rows=hidden,
        dtype=dtype,
        unit=Unit.SEQUENCE,
        is_tied=shape.ties_embeddings,
    )
    return (
        _norm("final_norm", 1, hidden),
        head,
        Collective(name="logits_all_gather", copies=1, elements=vocab, adds=False, unit=Unit.SEQUENCE),
        Pointwise(
            name="sampler",
            copies=1,
            table="sampler",
            reads=vocab,
            writes=1,
            flops_per_element=4.0,
            is_split=False,
            unit=Unit.SEQUENCE,
            element_bytes=_LOGIT_BYTES,
        ),
    )
