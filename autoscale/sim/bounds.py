"""What stands beside the oracle: the smallest fixed counts, and a planner that cannot look ahead (pure).

Both have two sizes, one for each role, that are searched by the same walk: up to where enough requests meet their
objectives, the role that is to blame for most misses first; then down again, role by role, in ever smaller steps.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoscale.sim.oracle import demands, misses
from autoscale.sim.scenario import Run, Scenario, run_schedule
from autoscale.types import PoolKey
from kvtransfer.topology import Role

# Where the walk begins, engines per engine kept busy; how far its steps go, and when they are small enough.
_FIRST_SIZE = {Role.PREFILL: 1.7, Role.DECODE: 1.05}
_FIRST_STEP, _LAST_STEP = 0.16, 0.015
# Near sizes that were found on the same trace with another seed: smaller steps, and fewer.
_NEAR_STEP, _NEAR_RUNS = 0.04, 8
# Where the walk of fixed counts ends, these are tried: prefill, decode.
_NEIGHBOURS = ((-1, 0), (0, -1), (-1, 1), (1, -1), (-2, 1), (1, -2))
# The causal planner looks at what arrived over one of these times, and keeps what it has for one of these, seconds.
_LOOKS_S = ((15.0, 30.0), (30.0, 120.0), (60.0, 600.0))
_GRID_S = 5.0

Sizes = Mapping[Role, float]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The cheapest run of a family that attains what it must, and its sizes; without one, the best of those tried.

    ``looks_s``: how far back the causal planner looks, and how long it keeps what it has.
    """

    run: Run
    sizes: Sizes
    is_attained: bool
    looks_s: tuple[float, float] | None = None


def smallest_static(
    scenario: Scenario,
    attainment_frac: float,
    *,
    tpot_s: float,
    near: Sizes | None = None,
    most_runs: int = 24,
    on_run: Callable[[str], None] = lambda line: None,
) -> Bound:
    """The fixed counts with the fewest GPU-hours that attain a share; ``sizes`` are the counts.

    ``near``: those of the same trace with another seed, to begin with.
    """
    keys = {key.role: key for key in scenario.pools}
    work = demands(scenario, keys, 60.0, tpot_s)
    first = near or {role: max(1.0, float(work[role].max()) * _FIRST_SIZE[role]) for role in Role}

    known: dict[tuple[int, ...], Run] = {}

    def run(sizes: Sizes) -> Run:
        pair = tuple(_within(scenario, keys[role], sizes[role]) for role in Role)
        if pair not in known:
            steps = {keys[role]: [(0.0, count)] for role, count in zip(Role, pair, strict=True)}
            known[pair] = run_schedule(scenario, steps)
            on_run(f"{known[pair].attainment_frac:.4f} attained by {pair[0]}P{pair[1]}D")
        return known[pair]

    bound = _walk(run, first, attainment_frac, most_runs, is_near=near is not None)
    counts = {role: float(_within(scenario, keys[role], bound.sizes[role])) for role in Role}
    best = Bound(run=bound.run, sizes=counts, is_attained=bound.is_attained)
    while best.is_attained and (fewer := _fewer(run, best, attainment_frac, scenario, keys)) is not None:
        best = fewer
    return best


def _fewer(
    run: Callable[[Sizes], Run],
    best: Bound,
    attainment_frac: float,
    scenario: Scenario,
    keys: Mapping[Role, PoolKey],
) -> Bound | None:
    """A neighbour on fewer GPUs that attains as much, the one on the fewest first."""
    gpus = {role: scenario.pools[keys[role]].gpus_per_replica for role in Role}
    allowed = {role: scenario.pools[keys[role]] for role in Role}
    found = []
    for ways in _NEIGHBOURS:
        change = dict(zip(Role, ways, strict=True))
        sizes = {role: best.sizes[role] + change[role] for role in Role}
        is_allowed = all(allowed[r].lowest_replicas <= sizes[r] <= allowed[r].highest_replicas for r in Role)
        spared = -sum(gpus[role] * change[role] for role in Role)
        if is_allowed and spared > 0:
            found.append((-spared, ways, sizes))
    for _, _, sizes in sorted(found, key=lambda each: each[:2]):
        tried = run(sizes)
        if tried.attainment_frac >= attainment_frac:
            return Bound(run=tried, sizes=sizes, is_attained=True)
    return None


