"""How fast a machine is just now: the time of one and the same short prompt, beside each measurement.

On a shared machine all work takes 1.3 to 1.5 times as long for a minute or more, so the least time of a place may be of
a slow minute. A time divided by the pace beside it is nearly the same in both.
"""

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from deployments.profiler.points import Timing

# Quantile of all paces of a run that counts as undisturbed: the least one may be luck.
UNDISTURBED_QUANTILE = 0.1


class Pace:
    """The paces of one engine."""

    def __init__(self, measure: Callable[[], Awaitable[float]]) -> None:
        """``measure``: computes the reference prompt, and returns the seconds."""
        self._measure = measure
        self._paces_s: list[float] = []

    async def beside(self, measure: Callable[[], Awaitable[float]]) -> Timing:
        """A measurement with the pace beside it: the lower one of the pace before and after, as noise only adds."""
        before_s = await self._measure()
        seconds = await measure()
        return Timing(seconds, min(before_s, await self._measure()))

    def note(self, timing: Timing) -> None:
        """Count the pace of a measurement, which may be of an earlier run."""
        if timing.pace_s is not None:
            self._paces_s.append(timing.pace_s)

    def undisturbed_s(self, timing: Timing) -> float:
        """The seconds that a measurement takes if nothing disturbs the machine."""
        return undisturbed_s(timing, self._paces_s)


def undisturbed_s(timing: Timing, paces_s: Sequence[float]) -> float:
    """The seconds that a measurement takes if nothing disturbs the machine; ``paces_s``: all paces of its engine."""
    if timing.pace_s is None:
        return timing.seconds
    return timing.seconds * float(np.quantile(paces_s, UNDISTURBED_QUANTILE)) / timing.pace_s
