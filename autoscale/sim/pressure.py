"""The pressure test: which split of so many GPUs serves most of a workload, and what its signals show then (pure).

Source: HeteroScale Algorithm 1, PRESSURETEST.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoscale.engine_model import ModelCounters
from autoscale.policies.heteroscale import Signal
from autoscale.ratio import PdRatio
from autoscale.sim.compare import least_frac, scenario_of
from autoscale.sim.config import SimConfig
from autoscale.sim.outcome import outcome, utilization_frac
from autoscale.sim.scenario import Run, Scenario, run_schedule
from autoscale.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role

# Each run lasts so long, of which the warm-up is a part, and has at least so many requests.
_RUN_S, _WARM_UP_S, _LEAST_REQUESTS = 120.0, 30.0, 1500
# And at least so many times what answers take at their objective: decode is as full as it gets only after them.
_RUN_ANSWERS, _WARM_UP_ANSWERS = 4.0, 2.0
# With more requests it ends as soon as it has lasted for that.
_MANY_REQUESTS = 50_000
_RATE_STEPS = 8
_USUAL_GPUS = 24
# Disaggregation must serve so much more than it costs in complexity.
_WORTH_FRAC = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PressurePoint:
    """The highest rate at which a split keeps the objectives; ``prefill`` is 0 for aggregated engines.

    ``signals``: what each of HeteroScale's signals shows there: per replica for tokens per second, the mean for
    utilisations, the median for latencies; ``None`` where there is nothing to show.
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
    """All splits that were tried; ``gpus`` of each of them."""

    points: Sequence[PressurePoint]
    aggregated: PressurePoint
    gpus: int

    @property
    def best(self) -> PressurePoint:
        """The split with a prefill pool that serves most."""
        return max(self.points, key=lambda point: point.requests_per_s)

    @property
    def pd_ratio(self) -> PdRatio:
        """Its ratio."""
        return PdRatio.of({Role.PREFILL: self.best.prefill, Role.DECODE: self.best.decode})

    @property
    def is_worth_disaggregating(self) -> bool:
        """Whether that serves more than the same GPUs without a prefill pool."""
        return self.best.requests_per_s > self.aggregated.requests_per_s * _WORTH_FRAC


def usual_gpus(config: SimConfig) -> int:
    """As many GPUs as show a ratio well, or as the pools may have in each split from all prefill to all decode."""
    pools = {key.role: pool for key, pool in config.pools().items()}
    each = {role: pools[role].gpus_per_replica for role in Role}
    whole = {role: pools[role].highest_replicas * each[role] for role in Role}
    return min(_USUAL_GPUS, whole[Role.PREFILL] + each[Role.DECODE], whole[Role.DECODE] + each[Role.PREFILL])


