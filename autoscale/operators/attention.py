"""Attention: pairs of queries and keys, and KV that is read and held (pure)."""

from dataclasses import dataclass

from autoscale.operators.kinds import ELEMENT_BYTES, Pass, Work, divisors

_WIDE = ELEMENT_BYTES["bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal attention of the decoder with grouped KV heads.

    ``kv_dtype``: type of the KV cache. Where there are fewer KV heads than ranks, each rank holds a copy of one.
    """

    name: str
    copies: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    weights: int = 0
    weight_bytes: float = 0.0

    def parallel_sizes(self) -> tuple[int, ...]:
        """As ``Operator`` says."""
        return tuple(size for size in divisors(self.heads) if not (self.kv_heads % size and size % self.kv_heads))

    def rank_heads(self, parallel: int) -> tuple[int, int]:
        """Query heads and KV heads of one rank."""
        return self.heads // parallel, max(1, self.kv_heads // parallel)

    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V of one token in one layer, over all ranks, without copies."""
        return 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.kv_dtype]

    def kv_tokens(self, step: Pass) -> float:
        """Tokens whose KV a pass reads or writes, over all sequences."""
        return step.prompts * (step.past_tokens + step.new_tokens) + step.decoding * step.context_tokens

    def work(self, step: Pass, parallel: int) -> Work:
        """Two products of 2 FLOPs for each pair of query and key; a prompt's token sees itself and those before it."""
        heads, kv_heads = self.rank_heads(parallel)
        new = step.new_tokens
        pairs = step.prompts * (new * step.past_tokens + new * (new + 1) / 2) + step.decoding * step.context_tokens
        kv_bytes = self.kv_tokens(step) * 2 * kv_heads * self.head_dim * ELEMENT_BYTES[self.kv_dtype]
        queries = step.tokens * heads * self.head_dim
        return Work(flops=4.0 * pairs * heads * self.head_dim, traffic_bytes=kv_bytes + 2 * _WIDE * queries)

    def output_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return _WIDE * step.tokens * self.heads * self.head_dim

    def input_bytes(self, step: Pass) -> float:
        """As ``Operator`` says: Q, K and V of the new tokens."""
        return _WIDE * step.tokens * (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionAttention:
    """Attention of a vision encoder: every patch sees all patches of its image, or those of its window.

    ``window_patches``: patches of a window; None: the whole image.
    """

    name: str
    copies: int
    heads: int
    head_dim: int
    merge: int
    window_patches: int | None
    weights: int = 0
    weight_bytes: float = 0.0

    def parallel_sizes(self) -> tuple[int, ...]:
        """As ``Operator`` says."""
        return divisors(self.heads)

    def _patches(self, step: Pass) -> int:
        return min(step.image_tokens, step.new_tokens) * self.merge**2

    def work(self, step: Pass, parallel: int) -> Work:
        """FLOPs of all pairs of patches that see each other; Q, K, V and the output are moved once."""
        patches, width = self._patches(step), self.heads // parallel * self.head_dim
        seen = patches if self.window_patches is None else min(patches, self.window_patches)
        return Work(
            flops=4.0 * step.prompts * patches * seen * width,
            traffic_bytes=4 * _WIDE * step.prompts * patches * width,
        )

    def output_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return _WIDE * step.prompts * self._patches(step) * self.heads * self.head_dim

    def input_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return 3 * self.output_bytes(step)
