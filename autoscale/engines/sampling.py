"""Where to measure an engine next: again where a time may be noise, and between places where its curve bends (pure).

Other work of a machine adds to a time, for seconds at a time. So measurements come in rounds, and a place is measured
again only in a later round. The least times count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoscale.engines.form import TOLERANCE_FRAC, Form, Place, Terms, fitted
from autoscale.engines.repeats import LEAST_ROUNDS, agree, between, is_settled, least_time

Times = Mapping[Place, Sequence[float]]  # measured seconds by place, one for each round

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
            place for place in places if form.misses(place, least_time(times[place])) and not is_settled(times[place])
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
    return {place: least_time(each) for place, each in times.items() if each}
