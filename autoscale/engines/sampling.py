"""Where to measure an engine next: again where a time may be noise, and between places where its curve bends (pure).

Other work of a machine adds to a time, for seconds at a time. So measurements come in rounds, and a place is measured
again only in a later round. The least times count.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoscale.engines.form import TOLERANCE_FRAC, Form, Place, Terms, fitted

Times = Mapping[Place, Sequence[float]]  # measured seconds by place, one for each round

LEAST_ROUNDS = 2  # rounds of a place whose time is that of the form
_MOST_ROUNDS = 6  # rounds of any other place
_AGREEMENT_FRAC = 0.1  # the three least times of a place agree within this share
LEAST_AGREED_ROUNDS = 3
_MOST_BETWEEN = 2  # places that are added between two of the first ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A plan of measurements of one curve.

    Attributes:
        terms: of the curve's form.
        axis: prompt lengths or batches that are measured in any case, at least one; they rise.
        contexts: mean contexts at which an axis value is measured, in tokens.
    """

    terms: Terms
    axis: tuple[int, ...]
    contexts: Callable[[int], tuple[int, ...]]

    def next_places(self, times: Times) -> list[Place]:
        """Places of the next round; empty: the survey is complete."""
        places = [place for at in self._measured_axis(times) for place in self._row(at)]
        first = [place for place in places if len(times.get(place, ())) < LEAST_ROUNDS]
        if first:
            return first
        form = form_of(self.terms, times)
        doubtful = [
            place for place in places if form.misses(place, _time(times[place])) and not is_settled(times[place])
        ]
        if doubtful:
            return doubtful
        return [place for at in self._bends(form) for place in self._row(at)]

    def _measured_axis(self, times: Times) -> list[int]:
        return sorted({*self.axis, *(at for at, _ in times)})

    def _row(self, at: int) -> list[Place]:
        return [(at, context_tokens) for context_tokens in self.contexts(at)]

    def _bends(self, form: Form) -> list[int]:
        """Axis values to add: in the middle of two whose corrections differ, so that a line between them may be off."""
        added = list[int]()
        for start, end in pairwise(sorted(form.corrections)):
            differences = [
                abs(form.correction(start, context) - form.correction(end, context)) for context in self.contexts(start)
            ]
            middle = between(start, end)
            if max(differences) <= 2.0 * TOLERANCE_FRAC or middle is None:
                continue
            if self._between_first([*form.corrections, *added], middle) < _MOST_BETWEEN:
                added.append(middle)
        return added

    def _between_first(self, measured: Sequence[int], at: int) -> int:
        """Number of values between the two of the first axis around ``at``."""
        before = max(each for each in self.axis if each < at)
        after = min(each for each in self.axis if each > at)
        return sum(before < each < after for each in measured)


def form_of(terms: Terms, times: Times) -> Form:
    """The form of measured times."""
    return fitted(terms, place_times(times), {place for place, each in times.items() if agree(each)})


def place_times(times: Times) -> dict[Place, float]:
    """The time of each place that has been measured."""
    return {place: _time(each) for place, each in times.items() if each}


def _time(times: Sequence[float]) -> float:
    """The median of the three least times: one that is too low by chance does not count; of two, the lower one."""
    least = sorted(times)[:LEAST_AGREED_ROUNDS]
    return least[(len(least) - 1) // 2]


def is_settled(times: Sequence[float]) -> bool:
    """Whether a place needs no further round: its least times agree, or there were enough of them."""
    return agree(times) or len(times) >= _MOST_ROUNDS


def agree(times: Sequence[float]) -> bool:
    """Whether the three least times of a place agree, so that they are its own and not the machine's."""
    least = sorted(times)[:LEAST_AGREED_ROUNDS]
    return len(least) == LEAST_AGREED_ROUNDS and least[-1] <= (1.0 + _AGREEMENT_FRAC) * least[0]


def between(start: int, end: int) -> int | None:
    """The whole number between two others at equal ratios; ``None``: there is none."""
    middle = min(max(round(math.sqrt(start * end)), start + 1), end - 1)
    return middle if start < middle < end else None
