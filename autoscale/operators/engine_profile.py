"""The profile of an engine from the times of its operators alone (pure).

Its points are steps of ``StepTimes``; memory that the weights leave is KV.
"""

from collections.abc import Iterable
from itertools import accumulate

from autoscale.engines.profile import (
    DecodeSurface,
    EngineProfile,
    Handoff,
    Memory,
    Precision,
    PrefillCurve,
    Source,
)
from autoscale.operators.costs import SourceKind
from autoscale.operators.experts import GroupedExperts
from autoscale.operators.graph import OperatorGraph
from autoscale.operators.kinds import Pass
from autoscale.operators.step_times import EngineSettings, HostTimes, StepTimes
from autoscale.operators.times import OperatorTimes

_GIB = 1024.0**3
_US = 1e-6


class MemoryShortageError(ValueError):
    """The weights leave no room for KV on the GPUs."""


def engine_profile(
    name: str,
    model: str,
    graph: OperatorGraph,
    times: OperatorTimes,
    settings: EngineSettings,
) -> EngineProfile:
    """The profile of an engine whose GPUs are of one type.

    Raises:
        ParallelSizeError: the model cannot be divided over that number of GPUs.
        MemoryShortageError: the weights leave no room for KV.
    """
    steps = StepTimes(graph, times, settings)
    prefill, decode = prefill_curve(steps, settings), decode_surface(steps, settings)
    beside = decode_surface_beside_prompts(steps, settings, prefill)
    gpu, parallel = times.gpu, settings.parallel
    kv_bytes = graph.kv_bytes_per_token
    return EngineProfile(
        name=name,
        model=model,
        gpu=gpu.name,
        gpus=parallel,
        kv_tokens=kv_tokens(graph, gpu.memory_bytes, settings),
        max_batch_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
        prefill=prefill,
        decode=decode,
        decode_beside_prompts=beside,
        # As in the shipped profiles: half of a 400 Gb/s link for each GPU, and the least that DOPD gives for NIXL.
        handoff=Handoff(base_s=0.015, kv_bytes_per_token=kv_bytes, bytes_per_s=25e9 * parallel),
        start_s=45.0,
        flops_per_token=2.0 * _active_weights(graph),
        peak_flops=gpu.peak(graph.precision.weights) * parallel,
        memory=Memory(weight_bytes=graph.weight_bytes, peak_bytes_per_s=gpu.memory_bytes_per_s * parallel),
        precision=Precision(
            dtype="float32" if graph.precision.weights == "fp32" else "bfloat16",
            quantization="fp8" if graph.precision.weights == "fp8" else None,
            kv_cache_dtype="fp8" if graph.precision.kv == "fp8" else "auto",
        ),
        sources=_sources(steps, settings.host),
    )


def prefill_curve(steps: StepTimes, settings: EngineSettings) -> PrefillCurve:
    """Seconds of one prompt alone, in chunks of ``max_batch_tokens``."""
    chunk = settings.max_batch_tokens
    lengths = _grid(1, settings.longest_tokens, chunk)
    seconds = [
        sum(
            steps.seconds(Pass(prompts=1, new_tokens=min(chunk, length - start), past_tokens=start))
            for start in range(0, length, chunk)
        )
        for length in lengths
    ]
    # Tiles of kernels make some longer prompts faster; the profile's curve must not fall.
    return PrefillCurve(tokens=tuple(lengths), seconds=tuple(accumulate(seconds, max)))


def decode_surface(steps: StepTimes, settings: EngineSettings) -> DecodeSurface:
    """Seconds of a step in which a batch decodes. CUDA graphs pad the batch (``padded_batch``)."""
    batches, contexts = _batches(settings), _contexts(settings)
    rows = tuple(
        tuple(steps.seconds(Pass(decoding=batch, context_tokens=context)) for context in contexts) for batch in batches
    )
    return DecodeSurface(batch=tuple(batches), context_tokens=tuple(contexts), step_s=rows)


