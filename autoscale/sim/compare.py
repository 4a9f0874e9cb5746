"""The bounds of one scenario, with which policies are compared, and the run of a policy (pure).

The oracle is a planner that knows the whole trace (``oracle``). The causal bound is a planner that knows only requests
that have arrived (``bounds``). Aggregated engines are decode replicas alone.
"""

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
# The most rate scales that are tried until PEAK_REPLICAS is reached.
_MOST_SCALINGS = 8
# While the peak is below this share of PEAK_REPLICAS, it is taken from the oracle's rough plan, without its search.
_ROUGH_FRAC = 0.7
# The next rate scale aims at this multiple of PEAK_REPLICAS, since a search ends with fewer replicas than a rough plan.
_AIM_FACTOR = 1.1
# Smallest limit of the simulations of an oracle's search. With a long trace, oracle_simulated_requests would allow
# fewer. See also _OTHER_SEED_DIVISOR.
_LEAST_RUNS = 30
# If a search begins at the plan of another seed, its number of simulations is divided by this number. Such a search
# needs fewer: seeds change only copies of requests and ties.
_OTHER_SEED_DIVISOR = 3
# A difference below this share of the oracle's GPU-hours is rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class OracleResult:
    """The oracle's plan of a scenario, its run, and the smallest fixed counts.

    Attributes:
        least_frac: share of the measured requests that must meet their objectives.
        rate_scale: factor of the number of the trace's requests.
        counts: the plan, replicas by role (rows) and bin of time (columns).
        result: the run of the plan, or a cheaper run: see ``with_cheaper_run``.
        static: the smallest fixed counts.
    """

    scenario: Scenario
    least_frac: float
    rate_scale: float
    counts: Counts
    result: Result
    static: Bound

    @property
    def peak_replicas(self) -> int:
        """The most replicas of both roles together in one bin of the plan."""
        return _peak(self.counts)

    @property
    def is_attained(self) -> bool:
        """Whether enough requests meet their objectives in its run."""
        return self.result.outcome.slo_attainment_frac >= self.least_frac

    def is_beaten_by(self, result: Result) -> bool:
        """Whether enough requests meet their objectives in another run, and with fewer GPU-hours.

        The oracle knows more than any policy, so such a run shows that the search for it has failed.
        """
        other_gpu_hours, own_gpu_hours = result.outcome.gpu_hours, self.result.outcome.gpu_hours
        is_cheaper = other_gpu_hours < own_gpu_hours * (1 - _ROUNDING)
        return result.outcome.slo_attainment_frac >= self.least_frac and is_cheaper

    @property
    def first_counts(self) -> dict[PoolKey, int]:
        """Replicas of each pool in the first bin; every policy begins with them."""
        return dict(zip(keys_of(self.scenario), self.counts[:, 0].tolist(), strict=True))


def _peak(counts: Counts) -> int:
    """The most replicas of both roles together (the rows) in one bin (a column)."""
    return int(counts.sum(axis=0).max())


def find_oracle(
    config: SimConfig,
    trace: Sequence[TraceRequest],
    *,
    rate_scale: float | None,
    seed: int = 0,
    other_seed: OracleResult | None = None,
) -> OracleResult:
    """The oracle's plan, and the scenario that it is for.

    ``rate_scale``: factor of the number of requests; ``None``: the scale at which the oracle's peak is at least
    ``PEAK_REPLICAS`` is searched. ``other_seed``: the result for the same trace and rate with another seed. The search
    begins at it, and takes about a third of the simulations.

    Raises:
        ValueError: several groups, no request can meet its objective, or no rate leads to that peak.
    """
    config.check_one_pair("the oracle")
    if rate_scale is not None:
        return _oracle_at(config, trace, rate_scale, seed, other_seed)
    # Rough plans take few simulations. The first ones bring the peak near PEAK_REPLICAS; then whole searches follow.
    scale, is_rough = 1.0, True
    for _ in range(_MOST_SCALINGS):
        if is_rough:
            scenario = scenario_of(config, trace, rate_scale=scale, seed=seed)
            peak = _peak(_planner(config, scenario, least_frac(config, scenario)).rough_plan())
        else:
            result = _oracle_at(config, trace, scale, seed)
            if (peak := result.peak_replicas) >= PEAK_REPLICAS:
                return result
        is_rough = is_rough and peak < PEAK_REPLICAS * _ROUGH_FRAC
        scale *= PEAK_REPLICAS * _AIM_FACTOR / peak
    raise ValueError(f"no rate was found at which the oracle's peak is {PEAK_REPLICAS} replicas: give --rate-scale")


