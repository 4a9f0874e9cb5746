"""Numbers that options must have."""

import math


def above_0(option: str, value: float | None) -> float | None:
    """The value of an option; None stays None.

    Raises:
        ValueError: the value is not a finite number above 0.
    """
    if value is not None and not 0.0 < value < math.inf:
        raise ValueError(f"{option} {value:g}: give a number above 0")
    return value
