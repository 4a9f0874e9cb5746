"""The runs of one scenario that policies are compared with: the oracle, the causal bound, fixed counts (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoscale.sim.bounds import Bound, causal_bound, smallest_static
from autoscale.sim.checks import least_frac
from autoscale.sim.config import SimConfig
from autoscale.sim.oracle import Oracle
from autoscale.sim.outcome import Result
from autoscale.sim.scenario import Scenario, run_policy, run_schedule, scenario_of
from autoscale.sim.schedule import Counts, changes_of, keys_of
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey

# Replicas at the oracle's peak. If the caller gives no rate scale, requests are multiplied until this is reached.
PEAK_REPLICAS = 40
# The most rate scales that are tried for that.
_MOST_SCALINGS = 8
# While the peak is below this share of PEAK_REPLICAS, a rough plan is enough.
_NEAR_FRAC = 0.7
# The next rate scale aims at this multiple of PEAK_REPLICAS, since whole plans have fewer replicas than rough ones.
_ABOVE_FRAC = 1.1
# The fewest simulations of the oracle's search for a trace of any length.
_LEAST_RUNS = 30
# A search that begins at the plan of another seed gets its simulations divided by this number.
_NEAR_SHARE = 3
# A difference below this share of the oracle's GPU-hours is rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class OracleResult:
    """The oracle's plan of a scenario, its run, and the smallest fixed counts.

    ``rate_scale``: factor of the number of the trace's requests. ``least_frac``: as in ``checks.least_frac``.
    """

    scenario: Scenario
    least_frac: float
    rate_scale: float
    counts: Counts
    result: Result
    static: Bound

    @property
    def peak_replicas(self) -> int:
        """The most replicas of both roles together in one bin."""
        return _peak(self.counts)

    @property
    def is_attained(self) -> bool:
        """Whether the plan meets the objectives of enough requests."""
        return self.result.outcome.slo_attainment_frac >= self.least_frac

    def is_beaten_by(self, result: Result) -> bool:
        """Whether enough requests meet their objectives in another run with fewer GPU-hours: the search has failed."""
        spent, own = result.outcome.gpu_hours, self.result.outcome.gpu_hours
        return result.outcome.slo_attainment_frac >= self.least_frac and spent < own * (1 - _ROUNDING)

    @property
    def first_counts(self) -> dict[PoolKey, int]:
        """The oracle's first counts, with which every policy begins."""
        return dict(zip(keys_of(self.scenario), self.counts[:, 0].tolist(), strict=True))


def _peak(counts: Counts) -> int:
    return int(counts.sum(axis=0).max())


def find_oracle(
    config: SimConfig,
    trace: Sequence[TraceRequest],
    *,
    rate_scale: float | None,
    seed: int = 0,
    near: OracleResult | None = None,
) -> OracleResult:
    """The oracle's plan, and the scenario that it is for.

    ``rate_scale``: multiplies the requests; ``None``: until the oracle's peak is ``PEAK_REPLICAS``. ``near``: the
    result for the same trace and rate with another seed, where the search begins; it saves two thirds of the work.

    Raises:
        ValueError: several groups, no request can meet its objective, or no rate leads to that peak.
    """
    config.check_one_group("the oracle")
    if rate_scale is not None:
        return _oracle_at(config, trace, rate_scale, seed, near)
    scale, is_rough = 1.0, True
    for _ in range(_MOST_SCALINGS):
        if is_rough:
            scenario = scenario_of(config, trace, rate_scale=scale, seed=seed)
            peak = _peak(_planner(config, scenario, least_frac(config, scenario)).rough_plan())
        else:
            result = _oracle_at(config, trace, scale, seed)
            if (peak := result.peak_replicas) >= PEAK_REPLICAS:
                return result
        is_rough = is_rough and peak < PEAK_REPLICAS * _NEAR_FRAC
        scale *= PEAK_REPLICAS * _ABOVE_FRAC / peak
    raise ValueError(f"no rate was found at which the oracle's peak is {PEAK_REPLICAS} replicas: give --rate-scale")


def _oracle_at(
    config: SimConfig, trace: Sequence[TraceRequest], rate_scale: float, seed: int, near: OracleResult | None = None
) -> OracleResult:
    scenario = scenario_of(config, trace, rate_scale=rate_scale, seed=seed)
    least = least_frac(config, scenario)
    near_static = None if near is None else near.static
    static = smallest_static(scenario, least, tpot_s=config.slo.tpot_s, near=near_static)
    planner = _planner(config, scenario, least, 1 if near is None else _NEAR_SHARE)
    counts, run = planner.plan(static.sizes, near=None if near is None else near.counts)
    return OracleResult(
        scenario=scenario,
        least_frac=least,
        rate_scale=rate_scale,
        counts=counts,
        result=Result.of(run),
        static=static,
    )


def _planner(config: SimConfig, scenario: Scenario, least: float, share: int = 1) -> Oracle:
    """The oracle with its simulations divided by ``share``."""
    most_runs = max(_LEAST_RUNS // share, config.oracle_simulated_requests // share // len(scenario.trace))
    return Oracle(scenario, least, bin_s=config.bin_s, tpot_s=config.slo.tpot_s, most_runs=most_runs)


def find_causal(config: SimConfig, oracle: OracleResult, near: Bound | None = None) -> Bound:
    """The causal bound of a scenario, or the smallest fixed counts if these are cheaper: both use no later requests.

    ``near``: the causal bound of the same trace with another seed, where the search begins.
    """
    causal = causal_bound(oracle.scenario, oracle.least_frac, tpot_s=config.slo.tpot_s, near=near)
    static = oracle.static
    is_static_better = static.result.outcome.gpu_hours < causal.result.outcome.gpu_hours or not causal.is_attained
    return static if static.is_attained and is_static_better else causal


def with_cheaper_run(oracle: OracleResult, causal: Bound) -> OracleResult:
    """The oracle with the causal bound's run, if that is cheaper.

    The oracle knows more, so a perfect one is never dearer. But its counts stay for a bin, and its search is limited.
    """
    is_cheaper = causal.result.outcome.gpu_hours < oracle.result.outcome.gpu_hours or not oracle.is_attained
    return replace(oracle, result=causal.result) if causal.is_attained and is_cheaper else oracle


def run_aggregated(config: SimConfig, oracle: OracleResult) -> Result:
    """The run of decode replicas alone on the oracle's GPUs: every prompt is computed on its decode replica."""
    scenario = oracle.scenario
    prefill, decode = keys_of(scenario)
    gpus = [scenario.pools[key].gpus_per_replica for key in (prefill, decode)]
    counts = [max(1, round(each / gpus[1])) for each in (np.array(gpus) @ oracle.counts).tolist()]
    return Result.of(run_schedule(scenario.limited_to([decode]), {decode: changes_of(counts, config.bin_s)}))


def run_named(config: SimConfig, name: str, scenario: Scenario, first: Mapping[PoolKey, int]) -> Result:
    """The run of one policy of a configuration, which begins with the counts ``first``."""
    return Result.of(run_policy(scenario, config.autoscale_config(name), first))
