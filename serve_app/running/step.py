"""One step of a pressure test on a running application: it sends requests at one rate, and watches the autoscaler."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.status import PlanRecord
from autoscale.policies.heteroscale import Signal
from autoscale.pressure.live_test import mean, mean_signals
from autoscale.pressure.rate_search import answer_s
from autoscale.pressure.steps import Step, StepResult, Tally, is_surely_bad, least_requests
from autoscale.traces.trace import TraceRequest, poisson_arrivals
from serve_app.load.generator import LoadGenerator
from serve_app.local.cluster import DeployError
from serve_app.running.fixed_counts import CountsTakenError, FixedCounts

# Time between two looks at the requests, seconds.
_POLL_S = 0.25
# Time after the last moment at which a request can meet its objectives until the step ends, seconds: a busy machine
# reports the end of a request late.
_SLACK_S = 1.0
# Time at the start of a step that does not count, as a multiple of an answer's time; as the warm-up in the simulator.
_SETTLE_ANSWERS = 2.0
# Requests of others may be this share of the step's own, and this number of standard errors more: Tandem's figure and
# ours are not of exactly the same seconds.
_OTHER_FRAC = 0.2
_OTHER_ERRORS = 3.0
# A request is late if it is sent this long after its time, seconds. If more than this share and this number are late,
# this machine is too slow to load the application.
_LATE_S = 0.25
_LATE_FRAC = 0.05
_LATE_REQUESTS = 3

# Called with the seconds in which the step still sends requests.
OnProgress = Callable[[float], None]


class StopTestError(DeployError):
    """The pressure test cannot go on; its results so far hold."""


class StepRunner:
    """Runs the steps of a pressure test.

    Args:
        generator: sends the requests.
        counts: counts that are set by hand.
        trace: requests whose lengths are sent, in this order, again and again.
        measured_s: least time in which requests count, seconds.
        is_beside_traffic: whether others may send requests too.
        most_errors: failed requests after which a step ends early.
    """

    def __init__(
        self,
        generator: LoadGenerator,
        counts: FixedCounts,
        trace: Sequence[TraceRequest],
        *,
        measured_s: float,
        is_beside_traffic: bool,
        most_errors: int,
    ) -> None:
        self._generator = generator
        self._counts = counts
        self._trace = trace
        self._measured_s = measured_s
        self._is_beside_traffic = is_beside_traffic
        self._most_errors = most_errors
        self._config: AutoscaleConfig = counts.before

    @property
    def window_s(self) -> float:
        """Time after which the autoscaler's window has no earlier requests: a window, a report and a decision."""
        return self._config.window_s + self._config.report_s + self._config.interval_s

    @property
    def settle_s(self) -> float:
        """Time at the start of a step whose requests do not count, seconds: until decode's batch is full."""
        return max(self.window_s, _SETTLE_ANSWERS * answer_s(self._trace, self._config.slo.tpot_s))

    def span_s(self, requests_per_s: float) -> float:
        """Expected time in which a step sends requests, seconds; low rates take longer to send enough of them."""
        return self.settle_s + self._counted_requests(requests_per_s) / requests_per_s

    def _counted_requests(self, requests_per_s: float) -> int:
        """Requests of a step that count."""
        enough = least_requests(self._config.slo.quantile_frac)
        return max(enough, math.ceil(requests_per_s * self._measured_s))

    def _requests(self, step: Step) -> list[TraceRequest]:
        """The requests of a step. A repeated step has other arrivals."""
        rng = random.Random(f"{step.requests_per_s} {step.run}")
        requests, counted = list[TraceRequest](), 0
        for request in poisson_arrivals(cycle(self._trace), step.requests_per_s, rng):
            requests.append(request)
            counted += request.at_s >= self.settle_s
            if counted == self._counted_requests(step.requests_per_s):
                break
        return requests

    async def run(self, step: Step, on_progress: OnProgress) -> StepResult:
        """Send the requests of a step; ends early if it can no longer become good.

        Raises:
            StopTestError: no request succeeds, others send requests too, or this machine is too slow.
            CountsTakenError: others have changed the counts.
        """
        requests = self._requests(step)
        span_s = requests[-1].at_s
        tally = Tally(requests, self._config.slo, self.settle_s)
        observed = _Observed(self._counts, self._config.interval_s)
        replay = asyncio.create_task(self._generator.replay(requests, tally.add))
        start_s, is_cut, now_s = time.perf_counter(), False, 0.0
        try:
            while not replay.done() and not is_cut and now_s < tally.end_s + _SLACK_S:
                await asyncio.wait({replay}, timeout=_POLL_S)
                now_s = time.perf_counter() - start_s
                if now_s <= span_s:
                    await observed.look(now_s)
                on_progress(max(0.0, span_s - now_s))
                is_cut = self._is_hopeless(tally, now_s)
        finally:
            replay.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({replay})
        if not replay.cancelled() and replay.exception() is None:
            self._check_pace(requests, [record.sent_s for record in replay.result()])
        elif not is_cut and not replay.cancelled():
            replay.result()  # raises its error
        own = tally.requests / (span_s - self.settle_s)
        other = self._other(observed.requests_per_s(self.settle_s), own)
        return StepResult(
            step=step,
            requests=tally.requests,
            missed=tally.missed(math.inf if not is_cut else now_s),
            failed=tally.failed,
            other_requests_per_s=other,
            signals=observed.signals(self.settle_s),
            is_cut=is_cut,
        )

    def _is_hopeless(self, tally: Tally, now_s: float) -> bool:
        """Whether the step cannot become good, or has too many failed requests."""
        if tally.failed > self._most_errors:
            if not tally.succeeded:
                raise StopTestError(f"all {tally.failed} requests of the step failed: does the endpoint answer?")
            return True
        return is_surely_bad(tally.requests, tally.missed(now_s), self._config.slo.quantile_frac)

    def _other(self, observed: float | None, own: float) -> float | None:
        """Requests per second of others; ``None``: not observed, or none are expected.

        Raises StopTestError: others send requests, and that was not allowed.
        """
        if observed is None:
            return None
        other = max(0.0, observed - own)
        margin = _OTHER_FRAC * own + _OTHER_ERRORS * math.sqrt(own / self._config.window_s)
        if self._is_beside_traffic:
            return other
        if other > margin:
            raise StopTestError(
                f"others sent {other:.3g} requests/s beside the test's {own:.3g}: run it when the application is idle, "
                "or with --beside-traffic"
            )
        return None

    @staticmethod
    def _check_pace(requests: Sequence[TraceRequest], sent_s: Sequence[float]) -> None:
        late = sum(sent - request.at_s > _LATE_S for request, sent in zip(requests, sent_s, strict=True))
        if late > max(_LATE_REQUESTS, _LATE_FRAC * len(requests)):
            raise StopTestError(
                f"this machine sent {late} of {len(requests)} requests more than {_LATE_S:g} s late: run the test on a "
                "machine with a free core"
            )


