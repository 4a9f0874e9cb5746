"""Two bounds beside the oracle: the smallest fixed counts, and a planner that cannot look ahead (pure).

Both have one size for each role, which the same walk searches. It goes up until enough requests meet their objectives,
the role that is to blame for most misses first; then down again, role by role, in ever smaller steps.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autoscale.sim.outcome import Result
from autoscale.sim.scenario import Run, Scenario, run_schedule
from autoscale.sim.schedule import changes_of, demands, keys_of, misses
from autoscale.types import PoolKey
from kvtransfer.topology import Role

# Where the walk begins: engines for each engine that the work keeps busy.
_FIRST_SIZE = {Role.PREFILL: 1.7, Role.DECODE: 1.05}
# The most simulations of a walk.
_MOST_RUNS = 24
# The walk's first step, as a share of a size.
_FIRST_STEP = 0.16
# The walk ends when its steps are smaller than this share.
_LAST_STEP = 0.015
# The first step, where sizes for the same trace with another seed are known.
_NEAR_STEP = 0.04
# The most simulations of a walk, where such sizes are known.
_NEAR_RUNS = 8
# Changes of (prefill, decode) that are tried where the walk of fixed counts ends.
_NEIGHBOURS = ((-1, 0), (0, -1), (-1, 1), (1, -1), (-2, 1), (1, -2))
# How far the causal planner looks back, and how long it keeps replicas, seconds; each pair is tried.
_LOOKS_S = ((15.0, 30.0), (30.0, 120.0), (60.0, 600.0))
# Step of the causal planner, seconds.
_GRID_S = 5.0
# Fixed counts begin with the work of the busiest bin of this length, seconds.
_PEAK_S = 60.0

# Fixed counts, or engines for each engine that the work keeps busy.
Sizes = Mapping[Role, float]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The cheapest run that attains enough, and its sizes; if no run does, the one that attains most.

    ``looks_s``: how far the causal planner looks back, and how long it keeps replicas.
    """

    result: Result
    sizes: Sizes
    is_attained: bool
    looks_s: tuple[float, float] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The fixed counts of the roles, by name."""
        return {str(role): int(size) for role, size in self.sizes.items()}


def smallest_static(scenario: Scenario, least_frac: float, *, tpot_s: float, near: Bound | None = None) -> Bound:
    """The fixed counts with the fewest GPU-hours that attain a share; ``sizes`` are the counts.

    ``near``: those of the same trace with another seed, to begin with, if they attain enough.
    """
    keys = keys_of(scenario)

    def counts_of(sizes: Sizes) -> tuple[int, ...]:
        return tuple(_within(scenario, key, sizes[key.role]) for key in keys)

    @cache
    def run(counts: tuple[int, ...]) -> Run:
        return run_schedule(scenario, {key: [(0.0, count)] for key, count in zip(keys, counts, strict=True)})

    def attains(counts: tuple[int, ...]) -> bool:
        return run(counts).attainment_frac >= least_frac

    peaks = demands(scenario, _PEAK_S, tpot_s).max(axis=1).tolist()
    first: Sizes = {role: max(1.0, peak * _FIRST_SIZE[role]) for role, peak in zip(Role, peaks, strict=True)}
    if is_near := near is not None and near.is_attained:
        first = near.sizes
    _, sizes = _walk(lambda sizes: run(counts_of(sizes)), first, least_frac, _MOST_RUNS, is_near=is_near)
    counts = counts_of(sizes)
    while attains(counts) and (fewer := next(filter(attains, _fewer(scenario, counts)), None)):
        counts = fewer
    return _bound(run(counts), dict(zip(Role, map(float, counts), strict=True)), least_frac)


def _fewer(scenario: Scenario, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Allowed counts next to these on fewer GPUs, those on the fewest GPUs first."""
    pools = [scenario.pools[key] for key in keys_of(scenario)]
    found = []
    for ways in _NEIGHBOURS:
        changed = tuple(count + way for count, way in zip(counts, ways, strict=True))
        is_allowed = all(
            pool.lowest_replicas <= count <= pool.highest_replicas for pool, count in zip(pools, changed, strict=True)
        )
        more_gpus = sum(pool.gpus_per_replica * way for pool, way in zip(pools, ways, strict=True))
        if is_allowed and more_gpus < 0:
            found.append((more_gpus, ways, changed))
    return [changed for _, _, changed in sorted(found)]


