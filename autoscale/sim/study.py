"""A whole comparison: seeds, bounds and policies, simulated in a pool of processes that the caller gives."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from statistics import fmean, stdev
from typing import Any

from autoscale.sim.bounds import Bound
from autoscale.sim.checks import impossible_requests, least_frac, notes
from autoscale.sim.compare import OracleResult, find_causal, find_oracle, no_dearer, run_aggregated, run_named
from autoscale.sim.config import BOUNDS, SimConfig
from autoscale.sim.outcome import Result
from autoscale.sim.scenario import Scenario, scenario_of
from autoscale.traces.trace import TraceRequest

# The bounds whose counts were searched until enough requests met their objectives.
_PLANNED = BOUNDS[:3]
# Name of the causal bound's simulation.
_CAUSAL = "causal bound"
# Probability that an interval of a mean holds it.
_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The runs that policies on one group are compared with."""

    oracle: OracleResult
    causal: Bound
    results: Mapping[str, Result]

    def is_attained(self, name: str) -> bool:
        """Whether a run attains enough."""
        return self.results[name].outcome.slo_attainment_frac >= self.oracle.least_frac


@dataclass(frozen=True, kw_only=True)
class Seed:
    """Everything that was simulated with one seed; ``bounds``: ``None`` with several groups."""

    seed: int
    scenario: Scenario
    bounds: Bounds | None
    policies: Mapping[str, Result]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison on one trace."""

    config: SimConfig
    names: Sequence[str]
    seeds: Sequence[Seed]
    requests: int
    impossible_requests: int
    rate_scale: float

    @property
    def beat_the_oracle(self) -> list[str]:
        """Policies that attained enough with fewer GPU-hours than the oracle: its search has failed then."""
        pairs = [(seed.bounds.oracle, seed.policies) for seed in self.seeds if seed.bounds is not None]
        return [name for name in self.names for oracle, runs in pairs if oracle.is_beaten_by(runs[name])]

    @property
    def flags(self) -> list[str]:
        """What a reader must know before believing the figures, a sentence each."""
        lines = []
        if not self.bounds:
            lines.append("the oracle and the bounds plan one group only: with several groups they are left out")
        lines += notes(self.config, self.seeds[0].scenario.measured_trace)
        for name in _PLANNED:
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
        """The share of the measured requests that must meet their objectives, with the first seed."""
        return least_frac(self.config, self.seeds[0].scenario)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A policy's figures with each seed, with GPU-hours as multiples of the oracle's and the causal bound's."""
        return [_row(seed, seed.policies[name]) for seed in self.seeds]

    @property
    def bounds(self) -> list[Bounds]:
        """The bounds of each seed; empty with several groups."""
        return [seed.bounds for seed in self.seeds if seed.bounds is not None]

    def bound_rows(self) -> dict[str, list[dict[str, Any]]]:
        """The bounds' figures with each seed, by name."""
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

    Policies on one group begin with the oracle's first counts, on several groups with the pools' fewest replicas. The
    first seed's oracle and causal bound are where the searches of the other seeds begin.

    ``rate_scale``: as in ``find_oracle``. ``on_step``: called with the name of a simulation that has ended, how many
    have ended, and how many there are.

    Raises:
        ValueError: a name is unknown, no request can meet its objective, or several groups where one is needed.
    """
    first, *others = list(seeds)
    begin = partial(_begin, config, names, pool)
    if len(config.groups) > 1:
        if rate_scale is None:
            config.check_one_group("--rate-scale auto")
        if "static" in names and "static" not in config.policies:
            config.check_one_group("the smallest static counts")
        scale = rate_scale or 1.0
        begun = [begin(seed, scenario_of(config, trace, rate_scale=scale, seed=seed)) for seed in (first, *others)]
    else:
        leading = pool.submit(find_oracle, config, trace, rate_scale=rate_scale, seed=first).result()
        scale = leading.rate_scale
        begun = [begin(first, leading.scenario, leading)]
        searches = {
            pool.submit(find_oracle, config, trace, rate_scale=scale, seed=seed, near=leading): seed for seed in others
        }
        for search in as_completed(searches):
            near = begun[0].runs[_CAUSAL].result()
            begun.append(begin(searches[search], search.result().scenario, search.result(), near))
    running = {run: name for each in begun for name, run in each.runs.items()}
    for done, run in enumerate(as_completed(running), start=1):
        run.result()
        on_step(running[run], done, len(running))
    return Study(
        config=config,
        names=names,
        seeds=[each.ended(names) for each in sorted(begun, key=lambda each: each.seed)],
        requests=len(trace),
        impossible_requests=impossible_requests(config, trace),
        rate_scale=scale,
    )


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """The simulations of one seed that have begun, by name; ``oracle``: ``None`` with several groups."""

    seed: int
    scenario: Scenario
    oracle: OracleResult | None
    runs: Mapping[str, Future[Any]]

    def ended(self, names: Sequence[str]) -> Seed:
        """Their results, when all have ended."""
        results, bounds = {name: run.result() for name, run in self.runs.items()}, None
        if self.oracle is not None:
            causal, static = results[_CAUSAL], self.oracle.static.result
            oracle = no_dearer(self.oracle, causal)
            runs = (oracle.result, causal.result, static, results["aggregated"])
            bounds = Bounds(oracle=oracle, causal=causal, results=dict(zip(BOUNDS, runs, strict=True)))
            results.setdefault("static", static)
        policies = {name: results[name] for name in names}
        return Seed(seed=self.seed, scenario=self.scenario, bounds=bounds, policies=policies)


def _begin(
    config: SimConfig,
    names: Sequence[str],
    pool: Executor,
    seed: int,
    scenario: Scenario,
    oracle: OracleResult | None = None,
    near: Bound | None = None,
) -> _Begun:
    """Begin the bounds and the policies of one seed; ``near``: the causal bound of another seed."""
    runs: dict[str, Future[Any]] = {}
    if oracle is None:
        first = {key: limits.lowest_replicas for key, limits in scenario.pools.items()}
    else:
        first = oracle.first_counts
        runs[_CAUSAL] = pool.submit(find_causal, config, oracle, near)
        runs["aggregated"] = pool.submit(run_aggregated, config, oracle)
    for name in names:
        named, counts = config, first
        if oracle is not None and name == "static" and name not in config.policies:
            if not config.failures:  # the search for the smallest counts has made this very run
                continue
            smallest = oracle.static.counts
            named = config.model_copy(update={"policies": {"static": {"policy": smallest}}})
            counts = {key: smallest[str(key.role)] for key in first}
        runs[name] = pool.submit(run_named, named, name, scenario, counts)
    return _Begun(seed=seed, scenario=scenario, oracle=oracle, runs=runs)


def _row(seed: Seed, result: Result) -> dict[str, Any]:
    row = asdict(result.outcome)
    for name in ("oracle", "causal_bound"):
        over = None  # a bound that does not attain enough would make policies look dear
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