class _Observed:
    """What the autoscaler shows during a step, once for each decision."""

    def __init__(self, counts: FixedCounts, interval_s: float) -> None:
        self._counts = counts
        self._interval_s = interval_s
        self._looked_s = 0.0
        self._ticked_s: float | None = None  # time of the last decision that was read, by the controller's clock
        self._records: list[tuple[float, PlanRecord]] = []  # with the time of the look

    async def look(self, now_s: float) -> None:
        """Read the last decision, if it may be a new one."""
        if now_s - self._looked_s < self._interval_s:
            return
        self._looked_s = now_s
        try:
            status = await asyncio.to_thread(self._counts.look)
        except CountsTakenError:
            raise
        except DeployError:  # the coordinator restarts
            return
        if status.last is not None and status.last.plan.state.ticked_s != self._ticked_s:
            self._ticked_s = status.last.plan.state.ticked_s
            self._records.append((now_s, status.last))

    def _since(self, from_s: float) -> list[PlanRecord]:
        return [record for at_s, record in self._records if at_s >= from_s]

    def requests_per_s(self, from_s: float) -> float | None:
        """Mean of the arrivals that the autoscaler observed; ``None``: it observed none."""
        rates = [record.traffic.requests_per_s for record in self._since(from_s)]
        return mean(rates, 0.0) if any(rate is not None for rate in rates) else None

    def signals(self, from_s: float) -> dict[Signal, float]:
        """Mean of each signal that was observed."""
        return mean_signals([record.signals for record in self._since(from_s)])
