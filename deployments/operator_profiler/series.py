"""The series of points of a model: one curve or surface of a table for each operator shape on one rank."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoscale.operators.attention import Attention
from autoscale.operators.gemm import Gemm
from autoscale.operators.gemm_times import GRAPH_ROWS, gemm_work, graph_batch
from autoscale.operators.graph import OperatorGraph
from autoscale.operators.kinds import ELEMENT_BYTES, Operator, Pass, Unit, Work, wide_dtype
from autoscale.operators.pointwise import Pointwise
from deployments.operator_profiler.tensors import Tensors
from deployments.operator_profiler.timing import Call

_SHORTEST_TOKENS = 16  # of a prompt
_SHORTEST_CONTEXT_TOKENS = 64
_PROMPTS = (2, 8)  # prompts together
_RATIO = 4  # of two sizes that are next to each other
_WIDE_RATIO = 8  # the same for contexts and batches of decode attention
_POINTWISE_RATIO = 16  # pointwise operators are lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Largest sizes, by the names of the engine's settings."""

    max_batch_tokens: int
    max_running: int
    longest_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """Kernels of operators.

    ``library``: torch, or vllm. ``attention``: torch's kernel. ``fused``: how torch runs small operators: ``eager`` or
    ``inductor``.
    """

    library: str = "torch"
    attention: str = "flash"
    fused: str = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one table with the same key: a curve over ``inner``, or one for each value of ``outer``.

    Attributes:
        operator: an operator that it is of, for messages.
        key: the columns of the table before the sizes.
        outer: first sizes; (None,) where the table has one size only.
        inner: sizes at which each curve is measured in any case.
        in_logs: whether the table is read by lines of logarithms.
        calls: makes the calls of a point.
        work: FLOPs and bytes of a point.
        is_fit: whether a point is within the sizes.
        weight_bytes: of the operator on this rank.
    """

    operator: str
    table: str
    key: tuple[str | int, ...]
    outer: tuple[int | None, ...]
    inner: tuple[int, ...]
    in_logs: bool = False
    calls: Callable[[Tensors, int, int], list[Call]]
    work: Callable[[int, int], Work]
    is_fit: Callable[[int, int], bool] = lambda outer, inner: True
    weight_bytes: float = 0.0

    @property
    def is_padded(self) -> bool:
        """Whether sizes between measured ones should be those that CUDA graphs pad to."""
        return self.table == "gemm"


def series_of(graph: OperatorGraph, parallels: Sequence[int], sizes: Sizes, backends: Backends) -> list[Series]:
    """All series of a model's tensor parallel sizes, each once, products first."""
    found: dict[tuple[str | int, ...], Series] = {}
    for parallel in parallels:
        for operator in graph.operators:
            for each in _series(operator, graph, parallel, sizes, backends) if is_measured(operator) else ():
                found.setdefault((each.table, *each.key), each)
    order = ("gemm", "decode_attention", "chunk_attention", "prompt_attention", "pointwise")
    return sorted(found.values(), key=lambda each: order.index(each.table))


def is_measured(operator: Operator) -> bool:
    """Whether an operator has a table: experts, exchanges between GPUs and vision encoders have none."""
    if isinstance(operator, Gemm | Pointwise):
        return operator.unit is not Unit.PATCH and operator.merge == 1
    return isinstance(operator, Attention)


def steps(least: int, most: int, ratio: int) -> tuple[int, ...]:
    """Sizes from the least to the most, each a multiple of the one before by ``ratio``; the last one may be nearer."""
    count = math.ceil(math.log(most / least, ratio)) if most > least else 0
    return tuple(sorted({min(most, least * ratio**power) for power in range(count + 1)}))


def padded(size: int) -> int:
    """The size that a CUDA graph pads a batch to."""
    return graph_batch(size) if size <= GRAPH_ROWS else size


def _series(
    operator: Operator, graph: OperatorGraph, parallel: int, sizes: Sizes, backends: Backends
) -> Iterator[Series]:
    if isinstance(operator, Gemm):
        return _products(operator, parallel, sizes)
    if isinstance(operator, Attention):
        return _attention(operator, parallel, sizes, backends)
    if isinstance(operator, Pointwise):
        return _pointwise(operator, graph, parallel, sizes, backends)
    raise TypeError(f"no series is known for the operator {operator.name}")


def _rows(unit: Unit, sizes: Sizes) -> int:
    return sizes.max_running if unit is Unit.SEQUENCE else sizes.max_batch_tokens


