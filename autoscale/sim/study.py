"""A whole comparison: seeds, bounds and policies, side by side in processes (pure but for the processes given)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from autoscale.sim.compare import (
    BoundResult,
    OracleResult,
    Result,
    find_causal,
    find_oracle,
    impossible_requests,
    least_frac,
    no_dearer,
    notes,
    run_aggregated,
    run_named,
    scenario_of,
)
from autoscale.sim.config import SimConfig
from autoscale.sim.scenario import Scenario
from autoscale.trace import TraceRequest
from autoscale.types import PoolKey

_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What policies on one group are held against."""

    oracle: OracleResult
    causal: BoundResult
    aggregated: Result

    @property
    def results(self) -> dict[str, Result]:
        """Each by its name."""
        return {
            "oracle": self.oracle.result,
            "causal_bound": self.causal.result,
            "smallest_static": self.oracle.static.result,
            "aggregated": self.aggregated,
        }

    @property
    def are_attained(self) -> dict[str, bool]:
        """Whether each attains what it must."""
        return {
            "oracle": self.oracle.is_attained,
            "causal_bound": self.causal.is_attained,
            "smallest_static": self.oracle.static.is_attained,
        }


@dataclass(frozen=True, kw_only=True)
class Seed:
    """Everything that was simulated with one seed; no ``bounds`` where there are several groups."""

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
        """Policies that attained what the oracle had to with fewer GPU-hours, which says that it is none."""
        return [
            name
            for name in self.names
            for seed in self.seeds
            if seed.bounds is not None and seed.bounds.oracle.is_beaten_by(seed.policies[name])
        ]

    @property
    def flags(self) -> list[str]:
        """What a reader must know before believing the figures."""
        lines = []
        if not self.bounds:
            lines.append("the oracle and the bounds plan one group, so there are none, nor multiples of them")
        lines += notes(self.config, self.seeds[0].scenario.measured_trace)
        for name in self.bounds[0].are_attained if self.bounds else ():
            if not all(each.are_attained[name] for each in self.bounds):
                what = name.replace("_", " ")
                lines.append(f"{what}: no counts were found that attain {self.least_frac:.2%}; the nearest are shown")
        end_s = self.seeds[0].scenario.end_s
        if late := [failure.at_s for failure in self.config.failures if failure.at_s > end_s]:
            lines.append(f"a failure at {late[0]:g} s comes after the last request, at {end_s:g} s: it changes nothing")
        for name in self.names:
            if failed := sum(seed.policies[name].outcome.failed_requests for seed in self.seeds):
                lines.append(
                    f"{name}: {failed:,} requests failed or had not ended {self.seeds[0].scenario.patience_s:,.0f} s "
                    "after the last one came; latencies are of the others"
                )
        if len(self.seeds) > 1 and self.rate_scale == 1.0:
            lines.append("at a rate scale of 1 seeds change the routers' ties alone: intervals say nothing of arrivals")
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
        """Those of each seed; none where there are several groups."""
        return [seed.bounds for seed in self.seeds if seed.bounds is not None]

    def bound_rows(self) -> dict[str, list[dict[str, Any]]]:
        """The same of what they are held against."""
        names = self.bounds[0].results if self.bounds else ()
        return {
            name: [_row(seed, seed.bounds.results[name]) for seed in self.seeds if seed.bounds is not None]
            for name in names
        }


