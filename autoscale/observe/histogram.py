"""Counts of times in buckets, and quantiles of them (pure)."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

# Upper edges of TTFT's buckets, seconds; one more bucket follows after the last edge.
TTFT_EDGES_S = (0.05, *(n / 10 for n in range(1, 11)), 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
# Upper edges of TPOT's buckets, seconds.
TPOT_EDGES_S = (*(n / 200 for n in range(1, 11)), 0.06, 0.07, 0.08, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Upper edges of the buckets of prompt and answer lengths, tokens: each is the square root of two times the one before,
# so that a length is known to within 20 %.
LENGTH_EDGES_TOKENS = tuple(float(round(64 * 2 ** (n / 2))) for n in range(23))


@dataclass(slots=True)
class Histogram:
    """Counts of observations in each bucket. The last bucket is for values above the last edge."""

    edges: tuple[float, ...]
    counts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0.0] * (len(self.edges) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1.0

    def as_report(self, name: str) -> dict[str, float]:
        """The buckets as named numbers of a replica's report; empty buckets, which are most, are left out."""
        return {f"{name}_{index}": count for index, count in enumerate(self.counts) if count}


def distribution(
    edges: Sequence[float], counts: Sequence[float], mean: float | None
) -> tuple[tuple[float, float], ...]:
    """Values with their shares of the observations, one for each bucket that has any; empty: there is none.

    The value of a bucket is the middle of its edges. All values are then scaled so that their mean is ``mean``, which
    is known exactly. ``counts`` has one number more than ``edges``.
    """
    total = math.fsum(counts)
    if total <= 0.0 or not mean:
        return ()
    lower, upper = (0.0, *edges), (*edges, edges[-1])
    points = [((low + high) / 2, count / total) for low, high, count in zip(lower, upper, counts, strict=True) if count]
    scale = mean / math.fsum(value * share for value, share in points)
    return tuple((value * scale, share) for value, share in points)


def quantile(edges: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value below which a share (0..1) of the observations lies, by linear interpolation inside its bucket.

    ``None``: there are no observations. If the result is the last edge, the true value may be above it. ``counts`` has
    one number more than ``edges``.
    """
    total = math.fsum(counts)
    if total <= 0.0:
        return None
    wanted_below, below = share * total, 0.0
    for index, edge in enumerate(edges):
        if below + counts[index] >= wanted_below and counts[index] > 0.0:
            lower_edge = edges[index - 1] if index else 0.0
            share_of_bucket = max(0.0, wanted_below - below) / counts[index]
            return lower_edge + (edge - lower_edge) * share_of_bucket
        below += counts[index]
    return edges[-1]
