"""The search for the highest rate at which objectives are kept, live and in the simulator (pure)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoscale.policies.heteroscale import Signal
from autoscale.traces.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PressurePoint:
    """The highest rate at which counts of replicas keep the objectives; 0: they kept them at no rate that was tried.

    ``prefill``, ``decode``: replicas; ``prefill`` is 0 for aggregated engines. ``attainment_frac``: share of requests
    that met their objectives at that rate. ``signals``: value of each signal of HeteroScale at that rate, which is
    tokens per second per replica, mean utilisation, or median latency in seconds; ``None``: not observed.
    """

    prefill: int
    decode: int
    requests_per_s: float
    attainment_frac: float
    signals: Mapping[Signal, float | None]

    @property
    def name(self) -> str:
        """The replicas as text, such as 2P3D."""
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode} aggregated"


def answer_s(trace: Iterable[TraceRequest], tpot_s: float) -> float:
    """Mean time of an answer at its TPOT objective, seconds; weighted by tokens: decode spends most time on long ones.

    Decode's batch is full only after such a time at a new rate.
    """
    outputs = [request.output_tokens for request in trace]
    return tpot_s * sum(tokens * tokens for tokens in outputs) / sum(outputs)


class RateSearch:
    """Raises the rate by a factor until one is bad, and then bisects between the last good and the first bad one.

    So a rate above a bad one is never tried.

    Args:
        first: the rate to begin with, requests per second.
        factor: factor of the rate while all rates are good.
        bisections: most bisections.
        tolerance_frac: the search also ends when the bad rate exceeds the good one by less than this share of itself.
        most: the highest rate that may be tried, requests per second.
    """

    def __init__(
        self, first: float, *, factor: float, bisections: int, tolerance_frac: float, most: float = math.inf
    ) -> None:
        self.good = 0.0  # highest good rate so far; 0: there is none
        self.bad: float | None = None  # lowest bad rate so far
        self._first = min(first, most)
        self._factor = factor
        self._bisections_left = bisections
        self._tolerance_frac = tolerance_frac
        self._most = most

    @property
    def next_rate(self) -> float | None:
        """The rate to try, requests per second; ``None``: the search has ended."""
        if self.bad is None:
            if self.good >= self._most:
                return None
            return min(self.good * self._factor, self._most) if self.good else self._first
        is_near = self.bad - self.good < self._tolerance_frac * self.bad
        return None if is_near or not self._bisections_left else (self.good + self.bad) / 2

    @property
    def is_capped(self) -> bool:
        """Whether every rate up to the highest allowed one was good."""
        return self.bad is None and self.good >= self._most

    def add(self, rate: float, *, is_good: bool) -> None:
        """Take the result of the next rate."""
        if self.bad is not None:
            self._bisections_left -= 1
        if is_good:
            self.good = rate
        else:
            self.bad = rate
