"""Makes the calls of a point with random data, so that weights and KV come from memory as in a real model."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own short name)
from torch import Tensor

from tests.lab.operators.kernels import (
    attention_call,
    biased_call,
    bound,
    compiled,
    product_call,
    rope,
    scaled_call,
    silu_mul,
    top_p,
)
from tests.lab.operators.shapes import (
    GEMMS,
    MODELS,
    Model,
    Point,
    Rank,
    UnsupportedShapeError,
    gemm_shape,
    kv_tokens,
    rank_of,
    work_of,
)
from tests.lab.operators.timing import MAX_CALLS, Call

# Weights or KV that are used in turns take this multiple of the L2 cache, so that none is found there again.
_ROTATION_OF_L2 = 3
# A point may need this much memory, in bytes.
MEMORY_LIMIT_BYTES = 40 * 10**9
# Cached memory that is given back before a point, in bytes: graphs leave their pools behind.
_IDLE_CACHE_BYTES = 8 * 2**30


class Layer:
    """Random tensors of one rank, kept between points of the same operator.

    Args:
        device: cpu or cuda.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        cache = 0 if device == "cpu" else torch.cuda.get_device_properties(0).L2_cache_size
        self.rotation_bytes = _ROTATION_OF_L2 * cache
        self._weights: tuple[object, list[Tensor]] = (None, [])
        self._kv = torch.empty(0)
        self._compiled: dict[str, Callable[..., Any] | Exception] = {}

    def calls(self, point: Point) -> list[Call]:
        """Variants of one point's call, on other weights or KV each, to be used in turns.

        Raises:
            UnsupportedShapeError: The model does not divide by TP, or the point needs more than the limit.
        """
        model = MODELS[point.model]
        rank = rank_of(model, point.tp)
        needed_bytes = work_of(point)[1]
        if needed_bytes > MEMORY_LIMIT_BYTES:
            raise UnsupportedShapeError(f"needs {needed_bytes / 1e9:.1f} GB, limit {MEMORY_LIMIT_BYTES / 1e9:.0f} GB")
        self._give_back()
        if point.operator in GEMMS:
            return self._gemm(point, model, rank)
        if point.operator == "attention":
            return self._attention(point, rank)
        build = {
            "embedding": self._embedding,
            "rmsnorm": self._rmsnorm,
            "rope": self._rope,
            "silu_mul": self._silu_mul,
            "residual_add": self._residual_add,
            "argmax": self._sampler,
            "top_p": self._sampler,
        }[point.operator]
        return build(point, model, rank)

    def drop(self) -> None:
        """Let go of all tensors."""
        self._weights, self._kv = (None, []), torch.empty(0)
        if self._device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _give_back(self) -> None:
        if self._device != "cpu":
            idle_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            if idle_bytes > _IDLE_CACHE_BYTES:
                torch.cuda.empty_cache()

    def _randn(self, *sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, device=self._device, dtype=torch.bfloat16).mul_(scale)

    def _copies(self, size_bytes: int) -> int:
        return max(1, min(MAX_CALLS, math.ceil(self.rotation_bytes / size_bytes)))

    def _weight_copies(self, key: tuple[object, ...], n: int, k: int, dtype: str) -> list[Tensor]:
        if self._weights[0] != key:
            self._weights = (None, [])  # free the old ones first
            copies = self._copies(n * k * (1 if dtype == "fp8" else 2))
            weights = [self._randn(n, k, scale=k**-0.5) for _ in range(copies)]
            if dtype == "fp8":
                weights = [(weight * 16).to(torch.float8_e4m3fn) for weight in weights]
            self._weights = (key, weights)
        return self._weights[1]

    def _gemm(self, point: Point, model: Model, rank: Rank) -> list[Call]:
        n, k = gemm_shape(rank, point.operator)
        weights = self._weight_copies((point.model, point.operator, point.tp, point.dtype), n, k, point.dtype)
        entered = self._randn(point.tokens, k)
        if point.dtype == "fp8":
            narrow, scale = entered.to(torch.float8_e4m3fn), torch.ones((), device=self._device)
            return [scaled_call(narrow, weight, scale) for weight in weights]
        out = torch.empty(point.tokens, n, device=self._device, dtype=torch.bfloat16)
        if model.has_qkv_bias and point.operator == "qkv_proj":
            bias = self._randn(n)
            return [biased_call(entered, weight, bias, out) for weight in weights]
        return [product_call(entered, weight, out) for weight in weights]

    def _attention(self, point: Point, rank: Rank) -> list[Call]:
        batch = point.batch or 1
        new, total = point.tokens // batch, kv_tokens(point) // batch
        query = self._randn(batch, new, rank.heads, rank.head_dim).transpose(1, 2)
        elements = batch * total * rank.kv_heads * rank.head_dim
        # K and V of a whole prompt were written just before; those of earlier tokens come from memory.
        copies = 1 if not point.context else self._copies(2 * elements * 2)
        keys, values = self._kv_pool(copies * elements)
        shape = (batch, total, rank.kv_heads, rank.head_dim)
        calls = []
        for index in range(copies):
            part = slice(index * elements, (index + 1) * elements)
            key, value = (pool[part].view(shape).transpose(1, 2) for pool in (keys, values))
            calls.append(attention_call(point, query, key, value))
        return calls

    def reserve_kv(self, points: Sequence[Point]) -> None:
        """Take KV for the largest of the points at once, so that it need not grow between them."""
        sizes = [0]
        for point in points:
            if point.operator == "attention" and point.tp == 1 and work_of(point)[1] <= MEMORY_LIMIT_BYTES:
                rank = rank_of(MODELS[point.model], point.tp)
                sizes.append(kv_tokens(point) * rank.kv_heads * rank.head_dim)
        with suppress(torch.OutOfMemoryError):  # then it grows, and the largest points are skipped
            self._kv_pool(max(sizes))

    def _kv_pool(self, elements: int) -> tuple[Tensor, Tensor]:
        """At least this many elements of K and of V, bf16."""
        if self._kv.numel() < 2 * elements:
            elements = max(elements, self.rotation_bytes)  # enough for any point that is used in turns
            self._kv = torch.empty(0)
            if self._device != "cpu":
                torch.cuda.empty_cache()
            size = min(2 ** math.ceil(math.log2(elements)), max(elements, MEMORY_LIMIT_BYTES // 4))
            self._kv = torch.empty(2, size, device=self._device, dtype=torch.bfloat16)
            random = self._randn(min(2**24, size))
            for flat in self._kv:
                for block in flat.split(random.numel()):
                    block.copy_(random[: block.numel()])
        return self._kv[0], self._kv[1]

    def _embedding(self, point: Point, model: Model, rank: Rank) -> list[Call]:
        key = (point.model, "embedding", point.tp, point.dtype)
        if self._weights[0] != key:
            self._weights = (None, [])
            self._weights = (key, [self._randn(rank.vocab, rank.hidden)])
        table = self._weights[1][0]
        copies = self._copies(2 * point.tokens * rank.hidden)
        rows = torch.randint(0, rank.vocab, (copies, point.tokens), device=self._device)
        return [bound(F.embedding, ids, table) for ids in rows]

    def _rmsnorm(self, point: Point, model: Model, rank: Rank) -> list[Call]:
        entered, weight = self._randn(point.tokens, rank.hidden), self._randn(rank.hidden)
        return [lambda: F.rms_norm(entered, (rank.hidden,), weight, 1e-5)]

    def _rope(self, point: Point, model: Model, rank: Rank) -> list[Call]:
        qkv = self._randn(point.tokens, rank.heads + 2 * rank.kv_heads, rank.head_dim)
        query, key = qkv[:, : rank.heads], qkv[:, rank.heads : rank.heads + rank.kv_heads]
        cos, sin = (self._randn(point.tokens, 1, rank.head_dim // 2) for _ in range(2))
        return [bound(self._fused(point.backend, "rope", rope), query, key, cos, sin)]

    def _silu_mul(self, point: Point, model: Model, rank: Rank) -> list[Call]:
        both = self._randn(point.tokens, 2 * rank.intermediate)
        gate, up = both.chunk(2, dim=-1)
        return [bound(self._fused(point.backend, "silu_mul", silu_mul), gate, up)]

    def _residual_add(self, point: Point, model: Model, rank: Rank) -> list[Call]:
        residual, entered = (self._randn(point.tokens, rank.hidden) for _ in range(2))
        out = torch.empty_like(residual)
        return [lambda: torch.add(residual, entered, out=out)]

    def _sampler(self, point: Point, model: Model, rank: Rank) -> list[Call]:
        logits = torch.randn(point.tokens, model.vocab, device=self._device).mul_(3)
        return [bound(top_p, logits)] if point.operator == "top_p" else [lambda: logits.argmax(dim=-1)]

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

    def give_up_compiling(self, point: Point, error: Exception) -> None:
        """Remember that a compiled operator failed."""
        if point.backend == "inductor" and not isinstance(self._compiled.get(point.operator), Exception):
            self._compiled[point.operator] = RuntimeError(f"compiling failed before: {error}"[:200])
