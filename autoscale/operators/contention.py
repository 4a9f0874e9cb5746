"""What operators that run on one GPU at the same time take from each other: the interference I(d, v) (pure).

The measure is ``taken_frac``: GPU time that operator v loses for each second that operator w runs beside it. Pure
turns of time give 1. Two kernels that overlap well give less, two that evict each other's cache give more. Any value
is above 0: two busy operators on one GPU always disturb each other.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.activity import Activity, Kind, nearest_size
from autoscale.operators.demand import BadCostError

Floats = NDArray[np.float64]

# The least share that an operator takes from another one. Two kernels that need no common unit still share caches, the
# memory controller and the launch queue; the smallest in pairs.csv is 0.63, and no pair was measured below it.
LEAST_TAKEN_FRAC = 0.1


class Contention(Protocol):
    """A model of contention on one GPU type."""

    def taken_fracs(self, activities: Sequence[Activity]) -> Floats:
        """For operators v (rows) and w (columns): GPU time that v loses for each second that w runs; above 0."""
        ...


def interference(own: int, busy_fracs: Sequence[float], taken_fracs: Floats) -> float:
    """I(d, v) of Algorithm 2: by which factor services of operator ``own`` are longer on a GPU that others share.

    I = 1 / (1 - sum over the others of taken_frac x busy share). It is 1 only if no other operator is busy, and
    infinite if they leave no time. With turns of time (taken_frac 1) and one replica it is exact: the wait of M/M/1
    with the longer service time is then that of processor sharing, T / (1 - rho) (Harchol-Balter, chapter 30).
    """
    taken = sum(float(taken_fracs[own, other]) * busy for other, busy in enumerate(busy_fracs) if other != own)
    return math.inf if taken >= 1.0 else 1.0 / (1.0 - taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformContention:
    """Every operator takes the same share from every other one: for sensitivity, and where nothing was measured."""

    taken_frac: float = 1.0

    def __post_init__(self) -> None:
        if not LEAST_TAKEN_FRAC <= self.taken_frac < math.inf:
            raise ValueError(f"taken_frac is {self.taken_frac}: give {LEAST_TAKEN_FRAC} or more")

    def taken_fracs(self, activities: Sequence[Activity]) -> Floats:
        """As ``Contention`` says."""
        return np.full((len(activities), len(activities)), self.taken_frac)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledContention:
    """Another model with every share multiplied by ``factor``: the sensitivity row of a report."""

    base: Contention
    factor: float

    def taken_fracs(self, activities: Sequence[Activity]) -> Floats:
        """As ``Contention`` says."""
        return np.maximum(self.base.taken_fracs(activities) * self.factor, LEAST_TAKEN_FRAC)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPairs:
    """Contention of pairs of kernels that were measured in two streams.

    Attributes:
        joint_speed: by the (kind, tokens) of both: the services of both that end in a second, each as a share of what
            it does alone, added up: 1 / I(v beside w) + 1 / I(w beside v). Both orders are in it.
        sizes: the measured token counts of each kind, ascending.
    """

    joint_speed: Mapping[tuple[tuple[Kind, int], tuple[Kind, int]], float]
    sizes: Mapping[Kind, tuple[int, ...]]

    def taken_fracs(self, activities: Sequence[Activity]) -> Floats:
        """As ``Contention`` says; 1 / joint speed of the nearest measured sizes."""
        places = [(one.kind, nearest_size(one.tokens, self.sizes[one.kind])) for one in activities]
        fracs = [[1.0 / self.joint_speed[own, other] for other in places] for own in places]
        taken: Floats = np.maximum(np.array(fracs), LEAST_TAKEN_FRAC)
        return taken


def load_pairs(path: Path) -> MeasuredPairs:
    """Read a table of pairs: columns kind, tokens, other_kind, other_tokens, joint_speed.

    Raises:
        BadCostError: the file cannot be read, a value is no number above 0, or a pair of kinds is missing.
    """
    speeds: dict[tuple[tuple[Kind, int], tuple[Kind, int]], float] = {}
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                own, other = _place(row["kind"], row["tokens"]), _place(row["other_kind"], row["other_tokens"])
                speed = float(row["joint_speed"])
                if not 0.0 < speed < math.inf:
                    raise BadCostError(f"{path}: joint_speed of {own} and {other} is {speed}: it must be above 0")
                speeds[own, other] = speeds[other, own] = speed
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BadCostError(f"{path}: cannot be read: {error!r}") from None
    places = sorted({own for own, _ in speeds})
    missing = [(own, other) for own in places for other in places if (own, other) not in speeds]
    if missing or {kind for kind, _ in places} != set(Kind):
        raise BadCostError(f"{path}: pairs are missing: {missing[:3] or 'of a whole kind'}")
    return MeasuredPairs(
        joint_speed=speeds, sizes={kind: tuple(size for one, size in places if one is kind) for kind in Kind}
    )


def _place(kind: str, tokens: str) -> tuple[Kind, int]:
    return Kind(kind), int(tokens)