def _products(operator: Gemm, parallel: int, sizes: Sizes) -> Iterator[Series]:
    n, k = operator.rank_shape(parallel)
    dtype, has_bias = operator.dtype, operator.has_bias
    yield Series(
        operator=operator.name,
        table="gemm",
        key=(dtype, n, k),
        outer=(None,),
        inner=steps(1, _rows(operator.unit, sizes), _RATIO),
        calls=lambda tensors, _, m: tensors.product(m, n, k, dtype, has_bias=has_bias),
        work=lambda _, m: gemm_work(dtype, m, n, k),
        weight_bytes=n * k * ELEMENT_BYTES[dtype],
    )


def _attention(operator: Attention, parallel: int, sizes: Sizes, backends: Backends) -> Iterator[Series]:
    heads = (*operator.rank_heads(parallel), operator.head_dim)
    # torch's kernels read KV in the type of the activations.
    key = (wide_dtype(operator.kv_dtype), *heads)
    chunk, longest, backend = sizes.max_batch_tokens, sizes.longest_tokens, backends.attention
    new_tokens = steps(min(_SHORTEST_TOKENS, chunk), min(chunk, longest), _RATIO)
    contexts = steps(min(_SHORTEST_CONTEXT_TOKENS, longest), longest, _WIDE_RATIO)
    yield Series(
        operator="decode attention",
        table="decode_attention",
        key=key,
        outer=steps(1, sizes.max_running, _WIDE_RATIO),
        inner=contexts,
        calls=lambda tensors, batch, context: tensors.attention(batch, 1, context, heads, backend, is_causal=False),
        work=lambda batch, context: operator.work(Pass(decoding=batch, context_tokens=context), parallel),
    )
    yield Series(
        operator="prompt attention",
        table="chunk_attention",
        key=key,
        outer=(0, *steps(chunk, longest - chunk, _RATIO)) if longest >= 2 * chunk else (0,),
        inner=new_tokens,
        in_logs=True,
        calls=lambda tensors, past, new: tensors.attention(1, new, past + new, heads, backend, is_causal=True),
        work=lambda past, new: operator.work(Pass(prompts=1, new_tokens=new, past_tokens=past), parallel),
        is_fit=lambda past, new: past + new <= longest,
    )
    yield Series(
        operator="attention of prompts together",
        table="prompt_attention",
        key=key,
        outer=tuple(prompts for prompts in _PROMPTS if prompts <= sizes.max_running),
        inner=new_tokens,
        in_logs=True,
        calls=lambda tensors, prompts, new: tensors.attention(prompts, new, new, heads, backend, is_causal=True),
        work=lambda prompts, new: operator.work(Pass(prompts=prompts, new_tokens=new), parallel),
        is_fit=lambda prompts, new: prompts * new <= chunk or new == new_tokens[0],
    )


def _pointwise(
    operator: Pointwise, graph: OperatorGraph, parallel: int, sizes: Sizes, backends: Backends
) -> Iterator[Series]:
    width = int(operator.rank_width(parallel))
    yield Series(
        operator=operator.name,
        table="pointwise",
        key=(operator.table, width),
        outer=(None,),
        inner=steps(1, _rows(operator.unit, sizes), _POINTWISE_RATIO),
        calls=_pointwise_calls(operator, graph, parallel, backends.fused),
        work=lambda _, rows: Work(flops=0.0, traffic_bytes=rows * width * operator.element_bytes),
        weight_bytes=operator.weight_bytes if operator.table == "embedding" else 0.0,
    )


def _pointwise_calls(
    operator: Pointwise, graph: OperatorGraph, parallel: int, backend: str
) -> Callable[[Tensors, int, int], list[Call]]:
    shape = graph.shape
    heads = (shape.heads // parallel, max(1, shape.kv_heads // parallel), shape.head_dim)
    experts = shape.experts
    match operator.table:
        case "norm":
            return lambda tensors, _, rows: tensors.residual_norm(rows, operator.writes // 2, backend)
        case "qk_norm":
            return lambda tensors, _, rows: tensors.head_norm(rows, heads, backend)
        case "rotary":
            return lambda tensors, _, rows: tensors.rope(rows, heads, backend)
        case "activation":
            return lambda tensors, _, rows: tensors.silu_mul(rows, operator.writes // parallel, backend)
        case "embedding":
            return lambda tensors, _, rows: tensors.embedding(rows, shape.vocab, shape.hidden)
        case "expert_choice" if experts is not None:
            count, chosen = experts.count, experts.per_token
            return lambda tensors, _, rows: tensors.expert_choice(rows, count, chosen)
        case "sampler":
            return lambda tensors, _, rows: tensors.greedy(rows, shape.vocab)
        case _:
            raise TypeError(f"no call is known for the pointwise operator {operator.name}")
