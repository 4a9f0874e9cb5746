"""Forecasts of a measured series, and their correction by earlier errors (pure)."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from kvtransfer.strict_config import StrictConfig

# A series counts as constant if it varies by less than this share of its values.
_CONSTANT_FRAC = 1e-9
# Tolerance for rounding errors of a number of steps.
_STEP_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast in the unit of the series, at least 0; ``fallback``: the reason if it is only the last value."""

    value: float
    fallback: str | None = None


class _Forecaster(StrictConfig):
    def forecast(self, times_s: Sequence[float], values: Sequence[float], horizon_s: float) -> Forecast:
        """The value that a series will have ``horizon_s`` after its last time.

        ``times_s``: the time of each of ``values``, rising.

        Raises:
            ValueError: there are no values, a number is not finite, or times do not rise.
        """
        if len(values) == 0 or len(times_s) != len(values):
            raise ValueError(f"{len(times_s)} times for {len(values)} values: give as many of both, and at least one")
        if not all(math.isfinite(number) for number in (*times_s, *values)) or not 0.0 <= horizon_s < math.inf:
            raise ValueError(f"a series of finite numbers and a horizon of 0 s or more are needed, not {horizon_s:g} s")
        if any(later <= sooner for sooner, later in pairwise(times_s)):
            raise ValueError("times_s must rise: leave out repeated times")
        forecast = self._forecast(times_s, values, horizon_s)
        return Forecast(value=max(0.0, forecast.value), fallback=forecast.fallback)

    def _forecast(self, times_s: Sequence[float], values: Sequence[float], horizon_s: float) -> Forecast:
        raise NotImplementedError


class LastValueConfig(_Forecaster):
    """The last value stays."""

    kind: Literal["last_value"] = "last_value"

    def _forecast(self, times_s: Sequence[float], values: Sequence[float], horizon_s: float) -> Forecast:
        return Forecast(value=values[-1])


class EwmaConfig(_Forecaster):
    """An exponentially weighted mean with a damped trend: Holt's method with weights by time."""

    kind: Literal["ewma"] = "ewma"
    level_s: float = Field(120.0, gt=0.0)
    """Age at which a value has 1/e of the weight of a new one."""
    trend_s: float | None = Field(None, gt=0.0)
    """Age at which a slope has 1/e of the weight of a new one. Left out: no trend."""
    damping_s: float = Field(300.0, gt=0.0)
    """Time after which the trend has faded to 1/e."""

    def _forecast(self, times_s: Sequence[float], values: Sequence[float], horizon_s: float) -> Forecast:
        level, slope = values[0], 0.0
        for (before_s, _), (at_s, value) in pairwise(zip(times_s, values, strict=True)):
            passed_s = at_s - before_s
            expected = level + slope * self._undamped_s(passed_s)
            rise = expected + _new_weight(passed_s, self.level_s) * (value - expected) - level
            if self.trend_s is not None:
                faded_slope = slope * math.exp(-passed_s / self.damping_s)
                new_slope = rise / passed_s
                slope = faded_slope + _new_weight(passed_s, self.trend_s) * (new_slope - faded_slope)
            level += rise
        return Forecast(value=level + slope * self._undamped_s(horizon_s))

    def _undamped_s(self, passed_s: float) -> float:
        """A shorter time, in which a constant slope rises as far as the damped trend does in ``passed_s``."""
        return self.damping_s * _new_weight(passed_s, self.damping_s)


class ArimaConfig(_Forecaster):
    """An ARIMA model, fitted anew for each forecast; if that fails, the last value with the reason."""

    kind: Literal["arima"] = "arima"
    order: tuple[
        Annotated[int, Field(ge=0, le=3)], Annotated[int, Field(ge=0, le=2)], Annotated[int, Field(ge=0, le=3)]
    ] = (1, 1, 1)
    """Autoregressive terms p, differences d, moving-average terms q."""

    @model_validator(mode="after")
    def _check_order(self) -> "ArimaConfig":
        p, d, q = self.order
        if d and not p + q:
            raise ValueError(f"order {self.order} has nothing to fit: give p or q, or take last_value")
        return self

    def _forecast(self, times_s: Sequence[float], values: Sequence[float], horizon_s: float) -> Forecast:
        p, d, q = self.order
        fewest = d + 2 * (p + q + 1)  # two values per parameter, and one that each difference takes away
        last = values[-1]
        if len(values) < fewest:
            return Forecast(value=last, fallback=f"{len(values)} values, ARIMA{self.order} needs {fewest}")
        step_s, series = _at_equal_steps(times_s, values)
        steps = math.ceil(horizon_s / step_s - _STEP_EPSILON)
        # A model is not trusted further ahead than its series reaches back.
        if len(series) < fewest or steps > len(series):
            return Forecast(value=last, fallback=f"{len(series)} steps of {step_s:.3g} s are too few for ARIMA")
        low, high = float(series.min()), float(series.max())
        if high - low <= _CONSTANT_FRAC * max(abs(low), abs(high)):
            return Forecast(value=last, fallback="the series is constant")
        try:
            # The fit ends when the likelihood changes by little. Scaled to 0..1, that means the same in every unit.
            scaled = (series - low) / (high - low)
            path = _fitted_path(scaled, self.order, max(1, steps)) * (high - low) + low
        except (ValueError, IndexError, ZeroDivisionError) as error:  # a singular matrix is a ValueError too
            return Forecast(value=last, fallback=f"ARIMA{self.order} does not fit: {error}")
        # Between two steps the forecast is on a straight line; step 0 is the last value.
        value = float(np.interp(horizon_s / step_s, np.arange(len(path) + 1), np.append(last, path)))
        if not math.isfinite(value):
            return Forecast(value=last, fallback=f"ARIMA{self.order} forecasts {value}")
        return Forecast(value=value)


