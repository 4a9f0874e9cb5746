"""What a simulated run was worth: attainment, latencies, GPU-hours, energy, and how the counts moved (pure)."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoscale.engine_model import ModelCounters
from autoscale.profile import EngineProfile
from autoscale.sim.profiled_range import ProfiledRange
from autoscale.sim.scenario import Run
from autoscale.types import PoolKey
from kvtransfer.topology import Role

# Board power of each GPU, watts (data sheets of the SXM boards).
_BOARD_W = {"A100": 400.0, "H100": 700.0, "H200": 700.0}
# Of the board's power: Llama-2-70B on two A100, peak and mean while it generates, and the mean of runs that mostly idle
# (Splitwise's measurements, splitwise-sim data/perf_model.csv).
_BUSY_FRAC = {Role.PREFILL: 1.0, Role.DECODE: 0.74}
_IDLE_FRAC = 0.18
# A pool that grows and shrinks, or the other way round, within this time has flapped.
_FLAP_S = 120.0
# Counts this far from the ratio, replicas of the smaller role, are still at it.
_BAND_REPLICAS = 1.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of one policy.

    Shares and latencies are of the requests that arrived after the warm-up; GPU-hours run from there to the last
    arrival. ``ratio_within_band_frac``: the share of decisions at which the replicas that served were within one
    replica of the smaller role of the P/D ratio that the policy kept then, ``None`` without plans;
    ``ratio_deviation_mean_replicas`` is the mean distance. Quantiles are ``None`` where no request ended.
    ``extrapolated_requests`` are of lengths beyond the profile, ``derived_requests`` have prompts of lengths for which
    it has derived times, not measured ones. ``cached_prompt_frac``: of the prompt tokens of engines that computed
    prompts, those that were in their prefix caches.
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


def outcome(run: Run, cost_per_gpu_hour: Mapping[PoolKey, float]) -> Outcome:
    """Sum a run up.

    Args:
        run: the run.
        cost_per_gpu_hour: of each pool.

    Raises:
        ValueError: nothing arrived after the warm-up.
    """
    scenario, measured = run.scenario, run.measured
    if not measured or scenario.end_s <= scenario.warm_up_s:
        raise ValueError(
            f"no request arrives after the warm-up of {scenario.warm_up_s:g} s: "
            "give a longer trace or a shorter warm_up_s"
        )
    ok = [record for record in measured if record.error is None]
    pairs = list(zip(measured, run.slos, strict=True))
    hours = run.fleet.gpu_hours(scenario.warm_up_s, scenario.end_s)
    by_type: dict[str, float] = {}
    for key, each in hours.items():
        name = scenario.profiles[key].gpu or "CPU"
        by_type[name] = by_type.get(name, 0.0) + each
    used = {role: utilization_frac(run, [role]) for role in Role}
    deviations = list(_deviations(run))
    prompts = scenario.profiles[min(scenario.profiles, key=lambda key: key.role is not Role.PREFILL)].prefill
    cached, computed = (
        sum(getattr(life.work, f"{what}_tokens") for life in run.fleet.lives) for what in ("cached", "prefill")
    )
    known, asked = ProfiledRange.of(scenario.profiles), scenario.measured_trace
    return Outcome(
        slo_attainment_frac=run.attainment_frac,
        ttft_attainment_frac=sum(r.ttft_s is not None and r.ttft_s <= slo.ttft_s for r, slo in pairs) / len(pairs),
        tpot_attainment_frac=sum(r.error is None and (r.tpot_s or 0.0) <= slo.tpot_s for r, slo in pairs) / len(pairs),
        goodput_requests_per_s=sum(run.is_met) / max(1e-9, scenario.end_s - scenario.warm_up_s),
        requests=len(measured),
        failed_requests=len(measured) - len(ok),
        extrapolated_requests=sum(not known.covers(r.input_tokens, r.output_tokens) for r in asked),
        derived_requests=sum(prompts.is_derived(request.input_tokens) for request in asked),
        preemptions=sum(life.work.preemptions for life in run.fleet.lives),
        **_quantiles("ttft", [r.ttft_s for r in ok]),
        **_quantiles("tpot", [r.tpot_s for r in ok]),
        **_quantiles("e2e", [None if r.last_token_s is None else r.last_token_s - r.sent_s for r in ok]),
        gpu_hours=sum(hours.values()),
        gpu_hours_by_type=by_type,
        cost=sum(each * cost_per_gpu_hour[key] for key, each in hours.items()),
        energy_kwh=_energy_kwh(scenario.profiles, hours, used),
        peak_replicas=_peak(run),
        scale_events=len(_changes(run)),
        flaps=_flaps(run),
        ratio_within_band_frac=_mean([float(d <= _BAND_REPLICAS + 1e-9) for d in deviations]),
        ratio_deviation_mean_replicas=_mean(deviations),
        prefill_utilization_frac=used[Role.PREFILL],
        decode_utilization_frac=used[Role.DECODE],
        cached_prompt_frac=cached / (cached + computed) if cached + computed else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantiles(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    seen = [value for value in values if value is not None]
    return {f"{name}_p{q}_s": float(np.quantile(seen, q / 100)) if seen else None for q in (50, 90, 99)}


def utilization_frac(
    run: Run, roles: Collection[Role], spent_s: Callable[[ModelCounters], float] = lambda work: work.busy_s
) -> float | None:
    """The share of their time, starts and drains included, in which some roles' engines computed while measured.

    A step counts where it ends, so one that began before may bring a full share above 1, which is not shown.

    Args:
        run: the run.
        roles: of which engines, all together.
        spent_s: what of an engine's time counts instead, seconds.
    """
    there_s = used_s = 0.0
    for life in run.fleet.lives:
        if life.key.role in roles and life.replica is not None:
            gone_s = run.scenario.end_s if life.gone_s is None else min(life.gone_s, run.scenario.end_s)
            there_s += max(0.0, gone_s - max(run.scenario.warm_up_s, life.asked_s))
            used_s += spent_s(life.work)
    return min(1.0, used_s / there_s) if there_s else None


def _energy_kwh(
    profiles: Mapping[PoolKey, EngineProfile], hours: Mapping[PoolKey, float], used: Mapping[Role, float | None]
) -> float | None:
    """Estimated: full power while prefill computes, less while decode does, a fifth else; None for unknown boards."""
    total_wh = 0.0
    for key, each in hours.items():
        board_w = _BOARD_W.get(profiles[key].gpu or "")
        if board_w is None:
            return None
        share = used[key.role] or 0.0
        total_wh += board_w * each * (_IDLE_FRAC + share * (_BUSY_FRAC[key.role] - _IDLE_FRAC))
    return total_wh / 1000.0


def _changes(run: Run) -> list[tuple[float, PoolKey, int]]:
    """The instants at which more or fewer of a pool were wanted, +1 or -1, between the warm-up and the last arrival.

    Who dies and is replaced at once changes nothing.
    """
    moves: Counter[tuple[float, PoolKey]] = Counter()
    for life in run.fleet.lives:
        if life.asked_s > 0.0:  # at 0 are those that it began with
            moves[life.asked_s, life.key] += 1
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
    for at_s, key, way in _changes(run):
        if key in last and last[key][1] != way and at_s - last[key][0] <= _FLAP_S:
            flaps += 1
        last[key] = (at_s, way)
    return flaps


def _peak(run: Run) -> int:
    """The most replicas that there were at one time, starting and draining ones too."""
    edges = [(life.asked_s, 1) for life in run.fleet.lives]
    edges += [(life.gone_s, -1) for life in run.fleet.lives if life.gone_s is not None]
    here = peak = 0
    for _, way in sorted(edges):
        here += way
        peak = max(peak, here)
    return peak


def _deviations(run: Run) -> Iterator[float]:
    roles = {life.replica_id: life.key.role for life in run.fleet.lives}
    for at_s, plan in run.plans:
        ratio = plan.decision.ratio or run.pd_ratio
        if ratio is not None and run.scenario.warm_up_s <= at_s <= run.scenario.end_s:
            counts = Counter(roles[name] for name in plan.admitted)
            yield ratio.deviation(counts[Role.PREFILL], counts[Role.DECODE])
