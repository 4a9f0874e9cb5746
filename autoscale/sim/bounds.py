"""Two bounds beside the oracle: the smallest fixed counts, and a planner that knows no later requests (pure).

Each bound has one size for each role. A walk searches the sizes: it simulates the bound, changes one size, and so on.
While too few requests meet their objectives, the walk increases the size of the role that causes most misses. After
that it reduces one size at a time, in ever smaller steps.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from autoscale.ratio import whole
from autoscale.sim.outcome import Result
from autoscale.sim.scenario import Run, Scenario, run_schedule
from autoscale.sim.schedule import changes_of, demands, keys_of, misses
from autoscale.types import PoolKey
from kvtransfer.topology import Role

# Size of each role. For fixed counts: the number of replicas. For the causal planner: a factor. The planner wants this
# factor times the engines that the work keeps busy, a number that ``schedule.demands`` computes from the profile.
Sizes = Mapping[Role, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Times of the causal planner, seconds.

    ``look_back_s``: time before now whose mean work is used. ``keep_s``: time without need after which a replica ends.
    """

    look_back_s: float
    keep_s: float


# The reason of the values below is not recorded. They only steer the search: a bound is always a
# simulated run, so a bad value makes it dearer, not wrong.
# Sizes at which a walk begins: replicas for each busy engine.
_FIRST_SIZE = {Role.PREFILL: 1.7, Role.DECODE: 1.05}
# Most simulations of all walks for one bound.
_MOST_RUNS = 24
# First step of a walk: share of a size by which it is reduced.
_FIRST_STEP = 0.16
# A walk ends when the steps of both roles are smaller than this share.
_LAST_STEP = 0.015
# As _FIRST_STEP, for a walk that begins at the sizes of another seed.
_OTHER_SEED_STEP = 0.04
# As _MOST_RUNS, for a walk that begins at the sizes of another seed.
_OTHER_SEED_RUNS = 8
# Changes of the fixed counts (prefill, decode) that are simulated after the walk, if they save GPUs.
_NEIGHBOURS = ((-1, 0), (0, -1), (-1, 1), (1, -1), (-2, 1), (1, -2))
# Each of these windows gets a walk; the best ones become the causal planner's.
_WINDOWS: tuple[Windows, ...] = (
    Windows(look_back_s=15.0, keep_s=30.0),
    Windows(look_back_s=30.0, keep_s=120.0),
    Windows(look_back_s=60.0, keep_s=600.0),
)
# Length of the causal planner's steps of time, seconds.
_GRID_S = 5.0
# Length of a bin of time for the first fixed counts, which are for the busiest bin; seconds.
_STATIC_BIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The cheapest run found in which enough requests meet their objectives, and its sizes.

    If ``is_attained`` is false, no such run was found, and this is the run in which most requests meet them.
    ``windows``: windows of the causal planner; ``None``: the sizes are fixed counts.
    """

    result: Result
    sizes: Sizes
    is_attained: bool
    windows: Windows | None = None

    @property
    def fixed_counts(self) -> dict[str, int]:
        """Replicas of each role by its name, if the sizes are fixed counts."""
        return {str(role): int(size) for role, size in self.sizes.items()}


def smallest_static(scenario: Scenario, least_frac: float, *, tpot_s: float, other_seed: Bound | None = None) -> Bound:
    """The fixed counts on the fewest GPUs, of those that were tried, with which enough requests meet their objectives.

    ``least_frac``: share of requests that is enough. ``tpot_s``: time per output token, seconds; ``schedule.demands``
    assumes the largest decode batches that keep it. ``other_seed``: the smallest fixed counts of another seed. The walk
    begins at them if they were enough there.
    """
    keys = keys_of(scenario)  # one pool of each role, in the order of ``Role``

    def counts_of(sizes: Sizes) -> tuple[int, ...]:
        return tuple(_allowed(scenario, key, sizes[key.role]) for key in keys)

    @cache  # different sizes of a walk may round to the same counts
    def simulate(counts: tuple[int, ...]) -> Run:
        return run_schedule(scenario, {key: [(0.0, count)] for key, count in zip(keys, counts, strict=True)})

    def attains(counts: tuple[int, ...]) -> bool:
        return simulate(counts).attainment_frac >= least_frac

    if other_seed is not None and other_seed.is_attained:
        first, first_step, most_runs = other_seed.sizes, _OTHER_SEED_STEP, _OTHER_SEED_RUNS
    else:
        peaks = demands(scenario, _STATIC_BIN_S, tpot_s).max(axis=1).tolist()
        first = {role: max(1.0, peak * _FIRST_SIZE[role]) for role, peak in zip(Role, peaks, strict=True)}
        first_step, most_runs = _FIRST_STEP, _MOST_RUNS
    _, sizes = _walk(lambda sizes: simulate(counts_of(sizes)), first, least_frac, first_step, most_runs)
    counts = counts_of(sizes)
    while attains(counts):
        cheaper = next(filter(attains, _cheaper_neighbours(scenario, counts)), None)
        if cheaper is None:
            break
        counts = cheaper
    return _bound(simulate(counts), dict(zip(Role, map(float, counts), strict=True)), least_frac)


def _cheaper_neighbours(scenario: Scenario, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Neighbours of fixed counts on fewer GPUs and within the pools' limits, those on the fewest GPUs first."""
    pools = [scenario.pools[key] for key in keys_of(scenario)]
    neighbours = []
    for changes in _NEIGHBOURS:
        changed = tuple(count + change for count, change in zip(counts, changes, strict=True))
        is_allowed = all(
            pool.lowest_replicas <= count <= pool.highest_replicas for pool, count in zip(pools, changed, strict=True)
        )
        more_gpus = sum(pool.gpus_per_replica * change for pool, change in zip(pools, changes, strict=True))
        if is_allowed and more_gpus < 0:
            neighbours.append((more_gpus, changes, changed))
    return [changed for _, _, changed in sorted(neighbours)]


