"""Few points describe a curve if they are where it bends."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.sampling import next_point


def sampled(
    curve: Callable[[int], float], least: int, most: int, tolerance_frac: float, limit: int = 40
) -> dict[int, float]:
    measured: dict[int, float] = {}
    while len(measured) < limit and (point := next_point(measured, least, most, tolerance_frac)) is not None:
        assert point not in measured and least <= point <= most
        measured[point] = curve(point)
    return measured


def line_at(measured: dict[int, float], at: int) -> float:
    points = sorted(measured)
    end = next(point for point in points[1:] if point >= at)
    start = points[points.index(end) - 1]
    return measured[start] + (measured[end] - measured[start]) * (at - start) / (end - start)


def test_a_line_needs_three_points() -> None:
    assert sorted(sampled(lambda at: 0.01 + 1e-4 * at, 16, 1600, 0.05)) == [16, 160, 1600]


def test_the_ends_come_first_and_then_the_point_at_equal_ratios() -> None:
    assert next_point({}, 16, 1024, 0.05) == 16
    assert next_point({16: 1.0}, 16, 1024, 0.05) == 1024
    assert next_point({16: 1.0, 1024: 2.0}, 16, 1024, 0.05) == 128


@pytest.mark.parametrize(
    "curve",
    [
        lambda at: max(0.02, 1e-4 * at),  # constant, and then a line
        lambda at: 0.01 + 5e-5 * at + 3e-9 * at * at,  # attention grows with the square
        lambda at: 0.005 + 0.002 * math.log2(at),
        lambda at: 0.01 if at <= 256 else 0.015 + 1e-5 * at,  # a jump: engines without a CUDA graph of this size
    ],
)
def test_points_left_out_are_near_the_lines_between_the_measured_ones(curve: Callable[[int], float]) -> None:
    measured = sampled(curve, 16, 32_768, 0.05)
    left_out = [at for at in (random.Random(0).randint(16, 32_768) for _ in range(400)) if at not in measured]
    errors = sorted(abs(line_at(measured, at) / curve(at) - 1.0) for at in left_out)
    assert errors[int(0.9 * len(errors))] < 0.05
    assert len(measured) <= 25


def test_points_gather_where_the_curve_bends() -> None:
    measured = sampled(lambda at: max(0.02, 1e-4 * at), 16, 32_768, 0.05)
    near_the_bend = [at for at in measured if 50 <= at <= 800]
    assert len(near_the_bend) >= len(measured) / 2


def test_neighbours_leave_nothing_to_measure() -> None:
    assert next_point({1: 1.0, 2: 5.0, 3: 1.0}, 1, 3, 0.05) is None
    assert next_point({1: 1.0, 2: 2.0}, 1, 2, 0.05) is None


@given(
    ends=st.tuples(st.integers(1, 100), st.integers(101, 5000)),
    values=st.lists(st.floats(1e-4, 10.0), min_size=60, max_size=60),
)
def test_any_values_end_in_distinct_points(ends: tuple[int, int], values: list[float]) -> None:
    given_values = iter(values)
    assert len(sampled(lambda _: next(given_values), *ends, 0.05, limit=60)) <= 60
