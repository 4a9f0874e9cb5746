"""The time of attention, from measured attention of this GPU (pure).

Heads that were not measured take the time of their roofline, times what the nearest measured heads take beyond
their own roofline.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from autoscale.operators.attention import Attention
from autoscale.operators.costs import SourceKind
from autoscale.operators.curves import Reading, worst
from autoscale.operators.gpu import Gpu
from autoscale.operators.kinds import Pass
from autoscale.operators.roofline import ATTENTION, gpu_roofline_s
from autoscale.operators.tables import HeadShape, OperatorTables

_Points = TypeVar("_Points")


@dataclass(frozen=True, slots=True)
class AttentionReading:
    """Seconds of one copy on one rank, and where they come from."""

    seconds: float
    kind: SourceKind
    text: str


class AttentionTimes:
    """Times of causal attention on one GPU type."""

    def __init__(self, gpu: Gpu, tables: OperatorTables) -> None:
        self._gpu, self._tables = gpu, tables

    def time(self, operator: Attention, step: Pass, parallel: int) -> AttentionReading:
        """One copy on one rank. Prompts and decoding sequences in one pass: see ``_mixed``."""
        shape = head_shape(operator, parallel)
        prompts, decode = replace(step, decoding=0, context_tokens=0.0), replace(step, prompts=0, new_tokens=0)
        if not step.prompts or not step.new_tokens:
            return self._sustained(self._decode(operator, decode, parallel, shape))
        if not step.decoding:
            return self._prompts(operator, prompts, parallel, shape)
        parts = (
            self._prompts(operator, prompts, parallel, shape),
            self._sustained(self._decode(operator, decode, parallel, shape)),
        )
        seconds = sum(part.seconds for part in parts)
        kind, text = worst(part.kind for part in parts), "; ".join(part.text for part in parts)
        mixed = self._mixed(operator, step, parallel, shape)
        # A table of mixed batches holds single prompts; a pass with more of them keeps the excess of the first.
        return AttentionReading(seconds * mixed, kind, text)

    def _sustained(self, reading: AttentionReading) -> AttentionReading:
        """Decode attention in an engine, which takes longer than in a short measurement: see ``Gpu``."""
        return replace(reading, seconds=reading.seconds * self._gpu.sustained_decode_attention_ratio)

    def _roofline_s(self, operator: Attention, step: Pass, parallel: int) -> float:
        return gpu_roofline_s(operator.work(step, parallel), self._gpu, "bf16", ATTENTION)

    def _nearest(self, measured: Mapping[HeadShape, _Points], shape: HeadShape) -> HeadShape | None:
        return min(measured, key=lambda each: (_distance(each, shape), each), default=None)

    def _decode(self, operator: Attention, step: Pass, parallel: int, shape: HeadShape) -> AttentionReading:
        nearest = self._nearest(self._tables.decode, shape)
        if nearest is None:
            return self._estimate(operator, step, parallel)
        reading = self._tables.decode[nearest].at(step.decoding, step.context_tokens)
        return self._scaled(operator, step, parallel, shape, nearest, reading, "decode")

    def _prompts(self, operator: Attention, step: Pass, parallel: int, shape: HeadShape) -> AttentionReading:
        chunks, prompts = self._tables.chunks, self._tables.prompts
        tables = chunks if chunks and (step.prompts == 1 or not prompts) else prompts
        nearest = self._nearest(tables, shape)
        if nearest is None:
            return self._estimate(operator, step, parallel)
        reading = self._chunk(nearest, step) if tables is chunks else self._together(nearest, step)
        return self._scaled(operator, step, parallel, shape, nearest, reading, "prompt")

    def _chunk(self, shape: HeadShape, step: Pass) -> Reading:
        """One prompt. Several prompts take the time of one that has as many pairs of tokens."""
        longer = math.sqrt(step.prompts)
        reading = self._tables.chunks[shape].at(step.past_tokens * longer, step.new_tokens * longer)
        return reading if step.prompts == 1 else Reading(reading.value, worst((reading.kind, SourceKind.EXTRAPOLATED)))

    def _together(self, shape: HeadShape, step: Pass) -> Reading:
        """Prompts together. What was computed before is the difference of two prompts, as the pairs of tokens are."""
        surface = self._tables.prompts[shape]
        whole = surface.at(step.prompts, step.past_tokens + step.new_tokens)
        if not step.past_tokens:
            return whole
        past, alone = surface.at(step.prompts, step.past_tokens), surface.at(step.prompts, step.new_tokens)
        kind = worst((whole.kind, past.kind, SourceKind.INTERPOLATED))
        return Reading(max(alone.value, whole.value - past.value), kind)

    def _mixed(self, operator: Attention, step: Pass, parallel: int, shape: HeadShape) -> float:
        """Time of prompts and decoding sequences in one kernel, as a multiple of the sum of both alone.

        Some kernels are slower where both are in one batch. 1.0 where no such batch was measured.
        """
        nearest = self._nearest(self._tables.mixed, shape)
        if nearest is None:
            return 1.0
        by_chunk = self._tables.mixed[nearest]
        sizes = sorted(by_chunk)
        new_tokens = min(sizes, key=lambda size: abs(math.log(size / step.new_tokens)))
        together_s = by_chunk[new_tokens].at(step.decoding, step.context_tokens).value
        measured = Pass(prompts=1, new_tokens=new_tokens)
        decoding = Pass(decoding=step.decoding, context_tokens=step.context_tokens)
        rank = replace(operator, heads=nearest.heads, kv_heads=nearest.kv_heads)
        apart_s = sum(
            part.seconds
            for part in (self._prompts(rank, measured, 1, nearest), self._decode(rank, decoding, 1, nearest))
        )
        return together_s / apart_s

    def _scaled(
        self,
        operator: Attention,
        step: Pass,
        parallel: int,
        shape: HeadShape,
        measured: HeadShape,
        reading: Reading,
        name: str,
    ) -> AttentionReading:
        """A reading of the measured heads for the operator's own ones."""
        text = f"{name} attention, {measured.heads} heads, {measured.kv_heads} KV heads"
        if measured == shape:
            return AttentionReading(reading.value, reading.kind, text)
        rank = replace(
            operator,
            heads=measured.heads,
            kv_heads=measured.kv_heads,
            head_dim=measured.head_dim,
            kv_dtype=measured.kv_dtype,
        )
        factor = self._roofline_s(operator, step, parallel) / self._roofline_s(rank, step, 1)
        return AttentionReading(reading.value * factor, SourceKind.ROOFLINE, f"roofline with the efficiency of {text}")

    def _estimate(self, operator: Attention, step: Pass, parallel: int) -> AttentionReading:
        text = f"roofline: no attention of a {self._gpu.name}"
        return AttentionReading(self._roofline_s(operator, step, parallel), SourceKind.ROOFLINE, text)


def head_shape(operator: Attention, parallel: int) -> HeadShape:
    """The heads of one rank."""
    heads, kv_heads = operator.rank_heads(parallel)
    return HeadShape(operator.kv_dtype, heads, kv_heads, operator.head_dim)


def _distance(one: HeadShape, other: HeadShape) -> float:
    """Distance of two shapes: the logarithms of their sizes; another type of KV counts like twice the KV heads."""
    sizes = ((one.heads, other.heads), (one.kv_heads, other.kv_heads), (one.head_dim, other.head_dim))
    return sum(abs(math.log(a / b)) for a, b in sizes) + (math.log(2) if one.kv_dtype != other.kv_dtype else 0.0)
