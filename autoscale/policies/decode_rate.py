"""Requests per second that a decode replica serves at the TPOT objective (mu), learned below saturation (pure).

A decode step takes longer with more requests in the batch, almost in a line. Replicas under varying load show points of
this line: their batch, and the time in which each request of it gets a token. At the objective the line gives the
largest batch. Points that are all alike, or far from the objective, show nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain

import numpy as np

from autoscale.policies.policy import admitted_replicas
from autoscale.types import Snapshot
from kvtransfer.topology import Role

# Age at which an observation has a third (1/e) of the weight of the newest one, seconds; as for prefill's rate.
_MEMORY_S = 300.0
# Observations are averaged over this time before they count as a point, seconds. Within a window of some seconds the
# batch and the tokens differ by chance, and such points would show a steeper line.
_POINT_S = 30.0
# Largest change of the batch since the point before, as a part, with which a point counts. While the batch grows, the
# tokens of the window are still those of a smaller one.
_MOST_CHANGE_FRAC = 0.2
# Number of points that are remembered.
_MOST_POINTS = 20
# Fewest points that show a line.
_LEAST_POINTS = 5
# Standard deviation of the batches, as a part of their mean, from which on they show a line and not one point.
_LEAST_SPREAD_FRAC = 0.1
# The line is followed to this multiple of the largest batch that was seen. Further on, an error of its slope of 10 %
# would be one of the same size in the rate.
_MOST_EXTENSION = 1.25
# Largest difference of a step from the learned line, as a part, with which the line holds. Otherwise prompts or engines
# have changed.
_MOST_ERROR_FRAC = 0.15
# Number of points in a row that are off the line, from which on the points before them are forgotten.
_NEW_POINTS = 2
# Part of the objective that a step without requests takes, where one point above the objective is all that is known.
_FIRST_FRAC = 0.5
_NAME = "decode_steps"

# Time at which it ended, batch of a standard replica (requests), and time of a step (seconds).
Point = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRate:
    """The points of the past, the sums of the next one, and the line through the points.

    Attributes:
        requests: sum over the observations since the last point: running requests of all replicas.
        replicas: standard replicas that computed, summed likewise.
        tokens_per_s: their tokens per second, summed likewise.
        began_s: time of the first of these observations; 0: there was none.
        first_s: time of a step without requests, by the line.
        slope_s: time by which each request of the batch makes a step longer; 0: no line is known.
    """

    requests: float = 0.0
    replicas: float = 0.0
    tokens_per_s: float = 0.0
    began_s: float = 0.0
    first_s: float = 0.0
    slope_s: float = 0.0
    points: tuple[Point, ...] = ()

    @classmethod
    def of(cls, memory: Mapping[str, tuple[float, ...]], now_s: float) -> "DecodeRate":
        """Read a policy's memory; observations of the future are forgotten, since the clock was set back."""
        values = memory.get(_NAME, ())
        if len(values) < _HEAD or len(values) % 3 or max(values[3], *values[_HEAD::3], 0.0) > now_s:
            return cls()
        head = dict(zip(cls.__slots__, values[:_HEAD], strict=False))
        points = zip(values[_HEAD::3], values[_HEAD + 1 :: 3], values[_HEAD + 2 :: 3], strict=True)
        return cls(**head, points=tuple(points))

    def memory(self) -> dict[str, tuple[float, ...]]:
        """The sums, the line and the points as a part of a policy's memory."""
        *head, points = astuple(self)
        return {_NAME: (*head, *chain.from_iterable(points))}

    def observed(self, snapshot: Snapshot, tpot_s: float) -> "DecodeRate":
        """The sums, the points and the line after one more snapshot; ``tpot_s``: the objective."""
        now_s, later = snapshot.now_s, self
        if self.began_s and now_s >= self.began_s + _POINT_S:
            later = DecodeRate(first_s=self.first_s, slope_s=self.slope_s, points=self.points)
            if self.tokens_per_s:
                point = (now_s, self.requests / self.replicas, self.requests / self.tokens_per_s)
                later = later._with(point, tpot_s)
        busy = [
            (replica.running_requests, weight, replica.decode_tokens_per_s)
            for replica, weight in admitted_replicas(snapshot, Role.DECODE)
            if replica.running_requests and replica.decode_tokens_per_s
        ]
        return replace(
            later,
            requests=later.requests + math.fsum(requests for requests, _, _ in busy),
            replicas=later.replicas + math.fsum(weight for _, weight, _ in busy),
            tokens_per_s=later.tokens_per_s + math.fsum(tokens for _, _, tokens in busy),
            began_s=later.began_s or now_s,
        )

    def _with(self, point: Point, tpot_s: float) -> "DecodeRate":
        """The points with one more, and the line that they show: a new one, or the old one if the point is near it."""
        points = (*self.points[1 - _MOST_POINTS :], point)
        old, other = (self.first_s, self.slope_s), _line_above(points, tpot_s) or (0.0, 0.0)
        if not self.slope_s:
            line = _line(points, tpot_s) or other
        elif not self._is_off(point):
            line = _line(points, tpot_s) or old
        elif not all(self._is_off(each) for each in points[-_NEW_POINTS:]):
            line = old  # a single point may be chance
        else:
            # Engines or prompts have changed. A line through earlier and later points would be that of neither.
            line, points = other, points[-_NEW_POINTS:]
        return DecodeRate(first_s=line[0], slope_s=line[1], points=points)

    def _is_off(self, point: Point) -> bool:
        """Whether a point is not near the line."""
        _, batch, step_s = point
        return abs(self.first_s + self.slope_s * batch - step_s) > _MOST_ERROR_FRAC * step_s

    def requests_per_s(self, tpot_s: float, output_tokens: float | None) -> float | None:
        """The rate of one standard replica at the TPOT objective, for answers of this mean length.

        At the objective a step has the batch B, and each of its requests gets a token. ``None``: too little was
        observed.
        """
        if not output_tokens or not self.slope_s or self.first_s >= tpot_s:
            return None
        return (tpot_s - self.first_s) / self.slope_s / tpot_s / output_tokens


