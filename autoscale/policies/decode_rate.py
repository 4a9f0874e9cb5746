"""Requests per second that a decode replica serves at the TPOT objective (mu), learned below saturation (pure).

A decode step takes longer with more requests in the batch, almost in a line. Replicas under varying load show points of
this line: their batch, and the time in which each request of it gets a token. At the objective the line gives the
largest batch. Points that are all alike, or far from the objective, show nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from math import fsum

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
# Time for which a learned rate holds if no newer one is learned, seconds. With more replicas the batches may be too
# small to show it, and with the configured rate the objective would be missed again.
_HOLDS_S = 3600.0
_NAME = "decode_steps"

# Time at which it ended, batch of a standard replica (requests), and time of a step (seconds).
Point = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRate:
    """The points of the past, the sums of the next one, and what they have shown.

    Attributes:
        requests: sum over the observations since the last point: running requests of all replicas.
        replicas: standard replicas that computed, summed likewise.
        tokens_per_s: their tokens per second, summed likewise.
        began_s: time of the first of these observations; 0: there was none.
        learned_tokens_per_s: tokens per second of a standard replica at the TPOT objective; 0: not learned.
        learned_s: time at which it was learned last.
    """

    requests: float = 0.0
    replicas: float = 0.0
    tokens_per_s: float = 0.0
    began_s: float = 0.0
    learned_tokens_per_s: float = 0.0
    learned_s: float = 0.0
    points: tuple[Point, ...] = ()

    @classmethod
    def of(cls, memory: Mapping[str, tuple[float, ...]], now_s: float) -> "DecodeRate":
        """Read a policy's memory; observations of the future are forgotten, since the clock was set back."""
        values = memory.get(_NAME, ())
        if len(values) < _HEAD or len(values) % 3 or max(values[3], values[5], *values[_HEAD::3]) > now_s:
            return cls()
        head = dict(zip(cls.__slots__, values[:_HEAD], strict=False))
        points = zip(values[_HEAD::3], values[_HEAD + 1 :: 3], values[_HEAD + 2 :: 3], strict=True)
        return cls(**head, points=tuple(points))

    def memory(self) -> dict[str, tuple[float, ...]]:
        """All of it as a part of a policy's memory."""
        *head, points = astuple(self)
        return {_NAME: (*head, *chain.from_iterable(points))}

    def observed(self, snapshot: Snapshot, tpot_s: float) -> "DecodeRate":
        """What is known with this snapshot of decode; ``tpot_s``: the objective."""
        now_s, later = snapshot.now_s, self
        if self.began_s and now_s >= self.began_s + _POINT_S:
            points = self.points
            if self.tokens_per_s:
                point = (now_s, self.requests / self.replicas, self.requests / self.tokens_per_s)
                points = (*points[1 - _MOST_POINTS :], point)
            learned = _tokens_per_s(points, tpot_s, now_s)
            later = DecodeRate(
                learned_tokens_per_s=self.learned_tokens_per_s if learned is None else learned,
                learned_s=self.learned_s if learned is None else now_s,
                points=points,
            )
        busy = [
            (replica.running_requests, weight, replica.decode_tokens_per_s)
            for replica, weight in admitted_replicas(snapshot, Role.DECODE)
            if replica.running_requests and replica.decode_tokens_per_s
        ]
        return replace(
            later,
            requests=later.requests + fsum(requests for requests, _, _ in busy),
            replicas=later.replicas + fsum(weight for _, weight, _ in busy),
            tokens_per_s=later.tokens_per_s + fsum(tokens for _, _, tokens in busy),
            began_s=later.began_s or now_s,
        )

    def requests_per_s(self, output_tokens: float | None, now_s: float) -> float | None:
        """The rate of one standard replica, for answers of this mean length; ``None``: it was not learned lately."""
        if not output_tokens or not self.learned_tokens_per_s or now_s > self.learned_s + _HOLDS_S:
            return None
        return self.learned_tokens_per_s / output_tokens


# Numbers in a memory before those of the points.
_HEAD = len(DecodeRate.__slots__) - 1


def _tokens_per_s(points: Sequence[Point], tpot_s: float, now_s: float) -> float | None:
    """Tokens per second of a standard replica at the TPOT objective: at the batch at which a step takes this time.

    ``None``: the points show no line, or the batch is far from all that was seen.
    """
    if len(points) < _LEAST_POINTS:
        return None
    ended_s, batches, steps_s = np.array(points).T
    changes = np.abs(np.diff(batches, prepend=0.0)) / batches
    weights = np.exp((ended_s - now_s) / _MEMORY_S) * (changes <= _MOST_CHANGE_FRAC)
    if np.count_nonzero(weights) < _LEAST_POINTS:
        return None
    mean, mean_s = np.average(batches, weights=weights), np.average(steps_s, weights=weights)
    variance = np.average((batches - mean) ** 2, weights=weights)
    slope_s = np.average((batches - mean) * (steps_s - mean_s), weights=weights)  # times the variance
    if math.sqrt(variance) < _LEAST_SPREAD_FRAC * mean or slope_s <= 0.0:
        return None
    batch = mean + (tpot_s - mean_s) * variance / slope_s
    return float(batch / tpot_s) if 0.0 < batch <= batches.max() * _MOST_EXTENSION else None
