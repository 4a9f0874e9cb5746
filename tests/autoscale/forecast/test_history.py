"""How ticks become points: means over requests, gaps, a set clock, and how much is remembered."""

import math
from dataclasses import replace

import pytest

from autoscale.forecast.history import History, Point
from autoscale.types import Traffic

CHAT = Traffic(requests_per_s=3.0, input_tokens_mean=50.0, output_tokens_mean=10.0)


def observed(*ticks: tuple[float, Traffic], most_points: int = 100) -> History:
    history = History()
    for now_s, traffic in ticks:
        history = history.observed(traffic, now_s, step_s=10.0, most_points=most_points)
    return history


def test_a_point_is_the_mean_over_ticks_and_lengths_are_means_over_requests() -> None:
    later = Traffic(requests_per_s=1.0, input_tokens_mean=90.0)
    history = observed((1003.0, CHAT), (1008.0, later), (1011.0, CHAT))
    # Rate (3 + 1) / 2; input (3 x 50 + 1 x 90) / 4; the second tick has no answers.
    assert history.points == (Point(1010.0, 2.0, 60.0, 10.0),)


def test_a_length_that_was_not_observed_is_that_of_the_step_before() -> None:
    history = observed((1003.0, CHAT), (1013.0, Traffic(requests_per_s=0.0)), (1023.0, CHAT))
    assert history.points[-1] == Point(1020.0, 0.0, 50.0, 10.0)
    unknown = observed((1003.0, Traffic(requests_per_s=1.0, input_tokens_mean=9.0)), (1013.0, CHAT))
    assert unknown.points == ()


def test_what_was_not_observed_whole_does_not_count() -> None:
    part = Traffic(requests_per_s=1.0, input_tokens_mean=50.0, output_tokens_mean=10.0, is_whole=False)
    history = observed((1003.0, CHAT), (1005.0, part), (1013.0, part), (1015.0, Traffic()), (1023.0, CHAT))
    assert history.points == (Point(1010.0, 3.0, 50.0, 10.0),)  # and the step after it is a gap


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["requests_per_s", "input_tokens_mean", "output_tokens_mean"])
def test_figures_that_are_no_numbers_do_not_count(name: str, wrong: float) -> None:
    history = observed((1003.0, CHAT), (1005.0, replace(CHAT, **{name: wrong})), (1013.0, CHAT))
    assert history.points == (Point(1010.0, 3.0, 50.0, 10.0),)


def test_no_more_than_the_remembered_time_stays() -> None:
    ticks = [(1003.0 + 10.0 * number, CHAT) for number in range(8)]
    history = observed(*ticks, most_points=3)
    assert [point.at_s for point in history.points] == [1050.0, 1060.0, 1070.0]
    after_a_gap = history.observed(CHAT, 1093.0, step_s=10.0, most_points=3)
    after_a_gap = after_a_gap.observed(CHAT, 1103.0, step_s=10.0, most_points=3)
    assert [point.at_s for point in after_a_gap.points] == [1080.0, 1100.0]


def test_a_clock_that_was_set_back_forgets_the_future() -> None:
    history = observed((1003.0, CHAT), (1013.0, CHAT), (1023.0, CHAT), (1012.0, CHAT))
    assert [point.at_s for point in history.points] == [1010.0]
    again = history.observed(CHAT, 1022.0, step_s=10.0, most_points=9)
    assert [point.at_s for point in again.points] == [1010.0, 1020.0]


def test_numbers_are_short_enough_to_store() -> None:
    history = observed(
        (1003.0, Traffic(requests_per_s=1 / 3, input_tokens_mean=2e4 / 3, output_tokens_mean=1.0)), (1013.0, CHAT)
    )
    assert history.points[0][1:3] == (0.333333, 6666.67)
    assert history.points[0].requests_per_s == pytest.approx(1 / 3, rel=1e-5)
