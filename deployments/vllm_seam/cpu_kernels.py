"""The kernels that layers of vLLM's CPU engines call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """Functions by what they compute, with vLLM's own arguments."""

    pack: Callable[..., Any]
    product: Callable[..., Any]
    plan_attention: Callable[..., Any]
    attention: Callable[..., Any]
    rotary: Callable[..., Any]
    silu_mul: Callable[..., Any]


def cpu_kernels() -> CpuKernels:
    """The kernels of the installed vLLM.

    Needs: ``create_onednn_mm``, ``onednn_mm``, ``cpu_attn_get_scheduler_metadata``, ``cpu_attention_with_kv_cache`` and
    ``rotary_embedding`` of ``vllm._custom_ops``; ``torch.ops._C.silu_and_mul``.
    Without it: ``tandem operators profile`` times torch's kernels on a CPU.

    Raises:
        ImportError, AttributeError: vLLM is missing, or has other kernels.
    """
    from vllm import _custom_ops as ops

    return CpuKernels(
        pack=ops.create_onednn_mm,
        product=ops.onednn_mm,
        plan_attention=ops.cpu_attn_get_scheduler_metadata,
        attention=ops.cpu_attention_with_kv_cache,
        rotary=ops.rotary_embedding,
        silu_mul=torch.ops._C.silu_and_mul,
    )
