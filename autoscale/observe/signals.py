"""Rates, means and quantiles of the last window, from the counters and gauges of replicas (pure).

A replica reports cumulative counters and gauges. Rates are differences over the time between two reports of the same
replica, by its own clock, so they fall when an engine stops. Quantiles come from bucket counts: differences per
replica, which are then added; quantiles of quantiles are never taken.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoscale.types import Latency, PoolKey, ReplicaStats, Traffic
from kvtransfer.topology import Role

# Upper edges of TTFT's buckets, seconds; one more bucket is beyond the last edge.
TTFT_EDGES_S = (0.05, *(n / 10 for n in range(1, 11)), 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
# Upper edges of TPOT's buckets, seconds.
TPOT_EDGES_S = (*(n / 200 for n in range(1, 11)), 0.06, 0.07, 0.08, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(slots=True)
class Histogram:
    """Counts of observations per bucket; the last bucket is beyond the last edge."""

    edges: tuple[float, ...]
    counts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0.0] * (len(self.edges) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1.0

    def as_report(self, name: str) -> dict[str, float]:
        """The buckets as named numbers of a replica's report; empty buckets, which are most, are left out."""
        return {f"{name}_{index}": count for index, count in enumerate(self.counts) if count}


def quantile(edges: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value below which a share (0..1) of the observations lies, by linear interpolation inside its bucket.

    ``None`` without observations; the last edge if the share lies beyond it. ``counts``: one more than ``edges``.
    """
    total = math.fsum(counts)
    if total <= 0.0:
        return None
    rank, below = share * total, 0.0
    for index, edge in enumerate(edges):
        if below + counts[index] >= rank and counts[index] > 0.0:
            lower = edges[index - 1] if index else 0.0
            return lower + (edge - lower) * max(0.0, rank - below) / counts[index]
        below += counts[index]
    return edges[-1]


# The least difference between two clocks, from one report to the next, that shows that a clock was set; seconds.
_CLOCK_JUMP_S = 5.0
# The longest interval between a replica's reports, seconds.
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
# Names of the buckets: first tokens that came, requests that wait for one, ended requests, requests that stream.
_TTFT = [f"ttft_{index}" for index in range(len(TTFT_EDGES_S) + 1)]
_LATE = [f"late_{index}" for index in range(len(TTFT_EDGES_S) + 1)]
_TPOT = [f"tpot_{index}" for index in range(len(TPOT_EDGES_S) + 1)]
_PACE = [f"pace_{index}" for index in range(len(TPOT_EDGES_S) + 1)]


class ReportWindow:
    """The reports of one replica in the last window."""

    def __init__(self, known_s: float) -> None:
        self._reports: deque[tuple[float, Mapping[str, float]]] = deque()
        self.seen_s = known_s
        # Whether the replica is not new, but its work since the last report is not known.
        self.is_interrupted = False

    def add(
        self, report_s: float, values: Mapping[str, float], *, now_s: float, window_s: float, interval_s: float
    ) -> None:
        """Take in a report; a report with a value that is not finite is dropped, so that the replica becomes stale.

        ``report_s`` is by the replica's own clock; freshness counts by ``now_s``, the controller's. A report is late by
        ``interval_s``, the time between two calls, at the most.
        """
        if not all(math.isfinite(value) for value in values.values()):
            return
        if self._reports:
            last_s, last = self._reports[-1]
            if report_s == last_s:
                return
            passed_s = report_s - last_s
            late_s = max(_CLOCK_JUMP_S, min(interval_s, _MOST_LATE_S))
            is_jump = not 0.0 < passed_s <= window_s or abs(passed_s - (now_s - self.seen_s)) > late_s
            if is_jump or values.get("decode_tokens", 0.0) < last.get("decode_tokens", 0.0):
                # A clock was set, or an engine counts from zero again: rates across this would be wrong.
                self._reports.clear()
            self.is_interrupted = not self._reports
        self._reports.append((report_s, values))
        self.seen_s = now_s
        while len(self._reports) > 2 and self._reports[1][0] <= report_s - window_s:
            self._reports.popleft()

    @property
    def span_s(self) -> float:
        """The time between the first and the last report, seconds."""
        return self._reports[-1][0] - self._reports[0][0] if self._reports else 0.0

    def latest(self, name: str) -> float | None:
        """The last value of a gauge or counter; ``None``: not reported."""
        return self._reports[-1][1].get(name) if self._reports else None

    def mean(self, name: str) -> float | None:
        """The mean of a gauge over the window; ``None``: not in the last report."""
        if self.latest(name) is None:
            return None
        reported = [value for _, values in self._reports if (value := values.get(name)) is not None]
        return math.fsum(reported) / len(reported)

    def gained(self, name: str) -> float | None:
        """Growth of a counter; ``None``: before the second report, or not reported."""
        if self.span_s <= 0.0:
            return None
        first, last = (self._reports[at][1].get(name) for at in (0, -1))
        return None if first is None or last is None else max(0.0, last - first)

    def gained_each(self, names: Sequence[str]) -> list[float]:
        """Growth of counters that reports leave out while they are 0; before the second report 0."""
        if self.span_s <= 0.0:
            return [0.0] * len(names)
        first, last = (self._reports[at][1] for at in (0, -1))
        return [max(0.0, last.get(name, 0.0) - first.get(name, 0.0)) for name in names]

    def latest_each(self, names: Sequence[str]) -> list[float]:
        """The last values of gauges that reports leave out while they are 0."""
        last = self._reports[-1][1] if self._reports else {}
        return [last.get(name, 0.0) for name in names]

    def rate(self, name: str) -> float | None:
        """A counter's growth per second."""
        gained = self.gained(name)
        return None if gained is None else gained / self.span_s

    def stats(self, replica_id: str) -> ReplicaStats:
        """The replica as a snapshot shows it."""
        handoffs, handoff_s = self.gained("handoffs"), self.gained("handoff_s")
        return ReplicaStats(
            replica_id=replica_id,
            observed_s=self.seen_s,
            decode_tokens_per_s=self.rate("decode_tokens"),
            prefill_tokens_per_s=self.rate("prefill_tokens"),
            handoff_s=handoff_s / handoffs if handoffs and handoff_s is not None else None,
            **{name: self.latest(name) for name in _GAUGES},
            **{name: self.mean(name) for name in _AVERAGED},
        )


class Signals:
    """The reports of all replicas of an application."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._windows: dict[PoolKey, dict[str, ReportWindow]] = {}

    def add(
        self,
        reports: Mapping[PoolKey, Mapping[str, tuple[float, Mapping[str, float]] | None]],
        now_s: float,
        interval_s: float,
    ) -> None:
        """Take in the running replicas of each pool; replicas that are left out are forgotten.

        Each has the time and values of its last report, or ``None`` before the first. ``interval_s``: time between two
        calls.
        """
        before, self._windows = self._windows, {}
        for key, replicas in reports.items():
            windows = self._windows[key] = {}
            for name, report in replicas.items():
                windows[name] = window = before.get(key, {}).get(name) or ReportWindow(now_s)
                if report is not None:
                    window.add(report[0], report[1], now_s=now_s, window_s=self.window_s, interval_s=interval_s)

    def replicas(self, key: PoolKey) -> tuple[ReplicaStats, ...]:
        """The replicas of a pool, in the order of ``add``."""
        return tuple(window.stats(name) for name, window in self._windows.get(key, {}).items())

    def latency(self, quantile_frac: float) -> Latency:
        """The quantile of TTFT and TPOT over all decode replicas.

        TTFT counts first tokens, and requests that wait for theirs with the time they have waited so far. TPOT counts
        requests that have ended, and requests that stream with their present pace.
        """
        windows = self._decode()
        first_tokens, first_tokens_s = _gained(windows, ("first_tokens", "first_tokens_s"))
        return Latency(
            ttft_mean_s=first_tokens_s / first_tokens if first_tokens else None,
            ttft_s=quantile(TTFT_EDGES_S, _ended_and_not(windows, _TTFT, _LATE), quantile_frac),
            tpot_s=quantile(TPOT_EDGES_S, _ended_and_not(windows, _TPOT, _PACE), quantile_frac),
        )

    def traffic(self) -> Traffic:
        """Arrivals and lengths over all decode replicas, where every request arrives; and the cached share of prompts.

        If one of them was interrupted, the traffic is not whole.
        """
        everywhere = [window for windows in self._windows.values() for window in windows.values()]
        cached, computed = _gained(everywhere, ("cached_prefill_tokens", "prefill_tokens"))
        windows = [window for window in self._decode() if window.span_s > 0.0]
        is_whole = not any(window.is_interrupted for window in self._decode())
        if not windows:
            return Traffic(is_whole=is_whole)
        rates = [window.rate("requests") for window in windows]
        requests, inputs, squared, ended, outputs = (
            math.fsum(window.gained(name) or 0.0 for window in windows)
            for name in ("requests", "input_tokens", "input_tokens_squared", "requests_ended", "output_tokens")
        )
        return Traffic(
            requests_per_s=math.fsum(rate for rate in rates if rate is not None),
            input_tokens_mean=inputs / requests if requests else None,
            input_tokens_weighted_mean=squared / inputs if inputs and squared else None,
            output_tokens_mean=outputs / ended if ended else None,
            cached_frac=cached / (cached + computed) if cached + computed else None,
            is_whole=is_whole,
        )

    def _decode(self) -> list[ReportWindow]:
        pools = [windows for key, windows in self._windows.items() if key.role is Role.DECODE]
        return [window for windows in pools for window in windows.values()]


def _ended_and_not(windows: Sequence[ReportWindow], ended: Sequence[str], going_on: Sequence[str]) -> list[float]:
    """Per bucket over all replicas: the growth of a counter in the window, and the present value of a gauge."""
    present = [window.latest_each(going_on) for window in windows]
    return [math.fsum(column) for column in zip(_gained(windows, ended), *present, strict=True)]


def _gained(windows: Sequence[ReportWindow], names: Sequence[str]) -> list[float]:
    """The growth of each counter over all replicas."""
    rows = [[0.0] * len(names), *(window.gained_each(names) for window in windows)]
    return [math.fsum(column) for column in zip(*rows, strict=True)]
