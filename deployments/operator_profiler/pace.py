"""How fast a CPU is just now: the time of one and the same product, beside each measurement.

See ``deployments/profiler/pace.py``, whose rule for times of a disturbed machine holds here too.
"""

import time

import torch

_SIDE = 384  # rows, inputs and outputs of the product: some milliseconds
_TRIES = 3  # products of one reading, whose least time counts


class HostPace:
    """Readings of the pace by this process, with its number of threads."""

    def __init__(self) -> None:
        self._square = torch.randn(_SIDE, _SIDE)

    def seconds(self) -> float:
        """Seconds of the product now."""
        found = []
        for _ in range(_TRIES):
            began_s = time.perf_counter()
            torch.mm(self._square, self._square)
            found.append(time.perf_counter() - began_s)
        return min(found)
