"""A simulated run in figures: attainment, latencies, GPU-hours, energy, and changes of counts (pure).

Attainment is the share of requests that met their objectives. A flap is a change of a pool's count that is soon undone.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any, Self

import numpy as np

from autoscale.engines.engine_step import ModelCounters
from autoscale.engines.profile import EngineProfile
from autoscale.sim.checks import ProfiledRange
from autoscale.sim.scenario import Run
from autoscale.types import PoolKey
from kvtransfer.topology import Role

# Board power of each GPU, watts (data sheets of the SXM boards).
_BOARD_W = {"A100": 400.0, "H100": 700.0, "H200": 700.0}
# Share of the board's power while an engine computes. Llama-2-70B on two A100: for prefill its peak, for decode the
# mean while it generates (Splitwise's measurements, splitwise-sim data/perf_model.csv).
_BUSY_FRAC = {Role.PREFILL: 1.0, Role.DECODE: 0.74}
# Share of the board's power of an idle engine: the mean of runs that mostly idle (the same file).
_IDLE_FRAC = 0.18
# Longest time of a flap, seconds: from a pool's growing to its shrinking, or from its shrinking to its growing.
_FLAP_S = 120.0
# Counts are at the ratio if the smaller role has at most this many replicas more or fewer than the ratio asks for.
_BAND_REPLICAS = 1.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run in figures.

    Shares and latencies are those of the requests that arrived after the warm-up. GPU-hours are from its end to the
    last arrival.

    Attributes:
        ttft_attainment_frac: share of requests that met their TTFT objective; ``tpot_attainment_frac`` likewise.
        goodput_requests_per_s: rate of the requests that met both objectives.
        extrapolated_requests: requests with lengths beyond the profile.
        derived_requests: requests with a prompt length for which a profile has derived times, not measured ones.
        ttft_p50_s: a quantile over the requests that did not fail, as all fields with such a name; ``None``: no request
            has this latency.
        cost: price of the GPU-hours, in the currency of the configuration.
        peak_replicas: most replicas at one time, starting and draining ones included.
        scale_events: number of times that a pool grew or shrank.
        ratio_within_band_frac: share of decisions at which the smaller role had at most one admitted replica more or
            fewer than the policy's ratio asks for; ``None``: there were no decisions.
        ratio_deviation_mean_replicas: mean difference of the smaller role's admitted replicas from the number that the
            ratio asks for; ``None``: there were no decisions.
        prefill_utilization_frac: share of the time in which prefill engines computed; see ``utilization_frac``.
        cached_prompt_frac: share of prompt tokens that prefix caches had.
    """

    slo_attainment_frac: float
    ttft_attainment_frac: float
    tpot_attainment_frac: float
    goodput_requests_per_s: float
    requests: int
    failed_requests: int
    extrapolated_requests: int
    derived_requests: int
    preemptions: int
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    tpot_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p90_s: float | None
    e2e_p99_s: float | None
    gpu_hours: float
    gpu_hours_by_type: Mapping[str, float]
    cost: float
    energy_kwh: float | None
    peak_replicas: int
    scale_events: int
    flaps: int
    ratio_within_band_frac: float | None
    ratio_deviation_mean_replicas: float | None
    prefill_utilization_frac: float | None
    decode_utilization_frac: float | None
    cached_prompt_frac: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of a run.

    ``timeline``: (seconds, prefill replicas, decode replicas) at each change, without replicas that start or drain.
    ``policy_faults``: reasons of the decisions after the warm-up that failed, so that the counts stayed.
    """

    outcome: Outcome
    timeline: Sequence[tuple[float, int, int]]
    policy_faults: Sequence[str] = ()

    @classmethod
    def of(cls, run: Run) -> Self:
        """The figures of a run. Raises ValueError: as ``outcome``."""
        decisions = [plan.decision for at_s, plan in run.plans if at_s >= run.scenario.warm_up_s]
        faults = [decision.reason for decision in decisions if decision.fault is not None]
        return cls(outcome=outcome(run), timeline=_timeline(run), policy_faults=faults)


def outcome(run: Run) -> Outcome:
    """The figures of a run.

    Raises:
        ValueError: no request arrived after the warm-up.
    """
    scenario, measured = run.scenario, run.measured
    if scenario.end_s <= scenario.warm_up_s:
        raise ValueError(
            f"no request arrives after the warm-up of {scenario.warm_up_s:g} s: "
            "give a longer trace or a shorter warm_up_s"
        )
    ok = [record for record in measured if record.error is None]
    pairs = list(zip(measured, run.slos, strict=True))
    hours = run.fleet.gpu_hours(scenario.warm_up_s, scenario.end_s)
    by_type: dict[str, float] = defaultdict(float)
    for key, each in hours.items():
        by_type[scenario.profiles[key].gpu or "CPU"] += each
    utilization = {role: utilization_frac(run, [role]) for role in Role}
    deviations = list(_deviations(run))

    work = [life.work for life in run.fleet.lives]
    cached, computed = sum(done.cached_tokens for done in work), sum(done.prefill_tokens for done in work)
    profiled, requests = ProfiledRange.of(scenario.profiles), scenario.measured_trace
    return Outcome(
        slo_attainment_frac=run.attainment_frac,
        # A request that failed after its first token can still meet its TTFT objective.
        ttft_attainment_frac=sum(r.ttft_s is not None and r.ttft_s <= slo.ttft_s for r, slo in pairs) / len(pairs),
        # A request with one token has no TPOT, and meets its objective.
        tpot_attainment_frac=sum(r.error is None and (r.tpot_s or 0.0) <= slo.tpot_s for r, slo in pairs) / len(pairs),
        goodput_requests_per_s=sum(run.is_met) / (scenario.end_s - scenario.warm_up_s),
        requests=len(measured),
        failed_requests=len(measured) - len(ok),
        extrapolated_requests=sum(not profiled.covers(request) for request in requests),
        derived_requests=sum(map(profiled.has_derived_time, requests)),
        preemptions=sum(done.preemptions for done in work),
        **_quantiles("ttft", [r.ttft_s for r in ok]),
        **_quantiles("tpot", [r.tpot_s for r in ok]),
        **_quantiles("e2e", [None if r.last_token_s is None else r.last_token_s - r.sent_s for r in ok]),
        gpu_hours=sum(hours.values()),
        gpu_hours_by_type=dict(by_type),
        cost=sum(each * scenario.pools[key].cost_per_gpu_hour for key, each in hours.items()),
        energy_kwh=_energy_kwh(scenario.profiles, hours, utilization),
        peak_replicas=_peak_replicas(run),
        scale_events=len(_changes(run)),
        flaps=_flaps(run),
        ratio_within_band_frac=_mean([float(d <= _BAND_REPLICAS + 1e-9) for d in deviations]),
        ratio_deviation_mean_replicas=_mean(deviations),
        prefill_utilization_frac=utilization[Role.PREFILL],
        decode_utilization_frac=utilization[Role.DECODE],
        cached_prompt_frac=cached / (cached + computed) if cached + computed else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantiles(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    present = [value for value in values if value is not None]
    return {f"{name}_p{q}_s": float(np.quantile(present, q / 100)) if present else None for q in (50, 90, 99)}


def utilization_frac(
    run: Run, roles: Collection[Role], spent_s: Callable[[ModelCounters], float] = lambda work: work.busy_s
) -> float | None:
    """Share of the measured time in which the engines of some roles computed.

    The time of a replica includes its start and its drain. A step counts when it ends, so the share could be slightly
    above 1; it is cut to 1. ``spent_s``: the part of an engine's work that counts as computing, seconds.
    """
    lives = [life for life in run.fleet.lives if life.key.role in roles and life.replica is not None]
    present_s = sum(life.present_s(run.scenario.warm_up_s, run.scenario.end_s) for life in lives)
    return min(1.0, sum(spent_s(life.work) for life in lives) / present_s) if present_s else None


def _energy_kwh(
    profiles: Mapping[PoolKey, EngineProfile],
    gpu_hours: Mapping[PoolKey, float],
    utilization: Mapping[Role, float | None],
) -> float | None:
    """An estimate from the boards' power while engines compute and while they idle; ``None``: a board is unknown."""
    total_wh = 0.0
    for key, hours in gpu_hours.items():
        board_w = _BOARD_W.get(profiles[key].gpu or "")
        if board_w is None:
            return None
        busy_share = utilization[key.role] or 0.0
        power_frac = _IDLE_FRAC + busy_share * (_BUSY_FRAC[key.role] - _IDLE_FRAC)
        total_wh += board_w * hours * power_frac
    return total_wh / 1000.0


