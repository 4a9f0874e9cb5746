"""The mean load of each step so far: what forecasts are made from (pure)."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoscale.load_forecast import SERIES, Load
from autoscale.types import Traffic

# Digits of a number of a point: more would be noise, and the points of a day are stored with each step.
_DIGITS = 6


class Point(NamedTuple):
    """The mean load of one step, and the end of the step (wall-clock time)."""

    at_s: float
    requests_per_s: float
    input_tokens: float
    output_tokens: float

    @property
    def load(self) -> Load:
        """The load without its time."""
        return Load(*self[1:])


class Sums(NamedTuple):
    """Of the ticks of a step: their number, and the sum of their rates.

    Then, for input and for output tokens: the sum of the rates of ticks with a mean length, and of rate x length.
    """

    ticks: float = 0.0
    rates: float = 0.0
    input_rates: float = 0.0
    inputs: float = 0.0
    output_rates: float = 0.0
    outputs: float = 0.0


_NO_SUMS = Sums()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The points of the last steps, the oldest first, and the sums of the running step.

    ``step``: number of the running step since 1970; ``None``: no tick has come. Steps begin at multiples of their
    length, so that the same step of the day before is known.
    """

    step: int | None = None
    sums: Sums = _NO_SUMS
    points: tuple[Point, ...] = ()

    def observed(self, traffic: Traffic, now_s: float, *, step_s: float, most_points: int) -> "History":
        """The history with the traffic of one more tick; a step that has ended becomes a point.

        A tick whose traffic was not observed, or only in part, does not count; one with a number that is not finite or
        below 0 neither. If the clock was set back, points of the future are left out.
        """
        step, history = math.floor(now_s / step_s), self
        if self.step is not None and step != self.step:
            history = self._closed(step, step_s, most_points)
        history = replace(history, step=step)
        rate, lengths = traffic.requests_per_s, (traffic.input_tokens_mean, traffic.output_tokens_mean)
        if rate is None or not traffic.is_whole:
            return history
        if not all(0.0 <= number < math.inf for number in (rate, *lengths) if number is not None):
            return history
        added = [1.0, rate]
        for length in lengths:
            added += [0.0, 0.0] if length is None else [rate, rate * length]
        return replace(history, sums=Sums(*(a + b for a, b in zip(history.sums, added, strict=True))))

    def _closed(self, step: int, step_s: float, most_points: int) -> "History":
        """The history at the begin of a step: the step before it has become a point, if its load is known."""
        assert self.step is not None
        points = self.points
        if step < self.step:
            points = tuple(point for point in points if point.at_s <= step * step_s)
        elif (load := self._means()) is not None:
            end_s = (self.step + 1) * step_s
            oldest_s = end_s - (most_points - 0.5) * step_s
            points = (*(point for point in points if oldest_s < point.at_s < end_s), Point(end_s, *load))
        return History(step=step, points=points)

    def _means(self) -> Load | None:
        """The mean load of the running step; ``None``: it is not known.

        Lengths are means over requests, not over ticks. A length that was not observed is that of the step before.
        """
        sums, before = self.sums, self.points[-1] if self.points else None
        lengths = list[float]()
        for rates, products, name in (
            (sums.input_rates, sums.inputs, SERIES[1]),
            (sums.output_rates, sums.outputs, SERIES[2]),
        ):
            if rates > 0.0:
                lengths.append(products / rates)
            elif before is not None:
                lengths.append(getattr(before, name))
        if not sums.ticks or len(lengths) < 2:
            return None
        return Load(*(float(f"{number:.{_DIGITS}g}") for number in (sums.rates / sums.ticks, *lengths)))
