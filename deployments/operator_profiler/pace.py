"""Times on a CPU that other work uses too: a clock that stands still without a core, and how fast the core is just now.

A core that its neighbours slow down still makes every call longer. So one and the same product is timed beside each
measurement. See ``deployments/profiler/pace.py``, whose rule for times of a disturbed machine holds here too.
"""

import time

import torch

_SIDE = 384  # rows, inputs and outputs of the product: some milliseconds
_TRIES = 3  # products of one reading, whose least time counts


def host_clock() -> float:
    """Seconds for which this thread had a core. It takes part in every call, so its wait for a core is left out."""
    return time.thread_time()


class HostPace:
    """Readings of the pace by this thread alone: several threads would also wait for each other."""

    def __init__(self) -> None:
        self._square = torch.randn(_SIDE, _SIDE)

    def seconds(self) -> float:
        """Seconds of the product now."""
        threads, found = torch.get_num_threads(), []
        torch.set_num_threads(1)
        try:
            for _ in range(_TRIES):
                began_s = host_clock()
                torch.mm(self._square, self._square)
                found.append(host_clock() - began_s)
        finally:
            torch.set_num_threads(threads)
        return min(found)
