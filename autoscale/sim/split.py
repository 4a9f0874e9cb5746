"""One split of GPUs between the roles: the highest rate that it serves, and its signals at that rate (pure).

A split keeps the objectives at a rate if enough requests meet them. A signal is a figure that HeteroScale may scale by.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autoscale.engines.engine_step import ModelCounters
from autoscale.policies.heteroscale import Signal
from autoscale.pressure.rate_search import PressurePoint, RateSearch, answer_s
from autoscale.sim.checks import least_frac
from autoscale.sim.config import SimConfig
from autoscale.sim.outcome import outcome, utilization_frac
from autoscale.sim.scenario import Run, run_schedule, scenario_of
from autoscale.traces.trace import TraceRequest, poisson_arrivals
from kvtransfer.topology import Role

# The reason of most values below is not recorded.
# Least simulated time of a run, seconds. The warm-up is part of it.
_RUN_S = 120.0
# Least simulated time of the warm-up, seconds.
_WARM_UP_S = 30.0
# Fewest requests of a run.
_LEAST_REQUESTS = 1500
# Least simulated time of a run, as a multiple of an answer's time at the TPOT objective. Decode's batch only becomes
# full after such a time.
_RUN_ANSWERS = 4.0
# Least simulated time of the warm-up, as a multiple of an answer's time.
_WARM_UP_ANSWERS = 2.0
# From this number of requests on, a run may end before _RUN_S, but not before _RUN_ANSWERS.
_MANY_REQUESTS = 50_000
# Number of bisections of the rate after which the search for it ends.
_RATE_STEPS = 8
# The search also ends when its bounds of the rate differ by less than this share.
_RATE_FRAC = 0.01


class SplitSimulator:
    """Simulates splits of one configuration, under Poisson arrivals of requests with the lengths of a trace."""

    def __init__(self, config: SimConfig, trace: Sequence[TraceRequest], seed: int) -> None:
        one_answer_s = answer_s(trace, config.slo.tpot_s)
        # Length of a run with _MANY_REQUESTS, and of other runs.
        self._short_run_s = _RUN_ANSWERS * one_answer_s
        self._run_s = max(_RUN_S, self._short_run_s)
        self._warm_up_frac = max(_WARM_UP_S, _WARM_UP_ANSWERS * one_answer_s) / self._run_s
        self._config = config
        self._trace = trace
        self._seed = seed

    def find_highest_rate(self, prefill: int, decode: int, likely_requests_per_s: float | None = None) -> PressurePoint:
        """The highest rate at which a split keeps the objectives.

        The search begins at ``likely_requests_per_s``; ``None``: at 1 request per second.
        """
        search = RateSearch(
            likely_requests_per_s or 1.0,
            # A likely rate needs smaller steps.
            factor=1.25 if likely_requests_per_s else 2.0,
            bisections=_RATE_STEPS,
            tolerance_frac=_RATE_FRAC,
        )
        best: Run | None = None
        while (rate := search.next_rate) is not None:
            run = self.run(prefill, decode, rate)
            is_good = self._are_objectives_kept(run)
            search.add(rate, is_good=is_good)
            best = run if is_good else best
        return PressurePoint(
            prefill=prefill,
            decode=decode,
            requests_per_s=search.good,
            attainment_frac=0.0 if best is None else best.attainment_frac,
            signals=dict.fromkeys(Signal, None) if best is None else signals_of(best),
        )

    def _are_objectives_kept(self, run: Run) -> bool:
        return run.attainment_frac >= least_frac(self._config, run.scenario)

    def run(self, prefill: int, decode: int, requests_per_s: float) -> Run:
        """Simulate a split at one rate; with 0 prefill replicas the engines are aggregated."""
        trace = self._arrivals(requests_per_s)
        # A run that ends before _run_s has a shorter warm-up.
        warm_up_s = self._warm_up_frac * min(trace[-1].at_s, self._run_s)
        scenario = scenario_of(self._config.model_copy(update={"warm_up_s": warm_up_s}), trace, seed=self._seed)
        counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        schedule = {key: [(0.0, counts[key.role])] for key in scenario.pools if counts[key.role]}
        return run_schedule(scenario.limited_to(schedule), schedule)

    def _arrivals(self, requests_per_s: float) -> list[TraceRequest]:
        """Requests of the trace at Poisson arrivals, as many as one run needs."""
        rng = random.Random(self._seed)
        # Prompts that share blocks come in the trace's order, near each other; other requests are chosen at random.
        has_hash_ids = any(request.hash_ids for request in self._trace)
        random_requests = (rng.choice(self._trace) for _ in itertools.count())
        requests = _requests_in_order(self._trace, rng) if has_hash_ids else random_requests
        arrivals, needed_s = list[TraceRequest](), self._run_s
        for request in poisson_arrivals(requests, requests_per_s, rng):
            arrivals.append(request)
            if len(arrivals) >= _MANY_REQUESTS:
                needed_s = self._short_run_s
            if len(arrivals) >= _LEAST_REQUESTS and request.at_s >= needed_s:
                break
        return arrivals


def _requests_in_order(trace: Sequence[TraceRequest], rng: random.Random) -> Iterator[TraceRequest]:
    """Requests in the trace's order from a random place on, without end.

    Each round through the trace has its own block ids: its prompts share no blocks with other rounds.
    """
    ids_per_round = 1 + max(max(request.hash_ids, default=0) for request in trace)
    for number in itertools.count(rng.randrange(len(trace))):
        round_number, index = divmod(number, len(trace))
        request = trace[index]
        first_id = round_number * ids_per_round
        yield replace(request, hash_ids=tuple([block + first_id for block in request.hash_ids]))


def signals_of(run: Run) -> dict[Signal, float | None]:
    """Value of each signal of HeteroScale in a run, as in ``PressurePoint.signals``."""
    figures = outcome(run)
    span_s = run.scenario.end_s - run.scenario.warm_up_s
    work = {role: [life.work for life in run.fleet.lives if life.key.role is role] for role in Role}

    def tokens_per_s(role: Role, tokens: Callable[[ModelCounters], float]) -> float | None:
        return sum(map(tokens, work[role])) / span_s / len(work[role]) if work[role] else None

    return {
        Signal.DECODE_TPS: tokens_per_s(Role.DECODE, lambda done: done.output_tokens),
        Signal.PREFILL_TPS: tokens_per_s(Role.PREFILL, lambda done: done.prefill_tokens),
        Signal.PREFILL_GPU_UTILIZATION: figures.prefill_utilization_frac,
        Signal.DECODE_GPU_UTILIZATION: figures.decode_utilization_frac,
        Signal.PREFILL_SM_ACTIVITY: utilization_frac(run, [Role.PREFILL], lambda done: done.sm_active_s),
        Signal.DECODE_SM_ACTIVITY: utilization_frac(run, [Role.DECODE], lambda done: done.sm_active_s),
        Signal.TTFT: figures.ttft_p50_s,
        Signal.TPOT: figures.tpot_p50_s,
    }
