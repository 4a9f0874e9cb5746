"""Shapes of the operators of one decoder layer on one rank of TP, and the work that each of them must do."""

from dataclasses import dataclass

# Bytes of one element by data type; FP8 products write bf16.
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}
GEMMS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")


class UnsupportedShapeError(ValueError):
    """The model cannot be divided over this many ranks, or the point is larger than the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shape of a dense decoder; `has_qkv_bias` as in Qwen2. Source: config.json of the model on Hugging Face."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int
    has_qkv_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One operator at one size.

    `tokens` are new tokens of all sequences together. `batch` is sequences, None where the operator sees tokens only.
    `context` is KV tokens of each sequence: in prefill those before the chunk, in decode all that the query reads.
    """

    model: str
    operator: str
    role: str
    tokens: int
    batch: int | None = None
    context: int | None = None
    tp: int = 1
    dtype: str = "bf16"
    backend: str = "eager"

    def label(self) -> str:
        """The point in a few words, for progress lines."""
        size = f"tokens {self.tokens}" + ("" if self.batch is None else f" batch {self.batch} context {self.context}")
        return f"{self.model} {self.operator} {self.role} {size} tp {self.tp} {self.dtype} {self.backend}"


MODELS = {
    model.name: model
    for model in (
        Model(
            name="llama-3-8b",
            hidden=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            intermediate=14336,
            vocab=128256,
            layers=32,
        ),
        Model(
            name="qwen2-7b",
            hidden=3584,
            heads=28,
            kv_heads=4,
            head_dim=128,
            intermediate=18944,
            vocab=152064,
            layers=28,
            has_qkv_bias=True,
        ),
        # For dry runs: every operator in milliseconds on a CPU.
        Model(name="tiny", hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512, layers=2),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What one rank of TP holds of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int

    @property
    def qkv_columns(self) -> int:
        """Outputs of the QKV projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer, bf16."""
        return 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES["bf16"]


def rank_of(model: Model, tp: int) -> Rank:
    """One of `tp` equal ranks; KV heads are copied where there are fewer than ranks, as in vLLM.

    Raises:
        UnsupportedShapeError: The heads, the intermediate size or the vocabulary cannot be divided by `tp`.
    """
    for name, size in (("heads", model.heads), ("intermediate", model.intermediate), ("vocab", model.vocab)):
        if size % tp:
            raise UnsupportedShapeError(f"{model.name} has {size} {name}, not divisible by tp {tp}")
    return Rank(
        heads=model.heads // tp,
        kv_heads=max(1, model.kv_heads // tp),
        head_dim=model.head_dim,
        hidden=model.hidden,
        intermediate=model.intermediate // tp,
        vocab=model.vocab // tp,
    )


def gemm_shape(rank: Rank, operator: str) -> tuple[int, int]:
    """(n, k) of a product: outputs and inputs per token."""
    return {
        "qkv_proj": (rank.qkv_columns, rank.hidden),
        "o_proj": (rank.hidden, rank.heads * rank.head_dim),
        "gate_up_proj": (2 * rank.intermediate, rank.hidden),
        "down_proj": (rank.hidden, rank.intermediate),
        "lm_head": (rank.vocab, rank.hidden),
    }[operator]


def attended_pairs(point: Point) -> int:
    """Pairs of query and key that causal attention looks at, over all sequences."""
    batch, context = point.batch or 1, point.context or 0
    if point.role == "decode":
        return batch * context
    new = point.tokens // batch
    return batch * (new * context + new * (new + 1) // 2)


def kv_tokens(point: Point) -> int:
    """KV tokens that attention reads, over all sequences."""
    batch, context = point.batch or 1, point.context or 0
    return batch * context if point.role == "decode" else batch * context + point.tokens


def work_of(point: Point) -> tuple[int, int]:
    """(FLOPs, bytes) of a point on one rank: each input read once, each output written once, a fused kernel.

    Raises:
        UnsupportedShapeError: As `rank_of`.
    """
    model = MODELS[point.model]
    rank = rank_of(model, point.tp)
    tokens, wide = point.tokens, ELEMENT_BYTES["bf16"]
    if point.operator in GEMMS:
        n, k = gemm_shape(rank, point.operator)
        has_bias = model.has_qkv_bias and point.operator == "qkv_proj"
        bias = n if has_bias else 0
        narrow = ELEMENT_BYTES[point.dtype]
        return 2 * tokens * n * k + tokens * bias, narrow * (tokens * k + n * k) + wide * (tokens * n + bias)
    if point.operator == "attention":
        queries = tokens * rank.heads * rank.head_dim
        flops = 4 * attended_pairs(point) * rank.heads * rank.head_dim
        return flops, wide * 2 * queries + kv_tokens(point) * rank.kv_bytes_per_token
    return _small_work(point.operator, rank, model.vocab, tokens)


def _small_work(operator: str, rank: Rank, vocab: int, tokens: int) -> tuple[int, int]:
    wide = ELEMENT_BYTES["bf16"]
    rotated = tokens * (rank.heads + rank.kv_heads) * rank.head_dim
    return {
        "embedding": (0, tokens * (2 * wide * rank.hidden + 8)),
        "rmsnorm": (4 * tokens * rank.hidden, wide * rank.hidden * (2 * tokens + 1)),
        # cos and sin of head_dim / 2 angles each
        "rope": (3 * rotated, wide * (2 * rotated + tokens * rank.head_dim)),
        "silu_mul": (5 * tokens * rank.intermediate, 3 * wide * tokens * rank.intermediate),
        "residual_add": (tokens * rank.hidden, 3 * wide * tokens * rank.hidden),
        # logits in float32; the sort of top_p counts as one pass
        "argmax": (tokens * vocab, 4 * tokens * vocab),
        "top_p": (8 * tokens * vocab, 4 * tokens * vocab),
    }[operator]
