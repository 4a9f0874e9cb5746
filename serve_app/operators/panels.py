"""Panels with curves or bars as plain values, which ``figures`` draws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one line; None: there is no value, and the line has a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves over one axis. Titles and labels have units; ``has_steps``: a value holds until the next.

    ``y_names``: names of the values 0, 1, ... of an axis that has no numbers.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    is_log_x: bool = False
    is_log_y: bool = False
    has_steps: bool = False
    y_names: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Groups of bars; ``values``: by series, one value for each group, or None.

    ``is_stacked``: series of a group lie on each other, else beside each other.
    ``most``: end of the axis of values; None: as needed.
    """

    title: str
    value_label: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | None]]
    is_stacked: bool = False
    most: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Panels side by side with one title and one caption."""

    title: str
    caption: str
    panels: Sequence[Panel | Bars]
    columns: int