def _oracle_at(
    config: SimConfig,
    trace: Sequence[TraceRequest],
    rate_scale: float,
    seed: int,
    other_seed: OracleResult | None = None,
) -> OracleResult:
    """The result of a whole search at one rate scale; ``other_seed``: as in ``find_oracle``."""
    scenario = scenario_of(config, trace, rate_scale=rate_scale, seed=seed)
    least = least_frac(config, scenario)
    other_static = other_counts = None
    divisor = 1
    if other_seed is not None:
        other_static, other_counts = other_seed.static, other_seed.counts
        divisor = _OTHER_SEED_DIVISOR
    static = smallest_static(scenario, least, tpot_s=config.slo.tpot_s, other_seed=other_static)
    planner = _planner(config, scenario, least, divisor)
    counts, run = planner.plan(static.sizes, other_seed=other_counts)
    return OracleResult(
        scenario=scenario,
        least_frac=least,
        rate_scale=rate_scale,
        counts=counts,
        result=Result.of(run),
        static=static,
    )


def _planner(config: SimConfig, scenario: Scenario, least: float, divisor: int = 1) -> Oracle:
    """The oracle of a scenario; ``divisor``: its number of simulations is divided by this number."""
    affordable_runs = config.oracle_simulated_requests // divisor // len(scenario.trace)
    most_runs = max(_LEAST_RUNS // divisor, affordable_runs)
    return Oracle(scenario, least, bin_s=config.bin_s, tpot_s=config.slo.tpot_s, most_runs=most_runs)


def find_causal(config: SimConfig, oracle: OracleResult, other_seed: Bound | None = None) -> Bound:
    """The causal bound of a scenario, or the smallest fixed counts if their run is cheaper.

    Fixed counts may take its place: they do not follow later requests either. Both have sizes chosen in hindsight. If
    only one of the two runs has enough requests that meet their objectives, that one is returned.

    ``other_seed``: the causal bound of the same trace with another seed, where the search begins.
    """
    causal = causal_bound(oracle.scenario, oracle.least_frac, tpot_s=config.slo.tpot_s, other_seed=other_seed)
    static = oracle.static
    if not static.is_attained:
        return causal
    if not causal.is_attained:
        return static
    return static if static.result.outcome.gpu_hours < causal.result.outcome.gpu_hours else causal


def with_cheaper_run(oracle: OracleResult, causal: Bound) -> OracleResult:
    """The oracle with the causal bound's run, if that is cheaper or the oracle's own run has too many misses.

    A causal run with too many misses is not taken.

    The oracle knows more, so the run of a perfect oracle is never dearer. But its search is limited, and its counts
    stay for a whole bin, while those of the causal bound may change every few seconds. ``counts`` remain the oracle's
    plan: policies begin with the first of them.
    """
    if not causal.is_attained:
        return oracle
    is_cheaper = causal.result.outcome.gpu_hours < oracle.result.outcome.gpu_hours
    return replace(oracle, result=causal.result) if is_cheaper or not oracle.is_attained else oracle


def run_aggregated(config: SimConfig, oracle: OracleResult) -> Result:
    """The run of decode replicas alone on the oracle's GPUs: every prompt is computed on its decode replica."""
    scenario = oracle.scenario
    prefill, decode = keys_of(scenario)
    decode_gpus = scenario.pools[decode].gpus_per_replica
    # The oracle's GPUs in each bin: the product of GPUs by role and replicas by role and bin.
    gpus_by_bin = np.array([scenario.pools[prefill].gpus_per_replica, decode_gpus]) @ oracle.counts
    counts = [max(1, round(gpus / decode_gpus)) for gpus in gpus_by_bin.tolist()]
    return Result.of(run_schedule(scenario.limited_to([decode]), {decode: changes_of(counts, config.bin_s)}))


def run_named(config: SimConfig, name: str, scenario: Scenario, first: Mapping[PoolKey, int]) -> Result:
    """The run of one policy of a configuration, which begins with the counts ``first``."""
    return Result.of(run_policy(scenario, config.autoscale_config(name), first))
