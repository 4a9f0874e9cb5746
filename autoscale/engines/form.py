"""The time of an engine's work as a form with few terms, fitted to measured times and corrected where it is off (pure).

A prompt of n tokens is computed in chunks. Each chunk has a constant cost. Each token has one for its matrices, and one
for each token before it, since attention reads them all. So the terms are the number of chunks, n, and n squared. A
decode step reads the weights once, computes each request's token, and reads the KV of all: its terms are 1, the batch,
and the batch times the mean context. Each term adds time, so no weight is below 0.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from autoscale.engines.profile import DecodeSurface, PrefillCurve

# Where something is measured: prompt tokens and 0, or batch and mean context in tokens. The first one is the axis.
Place = tuple[int, int]
Terms = Callable[[Place], tuple[float, ...]]

# A measured time that differs from the form by more than this share is a place of its own: half of what points left out
# may be off. Repeats of one measurement on an idle machine differ less.
TOLERANCE_FRAC = 0.05
_ITERATIONS = 30  # of the fit
# Two points of a curve differ at most by this factor: a line between them is at most 3 % above a curve that grows with
# the square.
_CURVE_RATIO = math.sqrt(2.0)


def prompt_terms(max_batch_tokens: int) -> Terms:
    """Terms of a prompt alone on an engine whose steps compute at most ``max_batch_tokens`` tokens."""
    return lambda place: (float(-(-place[0] // max_batch_tokens)), float(place[0]), float(place[0]) ** 2)


def step_terms(place: Place) -> tuple[float, ...]:
    """Terms of a decode step."""
    batch, context_tokens = place
    return 1.0, float(batch), float(batch) * context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Times of an engine at any place.

    Attributes:
        terms: what a place costs, before the weights.
        weights: seconds of each term.
        corrections: logarithm of measured time over the form's, by axis value, and then by context. It is 0 where the
            measured time is that of the form, or is not confirmed.
    """

    terms: Terms
    weights: tuple[float, ...]
    corrections: Mapping[int, Mapping[int, float]]

    def seconds(self, place: Place) -> float:
        """Seconds at a place: by the form, times the corrections of the measured places around it.

        Between two axis values the correction is on a line over their logarithm, between two contexts on a line. Beyond
        the outermost places theirs hold.
        """
        return _weighted(self.weights, self.terms(place)) * math.exp(self.correction(*place))

    def missed(self, place: Place, measured_s: float) -> float:
        """Logarithm of a measured time over the form's, without corrections."""
        return math.log(measured_s / _weighted(self.weights, self.terms(place)))

    def misses(self, place: Place, measured_s: float) -> bool:
        """Whether a measured time differs from the form by more than the tolerance."""
        return abs(self.missed(place, measured_s)) > TOLERANCE_FRAC

    def correction(self, at: int, context_tokens: int) -> float:
        """Logarithm of the factor at a place."""
        axis = sorted(self.corrections)
        rows = [self.corrections[each] for each in axis]
        columns = [np.interp(context_tokens, sorted(row), [row[each] for each in sorted(row)]) for row in rows]
        return float(np.interp(math.log(at), [math.log(each) for each in axis], columns))


def fitted(terms: Terms, seconds: Mapping[Place, float], confirmed: Collection[Place]) -> Form:
    """The form that is nearest to measured times, with corrections where it is off by more than ``TOLERANCE_FRAC``.

    Args:
        terms: of the form.
        seconds: times above 0 of at least one place.
        confirmed: places whose time repeats confirm; only they are corrected.
    """
    weights = term_weights([terms(place) for place in seconds], list(seconds.values()))
    form = Form(terms=terms, weights=weights, corrections={})
    corrections: dict[int, dict[int, float]] = {}
    for place, measured_s in seconds.items():
        is_other = place in confirmed and form.misses(place, measured_s)
        corrections.setdefault(place[0], {})[place[1]] = form.missed(place, measured_s) if is_other else 0.0
    return replace(form, corrections=corrections)


def prefill_curve(form: Form, max_batch_tokens: int) -> PrefillCurve:
    """The form of prompts as points of a profile, with a point on each side of the longest prompt of one step."""
    least, most = min(form.corrections), max(form.corrections)
    edge = {tokens for tokens in (max_batch_tokens, max_batch_tokens + 1) if least < tokens < most}
    tokens = sorted({*ladder(least, most, _CURVE_RATIO), *form.corrections, *edge})
    # Corrections may make a longer prompt faster. The curve must not fall: each point is the largest so far.
    seconds = accumulate((round(form.seconds((each, 0)), 7) for each in tokens), max)
    return PrefillCurve(tokens=tuple(tokens), seconds=tuple(seconds))


def decode_surface(form: Form) -> DecodeSurface:
    """The form of decode steps as points of a profile; a row for each measured batch."""
    batches = sorted(form.corrections)
    measured = [context for row in form.corrections.values() for context in row]
    contexts = ladder(min(measured), max(measured), 2.0)
    rows = tuple(tuple(round(form.seconds((batch, context)), 7) for context in contexts) for batch in batches)
    return DecodeSurface(batch=tuple(batches), context_tokens=contexts, step_s=rows)


def ladder(least: int, most: int, ratio: float) -> tuple[int, ...]:
    """Whole numbers from ``least`` to ``most`` at equal ratios of at most about ``ratio``."""
    steps = math.ceil(math.log(most / least) / math.log(ratio)) if most > least else 0
    return tuple(sorted({least, most, *(round(least * (most / least) ** (step / steps)) for step in range(steps))}))


def term_weights(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Seconds of each term, by the least relative errors; none is below 0.

    Args:
        rows: terms of each measured place.
        seconds: its time, above 0.

    A time that is far off counts less, by Cauchy's weights 1 / (1 + (error / tolerance)^2): it is a local deviation, or
    the machine was slow. The weights follow from the errors of the fit before.
    """
    from scipy.optimize import nnls  # its import takes a second

    relative = np.asarray(rows) / np.asarray(seconds)[:, None]
    largest = relative.max(axis=0)
    shares, importance = np.zeros(len(largest)), np.ones(len(relative))
    for _ in range(_ITERATIONS):
        shares, _ = nnls(relative / largest * importance[:, None], importance)
        errors = relative / largest @ shares - 1.0
        importance = 1.0 / np.sqrt(1.0 + (errors / TOLERANCE_FRAC) ** 2)
    return tuple(float(each) for each in shares / largest)


def _weighted(weights: Sequence[float], terms: Sequence[float]) -> float:
    return math.fsum(weight * term for weight, term in zip(weights, terms, strict=True))
