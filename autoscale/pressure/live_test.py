"""A pressure test of a running application: which step comes next, and what the steps showed (pure).

For each pair of counts the highest good rate is searched. The best counts serve the most requests per second and GPU.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoscale.policies.heteroscale import Signal
from autoscale.pressure.counts import gpus_of
from autoscale.pressure.rate_search import PressurePoint, RateSearch
from autoscale.pressure.steps import Step, StepResult, Verdict, verdict
from autoscale.room import Room
from kvtransfer.topology import Role

# Factor of the rate from step to step for the first counts: below 2, since the steps load a running application.
_FIRST_FACTOR = 1.5
# For later counts the first rate is likely to be near the highest good one, so steps are smaller, as in the simulator.
_LATER_FACTOR = 1.25
# The first rate for later counts, as a share of the best counts' rate per GPU: most likely it is still good.
_LIKELY_FRAC = 0.7
# Most bisections for each pair of counts. Four bring a factor of 1.5 to 3 % of the rate.
_BISECTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a pressure test: requests per second that it sends, seconds, GPUs, and failed requests of a step."""

    most_requests_per_s: float
    most_s: float
    most_gpus: float
    most_errors: int


class PressureTest:
    """The state of a test: which step comes next, and the highest good rate of all counts so far.

    Args:
        counts: replicas of each role, in the order in which they are tested.
        room: for the GPUs of a replica.
        limits: the first rate and all later ones are at most its rate.
        quantile_frac: share of requests that must meet their objectives.
        first_requests_per_s: the first rate.
        tolerance_frac: share of the rate by which the first bad rate may exceed the highest good one.
    """

    def __init__(
        self,
        counts: Sequence[Mapping[Role, int]],
        *,
        room: Room,
        limits: Limits,
        quantile_frac: float,
        first_requests_per_s: float,
        tolerance_frac: float,
    ) -> None:
        self.results: list[StepResult] = []
        self.points: list[PressurePoint] = []
        self.capped: list[str] = []  # names of points whose highest good rate is the highest allowed one
        self.is_out_of_time = False
        self._waiting = [dict(each) for each in counts]
        self._room = room
        self._limits = limits
        self._quantile_frac = quantile_frac
        self._tolerance_frac = tolerance_frac
        self._runs: list[StepResult] = []  # of the present step
        self._search = self._new_search(first_requests_per_s, _FIRST_FACTOR)
        self._best_here: list[StepResult] = []  # runs of the highest good rate of the present counts

    def _new_search(self, first: float, factor: float) -> RateSearch:
        return RateSearch(
            first,
            factor=factor,
            bisections=_BISECTIONS,
            tolerance_frac=self._tolerance_frac,
            most=self._limits.most_requests_per_s,
        )

    def next_step(self, elapsed_s: float, step_s: Callable[[float], float]) -> Step | None:
        """The step to run; ``None``: the test has ended.

        ``elapsed_s``: time since the test began; ``step_s``: time that a step at a rate takes.
        """
        while self._waiting:
            rate = self._search.next_rate
            if rate is not None and elapsed_s + step_s(rate) <= self._limits.most_s:
                counts = self._waiting[0]
                return Step(
                    prefill=counts[Role.PREFILL],
                    decode=counts[Role.DECODE],
                    requests_per_s=rate,
                    run=len(self._runs) + 1,
                )
            if rate is not None:
                self.is_out_of_time = True
                self.end()
            else:
                self._end_counts()
        return None

    def end(self) -> None:
        """End the test now: the present counts get the point that their steps so far allow."""
        if self._waiting:
            del self._waiting[1:]
            self._end_counts()

    def _end_counts(self) -> None:
        """Note the point of the present counts, and go on to the next ones."""
        counts, runs, search = self._waiting.pop(0), self._best_here, self._search
        self._best_here, self._runs = [], []
        if search.bad is None and not search.good:
            return  # no step of them has ended
        point = PressurePoint(
            prefill=counts[Role.PREFILL],
            decode=counts[Role.DECODE],
            requests_per_s=search.good + mean([each.other_requests_per_s for each in runs], 0.0),
            attainment_frac=1.0 - _total_missed_frac(runs) if runs else 0.0,
            signals=dict.fromkeys(Signal) | mean_signals([run.signals for run in runs]),
        )
        self.points.append(point)
        if search.is_capped:
            self.capped.append(point.name)
        if self._waiting:
            per_gpu = max(self.per_gpu(each) for each in self.points)
            likely = _LIKELY_FRAC * per_gpu * gpus_of(self._waiting[0], self._room)
            first = likely or search.bad or self._limits.most_requests_per_s
            self._search = self._new_search(first, _LATER_FACTOR)

    def add(self, result: StepResult) -> Verdict:
        """Take the result of the step, and return the verdict about all its runs."""
        self.results.append(result)
        self._runs.append(result)
        outcome = verdict(self._runs, self._quantile_frac, self._limits.most_errors)
        if outcome is not Verdict.UNCLEAR:
            is_good = outcome is Verdict.GOOD
            self._search.add(result.step.requests_per_s, is_good=is_good)
            if is_good:
                self._best_here = self._runs
            self._runs = []
        return outcome

    def per_gpu(self, point: PressurePoint) -> float:
        """Requests per second and GPU of a point."""
        counts = {Role.PREFILL: point.prefill, Role.DECODE: point.decode}
        return point.requests_per_s / gpus_of(counts, self._room)

    @property
    def best(self) -> PressurePoint | None:
        """The point with the most requests per second and GPU; ``None``: no rate was good."""
        good = [point for point in self.points if point.requests_per_s]
        return max(good, key=self.per_gpu, default=None)


def mean(values: Sequence[float | None], default: float) -> float:
    """The mean of the values that were observed; ``default``: none was."""
    present = [value for value in values if value is not None]
    return math.fsum(present) / len(present) if present else default


def _total_missed_frac(runs: Sequence[StepResult]) -> float:
    return sum(each.missed for each in runs) / sum(each.requests for each in runs)


def mean_signals(observed: Sequence[Mapping[Signal, float]]) -> dict[Signal, float]:
    """The mean of each signal that was observed."""
    values = {signal: [each[signal] for each in observed if signal in each] for signal in Signal}
    return {signal: math.fsum(each) / len(each) for signal, each in values.items() if each}


def with_target(policy: Mapping[str, object], point: PressurePoint, headroom_frac: float) -> dict[str, object]:
    """The fields of a policy ``heteroscale`` that the test changes: the target of its own signal.

    Empty: the policy is another one, or its signal is a latency, whose target is the objective. ``headroom_frac``:
    share of the signal at the highest good rate that becomes the target.
    """
    signal = policy.get("signal")
    if policy.get("kind") != "heteroscale" or signal in (Signal.TTFT, Signal.TPOT) or signal is None:
        return {}
    value = point.signals.get(Signal(str(signal)))
    return {} if value is None else {"target": float(f"{headroom_frac * value:.4g}")}
