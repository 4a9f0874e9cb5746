"""Whether an engine's next batch of events is the expected one, a late one, or one after a gap or a restart (pure)."""

from enum import StrEnum


class Turn(StrEnum):
    """How a batch follows the batches before it; all but ``NEXT`` are labels of a metric."""

    NEXT = "next"
    GAP = "gap"  # batches before it are missing
    LATE = "late"  # it came before, or batches after it have come
    RESTART = "restart"  # the engine is another one, and has nothing of what the batches so far have reported


class BatchOrder:
    """The number that the next batch must have; an engine numbers its batches from 0."""

    def __init__(self) -> None:
        self.expected = 0
        self._last_at_s = 0.0  # when the engine made the last batch in order, by its clock

    def turn(self, number: int, at_s: float) -> Turn:
        """How a batch follows; ``at_s``: when the engine made it, by its clock. Changes nothing."""
        if number == self.expected:
            return Turn.NEXT
        if number > self.expected:
            return Turn.GAP
        return Turn.RESTART if at_s > self._last_at_s else Turn.LATE

    def accept(self, number: int, at_s: float) -> None:
        """Go on after this batch, whatever is missing before it."""
        self.expected, self._last_at_s = number + 1, at_s
