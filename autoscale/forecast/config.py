"""LoadForecastConfig: how the load one start ahead is forecast (pure)."""

from typing import Self

from pydantic import Field, model_validator

from autoscale.forecast.series import ArimaConfig, CorrectionConfig, ForecastConfig
from kvtransfer.strict_config import StrictConfig

# Most points that are remembered. A point has about 40 bytes where the application's state is stored.
_MOST_POINTS = 3000


class LoadForecastConfig(StrictConfig):
    """How requests per second and mean lengths are forecast for the time when a replica that starts now will serve."""

    method: ForecastConfig = ArimaConfig()
    """The model of each series: arima, ewma or last_value."""
    correction: CorrectionConfig = CorrectionConfig()
    step_s: float = Field(60.0, ge=1.0, le=3600.0)
    """Time over which the load is averaged to one point, and between two forecasts, seconds."""
    fit_points: int = Field(50, ge=4, le=1000)
    """Number of the last points to which a model is fitted; Dynamo's window."""
    season_s: float | None = Field(86400.0, gt=0.0, le=604800.0)
    """Period after which the load repeats, seconds: a day, or a week. Once the last points also have points one period
    before them, the forecast is that of the difference, if the load follows its course of the period before. Left out
    (null): the course of the period before is not used."""
    budget_s: float = Field(0.8, gt=0.0, le=60.0)
    """Time for the forecasts of the three series together, seconds (DOPD section V-D). When it is over, no further
    order is tried. A forecast that has not come after 5 times this is the last value."""
    worse_frac: float = Field(0.05, ge=0.0, le=1.0)
    """Share by which the errors of a series' forecasts must exceed those of the last value before the last value is
    used. The forecasts are used again once their errors are smaller by this share."""

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        if (points := self.remembered_points) > _MOST_POINTS:
            raise ValueError(
                f"season_s ({self.season_s:g}) at a step_s of {self.step_s:g} needs {points} points, at most "
                f"{_MOST_POINTS} are remembered: choose a longer step_s, or null for season_s"
            )
        return self

    @property
    def remembered_points(self) -> int:
        """Number of the last points that are remembered."""
        season_points = 0 if self.season_s is None else int(self.season_s / self.step_s)
        return season_points + self.fit_points
