"""A comparison of policies with bounds: the simulations for every seed, in a pool of processes, and their figures."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from autoscale.sim.bounds import Bound
from autoscale.sim.checks import impossible_requests, least_frac, notes
from autoscale.sim.compare import OracleResult, find_causal, find_oracle, no_dearer, run_aggregated, run_named
from autoscale.sim.config import BOUNDS, SimConfig
from autoscale.sim.outcome import Result
from autoscale.sim.scenario import Scenario, scenario_of
from autoscale.traces.trace import TraceRequest

# Bounds whose counts are searched until enough requests meet their objectives.
_SEARCHED_BOUNDS = BOUNDS[:3]
# Probability that an interval contains the true mean.
_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds of one seed; ``results``: their runs, by the names in ``BOUNDS``."""

    oracle: OracleResult
    causal: Bound
    results: Mapping[str, Result]

    def is_attained(self, name: str) -> bool:
        """Whether enough requests meet their objectives in this bound's run."""
        return self.results[name].outcome.slo_attainment_frac >= self.oracle.least_frac


@dataclass(frozen=True, kw_only=True)
class SeedResults:
    """The results with one seed: ``policies`` by name, and ``bounds``, which are ``None`` with several groups."""

    seed: int
    scenario: Scenario
    bounds: Bounds | None
    policies: Mapping[str, Result]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison on one trace, and its results; ``names``: names of the policies."""

    config: SimConfig
    names: Sequence[str]
    seeds: Sequence[SeedResults]
    requests: int
    impossible_requests: int
    rate_scale: float

    @property
    def beat_the_oracle(self) -> list[str]:
        """Policies that met the goal with fewer GPU-hours than the oracle; if there are any, its search has failed."""
        pairs = [(seed.bounds.oracle, seed.policies) for seed in self.seeds if seed.bounds is not None]
        return [name for name in self.names for oracle, runs in pairs if oracle.is_beaten_by(runs[name])]

    @property
    def flags(self) -> list[str]:
        """What a reader must know before trusting the figures, one sentence each."""
        lines = []
        if not self.bounds:
            lines.append("the oracle and the bounds plan one group only: with several groups they are left out")
        lines += notes(self.config, self.seeds[0].scenario.measured_trace)
        for name in _SEARCHED_BOUNDS:
            if not all(each.is_attained(name) for each in self.bounds):
                what = name.replace("_", " ")
                lines.append(f"{what}: no counts were found that attain {self.least_frac:.2%}; the nearest are shown")
        end_s = self.seeds[0].scenario.end_s
        if late := [failure.at_s for failure in self.config.failures if failure.at_s > end_s]:
            lines.append(f"a failure at {late[0]:g} s comes after the last request, at {end_s:g} s: it changes nothing")
        for name in self.names:
            if failed := sum(seed.policies[name].outcome.failed_requests for seed in self.seeds):
                lines.append(
                    f"{name}: {failed:,} requests failed or had not ended {self.seeds[0].scenario.patience_s:,.0f} s "
                    "after the last one came; latencies are those of the other requests"
                )
        if len(self.seeds) > 1 and self.rate_scale == 1.0:
            lines.append(
                "at a rate scale of 1 seeds change only the routers' ties: intervals leave out the chance of arrivals"
            )
        return lines

    @cached_property
    def least_frac(self) -> float:
        """Share of the first seed's measured requests that must meet their objectives."""
        return least_frac(self.config, self.seeds[0].scenario)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A policy's figures, one row for each seed; GPU-hours also as multiples of those of two bounds."""
        return [_row(seed, seed.policies[name]) for seed in self.seeds]

    @property
    def bounds(self) -> list[Bounds]:
        """The bounds of each seed; empty with several groups."""
        return [seed.bounds for seed in self.seeds if seed.bounds is not None]

    def bound_rows(self) -> dict[str, list[dict[str, Any]]]:
        """Each bound's figures by its name, one row for each seed; empty with several groups."""
        pairs = [(seed, seed.bounds.results) for seed in self.seeds if seed.bounds is not None]
        return {name: [_row(seed, results[name]) for seed, results in pairs] for name in (BOUNDS if pairs else ())}


