"""The operators in plain torch, and calls of them with their tensors bound."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own short name)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from deployments.operator_profiler.timing import Call

_TOP_P = 0.9
_EPSILON = 1e-5  # of norms
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def rotate_half(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (tokens, heads, head_dim), halves against each other as in Llama and Qwen2."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of query and key."""
    return rotate_half(query, cos, sin), rotate_half(key, cos, sin)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation."""
    return F.silu(gate) * up


def top_p(logits: Tensor) -> Tensor:
    """One token of each row out of the likeliest that hold `_TOP_P`; steps as in vLLM's sampler in plain torch."""
    values, order = logits.sort(dim=-1)
    is_tail = values.softmax(dim=-1).cumsum(dim=-1) <= 1 - _TOP_P
    kept = torch.empty_like(logits).scatter_(-1, order, values.masked_fill(is_tail, -math.inf))
    probabilities = kept.softmax(dim=-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


def compiled(plain: Callable[..., Any]) -> Callable[..., Any] | Exception:
    """The function as one kernel for all sizes, or why there is no compiler."""
    try:
        for name, value in (("recompile_limit", 64), ("fail_on_recompile_limit_hit", True)):
            if hasattr(torch.compiler.config, name):
                setattr(torch.compiler.config, name, value)
        # no pool of worker processes for a few small kernels
        options: dict[str, Any] = {"compile_threads": 1}
        fused: Callable[..., Any] = torch.compile(plain, dynamic=True, fullgraph=True, options=options)
    except Exception as error:  # a missing compiler must not end the run
        return error
    return fused


def bound(function: Callable[..., Any], *tensors: Tensor) -> Call:
    """A call with its tensors."""
    return lambda: function(*tensors)


def product_call(entered: Tensor, weight: Tensor, out: Tensor) -> Call:
    """A linear layer."""
    columns = weight.t()
    return lambda: torch.mm(entered, columns, out=out)


def biased_call(entered: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Call:
    """A linear layer with bias."""
    columns = weight.t()
    return lambda: torch.addmm(bias, entered, columns, out=out)


def scaled_call(entered: Tensor, weight: Tensor, scale: Tensor) -> Call:
    """A linear layer in FP8 with one scale per tensor."""
    columns, whole = weight.t(), F.ScalingType.TensorWise
    return lambda: F.scaled_mm(
        entered, columns, scale, whole, scale, whole, output_dtype=torch.bfloat16, use_fast_accum=True
    )


def residual_norm(entered: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """The norm of a layer's input, which is added to the residual first, in place."""
    return F.rms_norm(residual.add_(entered), weight.shape, weight, _EPSILON)


def head_norm(query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norms of the heads of query and key, as in Qwen3."""
    return (
        F.rms_norm(query, query_weight.shape, query_weight, _EPSILON),
        F.rms_norm(key, key_weight.shape, key_weight, _EPSILON),
    )


def attention_call(query: Tensor, key: Tensor, value: Tensor, backend: str, *, is_causal: bool) -> Call:
    """Attention by one kernel; all tensors are (sequences, heads, tokens, head_dim).

    ``backend``: flash or cudnn. ``is_causal``: the last query sees all keys, each one before it sees one less.
    """
    past = key.shape[2] - query.shape[2]
    mask: Any = None
    if is_causal and past:
        mask = _chunk_mask(query, past) if query.device.type == "cpu" else causal_lower_right(*_sizes(query, key))
    is_square = is_causal and not past

    def attend() -> Tensor:
        with sdpa_kernel(_BACKENDS[backend]):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=is_square, enable_gqa=query.shape[1] != key.shape[1]
            )

    return attend


def _sizes(query: Tensor, key: Tensor) -> tuple[int, int]:
    return int(query.shape[2]), int(key.shape[2])


def _chunk_mask(query: Tensor, past: int) -> Tensor:
    """What each query of a chunk adds to the scores of all keys: nothing, or minus infinity for later keys."""
    new = query.shape[2]
    later = torch.ones(new, past + new, dtype=torch.bool).triu(past + 1)
    return torch.zeros(new, past + new, dtype=query.dtype).masked_fill(later, -math.inf)
