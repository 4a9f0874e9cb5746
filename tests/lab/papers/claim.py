"""One statement of a paper beside what our code gives for it (pure)."""

from collections.abc import Callable
from dataclasses import dataclass

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Drop a line of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A row of ``make reproduce``.

    ``source``: paper and figure, table or section. ``what``: the quantity, with its unit. ``tolerance``: the rule for
    ``is_reproduced``, in words. ``assumption``: our choices where the paper leaves something open; they are the same
    for all rows of a paper if possible.
    """

    source: str
    what: str
    claimed: str
    ours: str
    tolerance: str
    is_reproduced: bool
    assumption: str
