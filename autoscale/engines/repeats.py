"""What repeats of one measurement say, where other work of the machine adds to a time, for seconds at a time (pure).

So repeats come in later rounds, and the least times count.
"""

import math
from collections.abc import Sequence

_MOST_ROUNDS = 6  # rounds of a place whose times do not agree
_AGREEMENT_FRAC = 0.1  # the three least times of a place agree within this share
LEAST_ROUNDS = 2  # rounds of any place
LEAST_AGREED_ROUNDS = 3


def least_time(times: Sequence[float]) -> float:
    """The median of the three least times: one that is too low by chance does not count; of two, the lower one."""
    least = sorted(times)[:LEAST_AGREED_ROUNDS]
    return least[(len(least) - 1) // 2]


def is_repeated(times: Sequence[float]) -> bool:
    """Whether two times of a place agree, or it needs no further round for another reason (``is_settled``)."""
    is_pair = len(times) == LEAST_ROUNDS and max(times) <= (1.0 + _AGREEMENT_FRAC) * min(times)
    return is_pair or is_settled(times)


def is_settled(times: Sequence[float]) -> bool:
    """Whether a place needs no further round: its least times agree, or there were enough of them."""
    return agree(times) or len(times) >= _MOST_ROUNDS


def agree(times: Sequence[float]) -> bool:
    """Whether the three least times of a place agree, so that they are its own and not the machine's."""
    least = sorted(times)[:LEAST_AGREED_ROUNDS]
    return len(least) == LEAST_AGREED_ROUNDS and least[-1] <= (1.0 + _AGREEMENT_FRAC) * least[0]


def between(start: int, end: int) -> int | None:
    """The whole number between two others at equal ratios; ``None``: there is none."""
    middle = min(max(round(math.sqrt(start * end)), start + 1), end - 1)
    return middle if start < middle < end else None
