"""The reports of one replica in the last window, and what changed between the first and the last of them (pure)."""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from autoscale.types import DecodeStep, ReplicaStats

# From one report to the next, the replica's clock and the controller's clock may advance by different times. If they
# differ by more than this, seconds, a clock was set.
_CLOCK_JUMP_S = 5.0
# Longest time between two reports of a replica, seconds, whatever its interval (``AutoscaleConfig.report_s``). So the
# last report is never older than this.
_MOST_LATE_S = 10.0

# Gauges that a snapshot shows with their last value.
_GAUGES = (
    "running_requests",
    "waiting_requests",
    "deferred_requests",
    "queued_prefill_tokens",
    "kv_usage_frac",
    "unread_kv_requests",
)
# Gauges that change faster than replicas report: a snapshot shows their mean over the window.
_AVERAGED = ("gpu_utilization_frac", "sm_activity_frac")


class ReportWindow:
    """The reports of one replica in the last window; ``appeared_s``: when the replica was first seen."""

    def __init__(self, appeared_s: float) -> None:
        self._reports: deque[tuple[float, Mapping[str, float]]] = deque()
        # When the last report came, by the controller's clock; before the first report, ``appeared_s``.
        self.seen_s = appeared_s
        # Whether the last report cannot be compared with the one before it, so that the work between them is not known.
        self.is_interrupted = False

    def add(
        self, report_s: float, values: Mapping[str, float], *, now_s: float, window_s: float, interval_s: float
    ) -> None:
        """Take in a report; a report with a value that is not finite is dropped, so that the replica becomes stale.

        ``report_s`` is a time by the replica's clock, ``now_s`` one by the controller's. ``interval_s``: time between
        two calls of this method; a report waits for the next call, so it is late by at most this time.
        """
        if not all(math.isfinite(value) for value in values.values()):
            return
        if self._reports:
            last_s, last = self._reports[-1]
            if report_s == last_s:
                return
            passed_s, passed_here_s = report_s - last_s, now_s - self.seen_s
            tolerance_s = max(_CLOCK_JUMP_S, min(interval_s, _MOST_LATE_S))
            # Reports that are further apart than a window count as a set clock too.
            is_clock_set = not 0.0 < passed_s <= window_s or abs(passed_s - passed_here_s) > tolerance_s
            is_engine_new = values.get("decode_tokens", 0.0) < last.get("decode_tokens", 0.0)
            if is_clock_set or is_engine_new:
                self._reports.clear()  # a rate between the earlier reports and this one would be wrong
            self.is_interrupted = not self._reports
        self._reports.append((report_s, values))
        self.seen_s = now_s
        # The first report is the last one from before the window, so that growth is over the whole window.
        while len(self._reports) > 2 and self._reports[1][0] <= report_s - window_s:
            self._reports.popleft()

    @property
    def span_s(self) -> float:
        """The time between the first and the last report, seconds."""
        return self._reports[-1][0] - self._reports[0][0] if self._reports else 0.0

    def latest(self, name: str) -> float | None:
        """The last value of a gauge or counter; ``None``: not reported."""
        return self._reports[-1][1].get(name) if self._reports else None

    @property
    def names(self) -> Collection[str]:
        """Names of the values in the last report."""
        return self._reports[-1][1].keys() if self._reports else ()

    def mean(self, name: str) -> float | None:
        """The mean of a gauge over the window; ``None``: the last report lacks it."""
        if self.latest(name) is None:
            return None
        reported = [value for _, values in self._reports if (value := values.get(name)) is not None]
        return math.fsum(reported) / len(reported)

    def gained(self, name: str) -> float | None:
        """Growth of a counter over the window; ``None``: there is no second report yet, or it is not reported."""
        if self.span_s <= 0.0:
            return None
        first, last = (self._reports[index][1].get(name) for index in (0, -1))
        return None if first is None or last is None else max(0.0, last - first)

    def gained_each(self, names: Sequence[str]) -> list[float]:
        """Growth of counters that reports leave out while they are 0; all 0 before the second report."""
        if self.span_s <= 0.0:
            return [0.0] * len(names)
        first, last = (self._reports[index][1] for index in (0, -1))
        return [max(0.0, last.get(name, 0.0) - first.get(name, 0.0)) for name in names]

    def latest_each(self, names: Sequence[str]) -> list[float]:
        """The last values of gauges that reports leave out while they are 0."""
        last = self._reports[-1][1] if self._reports else {}
        return [last.get(name, 0.0) for name in names]

    def rate(self, name: str) -> float | None:
        """A counter's growth per second."""
        gained = self.gained(name)
        return None if gained is None else gained / self.span_s

    def _decode_step(self) -> DecodeStep | None:
        """The mean step without prompts; ``None``: there was none."""
        names = ("decode_steps", "decode_steps_s", "decode_steps_requests", "decode_steps_kv_tokens")
        steps, seconds, requests, kv_tokens = self.gained_each(names)
        if not (steps and seconds and requests):
            return None
        return DecodeStep(batch=requests / steps, context_tokens=kv_tokens / requests, seconds=seconds / steps)

    def stats(self, replica_id: str) -> ReplicaStats:
        """The replica as a snapshot shows it."""
        handoffs, handoff_s = self.gained("handoffs"), self.gained("handoff_s")
        pulled_bytes, pull_s = self.gained("pulled_bytes"), self.gained("pull_s")
        return ReplicaStats(
            replica_id=replica_id,
            observed_s=self.seen_s,
            decode_tokens_per_s=self.rate("decode_tokens"),
            prefill_tokens_per_s=self.rate("prefill_tokens"),
            handoff_s=handoff_s / handoffs if handoffs and handoff_s is not None else None,
            pull_bytes_per_s=pulled_bytes / pull_s if pulled_bytes and pull_s else None,
            decode_step=self._decode_step(),
            **{name: self.latest(name) for name in _GAUGES},
            **{name: self.mean(name) for name in _AVERAGED},
        )
