"""The time of any operator on one GPU type: measured, between measured points, beyond them, or by a roofline (pure)."""

from dataclasses import dataclass, replace

from autoscale.operators.attention import Attention, VisionAttention
from autoscale.operators.attention_times import AttentionTimes
from autoscale.operators.collective import Collective
from autoscale.operators.costs import SourceKind, TimeSource
from autoscale.operators.curves import worst
from autoscale.operators.experts import GroupedExperts
from autoscale.operators.gemm import Gemm
from autoscale.operators.gemm_times import GRAPH_ROWS, GemmTimes, gemm_work, graph_batch
from autoscale.operators.gpu import Gpu
from autoscale.operators.kinds import Operator, Pass, Work, count
from autoscale.operators.pointwise import Pointwise
from autoscale.operators.roofline import ATTENTION, COLLECTIVE, GEMM, POINTWISE, gpu_roofline_s, roofline_s
from autoscale.operators.tables import OperatorTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds of one copy on one rank, and where they come from."""

    seconds: float
    source: TimeSource


class OperatorTimes:
    """Times of operators on one GPU type, from its measured tables where they have the operator."""

    def __init__(self, gpu: Gpu, tables: OperatorTables) -> None:
        self.gpu = gpu
        self._tables = tables
        self._gemm = GemmTimes(gpu, tables.gemm)
        self._attention = AttentionTimes(gpu, tables)

    def time(self, operator: Operator, step: Pass, parallel: int) -> Timed:
        """One copy of an operator on one rank; 0 s for an operator without work, such as a collective on one GPU."""
        if isinstance(operator, Gemm):
            return self._gemm_time(operator, step, parallel)
        if isinstance(operator, Attention):
            reading = self._attention.time(operator, step, parallel)
            return _timed(reading.seconds, reading.kind, reading.text)
        if isinstance(operator, Pointwise):
            return self._pointwise(operator, step, parallel)
        if isinstance(operator, Collective):
            return self._collective(operator, step, parallel)
        if isinstance(operator, GroupedExperts):
            return self._experts(operator, step, parallel)
        if isinstance(operator, VisionAttention):
            work = operator.work(step, parallel)
            if not work.flops:
                return _nothing()
            seconds = gpu_roofline_s(work, self.gpu, "bf16", ATTENTION)
            return _timed(seconds, SourceKind.ROOFLINE, "roofline: attention of a vision encoder is not measured")
        raise TypeError(f"no time is known for an operator of type {type(operator).__name__}")

    def _gemm_time(self, operator: Gemm, step: Pass, parallel: int) -> Timed:
        m = count(step, operator.unit, operator.merge)
        if not m:
            return _nothing()
        n, k = operator.rank_shape(parallel)
        found = self._gemm.curve(operator.dtype, n, k)
        if found.curve is None:
            return _timed(self._gemm.roofline_s(operator.dtype, m, n, k), found.kind, found.text)
        is_in_graph = self.gpu.is_padding and not step.prompts and m <= GRAPH_ROWS
        reading = found.padded.at(graph_batch(m)) if is_in_graph and found.padded else found.curve.at(m)
        seconds = reading.value * self._sustained(gemm_work(operator.dtype, m, n, k), operator.dtype)
        return _timed(seconds, worst((reading.kind, found.kind)), found.text)

    def _sustained(self, work: Work, dtype: str) -> float:
        """How much longer a product takes in an engine than in a short measurement: arithmetic lowers the clock."""
        gpu = self.gpu
        compute_s, memory_s = work.flops / gpu.peak(dtype), work.traffic_bytes / gpu.memory_bytes_per_s
        return 1.0 + (gpu.sustained_product_ratio - 1.0) * min(1.0, compute_s / memory_s)

    def _pointwise(self, operator: Pointwise, step: Pass, parallel: int) -> Timed:
        """A row of another width takes the time of as many rows of the measured width as have the same elements."""
        rows = count(step, operator.unit, operator.merge)
        if not rows:
            return _nothing()
        width = operator.rank_width(parallel)
        curves = self._tables.pointwise.get(operator.table)
        if not curves:
            seconds = gpu_roofline_s(operator.work(step, parallel), self.gpu, "bf16", POINTWISE)
            return _timed(seconds, SourceKind.ROOFLINE, f"roofline: no {operator.table} of a {self.gpu.name}")
        nearest = min(curves, key=lambda each: (max(each / width, width / each), each))
        reading = curves[nearest].at(rows * width / nearest)
        kind = reading.kind if nearest == width else worst((reading.kind, SourceKind.INTERPOLATED))
        return _timed(reading.value, kind, f"{operator.table} of {nearest} elements")

    def _collective(self, operator: Collective, step: Pass, parallel: int) -> Timed:
        message_bytes = operator.message_bytes(step)
        if parallel == 1 or not message_bytes:
            return _nothing()
        curve = self._tables.all_reduce.get(parallel)
        if curve is None:
            efficiency = replace(COLLECTIVE, launch_s=self.gpu.link_latency_s)
            seconds = roofline_s(operator.work(step, parallel), 1.0, self.gpu.link_bytes_per_s, efficiency)
            return _timed(
                seconds, SourceKind.ROOFLINE, f"roofline of a link: no exchange of {parallel} {self.gpu.name}"
            )
        if operator.adds:
            reading = curve.at(message_bytes)
            return _timed(reading.value, reading.kind, f"all-reduce of {parallel} GPUs")
        # An all-gather sends half the bytes of an all-reduce.
        reading = curve.at(message_bytes / 2)
        kind = worst((reading.kind, SourceKind.EXTRAPOLATED))
        return _timed(reading.value, kind, f"all-gather as half an all-reduce of {parallel} GPUs")

    def _experts(self, operator: GroupedExperts, step: Pass, parallel: int) -> Timed:
        if not step.tokens:
            return _nothing()
        # Three launches: gate and up, activation, down.
        seconds = gpu_roofline_s(operator.work(step, parallel), self.gpu, operator.dtype, GEMM)
        return _timed(seconds + 2 * GEMM.launch_s, SourceKind.ROOFLINE, "roofline: experts are not measured")


def _timed(seconds: float, kind: SourceKind, text: str) -> Timed:
    return Timed(seconds=seconds, source=TimeSource(kind=kind, text=text))


def _nothing() -> Timed:
    return _timed(0.0, SourceKind.MEASURED, "no work")
