"""The time of a product of matrices, from measured products of this GPU (pure).

A shape between measured ones takes the time of its roofline, times what measured neighbours take beyond their own
roofline. So the work is counted exactly, and only the efficiency is interpolated.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoscale.operators.costs import SourceKind
from autoscale.operators.curves import Curve
from autoscale.operators.gpu import Gpu
from autoscale.operators.kinds import ELEMENT_BYTES, Work
from autoscale.operators.roofline import GEMM, gpu_roofline_s

Shape = tuple[int, int]  # (n, k)

# Largest batch of vLLM's CUDA graphs: max_cudagraph_capture_size.
GRAPH_ROWS = 512


@dataclass(frozen=True, slots=True)
class ShapeCurve:
    """Seconds over the rows m of one shape; ``kind`` holds for points inside the curve; None: there is no curve.

    ``padded``: the same for batches of a CUDA graph, which are padded: see ``padded_curve``.
    """

    curve: Curve | None
    kind: SourceKind
    text: str
    padded: Curve | None = None


class GemmTimes:
    """Times of products on one GPU type, by data type and shape."""

    def __init__(self, gpu: Gpu, measured: Mapping[str, Mapping[Shape, Curve]]) -> None:
        self._gpu, self._measured = gpu, measured
        self._curves: dict[tuple[str, int, int], ShapeCurve] = {}
        self._axes = {
            dtype: (sorted({n for n, _ in shapes}), sorted({k for _, k in shapes}))
            for dtype, shapes in measured.items()
        }

    def curve(self, dtype: str, n: int, k: int) -> ShapeCurve:
        """The curve of a shape: measured, between neighbours, or by the efficiency of the nearest shape."""
        key = (dtype, n, k)
        if key not in self._curves:
            found = self._found(dtype, n, k)
            self._curves[key] = found if found.curve is None else replace(found, padded=padded_curve(found.curve))
        return self._curves[key]

    def roofline_s(self, dtype: str, m: float, n: int, k: int) -> float:
        """Seconds without measurements: see ``gemm_work``."""
        return gpu_roofline_s(gemm_work(dtype, m, n, k), self._gpu, dtype, GEMM)

    def _found(self, dtype: str, n: int, k: int) -> ShapeCurve:
        shapes = self._measured.get(dtype)
        if not shapes:
            return ShapeCurve(None, SourceKind.ROOFLINE, f"roofline: no {dtype} products of a {self._gpu.name}")
        if (n, k) in shapes:
            return ShapeCurve(shapes[n, k], SourceKind.MEASURED, f"{dtype} products {n} x {k}")
        if corners := self._corners(dtype, n, k):
            names = ", ".join(f"{a} x {b}" for a, b in sorted(corners))
            text = f"{dtype} products {names}, by efficiency"
            return ShapeCurve(self._blend(dtype, n, k, corners), SourceKind.INTERPOLATED, text)
        nearest = min(shapes, key=lambda shape: (_distance(shape, (n, k)), shape))
        text = f"roofline with the efficiency of {dtype} products {nearest[0]} x {nearest[1]}"
        return ShapeCurve(self._blend(dtype, n, k, {nearest: 1.0}), SourceKind.ROOFLINE, text)

    def _corners(self, dtype: str, n: int, k: int) -> dict[Shape, float]:
        """Measured shapes around a shape with their weights, linear in logarithms; empty: some are missing."""
        shapes, (ns, ks) = self._measured[dtype], self._axes[dtype]
        corners = {(a, b): u * v for a, u in _neighbours(ns, n) for b, v in _neighbours(ks, k)}
        return corners if corners and all(corner in shapes for corner in corners) else {}

    def _blend(self, dtype: str, n: int, k: int, corners: Mapping[Shape, float]) -> Curve:
        """The curve of a shape by the mean excess over the roofline, in logarithms, of measured shapes."""
        shapes = self._measured[dtype]
        points: dict[float, float] = {}
        last = min(shapes[corner].axis[-1] for corner in corners)
        for m in sorted({m for corner in corners for m in shapes[corner].axis if m <= last}):
            excess = sum(
                weight * math.log(shapes[corner].at(m).value / self.roofline_s(dtype, m, *corner))
                for corner, weight in corners.items()
            )
            points[m] = self.roofline_s(dtype, m, n, k) * math.exp(excess)
        return Curve.of(points)


def gemm_work(dtype: str, m: float, n: int, k: int) -> Work:
    """FLOPs and bytes of a product: inputs in the data type, outputs in bf16."""
    narrow = ELEMENT_BYTES[dtype]
    return Work(flops=2.0 * m * n * k, traffic_bytes=narrow * (m * k + n * k) + ELEMENT_BYTES["bf16"] * m * n)


def graph_batch(batch: int) -> int:
    """The size of the CUDA graph that a batch is padded to; a batch beyond the largest graph is not padded."""
    if batch <= 2:
        return batch
    if batch <= 4:
        return 4
    step = 8 if batch <= 256 else 16
    return batch if batch > GRAPH_ROWS else -(-batch // step) * step


def padded_curve(curve: Curve) -> Curve:
    """A curve for batches of a CUDA graph: only sizes of graphs, none of which takes longer than a larger one.

    A batch can be padded to a larger graph, and measured times of equal work differ by up to a tenth. So a time above a
    later one is noise.
    """
    points = {m: time_s for m, time_s in zip(curve.axis, curve.values, strict=True) if m == graph_batch(int(m))}
    least = math.inf
    for m in sorted(points, reverse=True):
        if m <= GRAPH_ROWS:
            least = points[m] = min(points[m], least)
    return Curve.of(points) if points else curve


def _neighbours(axis: list[int], size: int) -> list[tuple[int, float]]:
    """The sizes of an axis around a size, with weights that add up to 1; empty: it lies beyond them."""
    index = bisect_left(axis, size)
    if index < len(axis) and axis[index] == size:
        return [(size, 1.0)]
    if index in (0, len(axis)):
        return []
    low, high = axis[index - 1], axis[index]
    share = math.log(size / low) / math.log(high / low)
    return [(low, 1.0 - share), (high, share)]


def _distance(one: Shape, other: Shape) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))
