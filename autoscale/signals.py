"""From what replicas count to rates, means and quantiles of the last window (pure).

A replica reports cumulative counters and gauges. Rates are differences over the time between two reports of the same
replica, by its own clock, so they fall by themselves when an engine stands still. Quantiles come from bucket counts
that are differenced per replica and then merged; quantiles of quantiles are never taken.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoscale.types import Latency, PoolKey, ReplicaStats, Traffic
from kvtransfer.topology import Role

# Upper edges of the buckets, s; the last one is open.
TTFT_EDGES_S = (0.05, *(n / 10 for n in range(1, 11)), 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
TPOT_EDGES_S = (*(n / 200 for n in range(1, 11)), 0.06, 0.07, 0.08, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(slots=True)
class Histogram:
    """Counts of observations per bucket; the last bucket holds what is beyond the last edge."""

    edges: tuple[float, ...]
    counts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0.0] * (len(self.edges) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1.0

    def as_report(self, name: str) -> dict[str, float]:
        """The buckets as named numbers of a replica's report, without the empty ones: they are most of them."""
        return {f"{name}_{index}": count for index, count in enumerate(self.counts) if count}


def quantile(edges: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value below which a share of the observations lies, by linear interpolation inside its bucket.

    Args:
        edges: upper edges of the buckets.
        counts: observations per bucket, one more than there are edges.
        share: 0..1.

    Returns:
        ``None`` without observations; the last edge where the share lies beyond it.
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


# Two clocks that differ by more between two reports than reports are late: one of them was set.
_CLOCK_JUMP_S = 5.0
_MOST_LATE_S = 10.0  # replicas report at least so often

_GAUGES = (
    "running_requests",
    "waiting_requests",
    "deferred_requests",
    "queued_prefill_tokens",
    "kv_usage_frac",
    "unread_kv_requests",
)
# They change faster than replicas report, so one report says little.
_AVERAGED = ("gpu_utilization_frac", "sm_activity_frac")
_TTFT = [f"ttft_{index}" for index in range(len(TTFT_EDGES_S) + 1)]
_LATE = [f"late_{index}" for index in range(len(TTFT_EDGES_S) + 1)]
_TPOT = [f"tpot_{index}" for index in range(len(TPOT_EDGES_S) + 1)]
_PACE = [f"pace_{index}" for index in range(len(TPOT_EDGES_S) + 1)]


class ReportWindow:
    """What one replica has reported in the last window."""

    def __init__(self, known_s: float) -> None:
        self._reports: deque[tuple[float, Mapping[str, float]]] = deque()
        self.seen_s = known_s
        # Whether what it did last is not known, though it is not new.
        self.is_interrupted = False

    def add(
        self, report_s: float, values: Mapping[str, float], *, now_s: float, window_s: float, interval_s: float
    ) -> None:
        """Take in a report; one with a value that is no number is not believed at all, so that the replica goes stale.

        Args:
            report_s: when the replica made it, by its own clock.
            values: its counters and gauges.
            now_s: our own clock; what counts for freshness, since the two may differ.
            window_s: how far back to keep reports.
            interval_s: how often reports are taken in, and so how late at most.
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
                # A clock that was set, or an engine that counts from zero again: rates over this would be wrong.
                self._reports.clear()
            self.is_interrupted = not self._reports
        self._reports.append((report_s, values))
        self.seen_s = now_s
        while len(self._reports) > 2 and self._reports[1][0] <= report_s - window_s:
            self._reports.popleft()

    @property
    def span_s(self) -> float:
        """The time that differences are taken over."""
        return self._reports[-1][0] - self._reports[0][0] if self._reports else 0.0

    def latest(self, name: str) -> float | None:
        """The last value of a gauge or counter; ``None`` where it is not reported."""
        return self._reports[-1][1].get(name) if self._reports else None

    def mean(self, name: str) -> float | None:
        """The mean of a gauge over the window; ``None`` where the last report leaves it out."""
        if self.latest(name) is None:
            return None
        seen = [value for _, values in self._reports if (value := values.get(name)) is not None]
        return math.fsum(seen) / len(seen)

    def gained(self, name: str) -> float | None:
        """By how much a counter has grown; ``None`` before the second report, or where one leaves it out."""
        if self.span_s <= 0.0:
            return None
        first, last = (self._reports[at][1].get(name) for at in (0, -1))
        return None if first is None or last is None else max(0.0, last - first)

    def gained_each(self, names: Sequence[str]) -> list[float]:
        """By how much counters have grown that reports leave out while they are 0; before the second report 0."""
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
        """Take in what runs now and what each last reported; who is not named is forgotten.

        Args:
            reports: for each pool its running replicas, each with the time and values of its last report, or ``None``
                before the first.
            now_s: our own clock.
            interval_s: how often this is called.
        """
        known, self._windows = self._windows, {}
        for key, replicas in reports.items():
            windows = self._windows[key] = {}
            for name, report in replicas.items():
                windows[name] = window = known.get(key, {}).get(name) or ReportWindow(now_s)
                if report is not None:
                    window.add(report[0], report[1], now_s=now_s, window_s=self.window_s, interval_s=interval_s)

    def replicas(self, key: PoolKey) -> tuple[ReplicaStats, ...]:
        """The replicas of a pool, in the order in which they were named."""
        return tuple(window.stats(name) for name, window in self._windows.get(key, {}).items())

    def latency(self, quantile_frac: float) -> Latency:
        """The quantile of TTFT and TPOT over all decode replicas.

        TTFT counts first tokens and, with the time they have waited so far, requests that have none yet; TPOT requests
        that have ended and, at their present pace, those that have not.
        """
        windows = list(self._decode())
        first_tokens, first_tokens_s = _summed(
            [[0.0, 0.0], *(window.gained_each(("first_tokens", "first_tokens_s")) for window in windows)]
        )
        return Latency(
            ttft_mean_s=first_tokens_s / first_tokens if first_tokens else None,
            ttft_s=quantile(TTFT_EDGES_S, _ended_and_not(windows, _TTFT, _LATE), quantile_frac),
            tpot_s=quantile(TPOT_EDGES_S, _ended_and_not(windows, _TPOT, _PACE), quantile_frac),
        )

    def traffic(self) -> Traffic:
        """Arrivals and lengths over all decode replicas, where every request arrives, and what caches held of prompts.

        Where one of them was interrupted, the others' arrivals are not all.
        """
        everywhere = (window for windows in self._windows.values() for window in windows.values())
        cached, computed = _summed(
            [[0.0, 0.0], *(window.gained_each(("cached_prefill_tokens", "prefill_tokens")) for window in everywhere)]
        )
        windows = [window for window in self._decode() if window.span_s > 0.0]
        is_whole = not any(window.is_interrupted for window in self._decode())
        if not windows:
            return Traffic(is_whole=is_whole)
        rates = [window.rate("requests") for window in windows]
        requests, inputs, squared, outputs = (
            math.fsum(window.gained(name) or 0.0 for window in windows)
            for name in ("requests", "input_tokens", "input_tokens_squared", "output_tokens")
        )
        ended = math.fsum(window.gained("requests_ended") or 0.0 for window in windows)
        return Traffic(
            requests_per_s=math.fsum(rate for rate in rates if rate is not None),
            input_tokens_mean=inputs / requests if requests else None,
            input_tokens_weighted_mean=squared / inputs if inputs and squared else None,
            output_tokens_mean=outputs / ended if ended else None,
            cached_frac=cached / (cached + computed) if cached + computed else None,
            is_whole=is_whole,
        )

    def _decode(self) -> Iterable[ReportWindow]:
        for key, windows in self._windows.items():
            if key.role is Role.DECODE:
                yield from windows.values()


def _ended_and_not(windows: Sequence[ReportWindow], ended: Sequence[str], going_on: Sequence[str]) -> list[float]:
    """Per bucket, what a counter has gained in the window and what a gauge shows now, over all replicas."""
    gained = [window.gained_each(ended) for window in windows]
    return _summed([[0.0] * len(ended), *gained, *(window.latest_each(going_on) for window in windows)])


def _summed(rows: Sequence[Sequence[float]]) -> list[float]:
    """Each column's sum."""
    return [math.fsum(column) for column in zip(*rows, strict=True)]
