"""Rates, means and quantiles of the last window, from the counters and gauges of replicas (pure).

A replica reports gauges, and counters since its start. A rate is the growth of a counter between two reports of one
replica, divided by the time between them on the replica's clock. So a rate falls when an engine stops. A quantile comes
from the counts of buckets: first their growth in each replica, then the sum over replicas. Quantiles of single replicas
are never combined.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoscale.observe.endpoint_report import REFUSED, refusal_of
from autoscale.observe.histogram import LENGTH_EDGES_TOKENS, TPOT_EDGES_S, TTFT_EDGES_S, distribution, quantile
from autoscale.observe.report_window import ReportWindow
from autoscale.types import Latency, PoolKey, Refused, ReplicaStats, Traffic
from kvtransfer.topology import Role

# Names of buckets. TTFT: counters of first tokens that came; gauges of requests that still wait for their first token.
_TTFT = [f"ttft_{index}" for index in range(len(TTFT_EDGES_S) + 1)]
_LATE = [f"late_{index}" for index in range(len(TTFT_EDGES_S) + 1)]
# TPOT: counters of ended requests; gauges of requests that stream.
_TPOT = [f"tpot_{index}" for index in range(len(TPOT_EDGES_S) + 1)]
_PACE = [f"pace_{index}" for index in range(len(TPOT_EDGES_S) + 1)]
# Lengths: counters of requests that began, and of answers that ended.
_INPUTS = [f"input_length_{index}" for index in range(len(LENGTH_EDGES_TOKENS) + 1)]
_OUTPUTS = [f"output_length_{index}" for index in range(len(LENGTH_EDGES_TOKENS) + 1)]


# Time and values of the last report of each replica, by replica id; ``None``: it has not reported yet.
Reports = Mapping[str, tuple[float, Mapping[str, float]] | None]
Windows = dict[str, ReportWindow]


class Signals:
    """The reports of all replicas of one service, and those of the endpoint about this service."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._windows: dict[PoolKey, dict[str, ReportWindow]] = {}
        self._endpoint: dict[str, ReportWindow] = {}  # by replica of the endpoint
        self._now_s, self._endpoint_lost_s = 0.0, -math.inf

    def add(
        self,
        reports: Mapping[PoolKey, Reports],
        now_s: float,
        interval_s: float,
    ) -> None:
        """Take in the reports of the running replicas of each pool; replicas that are left out are forgotten.

        A report is the time and the values of a replica's last report; ``None``: it has not reported yet.
        ``interval_s``: time between two calls.
        """
        before, self._windows, self._now_s = self._windows, {}, now_s
        for key, replicas in reports.items():
            self._windows[key] = self._updated(before.get(key, {}), replicas, interval_s)

    def add_endpoint(self, reports: Reports, now_s: float, interval_s: float) -> None:
        """Take in the figures of this service in the reports of the endpoint's running replicas; as ``add``.

        A replica that ends takes its counters along. Until its share of the requests reaches other replicas, the
        traffic is not whole.
        """
        self._now_s = now_s
        if not self._endpoint.keys() <= reports.keys():
            self._endpoint_lost_s = now_s
        self._endpoint_lost_s = min(self._endpoint_lost_s, now_s)  # the clock may be set back
        self._endpoint = self._updated(self._endpoint, reports, interval_s)

    def _updated(self, before: Mapping[str, ReportWindow], reports: Reports, interval_s: float) -> Windows:
        """The windows with one report more; ``before``: the windows at the last call."""
        windows: Windows = {}
        for name, report in reports.items():
            windows[name] = window = before.get(name) or ReportWindow(self._now_s)
            if report is not None:
                window.add(report[0], report[1], now_s=self._now_s, window_s=self.window_s, interval_s=interval_s)
        return windows

    def replicas(self, key: PoolKey) -> tuple[ReplicaStats, ...]:
        """The replicas of a pool, in the order of ``add``."""
        return tuple(window.stats(name) for name, window in self._windows.get(key, {}).items())

    def latency(self, quantile_frac: float) -> Latency:
        """The quantile of TTFT and TPOT over all decode replicas.

        TTFT counts first tokens that came in the window, and requests that still wait, with their time so far: on
        decode, or at the endpoint. TPOT counts requests that ended in the window, and requests that stream, with their
        present pace.
        """
        windows, endpoint = self._decode_windows(), list(self._endpoint.values())
        first_tokens, first_tokens_s = _gained(windows, ("first_tokens", "first_tokens_s"))
        offered = math.fsum(window.gained("offered_requests") or 0.0 for window in endpoint)
        return Latency(
            ttft_mean_s=first_tokens_s / first_tokens if first_tokens else None,
            # The endpoint counts no first tokens, so its windows add only requests that wait.
            ttft_s=quantile(TTFT_EDGES_S, _merged([*windows, *endpoint], _TTFT, _LATE), quantile_frac),
            tpot_s=quantile(TPOT_EDGES_S, _merged(windows, _TPOT, _PACE), quantile_frac),
            refused_frac=min(1.0, sum(self._refused().values()) / offered) if offered else None,
        )

    def _refused(self) -> dict[tuple[str, str], float]:
        """Number of requests refused in the window, by reason and priority."""
        names = sorted(
            {name for window in self._endpoint.values() for name in window.names if name.startswith(REFUSED)}
        )
        return dict(zip(map(refusal_of, names), _gained(list(self._endpoint.values()), names), strict=True))

    def traffic(self) -> Traffic:
        """Requests that users sent, and the cached share of prompts; see ``Traffic``.

        If the reports of a replica of decode or of the endpoint were interrupted, the traffic is not whole.
        """
        all_windows = [window for windows in self._windows.values() for window in windows.values()]
        cached, computed = _gained(all_windows, ("cached_prefill_tokens", "prefill_tokens"))
        decode_windows = self._decode_windows()
        is_interrupted = any(window.is_interrupted for window in (*decode_windows, *self._endpoint.values()))
        is_lost = self._now_s - self._endpoint_lost_s < self.window_s
        # The first seconds of a new process of Serve's controller: a rate over them is mostly chance.
        is_short = bool(self._endpoint) and max(w.span_s for w in self._endpoint.values()) < self.window_s / 2
        is_whole = not (is_interrupted or is_lost or is_short)
        reached = self._reached([window for window in decode_windows if window.span_s > 0.0])
        offered = self._offered([window for window in self._endpoint.values() if window.span_s > 0.0], reached)
        quietest = min(((window.seen_s, name) for name, window in self._endpoint.items()), default=None)
        return replace(
            offered,
            cached_frac=cached / (cached + computed) if cached + computed else None,
            is_whole=is_whole,
            quietest=None if quietest is None else (quietest[1], quietest[0]),
        )

    def _reached(self, windows: Sequence[ReportWindow]) -> Traffic:
        """The requests that reached decode; ``windows``: those of decode replicas that have rates."""
        if not windows:
            return Traffic()
        requests, inputs, squared, ended, outputs = _gained(
            windows, ("requests", "input_tokens", "input_tokens_squared", "requests_ended", "output_tokens")
        )
        input_mean, output_mean = inputs / requests if requests else None, outputs / ended if ended else None
        return Traffic(
            requests_per_s=math.fsum(window.rate("requests") or 0.0 for window in windows),
            served_per_s=math.fsum(window.rate("first_tokens") or 0.0 for window in windows),
            input_tokens_mean=input_mean,
            input_tokens_weighted_mean=squared / inputs if inputs and squared else None,
            output_tokens_mean=output_mean,
            input_lengths=distribution(LENGTH_EDGES_TOKENS, _gained(windows, _INPUTS), input_mean),
            output_lengths=distribution(LENGTH_EDGES_TOKENS, _gained(windows, _OUTPUTS), output_mean),
        )

    def _offered(self, windows: Sequence[ReportWindow], reached: Traffic) -> Traffic:
        """The offered requests; ``windows``: those of the endpoint that have rates. Without them, ``reached``.

        The endpoint estimates prompt lengths from bytes, decode counts tokens. So the lengths of offered prompts are
        the endpoint's, multiplied by the ratio of both for the prompts that passed.
        """
        if not windows:
            return reached
        names = ("offered_requests", "offered_tokens", "offered_tokens_squared", "passed_requests", "passed_tokens")
        requests, tokens, squared, passed, passed_tokens = _gained(windows, names)
        is_known = passed_tokens > 0.0 and reached.input_tokens_mean is not None
        per_estimate = (reached.input_tokens_mean or 0.0) * passed / passed_tokens if is_known else 1.0
        span_s = math.fsum(window.span_s for window in windows) / len(windows)
        refused = self._refused()
        return replace(
            reached,
            requests_per_s=math.fsum(window.rate("offered_requests") or 0.0 for window in windows),
            waiting_requests=math.fsum(window.latest("waiting_requests") or 0.0 for window in windows),
            waiting_tokens=math.fsum(window.latest("waiting_tokens") or 0.0 for window in windows) * per_estimate,
            refused=tuple(
                Refused(reason=reason, priority=priority, requests_per_s=number / span_s)
                for (reason, priority), number in refused.items()
            ),
            input_tokens_mean=tokens / requests * per_estimate if requests else None,
            input_tokens_weighted_mean=squared / tokens * per_estimate if tokens else None,
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
