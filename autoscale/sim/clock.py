"""A virtual clock: it runs events and arrivals in the order of their times (pure)."""

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Any

from autoscale.traces.trace import TraceRequest

# Number of an arrival in the order of events. Other events have numbers from 1 on, so an arrival precedes events of the
# same time. At most one arrival is scheduled.
_ARRIVAL = 0


class Clock:
    """The loop of a simulation; at equal times arrivals run first, then events in the order of the calls of ``at``."""

    def __init__(self, on_arrival: Callable[[TraceRequest], None]) -> None:
        """``on_arrival``: called with each submitted request at its time."""
        self.now_s = 0.0
        # Whether submitted requests have yet to arrive.
        self.has_arrivals = False
        self._on_arrival = on_arrival
        # A heap of (time, number, event, its arguments).
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._event_count = 0

    def at(self, time_s: float, event: Callable[..., None], *arguments: Any) -> None:
        """Schedule ``event`` at ``time_s``, seconds."""
        self._event_count += 1
        heappush(self._events, (time_s, self._event_count, event, arguments))

    def submit(self, requests: Iterable[TraceRequest]) -> None:
        """Let requests arrive at their times, which must be in order.

        The requests of an earlier call must have arrived.
        """
        self._schedule_next_arrival(iter(requests))

    def run(self, until_s: float = math.inf) -> None:
        """Run events and arrivals up to ``until_s``, which is then the present time."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event, arguments = heappop(self._events)
            event(*arguments)
        if until_s < math.inf:
            self.now_s = until_s

    def _schedule_next_arrival(self, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        self.has_arrivals = request is not None
        if request is not None:
            heappush(self._events, (request.at_s, _ARRIVAL, self._run_arrival, (request, requests)))

    def _run_arrival(self, request: TraceRequest, later: Iterator[TraceRequest]) -> None:
        self._schedule_next_arrival(later)
        self._on_arrival(request)