def causal_bound(scenario: Scenario, least_frac: float, *, tpot_s: float, other_seed: Bound | None = None) -> Bound:
    """The cheapest run of the causal planner: at every time it knows all requests that have arrived, and no later ones.

    It also knows the output tokens of those requests, and the speed of each engine. A replica is ready one start after
    the planner asks for it. Sizes and windows are the best in hindsight.

    ``least_frac`` and ``tpot_s``: as in ``smallest_static``. ``other_seed``: the causal bound of another seed. The walk
    begins at it if it has windows. Without windows it is fixed counts that were cheaper there, and is not used.
    """
    busy_engines = dict(zip(keys_of(scenario), demands(scenario, _GRID_S, tpot_s), strict=True))
    sizes: Sizes = _FIRST_SIZE
    all_windows, first_step, most_runs = _WINDOWS, _FIRST_STEP, _MOST_RUNS // len(_WINDOWS)
    if other_seed is not None and other_seed.windows is not None:
        sizes, all_windows = other_seed.sizes, (other_seed.windows,)
        first_step, most_runs = _OTHER_SEED_STEP, _OTHER_SEED_RUNS
    best: tuple[Run, Windows] | None = None
    for windows in all_windows:
        run, run_sizes = _walk(
            partial(_run_causal, scenario, busy_engines, windows), sizes, least_frac, first_step, most_runs
        )
        if best is None or run.rank(least_frac) < best[0].rank(least_frac):
            best, sizes = (run, windows), run_sizes  # the next walk begins at these sizes
    assert best is not None
    return _bound(best[0], sizes, least_frac, best[1])


def _bound(run: Run, sizes: Sizes, least_frac: float, windows: Windows | None = None) -> Bound:
    return Bound(result=Result.of(run), sizes=sizes, is_attained=run.attainment_frac >= least_frac, windows=windows)