def pressure_test(
    config: SimConfig,
    trace: Sequence[TraceRequest],
    *,
    gpus: int | None = None,
    seed: int = 0,
    on_point: Callable[[PressurePoint], None] = lambda point: None,
) -> PressureResult:
    """Find the split of so many GPUs that serves the most requests with the lengths of a trace.

    Splits are tried from the middle towards where more is served; arrivals are Poisson.

    Args:
        config: cluster and objectives.
        trace: where lengths are drawn from.
        gpus: of all replicas together; what a split leaves over stays unused. ``None``: ``usual_gpus``.
        seed: of arrivals and ties.
        on_point: told each split's result.

    Raises:
        ValueError: several groups, too few GPUs for a replica of each role, or none keeps the objectives at any rate.
    """
    config.check_one_group("the pressure test")
    gpus = usual_gpus(config) if gpus is None else gpus
    pools = {key.role: pool for key, pool in config.pools().items()}
    each = {role: pools[role].gpus_per_replica for role in Role}
    most = (gpus - each[Role.DECODE]) // each[Role.PREFILL]
    if most < 1:
        raise ValueError(f"{gpus} GPUs are too few: a replica of each role takes {sum(each.values())}")
    counts = {prefill: (gpus - prefill * each[Role.PREFILL]) // each[Role.DECODE] for prefill in range(1, most + 1)}
    highest = {role: pools[role].highest_replicas for role in Role}
    splits = {
        prefill: decode
        for prefill, decode in counts.items()
        if PdRatio(prefill, decode).is_supported and prefill <= highest[Role.PREFILL] and decode <= highest[Role.DECODE]
    }
    if not splits:
        raise ValueError(
            f"{gpus} GPUs make no split at a supported P/D ratio that the pools' highest_replicas allow "
            f"({highest[Role.PREFILL]} and {highest[Role.DECODE]}): give {usual_gpus(config)}"
        )
    test = PressureTest(config, trace, seed)
    known: dict[int, PressurePoint] = {}

    def point(prefill: int) -> PressurePoint:
        if prefill not in known:
            likely = max((p.requests_per_s for p in known.values()), default=None)
            known[prefill] = test.highest(prefill, splits[prefill], likely)
            on_point(known[prefill])
        return known[prefill]

    low, high = min(splits), max(splits)
    while high - low > 2:  # one peak: with few prefill replicas they are short, with many decode
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if point(left).requests_per_s < point(right).requests_per_s:
            low = left + 1
        else:
            high = right - 1 if right > left + 1 else right
    for prefill in range(max(min(splits), low - 1), min(max(splits), high + 1) + 1):
        point(prefill)
    aggregated = test.highest(0, min(gpus // each[Role.DECODE], highest[Role.DECODE]), None)
    on_point(aggregated)
    result = PressureResult(points=[known[at] for at in sorted(known)], aggregated=aggregated, gpus=gpus)
    if not max(result.best.requests_per_s, aggregated.requests_per_s):
        raise ValueError("no rate keeps the objectives: they are too tight for these engines and lengths")
    return result


class PressureTest:
    """Splits of one configuration under requests with the lengths of a trace; see ``pressure_test``."""

    def __init__(self, config: SimConfig, trace: Sequence[TraceRequest], seed: int) -> None:
        outputs = [request.output_tokens for request in trace]
        # Of the answer that an output token is in on average, as the long ones are there for longest.
        answer_s = config.slo.tpot_s * sum(tokens * tokens for tokens in outputs) / sum(outputs)
        self._least_s = _RUN_ANSWERS * answer_s
        self._run_s = max(_RUN_S, self._least_s)
        self._warm_up_frac = max(_WARM_UP_S, _WARM_UP_ANSWERS * answer_s) / self._run_s
        self._config = config.model_copy(update={"failures": ()})
        self._trace = trace
        self._seed = seed
        self._keys = {key.role: key for key in config.pools()}

    def highest(self, prefill: int, decode: int, likely: float | None) -> PressurePoint:
        """The highest rate at which a split keeps the objectives, to about a hundredth; begins at the likely one."""
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
            if high - low < 0.01 * high:
                break
        signals = dict.fromkeys(Signal, None) if best is None else signals_of(best)
        attained = 0.0 if best is None else best.attainment_frac
        return PressurePoint(
            prefill=prefill, decode=decode, requests_per_s=low, attainment_frac=attained, signals=signals
        )

    def _is_kept(self, run: Run) -> bool:
        return run.attainment_frac >= least_frac(self._config, run.scenario)

    def run(self, prefill: int, decode: int, requests_per_s: float) -> Run:
        """A split at one rate; no prefill replicas: aggregated engines."""
        rng = random.Random(self._seed)
        trace: list[TraceRequest] = []
        at_s, drawn = 0.0, _drawn(self._trace, rng)
        while len(trace) < _LEAST_REQUESTS or at_s < (self._run_s if len(trace) < _MANY_REQUESTS else self._least_s):
            at_s += rng.expovariate(requests_per_s)
            trace.append(replace(next(drawn), at_s=at_s))
        warm_up_s = self._warm_up_frac * min(at_s, self._run_s)
        scenario = scenario_of(self._config.model_copy(update={"warm_up_s": warm_up_s}), trace, seed=self._seed)
        counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        used = {role: self._keys[role] for role in Role if counts[role]}
        return run_schedule(_limited(scenario, used.values()), {used[r]: [(0.0, counts[r])] for r in used})


def _drawn(trace: Sequence[TraceRequest], rng: random.Random) -> Iterator[TraceRequest]:
    """Requests of a trace without end, by chance; where prefixes are known in its order, from anywhere.

    A prompt shares blocks with those around it. The trace's second round, and each later one, has blocks of its own.
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


def _limited(scenario: Scenario, keys: Iterable[PoolKey]) -> Scenario:
    kept = list(keys)
    return replace(
        scenario,
        profiles={key: each for key, each in scenario.profiles.items() if key in kept},
        pools={key: each for key, each in scenario.pools.items() if key in kept},
    )


def signals_of(run: Run) -> dict[Signal, float | None]:
    """What each signal shows in a run; see ``PressurePoint``."""
    figures = outcome(run, dict.fromkeys(run.scenario.pools, 0.0))
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