# Numbers in a memory before those of the points.
_HEAD = len(DecodeRate.__slots__) - 1


def _line(points: Sequence[Point], tpot_s: float) -> tuple[float, float] | None:
    """First step and slope of the line through the points, in seconds; newer points weigh more.

    ``None``: the points show no line, or the batch at the objective is far from all that was seen.
    """
    if len(points) < _LEAST_POINTS:
        return None
    ended_s, batches, steps_s = np.array(points).T
    weights = np.exp((ended_s - ended_s[-1]) / _MEMORY_S) * _is_steady(batches)
    if np.count_nonzero(weights) < _LEAST_POINTS:
        return None
    mean, mean_s = np.average(batches, weights=weights), np.average(steps_s, weights=weights)
    variance = np.average((batches - mean) ** 2, weights=weights)
    covariance_s = np.average((batches - mean) * (steps_s - mean_s), weights=weights)
    if math.sqrt(variance) < _LEAST_SPREAD_FRAC * mean or covariance_s <= 0.0:
        return None
    slope_s = float(covariance_s / variance)
    first_s = float(mean_s - slope_s * mean)
    batch = (tpot_s - first_s) / slope_s
    return (first_s, slope_s) if 0.0 < batch <= batches.max() * _MOST_EXTENSION else None


def _line_above(points: Sequence[Point], tpot_s: float) -> tuple[float, float] | None:
    """A line through the last point if it is above the objective; ``None``: it is not, or the batch is not steady.

    Replicas have too many requests there, whatever the line is. With more replicas smaller batches will show the line.
    """
    _, batch, step_s = points[-1]
    if step_s <= tpot_s or not _is_steady(np.array([each for _, each, _ in points]))[-1]:
        return None
    first_s = _FIRST_FRAC * tpot_s
    return first_s, (step_s - first_s) / batch


def _is_steady(batches: "np.typing.NDArray[np.float64]") -> "np.typing.NDArray[np.bool_]":
    """Of each point, whether its batch is near that of the point before."""
    return np.abs(np.diff(batches, prepend=0.0)) <= _MOST_CHANGE_FRAC * batches