def _walk(
    simulate: Callable[[Sizes], Run], first: Sizes, least_frac: float, first_step: float, most_runs: int
) -> tuple[Run, Sizes]:
    """The best run of a walk that begins at the sizes ``first``, and its sizes.

    If the run with a reduced size is no better, the step of that role is halved. ``simulate``: returns the run with the
    given sizes.
    """
    sizes, steps = first, dict.fromkeys(Role, first_step)
    best: tuple[Run, Sizes] | None = None
    reduced: Role | None = None  # the role whose size the last step has reduced
    for _ in range(most_runs):
        run = simulate(sizes)
        is_better = best is None or run.rank(least_frac) < best[0].rank(least_frac)
        if best is None or is_better:
            best = (run, sizes)
        misses_by_role = Counter(role for role, _ in misses(run))
        if best[0].attainment_frac < least_frac:
            sizes = _grown(sizes, run, misses_by_role, least_frac, first_step)
            continue
        if reduced is not None and not is_better:
            steps[reduced] /= 2
        if max(steps.values()) < _LAST_STEP:
            break
        # The role with the larger step; if steps are equal, the role with fewer misses.
        reduced = min(Role, key=lambda role: (-steps[role], misses_by_role[role]))
        sizes = {**best[1], reduced: best[1][reduced] / (1 + steps[reduced])}
    assert best is not None
    return best


def _grown(sizes: Sizes, run: Run, misses_by_role: Counter[Role], least_frac: float, step: float) -> Sizes:
    """The sizes of a run, with a larger size of the role that causes most misses.

    It grows by half a ``step`` at the allowed number of misses, by one step at ten times that number, and by one and a
    half steps from a hundred times on.
    """
    times_allowed = (1.0 - run.attainment_frac) / (1.0 - least_frac)
    half_steps = 1 + min(2.0, math.log10(max(1.0, times_allowed)))
    role = max(Role, key=misses_by_role.__getitem__)
    return {**sizes, role: sizes[role] * (1 + step / 2 * half_steps)}


def _allowed(scenario: Scenario, key: PoolKey, replicas: float) -> int:
    """``replicas`` rounded up to a whole number, and cut to the pool's limits."""
    pool = scenario.pools[key]
    return min(max(whole(replicas), pool.lowest_replicas), pool.highest_replicas)


def _run_causal(
    scenario: Scenario, busy_engines: Mapping[PoolKey, NDArray[np.float64]], windows: Windows, sizes: Sizes
) -> Run:
    """The run of the causal planner; ``busy_engines``: busy engines in each step of time, by pool."""
    needed = {key: busy * sizes[key.role] for key, busy in busy_engines.items()}
    return run_schedule(scenario, {key: _causal_counts(scenario, key, needed[key], windows) for key in needed})


def _causal_counts(
    scenario: Scenario, key: PoolKey, needed: NDArray[np.float64], windows: Windows
) -> list[tuple[float, int]]:
    """Ready replicas of one pool under the causal planner: (seconds, replicas) at each change.

    ``needed``: replicas that each step of time needs. The planner knows the need of a step when that step has passed.
    """
    look_back_steps, keep_steps = round(windows.look_back_s / _GRID_S), round(windows.keep_s / _GRID_S)
    start_steps = math.ceil(scenario.pools[key].start_s / _GRID_S)
    warm_up_steps = math.ceil(scenario.warm_up_s / _GRID_S)
    steps = range(len(needed))
    # Mean need in the look-back time before each step.
    means = np.array([needed[max(0, at - look_back_steps) : at].mean() if at else 0.0 for at in steps])
    # Highest of these means in the keep time.
    wanted = [float(means[max(0, at - keep_steps) : at + 1].max()) for at in steps]
    # The planner acts from the end of the warm-up on, so the replicas that it adds are ready one start later at the
    # earliest. Until then the counts are fixed, for the highest need of the warm-up.
    first = _allowed(scenario, key, float(needed[:warm_up_steps].max(initial=0.0)))
    counts = [first] * min(warm_up_steps + start_steps, len(needed))
    for at in steps[len(counts) :]:
        # A replica is ready if it was wanted one start ago and is still wanted.
        counts.append(_allowed(scenario, key, min(wanted[at - start_steps], wanted[at])))
    return changes_of(counts, _GRID_S)
