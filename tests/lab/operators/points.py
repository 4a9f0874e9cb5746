"""Which points are measured, the most important first."""

from collections.abc import Iterable, Iterator, Sequence

from tests.lab.operators.shapes import GEMMS, Point

LAYER_GEMMS = tuple(name for name in GEMMS if name != "lm_head")
MAIN_MODELS = ("llama-3-8b", "qwen2-7b")

# Powers of two, and sizes between them where the curve bends from memory to arithmetic.
_TOKENS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),
    *(1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
)
_FEW_TOKENS = (1, 4, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
_POINTWISE_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_FEW_SEQUENCES = (1, 8, 64, 256)
_LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_FEW_LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384)
_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_FEW_CONTEXTS = (512, 2048, 8192, 32768)
# (sequences, new tokens of each)
_PREFILL_BATCHES = tuple((b, n) for b in (2, 4, 8, 16) for n in (128, 512, 1024, 2048) if b * n <= 16384)
# (new tokens, KV tokens before them): chunked prefill
_CHUNKS = tuple((n, past) for n in (512, 2048) for past in (2048, 8192, 30720))


def gemms(model: str, tokens: Iterable[int], tp: int = 1, dtype: str = "bf16") -> Iterator[Point]:
    """The four products of a layer."""
    sizes = tuple(tokens)
    for operator in LAYER_GEMMS:
        for count in sizes:
            yield Point(model=model, operator=operator, role="both", tokens=count, tp=tp, dtype=dtype, backend="cublas")


def heads(model: str, sequences: Iterable[int], tp: int = 1) -> Iterator[Point]:
    """The LM head by sequences."""
    for count in sequences:
        yield Point(model=model, operator="lm_head", role="both", tokens=count, tp=tp, backend="cublas")


def samplers(model: str, sequences: Iterable[int]) -> Iterator[Point]:
    """Greedy and top-p sampling by sequences, over the whole vocabulary."""
    for count in sequences:
        for operator in ("argmax", "top_p"):
            yield Point(model=model, operator=operator, role="both", tokens=count, batch=count)


def pointwise(
    model: str, tokens: Iterable[int], operators: Sequence[str], tp: int = 1, backend: str = "eager"
) -> Iterator[Point]:
    """Operators that only move and add."""
    sizes = tuple(tokens)
    for operator in operators:
        for count in sizes:
            yield Point(model=model, operator=operator, role="both", tokens=count, tp=tp, backend=backend)


def prefill(model: str, sizes: Iterable[tuple[int, int, int]], tp: int = 1, backend: str = "flash") -> Iterator[Point]:
    """Prefill attention; `sizes` are (sequences, new tokens of each, KV tokens of each before them)."""
    for batch, new, past in sizes:
        yield Point(
            model=model,
            operator="attention",
            role="prefill",
            tokens=batch * new,
            batch=batch,
            context=past,
            tp=tp,
            backend=backend,
        )


def decode(
    model: str, batches: Iterable[int], contexts: Iterable[int], tp: int = 1, backend: str = "flash"
) -> Iterator[Point]:
    """Decode attention: one query token of each sequence."""
    lengths = tuple(contexts)
    for batch in batches:
        for context in lengths:
            yield Point(
                model=model,
                operator="attention",
                role="decode",
                tokens=batch,
                batch=batch,
                context=context,
                tp=tp,
                backend=backend,
            )


def _whole_layer(model: str) -> Iterator[Point]:
    yield from gemms(model, _TOKENS)
    yield from prefill(model, [(1, length, 0) for length in _LENGTHS])
    yield from decode(model, _SEQUENCES, _CONTEXTS)
    yield from pointwise(model, _POINTWISE_TOKENS, ("rmsnorm", "rope", "silu_mul", "residual_add", "embedding"))
    yield from heads(model, _SEQUENCES)
    yield from prefill(model, [(batch, new, 0) for batch, new in _PREFILL_BATCHES])
    yield from prefill(model, [(1, new, past) for new, past in _CHUNKS])
    yield from samplers(model, (1, 8, 32, 64, 128, 256))


