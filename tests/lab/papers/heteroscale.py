"""HeteroScale's Figures 4, 6 and 7 and its two policies, by our controller on our virtual cluster (pure).

Nothing is tuned for a single row: ``heteroscale_setting`` holds for all. Tolerances were written down before the first
run. Two were tightened after it, since they held for a wrong reason: for decode's signals replicas had not grown, and
SM activity had fallen a little.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoscale.engines.engine_step import ModelCounters
from autoscale.engines.profile import EngineProfile
from autoscale.policies.periodic import PeriodConfig, PeriodicConfig
from autoscale.pressure.rate_search import PressurePoint
from autoscale.sim.outcome import utilization_frac
from autoscale.sim.scenario import Run, run_policy, run_schedule
from autoscale.traces.trace import TraceRequest, cut
from kvtransfer.topology import Role
from tests.lab.papers.claim import Claim, Say, silent
from tests.lab.papers.heteroscale_setting import (
    ATTAINMENT_FRAC,
    DAY_S,
    HOUR_S,
    LOAD_FRAC,
    NODES,
    PEAK_HOUR,
    PROFILE,
    SERVICE_A,
    SERVICE_B,
    Dialogue,
    Service,
    pressure,
    throughput,
)
from tests.lab.papers.heteroscale_signals import EXPECTED, Found, track_signals
from tests.lab.stand.static_search import StaticSearch

# A schedule's periods; its counts are for the busiest minute of each on the day before.
PERIOD_HOURS = 4
_BUSIEST_S = 60.0
# Fixed counts are found on this part of the day around the peak, in hours.
_PEAK_HOURS = 0.5
# The ends of the curve serve no more than this share of its peak, which lies in the middle half of the splits.
_ENDS_FRAC = 0.8
# Tolerance of shares, as a difference.
_POINTS = 0.10
# The same between policies.
_FEW_POINTS = 0.05
# Tolerance of factors, as a share.
_RELATIVE = 0.25


def claims(say: Say = silent) -> Iterator[Claim]:
    """The rows, about two minutes on one core; ``say`` is called with a line for each step."""
    profile = EngineProfile.load(PROFILE)
    test = pressure(SERVICE_A, profile)
    curve = throughput(test)
    say(f"service A: {[round(point.requests_per_s, 2) for point in curve]}")
    yield ratio_claim(SERVICE_A, curve)
    other = throughput(pressure(SERVICE_B, profile))
    say(f"service B: {[round(point.requests_per_s, 2) for point in other]}")
    yield ratio_claim(SERVICE_B, other)
    dialogue = Dialogue(sim=SERVICE_A.cluster(profile), best=max(curve, key=lambda point: point.requests_per_s))
    yield from signal_claims(track_signals(dialogue, test, say))
    yield from day_claims(run_day(dialogue, say))


def ratio_claim(service: Service, curve: Sequence[PressurePoint]) -> Claim:
    """Figure 4: the most throughput lies at neither end of the P/D ratio."""
    best = max(curve, key=lambda point: point.requests_per_s)
    shares = [point.requests_per_s / best.requests_per_s for point in curve]
    nodes = best.prefill + best.decode
    return Claim(
        source="HeteroScale Fig. 4, section 4.1",
        what=f"service {service.name}: req/s by P nodes {'/'.join(str(point.prefill) for point in curve)}",
        claimed="a clear midrange peak, less on either side",
        ours=f"{'/'.join(f'{100 * each:.0f}' for each in shares)} % of {best.requests_per_s:.3g} at {best.name}",
        tolerance="peak within 4 to 12 P, both ends <= 80 % of it",
        is_reproduced=max(shares[0], shares[-1]) <= _ENDS_FRAC and nodes / 4 <= best.prefill <= nodes * 3 / 4,
        assumption="a replica of 4 H100 with a dense 70B for each node of 8 H20; lognormal lengths around the paper's "
        "averages, sigma 0.3; objectives for 95 % of requests",
    )


def signal_claims(found: Found) -> Iterator[Claim]:
    """Figure 6: which signals follow the load."""
    for signal, expected in EXPECTED.items():
        seen = found[signal]
        yield Claim(
            source="HeteroScale Fig. 6, section 4.2.2",
            what=f"{signal}: replicas against need",
            claimed=expected.claimed,
            ours=f"error {seen.tracking.error_frac:.0%}, most x{seen.tracking.overshoot:.2f}, "
            f"{seen.scale_events} events, half load {seen.half_load_frac:.0%}",
            tolerance=expected.rule,
            is_reproduced=expected.holds(found),
            assumption="all act at 80 % of the best split's highest rate; each signal alone, without safety net; our "
            "default guard; 8 hours, 15 times as fast",
        )


@dataclass(frozen=True, kw_only=True)
class Day:
    """The same day on fixed counts, by the TPS policy, and by a schedule."""

    fixed: Run
    tps: Run
    periodic: Run


def run_day(dialogue: Dialogue, say: Say = silent) -> Day:
    """The three runs; the two policies begin with the counts that midnight needs."""
    day = dialogue.day(seed=0)
    counts = fixed_counts(dialogue, day, say)
    scenario = dialogue.scenario(day)
    first = dialogue.pools(dialogue.counts(float(dialogue.needed(np.zeros(1))[0])))
    schedule = dialogue.config(schedule_of(dialogue, dialogue.day(seed=1)))
    runs = Day(
        fixed=run_schedule(scenario, {key: [(0.0, count)] for key, count in dialogue.pools(counts).items()}),
        tps=run_policy(scenario, dialogue.tps(), first),
        periodic=run_policy(scenario, schedule, first),
    )
    for name in ("fixed", "tps", "periodic"):
        run: Run = getattr(runs, name)
        say(f"{name}: {run.gpu_hours:.4g} GPU-hours, {run.attainment_frac:.2%} within the objective")
    return runs


def fixed_counts(dialogue: Dialogue, day: Sequence[TraceRequest], say: Say = silent) -> dict[Role, int]:
    """Counts as an operator chooses them: the fewest for the peak, with the headroom of the thresholds."""
    scenario = dialogue.scenario(cut(day, (PEAK_HOUR - _PEAK_HOURS / 2) * HOUR_S, _PEAK_HOURS * HOUR_S))
    profiles = {key.role: profile for key, profile in scenario.profiles.items()}
    search = StaticSearch(
        scenario.trace, scenario.slos, profiles, router=scenario.router, highest_replicas=NODES // 2, seed=scenario.seed
    )
    found = search.smallest(ATTAINMENT_FRAC)
    assert found is not None
    say(f"around the peak: {found}")
    counts = {Role.PREFILL: found.prefill, Role.DECODE: found.decode}
    return {role: math.ceil(count / LOAD_FRAC - 1e-9) for role, count in counts.items()}


def schedule_of(dialogue: Dialogue, before: Sequence[TraceRequest]) -> PeriodicConfig:
    """A schedule from the day before: each period has the counts that its busiest minute needed."""
    minutes = np.bincount([int(request.at_s // _BUSIEST_S) for request in before], minlength=int(DAY_S // _BUSIEST_S))
    nodes = dialogue.nodes(minutes / _BUSIEST_S)
    each = round(PERIOD_HOURS * HOUR_S / _BUSIEST_S)
    periods = []
    for begin in range(0, len(nodes), each):
        counts = dialogue.counts(float(nodes[begin : begin + each].max()))
        begins = f"{begin % 60} {begin // 60} * * *"  # a minute of the virtual day is one of the clock
        periods.append(PeriodConfig(begins=begins, prefill=counts[Role.PREFILL], decode=counts[Role.DECODE]))
    return PeriodicConfig(periods=tuple(periods))


def day_claims(day: Day) -> Iterator[Claim]:
    """Figure 7, and the two policies compared."""
    yield from _fleet_claims(day)
    yield from _policy_claims(day)


def _fleet_claims(day: Day) -> Iterator[Claim]:
    source = "HeteroScale Fig. 7, section 4.3"
    assumption = (
        "a day after section 4.2.1, mean 62 % of its peak, 15 times as fast; fixed: the fewest for the peak over 0.8, "
        "the thresholds' headroom"
    )
    saved = 1.0 - day.tps.gpu_hours / day.fixed.gpu_hours
    kept = [run.attainment_frac for run in (day.fixed, day.tps)]
    yield Claim(
        source=source,
        what="GPU-hours, TPS policy against fixed, fewer, %",
        claimed="41.3 % fewer",
        ours=f"{100 * saved:.1f} % fewer ({_pair(*kept)} keep the SLO)",
        tolerance="+-10 points, and 95 % keep the SLO",
        is_reproduced=abs(saved - 0.413) <= _POINTS and min(kept) >= ATTAINMENT_FRAC,
        assumption=assumption,
    )
    prefill = [_share(run, [Role.PREFILL], _busy_s) for run in (day.fixed, day.tps)]
    yield Claim(
        source=source,
        what="prefill GPU utilisation, %",
        claimed="46.8 -> 76.2 %",
        ours=_pair(*prefill),
        tolerance="+-10 points each",
        is_reproduced=abs(prefill[0] - 0.468) <= _POINTS and abs(prefill[1] - 0.762) <= _POINTS,
        assumption=assumption,
    )
    decode = [_share(run, [Role.DECODE], _busy_s) for run in (day.fixed, day.tps)]
    yield Claim(
        source=source,
        what="decode GPU utilisation, %",
        claimed="stays high, 86.0 -> 82.2 %",
        ours=_pair(*decode),
        tolerance="both >= 72.2 %, which is 10 points less",
        is_reproduced=min(decode) >= 0.822 - _POINTS,
        assumption="ours is the share of time in which a step runs",
    )
    for role, claimed in ((Role.PREFILL, (0.366, 0.625)), (Role.DECODE, (0.530, 0.616))):
        seen = [_share(run, [role], _active_s) for run in (day.fixed, day.tps)]
        rise, ours = claimed[1] / claimed[0], seen[1] / seen[0]
        yield Claim(
            source=source,
            what=f"{role} SM activity, %, and its rise",
            claimed=f"{_pair(*claimed)} (x{rise:.2f})",
            ours=f"{_pair(*seen)} (x{ours:.2f})",
            tolerance="it rises, by the claimed factor +-25 %",
            is_reproduced=ours > 1.0 and abs(ours / rise - 1.0) <= _RELATIVE,
            assumption="ours is the time of each step at the hardware's peak (roofline), lower than what counters show",
        )


def _policy_claims(day: Day) -> Iterator[Claim]:
    for name, spent_s, claimed in (("GPU utilisation", _busy_s, 0.100), ("SM activity", _active_s, 0.111)):
        periodic, tps = (_share(run, tuple(Role), spent_s) for run in (day.periodic, day.tps))
        yield Claim(
            source="HeteroScale section 4.3, TPS against periodic",
            what=f"{name} of all GPUs, by how much higher",
            claimed=f"+{100 * claimed:.1f} points",
            ours=f"{100 * (tps - periodic):+.1f} points ({_pair(periodic, tps)})",
            tolerance="+-5 points",
            is_reproduced=abs(tps - periodic - claimed) <= _FEW_POINTS,
            assumption="six periods of 4 hours, each with what its busiest minute of the day before needed; one "
            "service, where the paper compares different ones",
        )


def _busy_s(work: ModelCounters) -> float:
    return work.busy_s


def _active_s(work: ModelCounters) -> float:
    return work.sm_active_s


def _share(run: Run, roles: Sequence[Role], spent_s: Callable[[ModelCounters], float]) -> float:
    share = utilization_frac(run, roles, spent_s)
    assert share is not None
    return share


def _pair(before: float, after: float) -> str:
    return f"{100 * before:.1f} -> {100 * after:.1f} %"
