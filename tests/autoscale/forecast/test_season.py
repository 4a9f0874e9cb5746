"""The course of the day before: known, scaled, smoothed, or not used."""

import math

import numpy as np
import pytest

from autoscale.forecast.season import season_of

DAY_S = 86400.0
STEP_S = 300.0
TIMES = [STEP_S * number for number in range(1, int(1.5 * DAY_S / STEP_S) + 1)]


def wave(at_s: float) -> float:
    """A day's course: 10 at night and 30 at noon."""
    return 20.0 - 10.0 * math.cos(2.0 * math.pi * at_s / DAY_S)


def test_the_course_of_the_day_before_is_scaled_to_the_present_height() -> None:
    values = [wave(at_s) * (2.0 if at_s > DAY_S else 1.0) for at_s in TIMES]
    season = season_of(TIMES, values, 3600.0, points=50, season_s=DAY_S)
    assert season is not None
    assert season.ahead == pytest.approx(2.0 * wave(TIMES[-1] + 3600.0), rel=0.01)  # the mean over half an hour
    assert season.at_values == pytest.approx(values[-50:], rel=0.02)


def test_noise_of_the_day_before_is_smoothed() -> None:
    rng = np.random.default_rng(0)
    values = [wave(at_s) + float(rng.normal()) for at_s in TIMES]
    season = season_of(TIMES, values, 3600.0, points=50, season_s=DAY_S)
    assert season is not None
    # Seven values of noise 1 are averaged: 0.4, and three times that at most.
    assert season.ahead == pytest.approx(wave(TIMES[-1] + 3600.0), abs=1.2)


def test_a_short_history_has_no_season() -> None:
    times = TIMES[: int(DAY_S / STEP_S) + 49]
    assert season_of(times, [wave(at_s) for at_s in times], 300.0, points=50, season_s=DAY_S) is None
    longer = TIMES[: int(DAY_S / STEP_S) + 50]
    assert season_of(longer, [wave(at_s) for at_s in longer], 3600.0, points=50, season_s=DAY_S) is not None


def test_a_day_that_does_not_follow_the_day_before_has_no_season() -> None:
    flat = [wave(at_s) if at_s <= DAY_S else 20.0 for at_s in TIMES]
    assert season_of(TIMES, flat, 3600.0, points=50, season_s=DAY_S) is None
    higher = [wave(at_s) * (4.0 if at_s > DAY_S else 1.0) for at_s in TIMES]  # more than three times as high
    assert season_of(TIMES, higher, 3600.0, points=50, season_s=DAY_S) is None
    silent = [0.0 if at_s <= DAY_S else wave(at_s) for at_s in TIMES]
    assert season_of(TIMES, silent, 3600.0, points=50, season_s=DAY_S) is None


def test_a_gap_in_the_day_before_is_bridged() -> None:
    gap = [at_s for at_s in TIMES if not 0.45 * DAY_S < at_s < 0.55 * DAY_S]
    season = season_of(gap, [wave(at_s) for at_s in gap], 0.02 * DAY_S, points=20, season_s=DAY_S)
    assert season is not None
    assert season.ahead == pytest.approx(wave(0.52 * DAY_S), rel=0.05)  # the line from 0.45 to 0.55
