"""The same calls by the kernels that vLLM's CPU engines run: products with packed weights, attention of paged KV."""

import math
from typing import Any

import torch
from torch import Tensor

from deployments.operator_profiler.tensors import Tensors
from deployments.operator_profiler.timing import Call

_BLOCK_TOKENS = 32  # of the KV cache; vLLM's kernel for x86 wants a multiple of it
_PRIMITIVES = 32  # shapes that a product keeps code for, as vLLM's own layers ask
_POSITIONS = 4096


def vllm_reason() -> str | None:
    """Why vLLM's kernels of a CPU cannot be used here; None: they can."""
    try:
        tensors = VllmTensors("cpu", rotation_bytes=0, kv_limit_bytes=2**20, dtype="fp32")
        for call in (*tensors.product(2, 32, 32, "fp32"), *tensors.attention(1, 1, 4, (2, 1, 32), "", is_causal=True)):
            call()
    except Exception as error:  # vLLM is missing, is built for GPUs, or has other kernels in this version
        return f"{type(error).__name__}: {error}"[:200]
    return None


class VllmTensors(Tensors):
    """Calls of vLLM's kernels. The others stay torch's: norms too, which vLLM's CPU engines leave to torch."""

    def __init__(self, device: str, *, rotation_bytes: int, kv_limit_bytes: int, dtype: str) -> None:
        super().__init__(device, rotation_bytes=rotation_bytes, kv_limit_bytes=kv_limit_bytes, dtype=dtype)
        from deployments.vllm_seam.cpu_kernels import cpu_kernels

        self._kernels = cpu_kernels()
        self._packed: tuple[object, list[Any]] = (None, [])

    def drop(self) -> None:
        """Let go of all tensors."""
        self._packed = (None, [])
        super().drop()

    def product(self, m: int, n: int, k: int, dtype: str, *, has_bias: bool = False) -> list[Call]:
        """A linear layer whose weights oneDNN has packed."""
        key = (n, k, dtype)
        if self._packed[0] != key:
            self._packed = (None, [])
            weights = self._weight_copies(n, k, dtype)
            self._packed = (key, [self._kernels.pack(each.t(), _PRIMITIVES) for each in weights])
        entered, bias = self._randn(m, k), self._randn(n) if has_bias else None
        return [_bound(self._kernels.product, packed, entered, bias) for packed in self._packed[1]]

    def attention(
        self, batch: int, new: int, total: int, heads: tuple[int, int, int], backend: str, *, is_causal: bool
    ) -> list[Call]:
        """Attention of paged KV, as ``Tensors.attention``; KV is written before, which is not part of the time."""
        query_heads, kv_heads, head_dim = heads
        blocks = math.ceil(total / _BLOCK_TOKENS)
        elements = batch * blocks * _BLOCK_TOKENS * kv_heads * head_dim
        query = self._randn(batch * new, query_heads, head_dim)
        copies = 1 if is_causal and new == total else self._copies(2 * elements * query.element_size())
        self._kv_pool(copies * elements)
        caches = self._kv.view(-1)[: 2 * copies * elements]
        caches = caches.view(copies, batch * blocks, kv_heads, 2 * _BLOCK_TOKENS, head_dim)
        starts = torch.arange(batch + 1, dtype=torch.int32) * new
        lengths = torch.full((batch,), total, dtype=torch.int32)
        table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
        plan = self._kernels.plan_attention(
            num_reqs=batch,
            num_heads=query_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            seq_lens=lengths,
            dtype=self._dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa="vec" if head_dim % 32 == 0 else "vec16",
            enable_kv_split=True,
        )
        out, scale = torch.empty_like(query), head_dim**-0.5

        def attend(cache: Tensor) -> Call:
            key, value = cache.chunk(2, dim=2)
            places = (query, key, value, out, starts, lengths, scale, True, None, -1, table, 0.0, plan, None)
            return lambda: self._kernels.attention(*places)

        return [attend(cache) for cache in caches]

    def rope(self, rows: int, heads: tuple[int, int, int], backend: str) -> list[Call]:
        """The rotary embedding of query and key, in place."""
        query_heads, kv_heads, head_dim = heads
        qkv = self._randn(rows, (query_heads + 2 * kv_heads) * head_dim)
        end = query_heads * head_dim
        query, key = qkv[:, :end], qkv[:, end : end + kv_heads * head_dim]
        angles = self._randn(_POSITIONS, head_dim)
        positions = torch.arange(rows) % _POSITIONS
        return [_bound(self._kernels.rotary, positions, query, key, head_dim, angles, True)]

    def silu_mul(self, rows: int, width: int, backend: str) -> list[Call]:
        """The gated activation of ``width`` outputs."""
        both, out = self._randn(rows, 2 * width), self._randn(rows, width)
        return [_bound(self._kernels.silu_mul, out, both)]


def _bound(function: Any, *arguments: Any) -> Call:
    """A call with its arguments."""
    return lambda: function(*arguments)