def mean_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of every figure over seeds."""
    return {name: _mean([row[name] for row in rows]) for name in rows[0]}


def interval_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """The 95 % interval of the mean of every figure that is a number (Student's t); nothing for one seed."""
    if len(rows) < 2:
        return {}
    from scipy.stats import t as student_t  # takes a second, which one seed need not pay

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
    on_step: Callable[[str, int, int | None], None] = lambda line, done, total: None,
) -> Study:
    """Simulate all of it.

    Policies on one group begin with the oracle's first counts, on several with the fewest replicas that each may have.

    Args:
        config: cluster, objectives and policies.
        trace: in order of time.
        names: the policies.
        rate_scale: how many times as many requests; ``None``: until the oracle's peak is 40 replicas.
        seeds: one repetition each.
        pool: where simulations run.
        on_step: told what was done last, how many simulations are done, and of how many.

    Raises:
        ValueError: a name is unknown, no request can meet its objective, or several groups are asked for what takes
            one.
    """
    first, *others = seeds = list(seeds)
    parts: dict[Future[Any], tuple[int, str]] = {}
    scenarios: dict[int, Scenario] = {}
    oracles: dict[int, OracleResult] = {}

    def begin(seed: int, scenario: Scenario, counts: Mapping[PoolKey, int], static: BoundResult | None) -> None:
        scenarios[seed] = scenario
        for name in names:
            its, first_counts = config, counts
            if static is not None and name == "static" and name not in config.policies:
                if not config.failures:  # that run is there already
                    continue
                its = config.model_copy(update={"policies": {"static": {"policy": static.counts}}})
                first_counts = {key: static.counts[str(key.role)] for key in counts}
            parts[pool.submit(run_named, its, name, scenario, first_counts)] = (seed, name)

    def begin_with(oracle: OracleResult, seed: int, near: BoundResult | None = None) -> Future[BoundResult]:
        oracles[seed] = oracle
        causal = pool.submit(find_causal, config, oracle, near)
        parts[causal] = (seed, "causal bound")
        parts[pool.submit(run_aggregated, config, oracle)] = (seed, "aggregated")
        begin(seed, oracle.scenario, oracle.first_counts, oracle.static)
        return causal

    if len(config.groups) > 1:
        if rate_scale is None:
            config.check_one_group("--rate-scale auto")
        if "static" in names and "static" not in config.policies:
            config.check_one_group("the smallest static counts")
        scale = rate_scale or 1.0
        fewest = {key: virtual.lowest_replicas for key, virtual in config.pools().items()}
        for seed in seeds:
            begin(seed, scenario_of(config, trace, rate_scale=scale, seed=seed), fewest, None)
    else:
        leading = pool.submit(find_oracle, config, trace, rate_scale=rate_scale, seed=first).result()
        scale = leading.rate_scale
        beside_first = begin_with(leading, first)
        pending = {
            pool.submit(find_oracle, config, trace, rate_scale=scale, seed=seed, near=leading): seed for seed in others
        }
        for future in as_completed(pending):
            begin_with(future.result(), pending[future], beside_first.result())
    found: dict[tuple[int, str], Any] = {}
    for done, future in enumerate(as_completed(parts), start=1):
        found[parts[future]] = future.result()
        on_step(parts[future][1], done, len(parts))
    results = []
    for seed, scenario in sorted(scenarios.items()):
        bounds = None
        if seed in oracles:
            causal = found[seed, "causal bound"]
            bounds = Bounds(
                oracle=no_dearer(oracles[seed], causal), causal=causal, aggregated=found[seed, "aggregated"]
            )
            found.setdefault((seed, "static"), oracles[seed].static.result)
        policies = {name: found[seed, name] for name in names}
        results.append(Seed(seed=seed, scenario=scenario, bounds=bounds, policies=policies))
    return Study(
        config=config,
        names=names,
        seeds=results,
        requests=len(trace),
        impossible_requests=impossible_requests(config, trace),
        rate_scale=scale,
    )


def _row(seed: Seed, result: Result) -> dict[str, Any]:
    row = asdict(result.outcome)
    for name in ("oracle", "causal_bound"):
        over = None  # nor of a bound that does not attain what it must: it would say that fewer would do
        if seed.bounds is not None and seed.bounds.are_attained[name]:
            over = result.outcome.gpu_hours / seed.bounds.results[name].outcome.gpu_hours
        row[f"gpu_hours_over_{name}"] = over
    return row


def _mean(values: Sequence[Any]) -> Any:
    seen = [value for value in values if value is not None]
    if not seen:
        return None
    if isinstance(seen[0], dict):
        return {name: _mean([value.get(name) for value in seen]) for name in seen[0]}
    return seen[0] if len(values) == 1 else fmean(seen)
