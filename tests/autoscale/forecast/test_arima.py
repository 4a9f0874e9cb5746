"""Which order is chosen, what its interval says, and what a search without time does."""

import math

import numpy as np
import pytest

from autoscale.forecast.arima import RANDOM_WALK, best_fit, least_points

ORDERS = ((0, 1, 1), RANDOM_WALK, (1, 1, 1), (0, 1, 2))


def walk(count: int, seed: int = 1) -> np.ndarray:
    """A random walk."""
    return np.cumsum(np.random.default_rng(seed).normal(size=count))


def noisy_level(count: int, seed: int = 2) -> np.ndarray:
    """Independent noise around a level: of its changes, each is half undone by the next."""
    return 10.0 + np.random.default_rng(seed).normal(size=count)


def test_a_walk_is_taken_as_one_and_noise_around_a_level_is_averaged() -> None:
    walks = [best_fit(walk(100, seed), ORDERS, 1).order for seed in range(12)]
    assert walks.count(RANDOM_WALK) >= 8  # AIC takes a needless parameter in a sixth of the cases
    series = noisy_level(300)
    fit = best_fit(series, ORDERS, 1)
    assert fit.order != RANDOM_WALK
    # The mean of 300 values is known to 0.06; theta near -1 averages over nearly all of them.
    assert fit.path[0] == pytest.approx(10.0, abs=0.3)


def test_the_interval_of_a_walk_by_hand() -> None:
    series = np.array([0.0, 1.0, 0.0, 2.0, 1.0, 2.0])
    fit = best_fit(series, [RANDOM_WALK], 4)
    # The first two values are skipped: one state, and one difference. Changes that are left: -1, 2, -1, 1.
    sigma = math.sqrt((1 + 4 + 1 + 1) / 4)
    assert fit.path == pytest.approx([2.0] * 4)
    assert fit.half_widths == pytest.approx([1.2816 * sigma * math.sqrt(step) for step in (1, 2, 3, 4)])


def test_the_criterion_of_a_walk_is_that_of_statsmodels() -> None:
    """Otherwise the walk could not be compared with orders that statsmodels fits."""
    from statsmodels.tsa.arima.model import ARIMA

    series = walk(60)
    model = ARIMA(series, order=RANDOM_WALK, trend="n", concentrate_scale=True)
    model.initialize_approximate_diffuse()
    model.loglikelihood_burn = 2
    fitted = model.smooth([])
    expected = 2 - 2 * float(fitted.llf) + 4 / (len(series) - 2 - 2)
    assert best_fit(series, [RANDOM_WALK], 1).criterion == pytest.approx(expected, rel=1e-4)


def test_four_fifths_of_what_comes_is_inside_the_interval() -> None:
    covered = []
    for seed in range(60):
        series = noisy_level(61, seed)
        fit = best_fit(series[:-1], [(0, 1, 1)], 1)
        covered.append(abs(series[-1] - fit.path[0]) <= fit.half_widths[0])
    # 0.8, and three standard deviations of 60 trials.
    assert np.mean(covered) == pytest.approx(0.8, abs=0.16)


def test_without_time_the_first_order_alone_is_fitted() -> None:
    series, tried = noisy_level(60), list[None]()

    def has_time() -> bool:
        tried.append(None)
        return False

    assert best_fit(series, [(1, 1, 1), (0, 1, 1)], 1, has_time).order == (1, 1, 1)
    assert len(tried) == 1


def test_fewest_values_of_an_order() -> None:
    assert least_points(RANDOM_WALK) == 3
    assert least_points((2, 1, 1)) == 9
