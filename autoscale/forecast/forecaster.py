"""The forecasts of one service, from tick to tick: when one is due, and what is published of it (pure)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autoscale.forecast.config import LoadForecastConfig
from autoscale.forecast.history import History, Point
from autoscale.forecast.record import SeriesRecord
from autoscale.forecast.season import season_of
from autoscale.forecast.series import Forecast, Search
from autoscale.load_forecast import SERIES, LoadForecast
from autoscale.types import Traffic

# DOPD counts the forecasts within this number of requests in flight ...
_NEAR_REQUESTS = 10.0
# ... and within this number of tokens, for both lengths (section V-D).
_NEAR_TOKENS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastState:
    """All that is remembered of one service's forecasts. It is stored once for each step, outside the snapshot.

    ``step_s``: the length of a step; ``records``: one for each series.
    """

    step_s: float
    history: History = field(default_factory=History)
    records: tuple[SeriesRecord, ...] = field(default_factory=lambda: (SeriesRecord(),) * len(SERIES))
    forecast: LoadForecast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTask:
    """What one forecast is made from.

    ``orders``: for each series, the ARIMA order that was chosen last.
    """

    config: LoadForecastConfig
    points: tuple[Point, ...]
    horizon_s: float
    orders: tuple[tuple[int, int, int] | None, ...] = (None,) * len(SERIES)

    @property
    def last(self) -> Point:
        """The newest point."""
        return self.points[-1]


def fit(task: FitTask, has_time: Callable[[], bool] = lambda: True) -> tuple[Forecast, ...]:
    """The forecast of each series, not corrected; ``has_time``: whether there is time to try one more order."""
    config, times_s = task.config, [point.at_s for point in task.points]
    forecasts = []
    for name, order in zip(SERIES, task.orders, strict=True):
        values = [getattr(point, name) for point in task.points]
        forecasts.append(_fit_series(config, times_s, values, task.horizon_s, Search(first=order, has_time=has_time)))
    return tuple(forecasts)


def _fit_series(
    config: LoadForecastConfig, times_s: list[float], values: list[float], horizon_s: float, search: Search
) -> Forecast:
    """The forecast of one series: of what is left without the course of the period before, if that is known."""
    recent, season = slice(-config.fit_points, None), None
    if config.season_s is not None:
        season = season_of(times_s, values, horizon_s, points=config.fit_points, season_s=config.season_s)
    if season is not None:
        rest = [value - course for value, course in zip(values[recent], season.at_values, strict=True)]
        forecast = config.method.forecast(times_s[recent], rest, horizon_s, search, is_signed=True)
        if forecast.fallback is None:
            return replace(forecast.shifted(season.ahead), model=f"{forecast.model} and the period before")
    return config.method.forecast(times_s[recent], values[recent], horizon_s, search)


@dataclass(slots=True)
class Forecaster:
    """The forecasts of one service; a shell calls ``observe`` in each tick, and ``take`` with each result.

    ``tpot_s``: the TPOT objective, with which requests per second become requests in flight (Little's law).
    """

    config: LoadForecastConfig
    tpot_s: float
    state: ForecastState = field(init=False)

    def __post_init__(self) -> None:
        self.state = ForecastState(step_s=self.config.step_s)

    def resume(self, state: ForecastState) -> None:
        """Go on with a stored state. If its steps have another length, its points stay, and the rest begins anew."""
        if state.step_s == self.config.step_s:
            self.state = state
        else:
            self.state = replace(self.state, history=History(points=state.history.points))

    def observe(self, traffic: Traffic, now_s: float, start_s: float) -> FitTask | None:
        """Take the traffic of a tick; returns the forecast to make if a step has ended, else ``None``.

        ``start_s``: the longest start of a role, seconds.
        """
        config, before = self.config, self.state.history.points
        history = self.state.history.observed(
            traffic, now_s, step_s=config.step_s, most_points=config.remembered_points
        )
        self.state = replace(self.state, history=history)
        points = history.points
        if points == before:
            return None
        if before and (not points or points[-1].at_s <= before[-1].at_s):  # the clock was set back
            self.state = replace(self.state, records=ForecastState(step_s=config.step_s).records, forecast=None)
            return None
        self._compare(points[-1])
        steps = max(1, math.ceil(start_s / config.step_s - 1e-9))
        orders = tuple(record.order for record in self.state.records)
        return FitTask(config=config, points=points, horizon_s=steps * config.step_s, orders=orders)

    def _compare(self, point: Point) -> None:
        """Compare earlier forecasts with what came in a step."""
        flight_s = point.output_tokens * self.tpot_s  # time for which a request is in flight
        nears = (_NEAR_REQUESTS / flight_s if flight_s > 0.0 else math.inf, _NEAR_TOKENS, _NEAR_TOKENS)
        records = tuple(
            record.observed(
                point.at_s, actual, near=near, correction=self.config.correction, worse_frac=self.config.worse_frac
            )
            for record, actual, near in zip(self.state.records, point.load, nears, strict=True)
        )
        self.state = replace(self.state, records=records)

    def take(self, task: FitTask, forecasts: tuple[Forecast, ...]) -> None:
        """Publish the forecasts of the three series."""
        target_s = task.last.at_s + task.horizon_s
        made = [
            record.with_forecast(target_s, last, forecast)
            for record, last, forecast in zip(self.state.records, task.last.load, forecasts, strict=True)
        ]
        forecast = LoadForecast(
            issued_s=task.last.at_s,
            horizon_s=task.horizon_s,
            **{name: published for name, (_, published) in zip(SERIES, made, strict=True)},
        )
        self.state = replace(self.state, records=tuple(record for record, _ in made), forecast=forecast)

    def give_up(self, task: FitTask, why: str) -> None:
        """Publish the last values instead of forecasts that did not come."""
        self.take(task, tuple(Forecast(value=last, fallback=why) for last in task.last.load))

    def forecast(self, now_s: float) -> LoadForecast | None:
        """The newest forecast; ``None``: there is none, or its time is over by more than a step."""
        forecast = self.state.forecast
        if forecast is None or now_s > forecast.issued_s + forecast.horizon_s + self.config.step_s:
            return None
        return forecast