def causal_bound(
    scenario: Scenario,
    attainment_frac: float,
    *,
    tpot_s: float,
    near: tuple[Sizes, tuple[float, float]] | None = None,
    most_runs: int = 24,
    on_run: Callable[[str], None] = lambda line: None,
) -> Bound:
    """A planner that knows everything but the next start-up time.

    At every instant it knows all that has arrived, outputs included, and what each engine can do; a replica that it
    asks for is there one start later, and what arrives meanwhile it cannot know. How much more than that work it
    provides for, how far it looks back and how long it keeps what it has are the best in hindsight. ``sizes`` are
    engines per engine kept busy. ``near``: those of the same trace with another seed, and their ``looks_s``.
    """
    keys = {key.role: key for key in scenario.pools}
    work = demands(scenario, keys, _GRID_S, tpot_s)
    best: Bound | None = None
    looks = _LOOKS_S if near is None else (near[1],)
    for look_s, stay_s in looks:

        def run(sizes: Sizes, look_s: float = look_s, stay_s: float = stay_s) -> Run:
            steps = {
                keys[role]: _causal(scenario, keys[role], work[role] * sizes[role], look_s, stay_s) for role in Role
            }
            tried = run_schedule(scenario, steps)
            on_run(f"{tried.attainment_frac:.4f} attained with {tried.gpu_hours:.4g} GPU-hours")
            return tried

        first = best.sizes if best else _FIRST_SIZE if near is None else near[0]
        found = _walk(run, first, attainment_frac, most_runs // len(looks), is_near=near is not None)
        if best is None or _rank(found) < _rank(best):
            best = replace(found, looks_s=(look_s, stay_s))
    assert best is not None
    return best


def _rank(bound: Bound) -> tuple[bool, float]:
    return not bound.is_attained, bound.run.gpu_hours if bound.is_attained else -bound.run.attainment_frac


def _walk(run: Callable[[Sizes], Run], first: Sizes, attainment_frac: float, most_runs: int, *, is_near: bool) -> Bound:
    first_step = _NEAR_STEP if is_near else _FIRST_STEP
    sizes, step = dict(first), dict.fromkeys(Role, first_step)
    best: Bound | None = None
    shrunk: Role | None = None
    for _ in range(min(most_runs, _NEAR_RUNS) if is_near else most_runs):
        tried = run(sizes)
        bound = Bound(run=tried, sizes=dict(sizes), is_attained=tried.attainment_frac >= attainment_frac)
        is_better = best is None or _rank(bound) < _rank(best)
        best = bound if best is None or is_better else best
        blamed = Counter(role for role, _ in misses(tried))
        if not best.is_attained:
            missed = (1.0 - tried.attainment_frac) / (1.0 - attainment_frac)
            far = 1 + min(2.0, math.log10(max(1.0, missed)))
            sizes[max(Role, key=blamed.__getitem__)] *= 1 + first_step / 2 * far
            continue
        if shrunk is not None and not is_better:
            step[shrunk] /= 2
        if max(step.values()) < _LAST_STEP:
            break
        shrunk = min(Role, key=lambda role: (-step[role], blamed[role]))
        sizes = {**best.sizes, shrunk: best.sizes[shrunk] / (1 + step[shrunk])}
    assert best is not None
    return best


def _within(scenario: Scenario, key: PoolKey, wanted: float) -> int:
    pool = scenario.pools[key]
    return min(max(math.ceil(wanted - 1e-9), pool.lowest_replicas), pool.highest_replicas)


def _causal(
    scenario: Scenario, key: PoolKey, wanted: NDArray[np.float64], look_s: float, stay_s: float
) -> Sequence[tuple[float, int]]:
    """Ready replicas over time of a planner that sees ``wanted`` only once it is past."""
    look, stay = round(look_s / _GRID_S), round(stay_s / _GRID_S)
    start = math.ceil(scenario.pools[key].start_s / _GRID_S)
    held = math.ceil(scenario.warm_up_s / _GRID_S)
    seen = np.array([wanted[max(0, at - look) : at].mean() if at else 0.0 for at in range(len(wanted))])
    recent = np.array([seen[max(0, at - stay) : at + 1].max() for at in range(len(wanted))])
    steps: list[tuple[float, int]] = []
    first = _within(scenario, key, float(wanted[:held].max(initial=0.0)))
    for at in range(len(wanted)):
        if at < held + start:
            count = max(first, steps[-1][1]) if steps else first
        else:  # what was asked for a start ago, of which nobody has been let go since
            count = _within(scenario, key, float(min(recent[at - start], recent[at])))
        if not steps or count != steps[-1][1]:
            steps.append((at * _GRID_S, count))
    return steps
