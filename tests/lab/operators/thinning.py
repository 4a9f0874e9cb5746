"""Leaves out measured points that the line between their neighbours gives anyway."""

from collections.abc import Mapping

from autoscale.operators.curves import between

# Largest relative error of a point that is left out.
TOLERANCE_FRAC = 0.02


def thinned(
    points: Mapping[float, float], tolerance_frac: float = TOLERANCE_FRAC, *, in_logs: bool = False
) -> dict[float, float]:
    """The first and the last point, and those between that straight lines through the others miss.

    The point that a line misses most is kept, and both sides of it are thinned in the same way (Douglas and Peucker
    1973, with the relative error as the distance). So every point left out is within the tolerance. ``in_logs``: lines
    of the logarithms, as the curve will be read.
    """
    axis = sorted(points)
    kept = {axis[0], axis[-1]}
    spans = [(0, len(axis) - 1)]
    while spans:
        first, last = spans.pop()
        ends = (axis[first], axis[last]), (points[axis[first]], points[axis[last]])
        worst, worst_error = first, tolerance_frac
        for index in range(first + 1, last):
            at = axis[index]
            error = abs(between(*ends, at, in_logs=in_logs) / points[at] - 1.0)
            if error > worst_error:
                worst, worst_error = index, error
        if worst != first:
            kept.add(axis[worst])
            spans += [(first, worst), (worst, last)]
    return {point: points[point] for point in sorted(kept)}
