"""One step of a live pressure test: which of its requests count, and whether it is good (pure).

A step sends requests at one rate to fixed counts of replicas. It is good if enough requests meet their objectives.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from autoscale.policies.heteroscale import Signal
from autoscale.report import RequestRecord, Slo
from autoscale.slo import SloConfig
from autoscale.traces.trace import TraceRequest

# Most runs of one step. A step that is repeated is judged by all its requests.
_MOST_RUNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Requests at one rate to fixed counts; ``run``: 1, or 2 if the step is repeated."""

    prefill: int
    decode: int
    requests_per_s: float
    run: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step showed, without its first seconds.

    Attributes:
        requests: requests that count.
        missed: those of them that failed or missed an objective.
        failed: those of them that failed.
        other_requests_per_s: requests of others at the same time; ``None``: not observed.
        signals: mean of each signal that the autoscaler observed.
        is_cut: the step ended early, since it could not become good: further requests might have missed too.
    """

    step: Step
    requests: int
    missed: int
    failed: int
    other_requests_per_s: float | None = None
    signals: Mapping[Signal, float] = field(default_factory=dict)
    is_cut: bool = False

    @property
    def attainment_frac(self) -> float:
        """Share of the requests that met their objectives; for a step that was cut, the largest possible share."""
        return 1.0 - self.missed / self.requests


class Tally:
    """The requests of a step that count, while they end.

    Args:
        requests: requests of the step.
        slo: their objectives.
        from_s: requests that arrive earlier do not count, seconds from the start of the step.
    """

    def __init__(self, requests: Sequence[TraceRequest], slo: SloConfig, from_s: float) -> None:
        self.failed = 0  # also requests before ``from_s``
        self.succeeded = 0  # also requests before ``from_s``
        self._slo = slo
        self._missed = 0
        # When each request that has not ended has surely missed an objective, by its arrival.
        self._due_s = {
            each.at_s: each.at_s + longest_s(slo, each.input_tokens, each.output_tokens)
            for each in requests
            if each.at_s >= from_s
        }
        self.requests = len(self._due_s)
        self.end_s = max(self._due_s.values(), default=0.0)  # from then on nothing can change

    def add(self, request: TraceRequest, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.failed += record.error is not None
        self.succeeded += record.error is None
        if self._due_s.pop(request.at_s, None) is not None and not is_met(self._slo, record):
            self._missed += 1

    def missed(self, now_s: float) -> int:
        """Requests that have missed an objective, seconds after the start of the step."""
        return self._missed + sum(due_s < now_s for due_s in self._due_s.values())

    @property
    def is_over(self) -> bool:
        """Whether all requests that count have ended."""
        return not self._due_s


class Verdict(StrEnum):
    """Whether a step keeps the objectives; unclear steps are repeated."""

    GOOD = "good"
    BAD = "bad"
    UNCLEAR = "unclear"


def objectives(slo: SloConfig, input_tokens: int) -> Slo:
    """The objectives of a request with a prompt of this length."""
    return Slo(ttft_s=max(slo.ttft_s, slo.ttft_s_per_input_token * input_tokens), tpot_s=slo.tpot_s)


def is_met(slo: SloConfig, record: RequestRecord) -> bool:
    """Whether a request ended within its objectives."""
    return objectives(slo, record.input_tokens).is_met(record)


def longest_s(slo: SloConfig, input_tokens: int, output_tokens: int) -> float:
    """The longest time of a request that meets its objectives, seconds."""
    objective = objectives(slo, input_tokens)
    return objective.ttft_s + objective.tpot_s * max(0, output_tokens - 1)


def least_requests(quantile_frac: float) -> int:
    """The fewest requests that can show that a step is good: the margin of ``verdict`` lets them miss nothing."""
    return math.ceil(quantile_frac / (1.0 - quantile_frac))


def margin_frac(requests: int, quantile_frac: float) -> float:
    """The standard error of the share of requests that meet their objectives, if the true share is the quantile."""
    return math.sqrt(quantile_frac * (1.0 - quantile_frac) / requests)


def is_surely_bad(requests: int, missed: int, quantile_frac: float) -> bool:
    """Whether a step is bad, however the requests that have not ended yet will end; ``requests``: all of the step."""
    return 1.0 - missed / requests < quantile_frac - margin_frac(requests, quantile_frac)


def verdict(results: Sequence[StepResult], quantile_frac: float, most_errors: int) -> Verdict:
    """The verdict about all runs of one step.

    It is unclear if the attainment is nearer to the quantile than one standard error, unless it was run ``_MOST_RUNS``
    times. More than ``most_errors`` failed requests in one run are bad in any case.
    """
    requests, missed = sum(each.requests for each in results), sum(each.missed for each in results)
    attainment = 1.0 - missed / requests
    if any(each.failed > most_errors or each.is_cut for each in results):
        return Verdict.BAD
    if len(results) < _MOST_RUNS and abs(attainment - quantile_frac) < margin_frac(requests, quantile_frac):
        return Verdict.UNCLEAR
    return Verdict.GOOD if attainment >= quantile_frac else Verdict.BAD