def causal_bound(scenario: Scenario, least_frac: float, *, tpot_s: float, near: Bound | None = None) -> Bound:
    """A planner that knows everything but what arrives during the next start.

    At every instant it knows all requests that have arrived, their outputs included, and what each engine can do. A
    replica that it asks for is ready one start later. Its sizes, how far it looks back and how long it keeps replicas
    are the best in hindsight. ``near``: the bound of the same trace with another seed, to begin with.
    """
    work = dict(zip(keys_of(scenario), demands(scenario, _GRID_S, tpot_s), strict=True))
    sizes: Sizes = _FIRST_SIZE
    looks: Sequence[tuple[float, float]] = _LOOKS_S
    if is_near := near is not None and near.looks_s is not None:
        sizes, looks = near.sizes, [near.looks_s]
    best: tuple[Run, tuple[float, float]] | None = None
    for look_s, stay_s in looks:

        def run(sizes: Sizes, look_s: float = look_s, stay_s: float = stay_s) -> Run:
            steps = {key: _causal(scenario, key, row * sizes[key.role], look_s, stay_s) for key, row in work.items()}
            return run_schedule(scenario, steps)

        tried, its_sizes = _walk(run, sizes, least_frac, _MOST_RUNS // len(looks), is_near=is_near)
        if best is None or tried.rank(least_frac) < best[0].rank(least_frac):
            best, sizes = (tried, (look_s, stay_s)), its_sizes
    assert best is not None
    return _bound(best[0], sizes, least_frac, best[1])


def _bound(run: Run, sizes: Sizes, least_frac: float, looks_s: tuple[float, float] | None = None) -> Bound:
    return Bound(result=Result.of(run), sizes=sizes, is_attained=run.attainment_frac >= least_frac, looks_s=looks_s)


def _walk(
    run: Callable[[Sizes], Run], first: Sizes, least_frac: float, most_runs: int, *, is_near: bool
) -> tuple[Run, Sizes]:
    """The best run of a walk, and its sizes."""
    first_step = _NEAR_STEP if is_near else _FIRST_STEP
    sizes, step = dict(first), dict.fromkeys(Role, first_step)
    best: tuple[Run, Sizes] | None = None
    shrunk: Role | None = None
    for _ in range(min(most_runs, _NEAR_RUNS) if is_near else most_runs):
        tried = run(sizes)
        is_better = best is None or tried.rank(least_frac) < best[0].rank(least_frac)
        best = (tried, dict(sizes)) if best is None or is_better else best
        blamed = Counter(role for role, _ in misses(tried))
        if best[0].attainment_frac < least_frac:
            missed = (1.0 - tried.attainment_frac) / (1.0 - least_frac)
            far = 1 + min(2.0, math.log10(max(1.0, missed)))
            sizes[max(Role, key=blamed.__getitem__)] *= 1 + first_step / 2 * far
            continue
        if shrunk is not None and not is_better:
            step[shrunk] /= 2
        if max(step.values()) < _LAST_STEP:
            break
        shrunk = min(Role, key=lambda role: (-step[role], blamed[role]))
        sizes = {**best[1], shrunk: best[1][shrunk] / (1 + step[shrunk])}
    assert best is not None
    return best


def _within(scenario: Scenario, key: PoolKey, wanted: float) -> int:
    pool = scenario.pools[key]
    return min(max(math.ceil(wanted - 1e-9), pool.lowest_replicas), pool.highest_replicas)


def _causal(
    scenario: Scenario, key: PoolKey, wanted: NDArray[np.float64], look_s: float, stay_s: float
) -> Sequence[tuple[float, int]]:
    """Ready replicas over time, of a planner that sees ``wanted`` only after it has passed."""
    look, stay = round(look_s / _GRID_S), round(stay_s / _GRID_S)
    start = math.ceil(scenario.pools[key].start_s / _GRID_S)
    held = math.ceil(scenario.warm_up_s / _GRID_S)
    observed = np.array([wanted[max(0, at - look) : at].mean() if at else 0.0 for at in range(len(wanted))])
    recent = [observed[max(0, at - stay) : at + 1].max() for at in range(len(wanted))]
    counts = [_within(scenario, key, float(wanted[:held].max(initial=0.0)))] * min(held + start, len(wanted))
    # Later, those replicas that were started one start ago and have stayed since.
    for at in range(len(counts), len(wanted)):
        counts.append(_within(scenario, key, float(min(recent[at - start], recent[at]))))
    return changes_of(counts, _GRID_S)
