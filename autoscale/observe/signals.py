"""Rates, means and quantiles of the last window, from the counters and gauges of replicas (pure).

A replica reports gauges, and counters since its start. A rate is the growth of a counter between two reports of one
replica, divided by the time between them on the replica's clock. So a rate falls when an engine stops. A quantile comes
from the counts of buckets: first their growth in each replica, then the sum over replicas. Quantiles of single replicas
are never combined.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoscale.types import Latency, PoolKey, ReplicaStats, Traffic
from kvtransfer.topology import Role

# Upper edges of TTFT's buckets, seconds; one more bucket follows after the last edge.
TTFT_EDGES_S = (0.05, *(n / 10 for n in range(1, 11)), 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
# Upper edges of TPOT's buckets, seconds.
TPOT_EDGES_S = (*(n / 200 for n in range(1, 11)), 0.06, 0.07, 0.08, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(slots=True)
class Histogram:
    """Counts of observations in each bucket. The last bucket is for values above the last edge."""

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

    ``None``: there are no observations. If the result is the last edge, the true value may be above it. ``counts`` has
    one number more than ``edges``.
    """
    total = math.fsum(counts)
    if total <= 0.0:
        return None
    wanted_below, below = share * total, 0.0
    for index, edge in enumerate(edges):
        if below + counts[index] >= wanted_below and counts[index] > 0.0:
            lower_edge = edges[index - 1] if index else 0.0
            share_of_bucket = max(0.0, wanted_below - below) / counts[index]
            return lower_edge + (edge - lower_edge) * share_of_bucket
        below += counts[index]
    return edges[-1]


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
# Names of buckets. TTFT: counters of first tokens that came; gauges of requests that still wait for their first token.
_TTFT = [f"ttft_{index}" for index in range(len(TTFT_EDGES_S) + 1)]
_LATE = [f"late_{index}" for index in range(len(TTFT_EDGES_S) + 1)]
# TPOT: counters of ended requests; gauges of requests that stream.
_TPOT = [f"tpot_{index}" for index in range(len(TPOT_EDGES_S) + 1)]
_PACE = [f"pace_{index}" for index in range(len(TPOT_EDGES_S) + 1)]


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
        """Take in the reports of the running replicas of each pool; replicas that are left out are forgotten.

        A report is the time and the values of a replica's last report; ``None``: it has not reported yet.
        ``interval_s``: time between two calls.
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

        TTFT counts first tokens that came in the window, and requests that still wait, with their time so far. TPOT
        counts requests that ended in the window, and requests that stream, with their present pace.
        """
        windows = self._decode_windows()
        first_tokens, first_tokens_s = _gained(windows, ("first_tokens", "first_tokens_s"))
        return Latency(
            ttft_mean_s=first_tokens_s / first_tokens if first_tokens else None,
            ttft_s=quantile(TTFT_EDGES_S, _merged(windows, _TTFT, _LATE), quantile_frac),
            tpot_s=quantile(TPOT_EDGES_S, _merged(windows, _TPOT, _PACE), quantile_frac),
        )

    def traffic(self) -> Traffic:
        """Arrivals and lengths over all decode replicas, where every request arrives; and the cached share of prompts.

        If the reports of a decode replica were interrupted, the traffic is not whole.
        """
        all_windows = [window for windows in self._windows.values() for window in windows.values()]
        cached, computed = _gained(all_windows, ("cached_prefill_tokens", "prefill_tokens"))
        decode_windows = self._decode_windows()
        windows = [window for window in decode_windows if window.span_s > 0.0]
        is_whole = not any(window.is_interrupted for window in decode_windows)
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

    def _decode_windows(self) -> list[ReportWindow]:
        pools = [windows for key, windows in self._windows.items() if key.role is Role.DECODE]
        return [window for windows in pools for window in windows.values()]


def _merged(windows: Sequence[ReportWindow], counters: Sequence[str], gauges: Sequence[str]) -> list[float]:
    """The count of each bucket over all replicas: the growth of its counter, and the present value of its gauge."""
    present = [window.latest_each(gauges) for window in windows]
    return [math.fsum(column) for column in zip(_gained(windows, counters), *present, strict=True)]


def _gained(windows: Sequence[ReportWindow], names: Sequence[str]) -> list[float]:
    """The growth of each counter over all replicas."""
    rows = [[0.0] * len(names), *(window.gained_each(names) for window in windows)]
    return [math.fsum(column) for column in zip(*rows, strict=True)]
