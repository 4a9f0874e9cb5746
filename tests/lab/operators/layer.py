"""Makes the calls of a point of the lab, on one rank of a model."""

from collections.abc import Sequence

import torch

from deployments.operator_profiler.tensors import Tensors
from deployments.operator_profiler.timing import Call
from tests.lab.operators.shapes import (
    GEMMS,
    MODELS,
    Point,
    Rank,
    UnsupportedShapeError,
    gemm_shape,
    kv_tokens,
    rank_of,
    work_of,
)

# Weights or KV that are used in turns take this multiple of the L2 cache, so that none is found there again.
_ROTATION_OF_L2 = 3
# A point may need this much memory, in bytes.
MEMORY_LIMIT_BYTES = 40 * 10**9


class Layer:
    """Random tensors of one rank, kept between points of the same operator.

    Args:
        device: cpu or cuda.
    """

    def __init__(self, device: str) -> None:
        cache = 0 if device == "cpu" else torch.cuda.get_device_properties(0).L2_cache_size
        self._tensors = Tensors(device, rotation_bytes=_ROTATION_OF_L2 * cache, kv_limit_bytes=MEMORY_LIMIT_BYTES)

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
        self._tensors.give_back()
        if point.operator in GEMMS:
            n, k = gemm_shape(rank, point.operator)
            has_bias = model.has_qkv_bias and point.operator == "qkv_proj"
            return self._tensors.product(point.tokens, n, k, point.dtype, has_bias=has_bias)
        return self._attention(point, rank) if point.operator == "attention" else self._small(point, rank)

    def drop(self) -> None:
        """Let go of all tensors."""
        self._tensors.drop()

    def reserve_kv(self, points: Sequence[Point]) -> None:
        """Take KV for the largest of the points at once, so that it need not grow between them."""
        sizes = [0]
        for point in points:
            if point.operator == "attention" and point.tp == 1 and work_of(point)[1] <= MEMORY_LIMIT_BYTES:
                rank = rank_of(MODELS[point.model], point.tp)
                sizes.append(kv_tokens(point) * rank.kv_heads * rank.head_dim)
        self._tensors.reserve_kv(max(sizes))

    def give_up_compiling(self, point: Point, error: Exception) -> None:
        """Remember that a compiled operator failed."""
        if point.backend == "inductor":
            self._tensors.forget_compiled(point.operator, str(error))

    def _attention(self, point: Point, rank: Rank) -> list[Call]:
        batch = point.batch or 1
        heads = (rank.heads, rank.kv_heads, rank.head_dim)
        new, total = point.tokens // batch, kv_tokens(point) // batch
        return self._tensors.attention(batch, new, total, heads, point.backend, is_causal=point.role == "prefill")

    def _small(self, point: Point, rank: Rank) -> list[Call]:
        tensors, rows, vocab = self._tensors, point.tokens, MODELS[point.model].vocab
        match point.operator:
            case "embedding":
                return tensors.embedding(rows, rank.vocab, rank.hidden)
            case "rmsnorm":
                return tensors.norm(rows, rank.hidden)
            case "rope":
                return tensors.rope(rows, (rank.heads, rank.kv_heads, rank.head_dim), point.backend)
            case "silu_mul":
                return tensors.silu_mul(rows, rank.intermediate, point.backend)
            case "residual_add":
                return tensors.residual_add(rows, rank.hidden)
            case "argmax":
                return tensors.greedy(rows, vocab)
            case _:
                return tensors.top_p(rows, vocab)
