"""Thinned curves stay near all measured points."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.lab.operators.thinning import thinned


def line_at(points: dict[float, float], at: float) -> float:
    for (low, first), (high, second) in pairwise(points.items()):
        if low <= at <= high:
            return first + (at - low) / (high - low) * (second - first)
    return points[at]


def test_points_on_a_line_are_left_out() -> None:
    assert thinned({1.0: 1.0, 2.0: 2.0, 3.0: 3.0, 10.0: 10.0}) == {1.0: 1.0, 10.0: 10.0}


def test_a_step_is_kept() -> None:
    steps = {1.0: 1.0, 128.0: 1.0, 129.0: 2.0, 256.0: 2.0}
    assert thinned(steps) == steps


@given(st.dictionaries(st.integers(1, 200).map(float), st.floats(0.5, 50.0), min_size=1, max_size=30))
def test_every_point_left_out_is_near_the_line(points: dict[float, float]) -> None:
    kept = thinned(points)
    assert kept.items() <= points.items()
    for at, value in points.items():
        assert abs(line_at(kept, at) / value - 1.0) <= 0.02 + 1e-9  # rounding
