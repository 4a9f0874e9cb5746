"""Which points of a series are measured next: all sizes, then what repeats leave in doubt, then where it bends."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from autoscale.engines.repeats import LEAST_ROUNDS, between, is_repeated, least_time
from autoscale.operators.curves import between as line_between
from deployments.operator_profiler.series import Series, padded

Place = tuple[int | None, int]
Times = Mapping[Place, Sequence[float]]

# A point that the line between its neighbours misses by more than this share: the curve bends there.
_BEND_FRAC = 0.05
# Sizes closer than this ratio get none between them.
_LEAST_RATIO = 1.5


def next_places(series: Series, times: Times, excluded: frozenset[Place] = frozenset()) -> list[Place]:
    """Places of the next round; empty: the series is complete. ``excluded``: places that cannot be measured."""
    grid = [(outer, inner) for outer in series.outer for inner in series.inner if series.is_fit(outer or 0, inner)]
    places = sorted({*grid, *times} - excluded, key=order)
    fresh = [place for place in places if not times.get(place)]
    if fresh:
        return fresh
    doubtful = [place for place in places if not is_repeated(times[place])]
    if doubtful:
        return doubtful
    seconds = {place: least_time(times[place]) for place in places}
    return [place for place in _bends(series, seconds) if place not in excluded]


def order(place: Place) -> tuple[int, int]:
    """The order of places in a table."""
    return place[0] or 0, place[1]


def expected(times: Mapping[Place, Sequence[object]], due: Sequence[Place]) -> int:
    """Measurements that a series takes at least, with those that are done."""
    return sum(max(LEAST_ROUNDS, len(times.get(place, ()))) for place in {*times, *due})


def _bends(series: Series, seconds: Mapping[Place, float]) -> list[Place]:
    """New places beside those at which a curve bends, along both sizes."""
    rows: dict[int | None, dict[int, float]] = {}
    columns: dict[int, dict[int, float]] = {}
    for (outer, inner), value in seconds.items():
        rows.setdefault(outer, {})[inner] = value
        if outer:
            columns.setdefault(inner, {})[outer] = value
    found = {(outer, inner) for outer, row in rows.items() for inner in _between_bends(row, series)}
    found |= {(outer, inner) for inner, column in columns.items() for outer in _between_bends(column, series, False)}
    fitting = {place for place in found - seconds.keys() if series.is_fit(place[0] or 0, place[1])}
    return sorted(fitting, key=order)


def _between_bends(curve: Mapping[int, float], series: Series, is_inner: bool = True) -> Iterator[int]:
    """Sizes in the middle of the two stretches that meet at a bend."""
    axis = sorted(curve)
    for low, at, high in zip(axis, axis[1:], axis[2:], strict=False):
        line = line_between((low, high), (curve[low], curve[high]), at, in_logs=series.in_logs and is_inner)
        if abs(line / curve[at] - 1.0) <= _BEND_FRAC:
            continue
        for start, end in pairwise((low, at, high)):
            middle = between(start, end)
            if middle is None or end < _LEAST_RATIO * start:
                continue
            size = padded(middle) if series.is_padded else middle
            if start < size < end:
                yield size