def decode_surface_beside_prompts(steps: StepTimes, settings: EngineSettings, prefill: PrefillCurve) -> DecodeSurface:
    """Seconds that decoding requests take in a step with prompts: the whole step, less what the prompts add alone.

    The engine model adds the prompts' own time (``PrefillCurve.chunk_s``). The mean over several sizes of a prompt.
    """
    batches, contexts = _batches(settings), _contexts(settings)
    sizes = [size for size in (256, 512, 1024) if size <= settings.max_batch_tokens] or [settings.max_batch_tokens]

    def excess_s(batch: int, context: int, size: int) -> float:
        whole = steps.seconds(Pass(prompts=1, new_tokens=size, decoding=batch, context_tokens=context))
        return whole - prefill.chunk_s(0, size)

    rows = tuple(
        tuple(sum(excess_s(batch, context, size) for size in sizes) / len(sizes) for context in contexts)
        for batch in batches
    )
    return DecodeSurface(batch=tuple(batches), context_tokens=tuple(contexts), step_s=rows)


# Memory of each GPU that neither weights nor KV get: CUDA's context, its graphs, activations of the largest step.
# Assumed: vLLM's own profiling reports 2 to 4 GiB for models of this size.
_OTHER_BYTES = 3.0 * _GIB


def kv_tokens(graph: OperatorGraph, memory_bytes: float, settings: EngineSettings) -> int:
    """Tokens of KV that fit beside the weights, in whole blocks of 16.

    Raises:
        MemoryShortageError: none fit.
    """
    parallel, kv_heads = settings.parallel, graph.shape.kv_heads
    room_bytes = (memory_bytes * settings.memory_frac - _OTHER_BYTES) * parallel - graph.weight_bytes
    if experts := graph.shape.experts:
        copies = settings.redundant_experts / experts.count
        room_bytes -= copies * sum(
            each.weight_bytes * each.copies for each in graph.operators if isinstance(each, GroupedExperts)
        )
    # With more ranks than KV heads, each rank holds a copy of one head.
    bytes_per_token = graph.kv_bytes_per_token * max(1.0, parallel / kv_heads)
    tokens = int(room_bytes / bytes_per_token) // 16 * 16
    if tokens <= 0:
        raise MemoryShortageError(
            f"{graph.weight_bytes / 1e9:.1f} GB of weights leave no room for KV on {parallel} GPUs of "
            f"{memory_bytes / 1e9:.1f} GB: give more GPUs"
        )
    return tokens


def _active_weights(graph: OperatorGraph) -> float:
    """Parameters that compute a token: of the experts only those that are chosen, and no embedding."""
    total = float(graph.weights)
    shape = graph.shape
    if not shape.ties_embeddings:
        total -= shape.vocab * shape.hidden
    if experts := shape.experts:
        idle = experts.count - experts.per_token
        total -= 3.0 * shape.hidden * experts.intermediate * idle * experts.sparse_layers
    return total


def _grid(least: int, most: int, chunk: int) -> list[int]:
    """Lengths a factor of the square root of 2 apart, and the multiples of a chunk, at which a step is added."""
    lengths = {least, most} | set(range(chunk, most + 1, chunk))
    size = 16.0
    while size < most:
        lengths.add(round(size))
        size *= 2**0.5
    return sorted(lengths)


def _batches(settings: EngineSettings) -> list[int]:
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
    return sorted({size for size in sizes if size < settings.max_running} | {settings.max_running})


def _contexts(settings: EngineSettings) -> list[int]:
    sizes = [1 << power for power in range(6, 20)]
    return sorted({size for size in sizes if size < settings.longest_tokens} | {settings.longest_tokens})


def _sources(steps: StepTimes, host: HostTimes) -> tuple[Source, ...]:
    by_kind: dict[SourceKind, list[str]] = {}
    for name, kind in steps.kinds.items():
        by_kind.setdefault(kind, []).append(name)
    parts = "; ".join(f"{kind.value}: {', '.join(by_kind[kind])}" for kind in SourceKind if kind in by_kind)
    texts: Iterable[tuple[str, str]] = (
        ("prefill, decode", f"sums of operator times (docs/operators_times.md). {parts}"),
        (
            "host",
            f"{host.step_s / _US:g} us of each step and {host.request_s / _US:g} us for each request",
        ),
        ("kv_tokens", "memory of the GPUs, less the weights and 3 GiB for each GPU"),
    )
    derived = tuple(Source(part=part, kind="derived", text=text) for part, text in texts)
    assumed = Source(part="handoff, start_s", kind="assumed", text="as in the shipped H100 profiles")
    return (*derived, assumed)
