"""The course of the day before, which is taken out of a series before its forecast and put back after it (pure).

The course is smoothed, scaled to the present height of the series, and used only if the series follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Half of the time over which the course of the day before is smoothed, seconds. A mean over 30 minutes has little noise
# left, and follows the change of a day.
_SMOOTH_S = 900.0
# Largest scale of the course of the day before, and the inverse of the smallest one. Beyond, it is another kind of day.
_MOST_SCALE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Season:
    """The scaled course of the period before, at the times of the last values, and at the time of the forecast."""

    at_values: np.ndarray
    ahead: float


def season_of(
    times_s: Sequence[float], values: Sequence[float], horizon_s: float, *, points: int, season_s: float
) -> Season | None:
    """The course of the period before for the last ``points`` values; ``None``: it is not known, or does not help.

    It helps if changes over the horizon are smaller without it. ``times_s``: of all ``values``, rising. ``season_s``:
    length of the period, such as a day.
    """
    times, series = np.asarray(times_s, dtype=float), np.asarray(values, dtype=float)
    recent = times[-points:]
    if recent[0] - season_s < times[0]:
        return None
    course = _smoothed_at(times, series, np.append(recent, times[-1] + horizon_s) - season_s)
    mean = float(course[:-1].mean())
    scale = float(series[-points:].mean()) / mean if mean > 0.0 else 0.0
    if not 1.0 / _MOST_SCALE <= scale <= _MOST_SCALE:
        return None
    season = Season(at_values=scale * course[:-1], ahead=scale * float(course[-1]))
    steps = max(1, round(horizon_s / float(np.median(np.diff(times)))))
    rest = series[-points:] - season.at_values
    return season if _mean_change(rest, steps) < _mean_change(series[-points:], steps) else None


def _smoothed_at(times: np.ndarray, series: np.ndarray, at_s: np.ndarray) -> np.ndarray:
    """The mean of the values within ``_SMOOTH_S`` of each time; if there are none, the line across the gap."""
    sums = np.append(0.0, np.cumsum(series))
    first, end = np.searchsorted(times, at_s - _SMOOTH_S), np.searchsorted(times, at_s + _SMOOTH_S, side="right")
    counts = end - first
    return np.where(counts > 0, (sums[end] - sums[first]) / np.maximum(1, counts), np.interp(at_s, times, series))


def _mean_change(series: np.ndarray, steps: int) -> float:
    """The mean absolute change over some steps; infinite if the series is too short."""
    return float(np.abs(series[steps:] - series[:-steps]).mean()) if len(series) > steps else float("inf")