def _changes(run: Run) -> list[tuple[float, PoolKey, int]]:
    """Each time at which a pool grew or shrank, from the warm-up's end to the last arrival: (seconds, pool, +1 or -1).

    A replica that dies and is replaced at once is no change.
    """
    moves: Counter[tuple[float, PoolKey]] = Counter()
    for life in run.fleet.lives:
        if life.requested_s > 0.0:  # the run began with the replicas that were requested at 0
            moves[life.requested_s, life.key] += 1
        if life.stopped_s is not None:
            moves[life.stopped_s, life.key] -= 1
    first_s, last_s = run.scenario.warm_up_s, run.scenario.end_s
    changes = [
        (at_s, key, 1 if by > 0 else -1) for (at_s, key), by in moves.items() if by and first_s <= at_s <= last_s
    ]
    return sorted(changes, key=lambda change: (change[0], str(change[1])))


def _flaps(run: Run) -> int:
    last: dict[PoolKey, tuple[float, int]] = {}
    flaps = 0
    for at_s, key, change in _changes(run):
        if key in last:
            last_s, last_change = last[key]
            if change != last_change and at_s - last_s <= _FLAP_S:
                flaps += 1
        last[key] = (at_s, change)
    return flaps


def _peak_replicas(run: Run) -> int:
    """Most replicas at one time, starting and draining ones included."""
    edges = [(life.requested_s, 1) for life in run.fleet.lives]
    edges += [(life.gone_s, -1) for life in run.fleet.lives if life.gone_s is not None]
    # At equal times -1 comes first, so a replica and the one that replaces it count once.
    return max(accumulate(change for _, change in sorted(edges)), default=0)


def _timeline(run: Run) -> list[tuple[float, int, int]]:
    """Ready replicas that do not drain: (seconds, prefill replicas, decode replicas) at each change."""
    edges = [
        (at_s, life.key.role, change)
        for life in run.fleet.lives
        for at_s, change in ((life.ready_s, 1), (life.stopped_s, -1))
        if life.ready_s is not None and at_s is not None
    ]
    counts, points = Counter[Role](), dict[float, tuple[float, int, int]]()
    for at_s, role, change in sorted(edges, key=itemgetter(0)):
        counts[role] += change
        points[at_s] = (at_s, counts[Role.PREFILL], counts[Role.DECODE])
    return list(points.values())


def _deviations(run: Run) -> Iterator[float]:
    """Distance of the admitted replicas from the ratio at each decision, replicas of the smaller role."""
    roles = {life.replica_id: life.key.role for life in run.fleet.lives}
    for at_s, plan in run.plans:
        ratio = None if run.pd_ratio is None else plan.ratio(run.pd_ratio)
        if ratio is not None and run.scenario.warm_up_s <= at_s <= run.scenario.end_s:
            counts = Counter(roles[name] for name in plan.admitted)
            yield ratio.deviation(counts[Role.PREFILL], counts[Role.DECODE])
