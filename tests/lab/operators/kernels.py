"""The operators in plain torch, and calls of them with their tensors bound."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own short name)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.lab.operators.shapes import Point
from tests.lab.operators.timing import Call

_TOP_P = 0.9
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
        from torch._dynamo import config
        from torch._inductor import config as inductor

        inductor.compile_threads = 1  # no pool of worker processes for two small kernels
        for name, value in (("recompile_limit", 64), ("fail_on_recompile_limit_hit", True)):
            if hasattr(config, name):
                setattr(config, name, value)
        fused: Callable[..., Any] = torch.compile(plain, dynamic=True, fullgraph=True)
    except Exception as error:  # a missing compiler must not end the run
        return error
    return fused


def bound(function: Callable[..., Any], *tensors: Tensor) -> Call:
    """A call with its tensors."""
    return lambda: function(*tensors)


def product_call(entered: Tensor, weight: Tensor, out: Tensor) -> Call:
    """A linear layer in bf16."""
    columns = weight.t()
    return lambda: torch.mm(entered, columns, out=out)


def biased_call(entered: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Call:
    """A linear layer with bias."""
    columns = weight.t()
    return lambda: torch.addmm(bias, entered, columns, out=out)


def scaled_call(entered: Tensor, weight: Tensor, scale: Tensor) -> Call:
    """A linear layer in FP8 with one scale per tensor."""
    columns = weight.t()
    return lambda: torch._scaled_mm(
        entered, columns, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def attention_call(point: Point, query: Tensor, key: Tensor, value: Tensor) -> Call:
    """Attention by the kernel that the point names; all tensors are (sequences, heads, tokens, head_dim)."""
    if point.role == "prefill" and point.context:
        # Flash's causal mask is aligned to the last key, as chunked prefill needs; the public function refuses this.
        return lambda: torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
    backend, is_causal = _BACKENDS[point.backend], point.role == "prefill"

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

    return attend
