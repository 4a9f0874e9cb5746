"""The pressure test: which split of some GPUs serves most of a workload, and what its signals show then (pure).

Source: HeteroScale Algorithm 1, PRESSURETEST.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoscale.engines.engine_step import ModelCounters
from autoscale.policies.heteroscale import Signal
from autoscale.ratio import PdRatio
from autoscale.sim.checks import least_frac
from autoscale.sim.config import SimConfig
from autoscale.sim.outcome import outcome, utilization_frac
from autoscale.sim.scenario import Run, run_schedule, scenario_of
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role

# Least length of a run, its warm-up included, seconds.
_RUN_S = 120.0
# Least length of the warm-up, seconds.
_WARM_UP_S = 30.0
# Fewest requests of a run.
_LEAST_REQUESTS = 1500
# Least length of a run, in times of an answer at its TPOT objective: decode takes that long to fill.
_RUN_ANSWERS = 4.0
# Least length of the warm-up, in the same unit.
_WARM_UP_ANSWERS = 2.0
# With this many requests a run may end before _RUN_S.
_MANY_REQUESTS = 50_000
# The most bisections of the rate.
_RATE_STEPS = 8
# The bisection ends when the rate is known to this share.
_RATE_FRAC = 0.01
# GPUs that show a ratio well.
_USUAL_GPUS = 24
# Disaggregation must serve this many times the requests of aggregated engines, for what it costs in complexity.
_WORTH_FACTOR = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PressurePoint:
    """The highest rate at which a split keeps the objectives; ``prefill`` is 0 for aggregated engines.

    ``signals``: what each signal of HeteroScale shows at that rate: tokens per second per replica, mean utilisation,
    median latency; ``None``: not observed.
    """

    prefill: int
    decode: int
    requests_per_s: float
    attainment_frac: float
    signals: Mapping[Signal, float | None]

    @property
    def name(self) -> str:
        """The counts as text."""
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode} aggregated"


@dataclass(frozen=True, kw_only=True)
class PressureResult:
    """All splits that were tried, each with ``gpus`` GPUs at most."""

    points: Sequence[PressurePoint]
    aggregated: PressurePoint
    gpus: int

    @property
    def best(self) -> PressurePoint:
        """The split with a prefill pool that serves the most requests."""
        return max(self.points, key=lambda point: point.requests_per_s)

    @property
    def pd_ratio(self) -> PdRatio:
        """The ratio of the best split."""
        return PdRatio.of({Role.PREFILL: self.best.prefill, Role.DECODE: self.best.decode})

    @property
    def is_worth_disaggregating(self) -> bool:
        """Whether the best split serves more than the same GPUs without a prefill pool."""
        return self.best.requests_per_s > self.aggregated.requests_per_s * _WORTH_FACTOR


def usual_gpus(config: SimConfig) -> int:
    """GPUs that show a ratio well; fewer, where the pools' limits do not allow every split of that many."""
    prefill, decode = config.groups[0].prefill, config.groups[0].decode
    whole = prefill.highest_replicas * prefill.gpus, decode.highest_replicas * decode.gpus
    return min(_USUAL_GPUS, whole[0] + decode.gpus, whole[1] + prefill.gpus)


