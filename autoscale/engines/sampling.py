"""Where to measure a curve next: where it bends most, so that few points describe it (pure)."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise


def next_point(measured: Mapping[int, float], least: int, most: int, tolerance_frac: float) -> int | None:
    """The point at which a curve should be measured next; ``None``: lines between the points are near enough.

    The two ends come first, and then the point between them at equal ratios. After that, the interval in which a line
    is expected to be furthest from the curve is halved. The distance follows from how much the curve's slope changes at
    the ends of the interval: a line misses a curve by its second derivative times the square of the interval over 8.

    Args:
        measured: values above 0 by point.
        least: the first point of the curve, at least 1.
        most: the last point.
        tolerance_frac: distance between line and curve that is near enough, as a share of the value.
    """
    for end in (least, most):
        if end not in measured:
            return end
    points = sorted(measured)
    if len(points) == 2:
        return _between(least, most)
    curvatures = {at: _curvature(points, measured, at) for at in range(1, len(points) - 1)}
    worst, worst_frac = None, tolerance_frac
    for index, (start, end) in enumerate(pairwise(points)):
        bend = max(abs(curvatures.get(index, 0.0)), abs(curvatures.get(index + 1, 0.0)))
        missed_frac = bend * (end - start) ** 2 / 8.0 / min(measured[start], measured[end])
        if missed_frac > worst_frac and (point := _between(start, end)) is not None:
            worst, worst_frac = point, missed_frac
    return worst


def _between(start: int, end: int) -> int | None:
    """The whole number between two points at equal ratios; ``None``: there is none."""
    point = round(math.sqrt(max(1, start) * end))
    point = min(max(point, start + 1), end - 1)
    return point if start < point < end else None


def _curvature(points: Sequence[int], values: Mapping[int, float], at: int) -> float:
    """Second derivative of the curve at an inner point, from it and the two points beside it."""
    before, here, after = points[at - 1], points[at], points[at + 1]
    slope_before = (values[here] - values[before]) / (here - before)
    slope_after = (values[after] - values[here]) / (after - here)
    return 2.0 * (slope_after - slope_before) / (after - before)
