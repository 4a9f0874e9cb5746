"""The forecast of a service's load: what a snapshot, the status and the decision log have of it (pure).

``autoscale.forecast`` makes it.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

# Fewest forecasts by which a model is judged. With fewer, chance decides.
LEAST_JUDGED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How far the last forecasts of a series were off, each with the last value beside it.

    Attributes:
        forecasts: number of forecasts that were compared with what came.
        mape_frac: mean absolute error as a share of the observed value; ``None``: only zeros came.
        last_mape_frac: the same error of the last value.
        error_ratio: sum of the absolute errors, in multiples of that of the last value; below 1 the forecast is better.
        near_frac: share of the forecasts within 10 requests in flight, or 50 tokens (DOPD section V-D).
        last_near_frac: the same share of the last value.
        coverage_frac: share of the observed values inside the interval; ``None``: no forecast had an interval.
    """

    forecasts: int
    mape_frac: float | None
    last_mape_frac: float | None
    error_ratio: float
    near_frac: float
    last_near_frac: float
    coverage_frac: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesForecast:
    """The forecast of one series, in the unit of the series.

    Attributes:
        value: the number to plan with: that of the model, or the last value if there is a ``fallback``.
        low, high: bounds of the interval in which 80 % of the values should be; ``None``: the model gives none.
        last: the last observed value.
        model: the model that made the forecast, which is scored; after stepping back ``value`` is not its value.
        fallback: why ``value`` is only the last value; ``None``: it is not.
        accuracy: ``None``: no forecast was compared with what came yet.
    """

    value: float
    last: float
    model: str
    low: float | None = None
    high: float | None = None
    fallback: str | None = None
    accuracy: Accuracy | None = None

    @property
    def is_proven(self) -> bool:
        """Whether the value is a model's that was better than the last value, over enough forecasts to tell."""
        accuracy = self.accuracy
        is_judged = accuracy is not None and accuracy.forecasts >= LEAST_JUDGED
        return self.fallback is None and is_judged and accuracy is not None and accuracy.error_ratio < 1.0


class Load(NamedTuple):
    """One number of each series: requests per second, and mean tokens of a prompt and of an answer."""

    requests_per_s: float
    input_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadForecast:
    """The mean load of the step that ends ``horizon_s`` after ``issued_s``.

    Attributes:
        issued_s: end of the last step that was observed, wall-clock time.
        horizon_s: the longest start of a role, rounded up to whole steps.
        requests_per_s: requests that users send.
        input_tokens: mean length of a prompt.
        output_tokens: mean length of an answer.
    """

    issued_s: float
    horizon_s: float
    requests_per_s: SeriesForecast
    input_tokens: SeriesForecast
    output_tokens: SeriesForecast

    def __str__(self) -> str:
        rate, inputs, outputs = (each.value for each in self.series.values())
        model = self.requests_per_s.model if self.requests_per_s.fallback is None else "last value"
        return f"{rate:.3g} requests/s of {inputs:.0f} + {outputs:.0f} tokens in {self.horizon_s:.0f} s ({model})"

    @property
    def series(self) -> dict[str, SeriesForecast]:
        """The forecast of each series, by name."""
        return {name: getattr(self, name) for name in SERIES}

    @property
    def fallbacks(self) -> list[str]:
        """For each series that is only the last value: its name, and why."""
        return [f"{name}: {each.fallback}" for name, each in self.series.items() if each.fallback is not None]


# The names of the series that are forecast.
SERIES = Load._fields
assert set(SERIES) <= {field.name for field in fields(LoadForecast)}