def pressure_test(
    config: SimConfig,
    trace: Sequence[TraceRequest],
    *,
    gpus: int | None = None,
    seed: int = 0,
    on_point: Callable[[PressurePoint], None] = lambda point: None,
) -> PressureResult:
    """Find the split of some GPUs that serves the most requests with the lengths of a trace.

    The search narrows towards the split that serves most; arrivals are Poisson. A split may leave some GPUs unused.
    Without ``gpus`` they are ``usual_gpus``. ``on_point``: called with each split's result.

    Raises:
        ValueError: several groups, too few GPUs for a replica of each role, or no rate keeps the objectives.
    """
    config.check_one_group("the pressure test")
    gpus = usual_gpus(config) if gpus is None else gpus
    splits = _splits(config, gpus)
    test = PressureTest(config, trace, seed)
    points: dict[int, PressurePoint] = {}

    def point(prefill: int) -> PressurePoint:
        if prefill not in points:
            likely = max((p.requests_per_s for p in points.values()), default=None)
            points[prefill] = test.highest(prefill, splits[prefill], likely)
            on_point(points[prefill])
        return points[prefill]

    low, high = min(splits), max(splits)
    while high - low > 2:  # one peak: left of it prefill limits the rate, right of it decode
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if point(left).requests_per_s < point(right).requests_per_s:
            low = left + 1
        else:
            high = right - 1 if right > left + 1 else right
    for prefill in range(max(min(splits), low - 1), min(max(splits), high + 1) + 1):
        point(prefill)
    decode = config.groups[0].decode
    aggregated = test.highest(0, min(gpus // decode.gpus, decode.highest_replicas), None)
    on_point(aggregated)
    result = PressureResult(points=[points[at] for at in sorted(points)], aggregated=aggregated, gpus=gpus)
    if not max(result.best.requests_per_s, aggregated.requests_per_s):
        raise ValueError("no rate keeps the objectives: they are too tight for these engines and lengths")
    return result


def _splits(config: SimConfig, gpus: int) -> dict[int, int]:
    """Decode replicas by prefill replicas, for every split at a supported ratio within the pools' limits.

    Raises:
        ValueError: there is no such split.
    """
    prefill, decode = config.groups[0].prefill, config.groups[0].decode
    most = (gpus - decode.gpus) // prefill.gpus
    if most < 1:
        raise ValueError(f"{gpus} GPUs are too few: a replica of each role takes {prefill.gpus + decode.gpus}")
    counts = {count: (gpus - count * prefill.gpus) // decode.gpus for count in range(1, most + 1)}
    splits = {
        p: d
        for p, d in counts.items()
        if PdRatio(p, d).is_supported and p <= prefill.highest_replicas and d <= decode.highest_replicas
    }
    if not splits:
        raise ValueError(
            f"{gpus} GPUs make no split at a supported P/D ratio that the pools' highest_replicas allow "
            f"({prefill.highest_replicas} and {decode.highest_replicas}): give {usual_gpus(config)}"
        )
    return splits


class PressureTest:
    """Runs of one configuration's splits, under Poisson arrivals with the lengths of a trace."""

    def __init__(self, config: SimConfig, trace: Sequence[TraceRequest], seed: int) -> None:
        outputs = [request.output_tokens for request in trace]
        # Time of the answer that an average output token belongs to: long answers stay longest.
        answer_s = config.slo.tpot_s * sum(tokens * tokens for tokens in outputs) / sum(outputs)
        self._least_s = _RUN_ANSWERS * answer_s
        self._run_s = max(_RUN_S, self._least_s)
        self._warm_up_frac = max(_WARM_UP_S, _WARM_UP_ANSWERS * answer_s) / self._run_s
        self._config = config.model_copy(update={"failures": ()})
        self._trace = trace
        self._seed = seed

    def highest(self, prefill: int, decode: int, likely: float | None) -> PressurePoint:
        """The highest rate at which a split keeps the objectives; the search begins at the likely one."""
        low, high = 0.0, likely or 1.0
        best: Run | None = None
        while self._is_kept(run := self.run(prefill, decode, high)):
            low, high, best = high, high * (1.25 if likely else 2.0), run
        for _ in range(_RATE_STEPS):
            rate = (low + high) / 2
            run = self.run(prefill, decode, rate)
            if self._is_kept(run):
                low, best = rate, run
            else:
                high = rate
            if high - low < _RATE_FRAC * high:
                break
        return PressurePoint(
            prefill=prefill,
            decode=decode,
            requests_per_s=low,
            attainment_frac=0.0 if best is None else best.attainment_frac,
            signals=dict.fromkeys(Signal, None) if best is None else signals_of(best),
        )

    def _is_kept(self, run: Run) -> bool:
        return run.attainment_frac >= least_frac(self._config, run.scenario)

    def run(self, prefill: int, decode: int, requests_per_s: float) -> Run:
        """A split at one rate; without prefill replicas the engines are aggregated."""
        rng = random.Random(self._seed)
        trace: list[TraceRequest] = []
        at_s, drawn = 0.0, _drawn(self._trace, rng)
        while len(trace) < _LEAST_REQUESTS or at_s < (self._run_s if len(trace) < _MANY_REQUESTS else self._least_s):
            at_s += rng.expovariate(requests_per_s)
            trace.append(replace(next(drawn), at_s=at_s))
        warm_up_s = self._warm_up_frac * min(at_s, self._run_s)
        scenario = scenario_of(self._config.model_copy(update={"warm_up_s": warm_up_s}), trace, seed=self._seed)
        counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        used = {key: [(0.0, counts[key.role])] for key in scenario.pools if counts[key.role]}
        return run_schedule(scenario.limited_to(used), used)


def _drawn(trace: Sequence[TraceRequest], rng: random.Random) -> Iterator[TraceRequest]:
    """Endless requests of a trace: at random, or if they have ``hash_ids``, in order from a random place.

    A prompt shares blocks with the prompts around it. Each further round of the trace gets blocks of its own.
    """
    if not any(request.hash_ids for request in trace):
        while True:
            yield rng.choice(trace)
    ids = 1 + max(max(request.hash_ids, default=0) for request in trace)
    begin = rng.randrange(len(trace))
    for number in itertools.count(begin):
        turn, index = divmod(number, len(trace))
        request = trace[index]
        yield replace(request, hash_ids=tuple([block + turn * ids for block in request.hash_ids]))


def signals_of(run: Run) -> dict[Signal, float | None]:
    """What each signal of HeteroScale shows in a run, as in ``PressurePoint.signals``."""
    figures = outcome(run)
    span_s = run.scenario.end_s - run.scenario.warm_up_s
    work = {role: [life.work for life in run.fleet.lives if life.key.role is role] for role in Role}

    def rate(role: Role, value: Callable[[ModelCounters], float]) -> float | None:
        return sum(map(value, work[role])) / span_s / len(work[role]) if work[role] else None

    return {
        Signal.DECODE_TPS: rate(Role.DECODE, lambda done: done.output_tokens),
        Signal.PREFILL_TPS: rate(Role.PREFILL, lambda done: done.prefill_tokens),
        Signal.PREFILL_GPU_UTILIZATION: figures.prefill_utilization_frac,
        Signal.DECODE_GPU_UTILIZATION: figures.decode_utilization_frac,
        Signal.PREFILL_SM_ACTIVITY: utilization_frac(run, [Role.PREFILL], lambda done: done.sm_active_s),
        Signal.DECODE_SM_ACTIVITY: utilization_frac(run, [Role.DECODE], lambda done: done.sm_active_s),
        Signal.TTFT: figures.ttft_p50_s,
        Signal.TPOT: figures.tpot_p50_s,
    }
