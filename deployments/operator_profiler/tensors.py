"""Calls of operators with random tensors, so that weights and KV come from memory as in a real model."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own short name)
from torch import Tensor

from deployments.operator_profiler.kernels import (
    attention_call,
    biased_call,
    bound,
    compiled,
    head_norm,
    product_call,
    residual_norm,
    rope,
    scaled_call,
    silu_mul,
    top_p,
)
from deployments.operator_profiler.timing import MAX_CALLS, Call

# Cached memory that is given back before a point, in bytes: graphs leave their pools behind.
_IDLE_CACHE_BYTES = 8 * 2**30
# Random numbers that are drawn; larger tensors repeat them.
_DRAWN = 2**24
_WIDE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}


class Tensors:
    """Random tensors of one device, kept between calls of the same operator.

    Args:
        device: cpu or cuda.
        rotation_bytes: Least size of the weights, or of the KV, that calls use in turns: caches must not hold it.
        kv_limit_bytes: Most memory of the KV that is kept between calls.
        dtype: bf16 or fp32, of everything but FP8 products and logits.
    """

    def __init__(self, device: str, *, rotation_bytes: int, kv_limit_bytes: int, dtype: str = "bf16") -> None:
        self._device, self.rotation_bytes, self._kv_limit_bytes = device, rotation_bytes, kv_limit_bytes
        self._dtype = _WIDE[dtype]
        self._weights: tuple[object, list[Tensor]] = (None, [])
        self._kv = torch.empty(0)
        self._compiled: dict[str, Callable[..., Any] | Exception] = {}

    def drop(self) -> None:
        """Let go of all tensors."""
        self._weights, self._kv = (None, []), torch.empty(0)
        if self._device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def give_back(self) -> None:
        """Give cached memory back where it is much."""
        if self._device != "cpu":
            idle_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            if idle_bytes > _IDLE_CACHE_BYTES:
                torch.cuda.empty_cache()

    def product(self, m: int, n: int, k: int, dtype: str, *, has_bias: bool = False) -> list[Call]:
        """A linear layer of k inputs and n outputs on m rows; FP8 writes bf16."""
        weights = self._weight_copies(n, k, dtype)
        entered = self._randn(m, k)
        if dtype == "fp8":
            narrow, scale = entered.to(torch.float8_e4m3fn), torch.ones((), device=self._device)
            return [scaled_call(narrow, weight, scale) for weight in weights]
        out = torch.empty(m, n, device=self._device, dtype=self._dtype)
        if has_bias:
            bias = self._randn(n)
            return [biased_call(entered, weight, bias, out) for weight in weights]
        return [product_call(entered, weight, out) for weight in weights]

    def attention(
        self, batch: int, new: int, total: int, heads: tuple[int, int, int], backend: str, *, is_causal: bool
    ) -> list[Call]:
        """Attention of ``batch`` sequences of ``total`` tokens, the last ``new`` of which are queries.

        ``heads``: query heads, KV heads, elements of a head.
        """
        query_heads, kv_heads, head_dim = heads
        query = self._randn(batch, new, query_heads, head_dim).transpose(1, 2)
        elements = batch * total * kv_heads * head_dim
        # K and V of a whole prompt were written just before; those of earlier tokens come from memory.
        copies = 1 if is_causal and new == total else self._copies(2 * elements * query.element_size())
        keys, values = self._kv_pool(copies * elements)
        shape = (batch, total, kv_heads, head_dim)
        calls = []
        for index in range(copies):
            part = slice(index * elements, (index + 1) * elements)
            key, value = (pool[part].view(shape).transpose(1, 2) for pool in (keys, values))
            ready = (query, key, value) if self._device != "cpu" else _without_groups(query, key, value)
            calls.append(attention_call(*ready, backend, is_causal=is_causal))
        return calls

    def reserve_kv(self, elements: int) -> None:
        """Take KV of this many elements at once, so that it need not grow between points."""
        with suppress(torch.OutOfMemoryError):  # then it grows, and the largest points fail
            self._kv_pool(elements)

    def embedding(self, rows: int, vocab: int, hidden: int) -> list[Call]:
        """Rows of a table of the vocabulary."""
        key = ("embedding", vocab, hidden)
        if self._weights[0] != key:
            self._weights = (None, [])  # free the old ones first
            self._weights = (key, [self._repeated(vocab, hidden)])
        table = self._weights[1][0]
        copies = self._copies(table.element_size() * rows * hidden)
        ids = torch.randint(0, vocab, (copies, rows), device=self._device)
        return [bound(F.embedding, each, table) for each in ids]

    def norm(self, rows: int, hidden: int) -> list[Call]:
        """A norm alone."""
        entered, weight = self._randn(rows, hidden), self._randn(hidden)
        return [lambda: F.rms_norm(entered, (hidden,), weight, 1e-5)]

    def residual_norm(self, rows: int, hidden: int, backend: str) -> list[Call]:
        """The residual's addition and a norm."""
        entered, residual, weight = self._randn(rows, hidden), self._randn(rows, hidden), self._randn(hidden)
        return [bound(self._fused(backend, "residual_norm", residual_norm), entered, residual, weight)]

    def head_norm(self, rows: int, heads: tuple[int, int, int], backend: str) -> list[Call]:
        """Norms of the heads of query and key."""
        query, key = self._query_and_key(rows, heads)
        weights = self._randn(heads[2]), self._randn(heads[2])
        return [bound(self._fused(backend, "head_norm", head_norm), query, key, *weights)]

    def rope(self, rows: int, heads: tuple[int, int, int], backend: str) -> list[Call]:
        """The rotary embedding of query and key."""
        query, key = self._query_and_key(rows, heads)
        cos, sin = (self._randn(rows, 1, heads[2] // 2) for _ in range(2))
        return [bound(self._fused(backend, "rope", rope), query, key, cos, sin)]

    def silu_mul(self, rows: int, width: int, backend: str) -> list[Call]:
        """The gated activation of ``width`` outputs."""
        gate, up = self._randn(rows, 2 * width).chunk(2, dim=-1)
        return [bound(self._fused(backend, "silu_mul", silu_mul), gate, up)]

    def residual_add(self, rows: int, hidden: int) -> list[Call]:
        """The addition of the residual alone."""
        residual, entered = (self._randn(rows, hidden) for _ in range(2))
        out = torch.empty_like(residual)
        return [lambda: torch.add(residual, entered, out=out)]

    def greedy(self, rows: int, vocab: int) -> list[Call]:
        """The likeliest token of each row of float32 logits."""
        logits = torch.randn(rows, vocab, device=self._device).mul_(3)
        return [lambda: logits.argmax(dim=-1)]

    def top_p(self, rows: int, vocab: int) -> list[Call]:
        """A token of each row out of the likeliest; it may refuse to be captured in a graph."""
        return [bound(top_p, torch.randn(rows, vocab, device=self._device).mul_(3))]

    def expert_choice(self, rows: int, experts: int, chosen: int) -> list[Call]:
        """The likeliest experts of each row, and their shares."""
        logits = self._randn(rows, experts)
        return [lambda: logits.softmax(dim=-1, dtype=torch.float32).topk(chosen, dim=-1)]

    def forget_compiled(self, name: str, reason: str) -> None:
        """Remember that a compiled operator failed."""
        if not isinstance(self._compiled.get(name), Exception):
            self._compiled[name] = RuntimeError(f"compiling failed before: {reason}"[:200])

    def _query_and_key(self, rows: int, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        query_heads, kv_heads, head_dim = heads
        qkv = self._randn(rows, query_heads + 2 * kv_heads, head_dim)
        return qkv[:, :query_heads], qkv[:, query_heads : query_heads + kv_heads]

    def _randn(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self._device, dtype=self._dtype)

    def _repeated(self, *sizes: int, scale: float = 1.0) -> Tensor:
        """A large random tensor whose numbers repeat."""
        found = torch.empty(*sizes, device=self._device, dtype=self._dtype)
        flat = found.view(-1)
        random = self._randn(min(_DRAWN, flat.numel())).mul_(scale)
        for start in range(0, flat.numel(), random.numel()):
            block = flat[start : start + random.numel()]
            block.copy_(random[: block.numel()])
        return found

    def _copies(self, size_bytes: int) -> int:
        return max(1, min(MAX_CALLS, math.ceil(self.rotation_bytes / size_bytes)))

    def _weight_copies(self, n: int, k: int, dtype: str) -> Sequence[Tensor]:
        key = (n, k, dtype)
        if self._weights[0] != key:
            self._weights = (None, [])  # free the old ones first
            size = n * k * (1 if dtype == "fp8" else self._dtype.itemsize)
            copies = self._copies(size)
            weights = [self._repeated(n, k, scale=k**-0.5) for _ in range(copies)]
            if dtype == "fp8":
                weights = [(weight * 16).to(torch.float8_e4m3fn) for weight in weights]
            self._weights = (key, weights)
        return self._weights[1]

    def _kv_pool(self, elements: int) -> tuple[Tensor, Tensor]:
        """At least this many elements of K and of V."""
        if self._kv.numel() < 2 * elements:
            elements = max(elements, self.rotation_bytes)  # enough for any point that is used in turns
            self._kv = torch.empty(0)
            if self._device != "cpu":
                torch.cuda.empty_cache()
            size = min(2 ** math.ceil(math.log2(elements)), max(elements, self._kv_limit_bytes // 4))
            self._kv = self._repeated(2, size)
        return self._kv[0], self._kv[1]

    def _fused(self, backend: str, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The operator as it stands, or compiled; a compiler that failed once is not asked again."""
        if backend != "inductor":
            return plain
        if name not in self._compiled:
            self._compiled[name] = compiled(plain)
        found = self._compiled[name]
        if isinstance(found, Exception):
            raise found
        return found


def _without_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same attention with one KV head for each query head, without a copy of any KV.

    torch's fast kernel of a CPU knows no groups of heads. A single query of each head becomes a group of queries of
    its KV head; otherwise each KV head is a sequence whose heads see the same KV.
    """
    batch, heads, new, head_dim = query.shape
    kv_heads = key.shape[1]
    if new == 1:
        return query.reshape(batch, kv_heads, heads // kv_heads, head_dim), key, value
    parts = query.reshape(batch * kv_heads, heads // kv_heads, new, head_dim)
    if batch > 1 and kv_heads > 1:  # a view of two axes as one needs KV that lies head by head
        key, value = key.contiguous(), value.contiguous()
    shared = [
        each.reshape(batch * kv_heads, 1, -1, head_dim).expand(-1, heads // kv_heads, -1, -1) for each in (key, value)
    ]
    return parts, shared[0], shared[1]