def mean_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of every figure over seeds."""
    return {name: _mean([row[name] for row in rows]) for name in rows[0]}


def interval_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """The 95 % interval of the mean of every numeric figure (Student's t); empty for one seed."""
    if len(rows) < 2:
        return {}
    from scipy.stats import t as student_t  # its import takes a second

    intervals = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if all(isinstance(value, int | float) for value in values):
            half = student_t.ppf(0.5 + _CONFIDENCE / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
            intervals[name] = (fmean(values) - half, fmean(values) + half)
    return intervals


def is_smallest_static(config: SimConfig, name: str) -> bool:
    """Whether a name means the smallest fixed counts: it is ``static``, and the configuration gives it no counts."""
    return name == "static" and name not in config.policies


def run_study(
    config: SimConfig,
    trace: Sequence[TraceRequest],
    names: Sequence[str],
    *,
    rate_scale: float | None,
    seeds: Iterable[int],
    pool: Executor,
    on_step: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Study:
    """Simulate policies and bounds with every seed, in a pool of processes.

    With one group, policies begin with the oracle's first counts. With several groups there is no oracle: policies
    begin with the fewest replicas that the pools allow.

    ``rate_scale``: as in ``find_oracle``. ``on_step``: called when a simulation has ended, with its name, the number of
    ended simulations, and the number of all simulations.

    Raises:
        ValueError: a name is unknown, no request can meet its objective, or several groups where one is needed.
    """
    start = _start_groups if len(config.groups) > 1 else _start_with_oracle
    scale, started = start(config, trace, names, rate_scale, list(seeds), pool)
    running = {run: name for each in started for name, run in each.runs()}
    for done, run in enumerate(as_completed(running), start=1):
        run.result()
        on_step(running[run], done, len(running))
    return Study(
        config=config,
        names=names,
        seeds=[each.results(names) for each in sorted(started, key=lambda each: each.seed)],
        requests=len(trace),
        impossible_requests=impossible_requests(config, trace),
        rate_scale=scale,
    )


@dataclass(frozen=True, kw_only=True)
class _BoundSimulations:
    """The simulations of one seed's bounds that have started; the search of ``oracle`` has ended."""

    oracle: OracleResult
    causal: Future[Bound]
    aggregated: Future[Result]

    def results(self) -> Bounds:
        """The bounds, when the simulations have ended."""
        causal, static = self.causal.result(), self.oracle.static.result
        oracle = no_dearer(self.oracle, causal)
        results = (oracle.result, causal.result, static, self.aggregated.result())
        return Bounds(oracle=oracle, causal=causal, results=dict(zip(BOUNDS, results, strict=True)))


@dataclass(frozen=True, kw_only=True)
class _SeedSimulations:
    """The simulations of one seed that have started; ``bounds``: ``None`` with several groups.

    ``policies``: by name, without the smallest fixed counts if no replica fails: their result is that of the bound.
    """

    seed: int
    scenario: Scenario
    bounds: _BoundSimulations | None
    policies: Mapping[str, Future[Result]]

    def runs(self) -> list[tuple[str, Future[Any]]]:
        """All simulations with the names that ``on_step`` gets."""
        runs: list[tuple[str, Future[Any]]] = list(self.policies.items())
        if self.bounds is not None:
            runs += [("causal bound", self.bounds.causal), ("aggregated", self.bounds.aggregated)]
        return runs

    def results(self, names: Sequence[str]) -> SeedResults:
        """The results when all simulations have ended, with the policies in the order of ``names``."""
        policies = {name: run.result() for name, run in self.policies.items()}
        bounds = None if self.bounds is None else self.bounds.results()
        if bounds is not None:
            policies.setdefault("static", bounds.results["smallest_static"])
        policies = {name: policies[name] for name in names}
        return SeedResults(seed=self.seed, scenario=self.scenario, bounds=bounds, policies=policies)


def _start_groups(
    config: SimConfig,
    trace: Sequence[TraceRequest],
    names: Sequence[str],
    rate_scale: float | None,
    seeds: Sequence[int],
    pool: Executor,
) -> tuple[float, list[_SeedSimulations]]:
    """Start the policies of every seed with several groups; the rate scale, and the simulations."""
    if rate_scale is None:
        config.check_one_group("--rate-scale auto")
    if any(is_smallest_static(config, name) for name in names):
        config.check_one_group("the smallest static counts")
    scale, started = rate_scale or 1.0, []
    for seed in seeds:
        scenario = scenario_of(config, trace, rate_scale=scale, seed=seed)
        counts = {key: limits.lowest_replicas for key, limits in scenario.pools.items()}
        runs = {name: pool.submit(run_named, config, name, scenario, counts) for name in names}
        started.append(_SeedSimulations(seed=seed, scenario=scenario, bounds=None, policies=runs))
    return scale, started


def _start_with_oracle(
    config: SimConfig,
    trace: Sequence[TraceRequest],
    names: Sequence[str],
    rate_scale: float | None,
    seeds: Sequence[int],
    pool: Executor,
) -> tuple[float, list[_SeedSimulations]]:
    """Start the bounds and policies of every seed with one group; the rate scale, and the simulations.

    The searches of later seeds begin at the oracle and the causal bound of the first seed.
    """
    first, *later = seeds
    leading = pool.submit(find_oracle, config, trace, rate_scale=rate_scale, seed=first).result()
    scale = leading.rate_scale
    bounds = _start_bounds(config, pool, leading, None)
    started = [_start_seed(config, names, pool, first, bounds)]
    searches = {
        pool.submit(find_oracle, config, trace, rate_scale=scale, seed=seed, near=leading): seed for seed in later
    }
    for search in as_completed(searches):
        later_bounds = _start_bounds(config, pool, search.result(), bounds.causal.result())
        started.append(_start_seed(config, names, pool, searches[search], later_bounds))
    return scale, started


def _start_bounds(config: SimConfig, pool: Executor, oracle: OracleResult, near: Bound | None) -> _BoundSimulations:
    """Start the bounds of one seed; ``near``: the causal bound of another seed, where the search begins."""
    causal, aggregated = pool.submit(find_causal, config, oracle, near), pool.submit(run_aggregated, config, oracle)
    return _BoundSimulations(oracle=oracle, causal=causal, aggregated=aggregated)


def _start_seed(
    config: SimConfig, names: Sequence[str], pool: Executor, seed: int, bounds: _BoundSimulations
) -> _SeedSimulations:
    """Start the policies of one seed beside its bounds."""
    oracle, policies = bounds.oracle, dict[str, Future[Result]]()
    scenario, smallest = oracle.scenario, oracle.static.fixed_counts
    for name in names:
        if not is_smallest_static(config, name):
            policies[name] = pool.submit(run_named, config, name, scenario, oracle.first_counts)
        elif config.failures:  # without failures, the search for the smallest counts has simulated them
            fixed = config.model_copy(update={"policies": {"static": {"policy": smallest}}})
            counts = {key: smallest[str(key.role)] for key in scenario.pools}
            policies[name] = pool.submit(run_named, fixed, name, scenario, counts)
    return _SeedSimulations(seed=seed, scenario=scenario, bounds=bounds, policies=policies)


def _row(seed: SeedResults, result: Result) -> dict[str, Any]:
    row = asdict(result.outcome)
    for name in ("oracle", "causal_bound"):
        over = None  # beside a bound with too many misses, policies would look dear
        if seed.bounds is not None and seed.bounds.is_attained(name):
            over = result.outcome.gpu_hours / seed.bounds.results[name].outcome.gpu_hours
        row[f"gpu_hours_over_{name}"] = over
    return row


def _mean(values: Sequence[Any]) -> Any:
    observed = [value for value in values if value is not None]
    if not observed:
        return None
    if isinstance(observed[0], dict):
        return {name: _mean([value.get(name) for value in observed]) for name in observed[0]}
    return observed[0] if len(values) == 1 else fmean(observed)
