"""The simulations of a study: policies and bounds with every seed, in a pool of processes.

For each seed the search for the oracle comes first: the policies begin with its first counts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass
from typing import Any

from autoscale.sim.bounds import Bound
from autoscale.sim.checks import impossible_requests
from autoscale.sim.compare import OracleResult, find_causal, find_oracle, run_aggregated, run_named, with_cheaper_run
from autoscale.sim.config import BOUNDS, SimConfig
from autoscale.sim.outcome import Result
from autoscale.sim.scenario import Scenario, scenario_of
from autoscale.sim.study import Bounds, SeedResults, Study, is_smallest_static
from autoscale.traces.trace import TraceRequest


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
    starter = _Starter(config=config, trace=trace, names=names, pool=pool)
    start = starter.start_with_oracle if config.is_one_pair else starter.start_groups
    scale, started = start(rate_scale, list(seeds))
    running = {run: name for each in started for name, run in each.runs()}
    for done, run in enumerate(as_completed(running), start=1):
        run.result()  # raises the error of a simulation that failed
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
    """The bounds of one seed: the oracle, whose search has ended, and the simulations that have started."""

    oracle: OracleResult
    causal: Future[Bound]
    aggregated: Future[Result]

    def results(self) -> Bounds:
        """The bounds; waits for the simulations."""
        causal, static = self.causal.result(), self.oracle.static.result
        # The oracle's search does not try all plans: the causal bound's run may be cheaper.
        oracle = with_cheaper_run(self.oracle, causal)
        results = (oracle.result, causal.result, static, self.aggregated.result())
        return Bounds(oracle=oracle, causal=causal, results=dict(zip(BOUNDS, results, strict=True)))


@dataclass(frozen=True, kw_only=True)
class _SeedSimulations:
    """The simulations of one seed that have started.

    ``bounds`` is ``None`` if there are several groups. ``policies``: runs by name. Bounds are simulated without
    failures of replicas. So if the configuration has none, the bound's run is also that of the smallest fixed counts as
    a policy, and ``policies`` leaves it out.
    """

    seed: int
    scenario: Scenario
    bounds: _BoundSimulations | None
    policies: Mapping[str, Future[Result]]

    def runs(self) -> list[tuple[str, Future[Any]]]:
        """All simulations, each with the name that ``on_step`` gets."""
        runs: list[tuple[str, Future[Any]]] = list(self.policies.items())
        if self.bounds is not None:
            runs += [("causal bound", self.bounds.causal), ("aggregated", self.bounds.aggregated)]
        return runs

    def results(self, names: Sequence[str]) -> SeedResults:
        """The results, with the policies in the order of ``names``; waits for the simulations."""
        policies = {name: run.result() for name, run in self.policies.items()}
        bounds = None if self.bounds is None else self.bounds.results()
        if bounds is not None:
            policies.setdefault("static", bounds.results["smallest_static"])  # if ``policies`` leaves it out
        policies = {name: policies[name] for name in names}
        return SeedResults(seed=self.seed, scenario=self.scenario, bounds=bounds, policies=policies)


@dataclass(frozen=True, kw_only=True)
class _Starter:
    """Starts the simulations of a study; both public methods return the rate scale and each seed's simulations."""

    config: SimConfig
    trace: Sequence[TraceRequest]
    names: Sequence[str]
    pool: Executor

    def start_groups(self, rate_scale: float | None, seeds: Sequence[int]) -> tuple[float, list[_SeedSimulations]]:
        """Start the policies of every seed, if there are several groups or none with prefill."""
        if rate_scale is None:
            self.config.check_one_pair("--rate-scale auto")
        if any(is_smallest_static(self.config, name) for name in self.names):
            self.config.check_one_pair("the smallest static counts")
        scale, started = rate_scale or 1.0, []
        for seed in seeds:
            scenario = scenario_of(self.config, self.trace, rate_scale=scale, seed=seed)
            counts = {key: limits.lowest_replicas for key, limits in scenario.pools.items()}
            runs = {name: self.pool.submit(run_named, self.config, name, scenario, counts) for name in self.names}
            started.append(_SeedSimulations(seed=seed, scenario=scenario, bounds=None, policies=runs))
        return scale, started

    def start_with_oracle(self, rate_scale: float | None, seeds: Sequence[int]) -> tuple[float, list[_SeedSimulations]]:
        """Start the bounds and policies of every seed, if there is one group.

        The searches of later seeds begin at the oracle and the causal bound of the first seed.
        """
        config, trace, submit = self.config, self.trace, self.pool.submit
        first, *later = seeds
        first_oracle = submit(find_oracle, config, trace, rate_scale=rate_scale, seed=first).result()
        scale = first_oracle.rate_scale
        first_causal = submit(find_causal, config, first_oracle)
        started = [self._start_seed(first, first_oracle, first_causal)]
        searches = {
            submit(find_oracle, config, trace, rate_scale=scale, seed=seed, other_seed=first_oracle): seed
            for seed in later
        }
        for search in as_completed(searches):
            causal = submit(find_causal, config, search.result(), first_causal.result())
            started.append(self._start_seed(searches[search], search.result(), causal))
        return scale, started

    def _start_seed(self, seed: int, oracle: OracleResult, causal: Future[Bound]) -> _SeedSimulations:
        """Start the policies and the aggregated engines of one seed, whose oracle has been found."""
        config, pool, policies = self.config, self.pool, dict[str, Future[Result]]()
        aggregated = pool.submit(run_aggregated, config, oracle)
        scenario, smallest = oracle.scenario, oracle.static.fixed_counts
        for name in self.names:
            if not is_smallest_static(config, name):
                policies[name] = pool.submit(run_named, config, name, scenario, oracle.first_counts)
            elif config.failures:  # the bound's run had none, so these counts are simulated again
                # A configuration that gives ``static`` these counts; only this run uses it.
                fixed = config.model_copy(update={"policies": {"static": {"policy": smallest}}})
                counts = {key: smallest[str(key.role)] for key in scenario.pools}
                policies[name] = pool.submit(run_named, fixed, name, scenario, counts)
        bounds = _BoundSimulations(oracle=oracle, causal=causal, aggregated=aggregated)
        return _SeedSimulations(seed=seed, scenario=scenario, bounds=bounds, policies=policies)
