"""Reading between, at and beyond measured points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.costs import SourceKind
from autoscale.operators.curves import Curve, Reading, Surface, worst


def test_a_value_between_points_is_on_their_line() -> None:
    curve = Curve.of({10.0: 1.0, 20.0: 3.0, 40.0: 4.0})
    assert curve.at(20) == Reading(3.0, SourceKind.MEASURED)
    assert curve.at(15) == Reading(2.0, SourceKind.INTERPOLATED)
    assert curve.at(30) == Reading(3.5, SourceKind.INTERPOLATED)


def test_values_beyond_the_points_are_marked() -> None:
    curve = Curve.of({10.0: 1.0, 20.0: 3.0, 40.0: 4.0})
    assert curve.at(5) == Reading(1.0, SourceKind.EXTRAPOLATED)
    # The last stretch by a factor of 2 is from 20 to 40: 0.05 for each step.
    assert curve.at(60) == Reading(5.0, SourceKind.EXTRAPOLATED)


def test_the_slope_beyond_spans_more_than_two_close_points() -> None:
    # 96 and 100 are noise: the slope is that from 50 on.
    curve = Curve.of({50.0: 5.0, 96.0: 10.5, 100.0: 10.0})
    assert curve.at(200).value == pytest.approx(20.0)  # rounding


def test_a_falling_end_is_not_continued() -> None:
    assert Curve.of({1.0: 5.0, 2.0: 4.0}).at(10).value == 4.0


def test_one_point_grows_in_proportion() -> None:
    assert Curve.of({4.0: 2.0}).at(8).value == 4.0
    assert Curve.of({4.0: 2.0}).at(1).value == 2.0


def test_no_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        Curve.of({})
    with pytest.raises(ValueError, match="at least one point"):
        Surface.of({})


def test_a_surface_is_read_on_both_axes() -> None:
    surface = Surface.of({(1, 10): 1.0, (1, 20): 2.0, (3, 10): 3.0, (3, 20): 6.0})
    assert surface.at(1, 20) == Reading(2.0, SourceKind.MEASURED)
    assert surface.at(2, 15) == Reading(3.0, SourceKind.INTERPOLATED)
    assert surface.at(2, 10) == Reading(2.0, SourceKind.INTERPOLATED)
    assert surface.at(5, 10) == Reading(5.0, SourceKind.EXTRAPOLATED)
    assert surface.at(0.5, 10) == Reading(1.0, SourceKind.EXTRAPOLATED)
    assert surface.at(2, 40).kind is SourceKind.EXTRAPOLATED


def test_the_worst_of_two_sources_counts() -> None:
    assert worst([SourceKind.MEASURED, SourceKind.ROOFLINE, SourceKind.EXTRAPOLATED]) is SourceKind.ROOFLINE
    assert worst([SourceKind.MEASURED, SourceKind.INTERPOLATED]) is SourceKind.INTERPOLATED


POINTS = st.dictionaries(st.integers(1, 1000).map(float), st.floats(0.1, 100.0), min_size=1, max_size=8)


@given(points=POINTS, at=st.floats(0.0, 5000.0))
def test_a_reading_between_points_lies_between_their_values(points: dict[float, float], at: float) -> None:
    reading = Curve.of(points).at(at)
    assert reading.value > 0
    if min(points) <= at <= max(points):
        low = max(each for each in points if each <= at)
        high = min(each for each in points if each >= at)
        least, most = sorted((points[low], points[high]))
        assert least - 1e-9 <= reading.value <= most + 1e-9  # rounding
        assert reading.kind is not SourceKind.EXTRAPOLATED
    else:
        assert reading.kind is SourceKind.EXTRAPOLATED


def test_a_curve_in_logarithms_follows_a_power() -> None:
    squares = Curve.of({10.0: 100.0, 40.0: 1600.0}, in_logs=True)
    assert squares.at(20).value == pytest.approx(400.0)  # rounding
    assert Surface.of({(1, 10): 100.0, (1, 40): 1600.0}, in_logs=True).at(1, 20).value == pytest.approx(400.0)
