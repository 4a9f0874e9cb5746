"""A study: policies compared with bounds, with several seeds; its figures, and what its reader must know (pure)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from autoscale.sim.bounds import Bound
from autoscale.sim.checks import least_frac, notes
from autoscale.sim.compare import OracleResult
from autoscale.sim.config import BOUNDS, SimConfig
from autoscale.sim.outcome import Result
from autoscale.sim.scenario import Scenario

# Bounds whose counts are searched until enough requests meet their objectives: all but ``aggregated``.
_SEARCHED_BOUNDS = BOUNDS[:3]
# Probability with which an interval contains the true mean.
_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds of one seed; ``results``: the figures of their runs, by the names in ``BOUNDS``."""

    oracle: OracleResult
    causal: Bound
    results: Mapping[str, Result]

    def is_attained(self, name: str) -> bool:
        """Whether enough requests meet their objectives in this bound's run."""
        return self.results[name].outcome.slo_attainment_frac >= self.oracle.least_frac


@dataclass(frozen=True, kw_only=True)
class SeedResults:
    """The results with one seed: ``policies`` by name, and ``bounds``; ``None``: there are several groups."""

    seed: int
    scenario: Scenario
    bounds: Bounds | None
    policies: Mapping[str, Result]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison on one trace, and its results.

    Attributes:
        names: names of the policies.
        seeds: results of each seed.
        requests: requests of the trace before its rate is scaled.
        impossible_requests: those of them that cannot meet their TPOT objective on any engine.
    """

    config: SimConfig
    names: Sequence[str]
    seeds: Sequence[SeedResults]
    requests: int
    impossible_requests: int
    rate_scale: float

    @property
    def beat_the_oracle(self) -> list[str]:
        """Policies that beat the oracle with at least one seed (``OracleResult.is_beaten_by``).

        If there are any, the oracle's search has failed.
        """
        pairs = [(seed.bounds.oracle, seed.policies) for seed in self.seeds if seed.bounds is not None]
        return [name for name in self.names if any(oracle.is_beaten_by(results[name]) for oracle, results in pairs)]

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
            if faults := [fault for seed in self.seeds for fault in seed.policies[name].policy_faults]:
                lines.append(f"{name}: {len(faults):,} of its decisions failed; the first one: {faults[0]}")
        if len(self.seeds) > 1 and self.rate_scale == 1.0:
            lines.append(
                "at a rate scale of 1 a seed changes only how routers choose between equal replicas: arrivals are the "
                "same, so the intervals are too narrow"
            )
        return lines

    @cached_property
    def least_frac(self) -> float:
        """Share of the measured requests that must meet their objectives, for texts: that of the first seed."""
        return least_frac(self.config, self.seeds[0].scenario)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A policy's figures, one row for each seed; see ``_row``."""
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
    """The mean of every figure over the rows of all seeds."""
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


def _row(seed: SeedResults, result: Result) -> dict[str, Any]:
    """The figures of a run, and its GPU-hours as multiples of those of the oracle and of the causal bound.

    A multiple is ``None`` if the bound has too many misses: it then has too few GPUs, and every policy would look
    expensive.
    """
    row = asdict(result.outcome)
    for name in ("oracle", "causal_bound"):
        multiple = None
        if seed.bounds is not None and seed.bounds.is_attained(name):
            multiple = result.outcome.gpu_hours / seed.bounds.results[name].outcome.gpu_hours
        row[f"gpu_hours_over_{name}"] = multiple
    return row


def _mean(values: Sequence[Any]) -> Any:
    """The mean of the observed values, for dictionaries name by name; the value of a single seed keeps its type."""
    observed = [value for value in values if value is not None]
    if not observed:
        return None
    if isinstance(observed[0], dict):
        return {name: _mean([value.get(name) for value in observed]) for name in observed[0]}
    return observed[0] if len(values) == 1 else fmean(observed)
