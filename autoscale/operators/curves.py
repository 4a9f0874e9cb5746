"""Interpolation in measured points, which says whether a value lies between them (pure).

Most curves are lines in plain numbers between points. Those of prompt attention, which grows with a power of the
length, are lines in logarithms: both were compared at points left out (docs/operators_times.md).
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoscale.operators.costs import SourceKind

# Beyond a curve, the slope is that of its last stretch over which the axis grows by this factor. A longer stretch would
# hide its bend, a shorter one has the noise of two points.
_LAST_STRETCH = 2.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that was read from measured points, and how."""

    value: float
    kind: SourceKind


def worst(kinds: Iterable[SourceKind]) -> SourceKind:
    """The least trusted of some kinds."""
    order = list(SourceKind)
    return max(kinds, key=order.index)


def between(axis: tuple[float, float], values: tuple[float, float], point: float, *, in_logs: bool) -> float:
    """The value at a point between two points, by their line in plain numbers or in logarithms."""
    if in_logs:
        share = math.log(point / axis[0]) / math.log(axis[1] / axis[0])
        return float(values[0] * (values[1] / values[0]) ** share)
    return values[0] + (point - axis[0]) / (axis[1] - axis[0]) * (values[1] - values[0])


@dataclass(frozen=True, slots=True)
class Curve:
    """Values at rising points of one axis, at least one.

    ``in_logs``: lines between points are those of the logarithms; all points must be above 0.
    """

    axis: tuple[float, ...]
    values: tuple[float, ...]
    in_logs: bool = False

    @classmethod
    def of(cls, points: Mapping[float, float], *, in_logs: bool = False) -> "Curve":
        """The curve through points, in any order.

        Raises:
            ValueError: there is no point.
        """
        if not points:
            raise ValueError("a curve needs at least one point")
        axis = tuple(sorted(points))
        return cls(axis, tuple(points[each] for each in axis), in_logs)

    def at(self, point: float) -> Reading:
        """The value at a point: below the axis that of its first point, above it the line of the last stretch."""
        axis, values = self.axis, self.values
        index = bisect_left(axis, point)
        if index < len(axis) and axis[index] == point:
            return Reading(values[index], SourceKind.MEASURED)
        if index == 0:
            return Reading(values[0], SourceKind.EXTRAPOLATED)
        if index == len(axis):
            return Reading(self._beyond(point), SourceKind.EXTRAPOLATED)
        ends = (axis[index - 1], axis[index]), (values[index - 1], values[index])
        return Reading(between(*ends, point, in_logs=self.in_logs), SourceKind.INTERPOLATED)

    def _beyond(self, point: float) -> float:
        """The line of the last stretch, which never falls: more work takes no less time."""
        axis, values = self.axis, self.values
        start = max(0, min(bisect_left(axis, axis[-1] / _LAST_STRETCH), len(axis) - 2))
        if start == len(axis) - 1:
            return values[-1] * point / axis[-1]  # one point: in proportion
        slope = (values[-1] - values[start]) / (axis[-1] - axis[start])
        return values[-1] + max(0.0, slope) * (point - axis[-1])


@dataclass(frozen=True, slots=True)
class Surface:
    """Curves at rising points of a second axis, such as one over context for each batch."""

    axis: tuple[float, ...]
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Mapping[tuple[float, float], float], *, in_logs: bool = False) -> "Surface":
        """The surface through points (first axis, second axis), in any order.

        Raises:
            ValueError: there is no point.
        """
        rows: dict[float, dict[float, float]] = {}
        for (first, second), value in points.items():
            rows.setdefault(first, {})[second] = value
        if not rows:
            raise ValueError("a surface needs at least one point")
        axis = tuple(sorted(rows))
        return cls(axis, tuple(Curve.of(rows[each], in_logs=in_logs) for each in axis))

    def at(self, first: float, second: float) -> Reading:
        """The value between the two nearest curves, or beyond them by the same rule as ``Curve``."""
        axis = self.axis
        index = bisect_left(axis, first)
        if index < len(axis) and axis[index] == first:
            return self.curves[index].at(second)
        if index == 0:
            return Reading(self.curves[0].at(second).value, SourceKind.EXTRAPOLATED)
        if index == len(axis):
            column = Curve(axis, tuple(curve.at(second).value for curve in self.curves))
            return Reading(column.at(first).value, SourceKind.EXTRAPOLATED)
        low, high = self.curves[index - 1].at(second), self.curves[index].at(second)
        share = (first - axis[index - 1]) / (axis[index] - axis[index - 1])
        kind = worst((low.kind, high.kind, SourceKind.INTERPOLATED))
        return Reading(low.value + share * (high.value - low.value), kind)