def _other_kernels(model: str) -> Iterator[Point]:
    yield from prefill(model, [(1, length, 0) for length in _FEW_LENGTHS], backend="cudnn")
    yield from prefill(model, [(4, 2048, 0)], backend="cudnn")
    yield from decode(model, _FEW_SEQUENCES, (512, 2048, 8192), backend="cudnn")
    yield from pointwise(model, _POINTWISE_TOKENS, ("rope", "silu_mul"), backend="inductor")


def _tp_rank(model: str, tp: int) -> Iterator[Point]:
    yield from gemms(model, _FEW_TOKENS, tp)
    yield from prefill(model, [(1, length, 0) for length in _FEW_LENGTHS], tp)
    yield from decode(model, _FEW_SEQUENCES, _FEW_CONTEXTS, tp)
    yield from heads(model, _FEW_SEQUENCES, tp)
    yield from pointwise(model, (1, 32, 256, 2048, 8192), ("rope", "silu_mul"), tp)


def full_plan() -> list[Point]:
    """All points of the measurement on a GPU, the most important first."""
    plan = [point for model in MAIN_MODELS for point in _whole_layer(model)]
    plan += [point for model in MAIN_MODELS for point in _other_kernels(model)]
    plan += [point for model in MAIN_MODELS for tp in (2, 4, 8) for point in _tp_rank(model, tp)]
    plan += [point for model in MAIN_MODELS for point in gemms(model, _TOKENS, 1, "fp8")]
    plan += [point for tp in (2, 4, 8) for model in MAIN_MODELS for point in gemms(model, _FEW_TOKENS, tp, "fp8")]
    return plan


def quick_plan() -> list[Point]:
    """A few points of the tiny model that pass through every line."""
    model = "tiny"
    plan = list(gemms(model, (1, 16)))
    plan += prefill(model, [(1, 16, 0), (2, 8, 0), (1, 8, 16)])
    plan += decode(model, (1, 4), (16, 64))
    plan += pointwise(model, (1, 16), ("rmsnorm", "rope", "silu_mul", "residual_add", "embedding"))
    plan += [*heads(model, (1, 4)), *samplers(model, (2,))]
    plan += [*prefill(model, [(1, 16, 0)], backend="cudnn"), *decode(model, (2,), (16,), backend="cudnn")]
    plan += gemms(model, (16,), 2)
    plan += gemms(model, (16,), 8)  # four heads do not go over eight ranks: a row of skipped points
    plan += gemms(model, (1, 16), 1, "fp8")
    return plan


def compiled_plan() -> list[Point]:
    """The tiny model's fused operators, for a dry run with a GPU."""
    return list(pointwise("tiny", (1, 16, 32), ("rope", "silu_mul"), backend="inductor"))


def representative(model: str) -> list[Point]:
    """Points that bound arithmetic, bandwidth or neither: for pairs and power."""
    long, chunk, batch, context = (8192, 2048, 64, 2048) if model != "tiny" else (32, 16, 4, 32)
    return [
        _gemm(model, "gate_up_proj", chunk),
        _gemm(model, "down_proj", chunk),
        _gemm(model, "o_proj", chunk),
        *prefill(model, [(1, chunk, 0), (1, long, 0)]),
        _gemm(model, "gate_up_proj", batch),
        _gemm(model, "qkv_proj", batch),
        *decode(model, (batch,), (context,)),
        *pointwise(model, (chunk,), ("rmsnorm", "silu_mul")),
    ]


def share_points(model: str) -> list[Point]:
    """Fig. 8: each operator with a prompt of 2,048 tokens and with one token, and beside it a batch of decodes."""
    chunk, batch, context = (2048, 64, 2048) if model != "tiny" else (16, 4, 32)
    sizes = (chunk, 1, batch)
    found = [*prefill(model, [(1, chunk, 0)]), *decode(model, (1, batch), (context,)), *gemms(model, sizes)]
    found += pointwise(model, sizes, ("rmsnorm", "rope", "silu_mul", "residual_add"))
    return found


def _gemm(model: str, operator: str, tokens: int) -> Point:
    return Point(model=model, operator=operator, role="both", tokens=tokens, backend="cublas")
