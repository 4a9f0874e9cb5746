"""The record of a series' forecasts: compared with what came, corrected by it, and not used while bad (pure).

Source: DOPD section V-D (correction factors, and the count of forecasts within 10 requests or 50 tokens).
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoscale.forecast.arima import Order
from autoscale.forecast.series import CorrectionConfig, Forecast
from autoscale.load_forecast import LEAST_JUDGED, Accuracy, SeriesForecast

# Number of the last outcomes that count. At a step of a minute, that is most of an hour.
_REMEMBERED_OUTCOMES = 50


class Outcome(NamedTuple):
    """One forecast, compared with what came.

    Attributes:
        error: absolute error of the corrected forecast, in the unit of the series.
        last_error: absolute error of the last value.
        actual: the value that came.
        is_near: whether the error was within DOPD's limit.
        is_last_near: whether the error of the last value was.
        is_covered: whether the value was inside the interval; ``None``: there was none.
    """

    error: float
    last_error: float
    actual: float
    is_near: bool
    is_last_near: bool
    is_covered: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A forecast whose time has not come: as the model made it, and corrected; ``last``: the last value then."""

    target_s: float
    raw: float
    forecast: float
    last: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRecord:
    """All that is remembered of the forecasts of one series.

    Attributes:
        factor: forecasts are divided by it.
        pending: forecasts whose time has not come, the oldest first.
        outcomes: the last compared forecasts, the oldest first.
        is_stepped_back: whether the last value is used, since the forecasts were worse.
        order: the ARIMA order that was chosen last.
    """

    factor: float = 1.0
    pending: tuple[Pending, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    is_stepped_back: bool = False
    order: Order | None = None

    def observed(
        self, at_s: float, actual: float, *, near: float, correction: CorrectionConfig, worse_frac: float
    ) -> "SeriesRecord":
        """The record after the value of the step that ended at ``at_s`` came.

        ``near``: DOPD's limit of an error, in the unit of the series. A forecast for a time that was not observed is
        dropped.
        """
        record = replace(self, pending=tuple(each for each in self.pending if each.target_s > at_s))
        for due in (each for each in self.pending if math.isclose(each.target_s, at_s, abs_tol=1e-3)):
            error, last_error = abs(due.forecast - actual), abs(due.last - actual)
            is_covered = None if due.low is None or due.high is None else due.low <= actual <= due.high
            outcome = Outcome(error, last_error, actual, error <= near, last_error <= near, is_covered)
            factor = correction.updated(record.factor, due.raw, actual)
            outcomes = (*record.outcomes, outcome)[-_REMEMBERED_OUTCOMES:]
            record = replace(record, factor=factor, outcomes=outcomes)._judged(worse_frac)
        return record

    def _judged(self, worse_frac: float) -> "SeriesRecord":
        """The record with the decision whether forecasts are used; hysteresis, so that chance changes little."""
        if len(self.outcomes) < LEAST_JUDGED:
            return self
        ratio = self._error_ratio()
        if self.is_stepped_back:
            return replace(self, is_stepped_back=ratio * (1.0 + worse_frac) > 1.0)
        return replace(self, is_stepped_back=ratio > 1.0 + worse_frac)

    def _error_ratio(self) -> float:
        error = math.fsum(each.error for each in self.outcomes)
        last_error = math.fsum(each.last_error for each in self.outcomes)
        if last_error == 0.0:
            return 1.0 if error == 0.0 else _WORST_RATIO
        return min(error / last_error, _WORST_RATIO)

    def with_forecast(self, target_s: float, last: float, forecast: Forecast) -> tuple["SeriesRecord", SeriesForecast]:
        """The record with one more forecast to compare, and what is published of it."""
        value, low, high = (
            None if number is None else number / self.factor for number in (forecast.value, forecast.low, forecast.high)
        )
        assert value is not None
        if forecast.fallback is not None:
            value = last  # the factor corrects models
        pending = Pending(target_s=target_s, raw=forecast.value, forecast=value, last=last, low=low, high=high)
        record = replace(self, pending=(*self.pending, pending), order=forecast.order or self.order)
        accuracy, fallback = self.accuracy(), forecast.fallback
        if fallback is None and self.is_stepped_back and accuracy is not None:
            value, low, high = last, None, None
            fallback = (
                f"the errors of {forecast.model} are {accuracy.error_ratio:.2f} times those of the last value, over "
                f"{accuracy.forecasts} forecasts"
            )
        published = SeriesForecast(
            value=value, low=low, high=high, last=last, model=forecast.model, fallback=fallback, accuracy=accuracy
        )
        return record, published

    def accuracy(self) -> Accuracy | None:
        """The figures of the outcomes; ``None``: there are none."""
        count = len(self.outcomes)
        if not count:
            return None
        with_interval = [each.is_covered for each in self.outcomes if each.is_covered is not None]
        return Accuracy(
            forecasts=count,
            mape_frac=_mape_frac([(each.error, each.actual) for each in self.outcomes]),
            last_mape_frac=_mape_frac([(each.last_error, each.actual) for each in self.outcomes]),
            error_ratio=self._error_ratio(),
            near_frac=sum(each.is_near for each in self.outcomes) / count,
            last_near_frac=sum(each.is_last_near for each in self.outcomes) / count,
            coverage_frac=sum(with_interval) / len(with_interval) if with_interval else None,
        )


# Largest ratio of errors: if the last value made none, the ratio would be infinite, and JSON has no infinity.
_WORST_RATIO = 1e6


def _mape_frac(errors: list[tuple[float, float]]) -> float | None:
    """The mean of absolute errors as shares of the observed values that are not 0; ``None``: all are 0."""
    shares = [error / actual for error, actual in errors if actual > 0.0]
    return math.fsum(shares) / len(shares) if shares else None
