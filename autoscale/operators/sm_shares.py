"""MPS: the share of the SMs that an operator gets (Eq. 6), and contention by SMs and memory bandwidth (pure)."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.activity import Activity, Kind, nearest_size
from autoscale.operators.contention import LEAST_TAKEN_FRAC
from autoscale.operators.demand import BadCostError

Floats = NDArray[np.float64]

# An operator may take this much longer with its share of the SMs than with all of them. It is about the spread of two
# measurements of one kernel in shares.csv (5 % at shares from 50 to 100 %).
SLOWER_FRAC = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SmShares:
    """Times of kernels by their share of the SMs, as multiples of the time with all SMs (the paper's Fig. 8a).

    ``curves``: by kind and tokens, points (share in percent, multiple), ascending, the last one at 100 %.
    """

    curves: Mapping[tuple[Kind, int], tuple[tuple[int, float], ...]]

    def slowdown(self, activity: Activity, share_percent: float) -> float:
        """The multiple at a share: linear in 1 / share between points, and in proportion to 1 / share below them."""
        curve = self._curve(activity)
        if share_percent <= curve[0][0]:
            return curve[0][1] * curve[0][0] / share_percent
        for (low, slow), (high, fast) in pairwise(curve):
            if share_percent <= high:
                part = (1.0 / share_percent - 1.0 / high) / (1.0 / low - 1.0 / high)
                return fast + part * (slow - fast)
        return curve[-1][1]

    def least_share_percent(self, activity: Activity, slower_frac: float = SLOWER_FRAC) -> int:
        """M_v: the smallest measured share with which an operator takes at most ``slower_frac`` longer."""
        return next(share for share, multiple in self._curve(activity) if multiple <= 1.0 + slower_frac)

    def _curve(self, activity: Activity) -> tuple[tuple[int, float], ...]:
        kind = activity.kind
        sizes = tuple(sorted(size for one, size in self.curves if one is kind))
        return self.curves[kind, nearest_size(activity.tokens, sizes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmBandwidthContention:
    """Contention of operators with a share of the SMs each: a stated model, no measurement of pairs.

    An operator w takes its share of the SMs and its share of the memory bandwidth. From v it takes the larger of the
    two, each weighted by how much v depends on it: v's own need over its largest need.
    """

    shares: SmShares

    def taken_fracs(self, activities: Sequence[Activity]) -> Floats:
        """As ``Contention`` says."""
        sms = np.array([self.shares.least_share_percent(one) / 100.0 for one in activities])
        traffic = np.array([one.bandwidth_frac for one in activities])
        largest = np.maximum(sms, traffic)
        larger = np.maximum(np.outer(sms / largest, sms), np.outer(traffic / largest, traffic))
        taken: Floats = np.maximum(larger, LEAST_TAKEN_FRAC)
        return taken


def load_shares(path: Path) -> SmShares:
    """Read a table of curves: columns kind, tokens, share_percent, slowdown.

    A curve must end at 100 % with 1, and a kind must have one at least.

    Raises:
        BadCostError: the file cannot be read, or a value is wrong.
    """
    points: dict[tuple[Kind, int], dict[int, float]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                place = Kind(row["kind"]), int(row["tokens"])
                points.setdefault(place, {})[int(row["share_percent"])] = float(row["slowdown"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BadCostError(f"{path}: cannot be read: {error!r}") from None
    for place, curve in points.items():
        if curve.get(100) != 1.0 or not all(0.0 < value < math.inf for value in curve.values()):
            raise BadCostError(f"{path}: curve of {place}: values must be above 0, and 1 at 100 %")
    if {kind for kind, _ in points} != set(Kind):
        raise BadCostError(f"{path}: a kind has no curve: needed are {', '.join(Kind)}")
    return SmShares(curves={place: tuple(sorted(curve.items())) for place, curve in points.items()})
