"""One statement of a paper beside what our code gives for it (pure)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A row of ``make reproduce``.

    ``source``: paper and figure, table or section. ``what``: the quantity, with its unit. ``tolerance``: what
    ``is_reproduced`` was decided by, in words. ``assumption``: what the paper leaves open and we chose, the same for
    all rows of a paper where it can be.
    """

    source: str
    what: str
    claimed: str
    ours: str
    tolerance: str
    is_reproduced: bool
    assumption: str