ForecastConfig = Annotated[LastValueConfig | EwmaConfig | ArimaConfig, Field(discriminator="kind")]


class CorrectionConfig(StrictConfig):
    """Forecasts are divided by a factor: the mean ratio of earlier forecasts to observed values.

    DOPD takes the newest ratio alone (section II-A), which is ``weight_frac`` 1. Tried on traces, this made one-step
    errors 10 to 50 % larger, since it amplifies noise. With ``weight_frac`` 0.1, errors are as large as without
    correction.
    """

    weight_frac: float = Field(0.1, ge=0.0, le=1.0)
    """Weight of the newest ratio; 0: no correction."""
    most: float = Field(1.25, ge=1.0, le=10.0)
    """Largest factor; the smallest one is its inverse."""

    def updated(self, factor: float, predicted: float, observed: float) -> float:
        """The factor after one more observation: a weighted geometric mean (DOPD section V-D).

        ``factor``: the factor before, 1 at first; ``predicted``: the forecast without correction.
        """
        ratio = predicted / observed if observed > 0.0 else math.inf
        if predicted == observed:
            ratio = 1.0  # both may be 0
        before, newest = (min(max(value, 1.0 / self.most), self.most) for value in (factor, ratio))
        return math.exp((1.0 - self.weight_frac) * math.log(before) + self.weight_frac * math.log(newest))


def _new_weight(passed_s: float, memory_s: float) -> float:
    """Weight of a new value, ``passed_s`` after the last one: ``1 - exp(-passed_s / memory_s)``."""
    return -math.expm1(-passed_s / memory_s)


def _at_equal_steps(times_s: Sequence[float], values: Sequence[float]) -> tuple[float, np.ndarray]:
    """The median step of the times, seconds, and the series at this step.

    The series ends with the last value; its other values are interpolated. It has at most as many values as ``values``,
    so if there are gaps, it begins later.
    """
    step_s = float(np.median(np.diff(times_s)))
    count = min(len(values), int((times_s[-1] - times_s[0]) / step_s + _STEP_EPSILON) + 1)
    at_s = times_s[-1] - step_s * np.arange(count - 1, -1, -1)
    return step_s, np.interp(at_s, times_s, values)


def _fitted_path(series: np.ndarray, order: tuple[int, int, int], steps: int) -> np.ndarray:
    """The values of the next steps by the most likely model: ``X = mu + sum phi X + sum theta eps``.

    The default fit of statsmodels takes 25 ms, and sometimes seconds on busy cores: its stationary start and L-BFGS-B
    solve tiny systems with BLAS threads that wait for each other. This fit takes 10 to 20 ms, with equal forecasts.

    Source: DOPD Algorithm 2, line 27.
    """
    from statsmodels.tsa.arima.model import ARIMA  # it takes a second to import

    p, d, q = order
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # warnings are about convergence, and the caller checks the forecast
        # A series without differences has a mean, which is fitted too.
        model = ARIMA(series, order=order, trend="n" if d else "c", concentrate_scale=True)
        # The state before the first value is unknown: it has a huge variance, and the first values do not count.
        model.initialize_approximate_diffuse()
        model.loglikelihood_burn = model.k_states
        start = [*([] if d else [np.mean(series)]), *[0.1] * (p + q)]
        fitted = model.fit(start_params=start, cov_type="none", method_kwargs={"method": "bfgs", "maxiter": 15})
        return np.asarray(fitted.forecast(steps))
