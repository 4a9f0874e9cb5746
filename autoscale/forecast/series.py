"""Forecasts of a measured series, and their correction by earlier errors (pure)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator

from autoscale.forecast.arima import RANDOM_WALK, Order, best_fit, least_points
from kvtransfer.strict_config import StrictConfig

# A series counts as constant if it varies by less than this share of its values.
_CONSTANT_FRAC = 1e-9
# Tolerance for rounding errors of a number of steps.
_STEP_EPSILON = 1e-9
# A forecast is taken as diverged if it leaves the range of its series by more than this multiple of the range. Loads
# that double and double again within a series stay inside.
_MOST_SPREADS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast in the unit of the series, at least 0.

    Attributes:
        low, high: bounds of the interval in which 80 % of the values should be; ``None``: the model gives none.
        model: the name of the model.
        order: the order that was chosen; ``None``: the model has none.
        fallback: why it is only the last value; ``None``: it is not.
    """

    value: float
    low: float | None = None
    high: float | None = None
    model: str = "last value"
    order: Order | None = None
    fallback: str | None = None

    def shifted(self, by: float) -> "Forecast":
        """The forecast with ``by`` added, at least 0."""
        low, high = (None if bound is None else max(0.0, bound + by) for bound in (self.low, self.high))
        return replace(self, value=max(0.0, self.value + by), low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How the best model is searched: the order to try first, and whether there is time for one more."""

    first: Order | None = None
    has_time: Callable[[], bool] = lambda: True


class _Forecaster(StrictConfig):
    def forecast(
        self,
        times_s: Sequence[float],
        values: Sequence[float],
        horizon_s: float,
        search: Search = Search(),
        *,
        is_signed: bool = False,
    ) -> Forecast:
        """The value that a series will have ``horizon_s`` after its last time.

        ``times_s``: the time of each of ``values``, rising. ``is_signed``: whether the series may be below 0, and then
        the forecast, too.

        Raises:
            ValueError: there are no values, a number is not finite, or times do not rise.
        """
        if len(values) == 0 or len(times_s) != len(values):
            raise ValueError(f"{len(times_s)} times for {len(values)} values: give as many of both, and at least one")
        if not all(math.isfinite(number) for number in (*times_s, *values)) or not 0.0 <= horizon_s < math.inf:
            raise ValueError(f"a series of finite numbers and a horizon of 0 s or more are needed, not {horizon_s:g} s")
        if any(later <= sooner for sooner, later in pairwise(times_s)):
            raise ValueError("times_s must rise: leave out repeated times")
        forecast = self._forecast(times_s, values, horizon_s, search)
        return forecast if is_signed else forecast.shifted(0.0)

    def _forecast(
        self, times_s: Sequence[float], values: Sequence[float], horizon_s: float, search: Search
    ) -> Forecast:
        raise NotImplementedError


class LastValueConfig(_Forecaster):
    """The last value stays."""

    kind: Literal["last_value"] = "last_value"

    def _forecast(
        self, times_s: Sequence[float], values: Sequence[float], horizon_s: float, search: Search
    ) -> Forecast:
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

    def _forecast(
        self, times_s: Sequence[float], values: Sequence[float], horizon_s: float, search: Search
    ) -> Forecast:
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
        return Forecast(value=level + slope * self._undamped_s(horizon_s), model="weighted mean")

    def _undamped_s(self, passed_s: float) -> float:
        """A shorter time, in which a constant slope rises as far as the damped trend does in ``passed_s``."""
        return self.damping_s * _new_weight(passed_s, self.damping_s)


class ArimaConfig(_Forecaster):
    """The best of a few ARIMA models, fitted anew for each forecast; if none can be fitted, the last value."""

    kind: Literal["arima"] = "arima"
    orders: tuple[
        tuple[Annotated[int, Field(ge=0, le=3)], Annotated[int, Field(ge=0, le=2)], Annotated[int, Field(ge=0, le=3)]],
        ...,
    ] = Field(((0, 1, 1), (0, 1, 0), (1, 1, 1), (0, 1, 2)), min_length=1, max_length=12)
    """Orders that are tried: autoregressive terms p, differences d, moving-average terms q. Akaike's criterion chooses
    among them. The last chosen order is tried first, and there may be no time for all. (0, 1, 0) is the last value.
    Orders without differences gained nothing on the public traces, whose loads have no lasting mean."""

    @field_validator("orders")
    @classmethod
    def _check_orders(cls, orders: tuple[Order, ...]) -> tuple[Order, ...]:
        for p, d, q in orders:
            if d and not p + q and (p, d, q) != RANDOM_WALK:
                raise ValueError(f"order {(p, d, q)} has nothing to fit: give p or q, or (0, 1, 0)")
        return orders

    def _forecast(
        self, times_s: Sequence[float], values: Sequence[float], horizon_s: float, search: Search
    ) -> Forecast:
        last = values[-1]
        fewest = min(map(least_points, self.orders))
        if len(values) < fewest:
            return Forecast(value=last, fallback=f"{len(values)} values, ARIMA needs {fewest}")
        step_s, series = _at_equal_steps(times_s, values)
        steps = math.ceil(horizon_s / step_s - _STEP_EPSILON)
        # A model is not trusted further ahead than its series reaches back.
        if len(series) < fewest or steps > len(series):
            return Forecast(value=last, fallback=f"{len(series)} steps of {step_s:.3g} s are too few for ARIMA")
        lowest, highest = float(series.min()), float(series.max())
        spread = highest - lowest
        if spread <= _CONSTANT_FRAC * max(abs(lowest), abs(highest)):
            return Forecast(value=last, fallback="the series is constant")
        orders = [order for order in self.orders if least_points(order) <= len(series)]
        orders.sort(key=lambda order: order != search.first)
        try:
            # The fit ends when the likelihood changes by little. Scaled to 0..1, that means the same in every unit.
            fit = best_fit((series - lowest) / spread, orders, max(1, steps), search.has_time)
        except ValueError as error:
            return Forecast(value=last, fallback=f"no model fits: {error}")
        # Between two steps the forecast is on a straight line; step 0 is the last value.
        at, known = horizon_s / step_s, np.arange(max(1, steps) + 1)
        scaled = float(np.interp(at, known, np.append((last - lowest) / spread, fit.path)))
        half_width = float(np.interp(at, known, np.append(0.0, fit.half_widths))) * spread
        if not -_MOST_SPREADS <= scaled <= 1.0 + _MOST_SPREADS:
            return Forecast(
                value=last, fallback=f"ARIMA{fit.order} diverges: it forecasts {scaled * spread + lowest:.4g}"
            )
        value = scaled * spread + lowest
        return Forecast(
            value=value, low=value - half_width, high=value + half_width, model=f"ARIMA{fit.order}", order=fit.order
        )


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
