"""Policies side by side on one scenario, with the oracle, the causal bound and fixed counts beside them (pure)."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from autoscale.report import Slo
from autoscale.sim.bounds import Bound, causal_bound, smallest_static
from autoscale.sim.config import SimConfig
from autoscale.sim.oracle import ClairvoyantPlan, Oracle
from autoscale.sim.outcome import Outcome, outcome
from autoscale.sim.profiled_range import ProfiledRange
from autoscale.sim.scenario import Failure, Run, Scenario, run_policy, run_schedule
from autoscale.sim.static import unloaded_ttft_s
from autoscale.trace import TraceRequest, scale_rate
from autoscale.types import PoolKey
from kvtransfer.topology import Role

# With ``auto``, rates are scaled until the oracle's peak is so many replicas.
PEAK_REPLICAS = 40
_MOST_SCALINGS = 8
# What still fits into memory: requests after scaling, and bins of the oracle's counts, four months of 15 s.
_MOST_REQUESTS, _MOST_BINS = 20_000_000, 700_000
# Plans that are simulated at least, however long the trace; beside a plan for another seed, this part of the work.
_LEAST_RUNS, _NEAR_SHARE = 30, 3
# Longer without a request at the beginning is most likely a clock that did not begin at 0.
_IDLE_S = 60.0
# The first plans are rough, until the peak is this near; what is aimed at, since the last ones have fewer replicas.
_NEAR_FRAC, _ABOVE_FRAC = 0.7, 1.1

# Less than this below the oracle's GPU-hours is rounding.
_ROUNDING = 1e-6

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run summed up, and how many replicas served over time: (seconds, prefill, decode) each."""

    outcome: Outcome
    timeline: Sequence[tuple[float, int, int]]


@dataclass(frozen=True, kw_only=True)
class BoundResult:
    """A bound, with the sizes that it was found at, and ``looks_s`` as in ``Bound``."""

    result: Result
    sizes: Mapping[Role, float]
    is_attained: bool
    looks_s: tuple[float, float] | None

    @property
    def counts(self) -> dict[str, int]:
        """Of fixed counts, how many of each role."""
        return {str(role): int(size) for role, size in self.sizes.items()}


@dataclass(frozen=True, kw_only=True)
class OracleResult:
    """The oracle's plan of a scenario, and the smallest fixed counts.

    ``rate_scale``: how many times the trace's requests it has. ``least_frac``: see the function.
    """

    scenario: Scenario
    least_frac: float
    rate_scale: float
    plan: ClairvoyantPlan
    result: Result
    static: BoundResult

    @property
    def is_attained(self) -> bool:
        """Whether any counts meet the objective."""
        return self.result.outcome.slo_attainment_frac >= self.least_frac

    def is_beaten_by(self, result: Result) -> bool:
        """Whether a run attained as much with fewer GPU-hours, which says that this is no oracle's."""
        spent, its = result.outcome.gpu_hours, self.result.outcome.gpu_hours
        return result.outcome.slo_attainment_frac >= self.least_frac and spent < its * (1 - _ROUNDING)

    @property
    def first_counts(self) -> dict[PoolKey, int]:
        """What every policy begins with: the oracle's first counts."""
        return {key: self.plan.counts[key.role][0] for key in self.scenario.pools}


def scenario_of(
    config: SimConfig, trace: Sequence[TraceRequest], *, rate_scale: float = 1.0, seed: int = 0
) -> Scenario:
    """A trace on the cluster of a configuration.

    What a request takes on idle engines is that of the slowest group: its objective is the same wherever it goes.

    Args:
        config: cluster and objectives.
        trace: in order of time.
        rate_scale: how many times as many requests.
        seed: of the copies of requests and of the routers' ties.

    Raises:
        ValueError: that many requests are none, or too many.
    """
    if (most := len(trace) * rate_scale) > _MOST_REQUESTS:
        raise ValueError(
            f"{len(trace):,} requests x {rate_scale:g} are {most:,.0f}, more than {_MOST_REQUESTS:,}: give a smaller "
            "rate scale, or a shorter part of the trace"
        )
    scaled = trace if rate_scale == 1.0 else scale_rate(trace, rate_scale, random.Random(seed))
    if not scaled:
        raise ValueError(f"{len(trace):,} requests x {rate_scale:g} leave none: give a larger rate scale")
    engines = [{role: group.pool(role).profile for role in Role} for group in config.groups]
    link_frac, uplink_bytes_per_s = config.groups[0].link_frac, config.groups[0].uplink_bytes_per_s  # of every group

    @cache
    def slo(input_tokens: int) -> Slo:
        alone_s = max(
            unloaded_ttft_s(
                input_tokens, each, config.router, link_frac=link_frac, uplink_bytes_per_s=uplink_bytes_per_s
            )
            for each in engines
        )
        ttft_s = max(config.slo.ttft_least_s, config.slo.ttft_unloaded_factor * alone_s)
        return Slo(ttft_s=ttft_s, tpot_s=config.slo.tpot_s)

    return Scenario(
        trace=scaled,
        slos=[slo(request.input_tokens) for request in scaled],
        profiles=config.profiles(),
        pools=config.pools(),
        router=config.router,
        seed=seed,
        warm_up_s=config.warm_up_s,
        link_frac=link_frac,
        uplink_bytes_per_s=uplink_bytes_per_s,
        prefix_block_tokens=config.prefix_block_tokens,
        failures=[
            Failure(at_s=each.at_s, key=PoolKey(each.group or config.groups[0].name, each.role), replicas=each.replicas)
            for each in config.failures
        ],
    )


def check_lengths(config: SimConfig, trace: Sequence[TraceRequest], path: Path, *, is_strict: bool = False) -> None:
    """Refuse requests that an engine of a group cannot hold and, if strict, those beyond what was profiled.

    Raises:
        ValueError: names the file, and the line of the first such request.
    """
    profiles = config.profiles()
    most = min(profile.kv_tokens for profile in profiles.values())
    block = max(profile.block_tokens for key, profile in profiles.items() if key.role is Role.DECODE)
    known = ProfiledRange.of(profiles)
    beyond = []
    for request in trace:
        total = request.input_tokens + request.output_tokens
        if total + block > most:
            raise ValueError(
                f"{path}: line {request.line}: {request.input_tokens} + {request.output_tokens} tokens do not fit the "
                f"KV of an engine, {most} tokens: choose another profile, or leave it out"
            )
        if not known.covers(request.input_tokens, request.output_tokens):
            beyond.append(request)
    if is_strict and beyond:
        first = beyond[0]
        raise ValueError(
            f"{path}: {len(beyond)} of {len(trace)} requests are beyond the profile, the first in line {first.line}: "
            f"{first.input_tokens} + {first.output_tokens} tokens: it covers prompts of {known.low_tokens} to "
            f"{known.high_tokens} tokens and contexts up to {known.longest_tokens}; profile more, or leave --strict out"
        )


def check_trace(config: SimConfig, trace: Sequence[TraceRequest], path: Path, *, is_strict: bool = False) -> None:
    """The same, and refuse a trace that ends with the warm-up, or that lasts too long.

    Raises:
        ValueError: names the file.
    """
    check_lengths(config, trace, path, is_strict=is_strict)
    if trace[-1].at_s > _MOST_BINS * config.bin_s:
        raise ValueError(
            f"{path}: line {trace[-1].line}: the trace lasts {trace[-1].at_s:.6g} s, more than {_MOST_BINS:,} bins of "
            f"{config.bin_s:g} s: are its timestamps seconds? Else give a part of it with --start and --duration"
        )
    if trace[-1].at_s <= config.warm_up_s:
        raise ValueError(
            f"{path}: no request arrives after the warm-up of {config.warm_up_s:g} s: give a longer trace or a shorter "
            "warm_up_s"
        )


def impossible_requests(config: SimConfig, trace: Iterable[TraceRequest]) -> int:
    """How many requests miss their TPOT objective even alone on an engine, whichever group's."""
    engines = [group.pool(Role.DECODE).profile.decode for group in config.groups]
    return sum(
        request.output_tokens > 1
        and all(e.seconds_for(1, request.input_tokens + request.output_tokens / 2) > config.slo.tpot_s for e in engines)
        for request in trace
    )


def least_frac(config: SimConfig, scenario: Scenario) -> float:
    """The share of a scenario's measured requests that must meet their objectives: what is asked, of those that can.

    Raises:
        ValueError: no measured request can, or none is measured.
    """
    measured = scenario.measured_trace
    if not measured:
        raise ValueError(
            f"none of {len(scenario.trace):,} requests arrives after the warm-up of {scenario.warm_up_s:g} s: give a "
            "longer trace, a larger rate scale or a shorter warm_up_s"
        )
    impossible = impossible_requests(config, measured)
    if impossible == len(measured):
        raise ValueError(
            f"slo.tpot_s is {config.slo.tpot_s:g}: none of the {len(measured)} measured requests can meet it, even "
            "alone on an engine: give a longer one, or other engines"
        )
    return config.slo.attainment_frac * (1.0 - impossible / len(measured))


def notes(config: SimConfig, trace: Sequence[TraceRequest]) -> list[str]:
    """What a reader must know about these requests before believing figures about them."""
    profiles = config.profiles()
    known = ProfiledRange.of(profiles)
    lines = []
    if (idle_s := trace[0].at_s - config.warm_up_s) > _IDLE_S:
        lines.append(
            f"the first request comes {idle_s:,.0f} s after the warm-up: GPU-hours of that time count too; --start "
            "leaves it out"
        )
    if beyond := sum(not known.covers(request.input_tokens, request.output_tokens) for request in trace):
        lines.append(
            f"{beyond:,} of {len(trace):,} requests are longer or shorter than what was profiled; their times are "
            "extrapolated, and --strict refuses them"
        )
    prefills = [profile.prefill for key, profile in profiles.items() if key.role is Role.PREFILL]
    if derived := sum(any(each.is_derived(request.input_tokens) for each in prefills) for request in trace):
        lines.append(f"{derived:,} of {len(trace):,} requests have prompts whose times were derived, not measured")
    for profile in {each.name: each for each in profiles.values()}.values():
        if profile.max_running > profile.decode.batch[-1]:
            lines.append(
                f"{profile.name}: engines run up to {profile.max_running} requests at once, of which "
                f"{profile.decode.batch[-1]} were profiled; the times of larger batches are extrapolated"
            )
    if impossible := impossible_requests(config, trace):
        lines.append(
            f"{impossible:,} of {len(trace):,} requests cannot meet their TPOT objective even alone on an engine: the "
            "share that is asked for is of the others"
        )
    return lines


def find_oracle(
    config: SimConfig,
    trace: Sequence[TraceRequest],
    *,
    rate_scale: float | None,
    seed: int = 0,
    near: OracleResult | None = None,
    say: Say = silent,
) -> OracleResult:
    """The oracle's plan, and the scenario that it is for.

    Args:
        config: cluster and objectives.
        trace: in order of time.
        rate_scale: how many times as many requests; ``None``: until the oracle's peak is 40 replicas.
        seed: see ``scenario_of``.
        near: what was found on the same trace at that rate with another seed, to begin with: a third of the work.
        say: told what happens.

    Raises:
        ValueError: several groups, no request can meet its objective, or no rate makes the plan take so many replicas.
    """
    config.check_one_group("the oracle")
    slo = config.slo

    def planner(scenario: Scenario, least: float) -> Oracle:
        return Oracle(
            scenario,
            attainment_frac=least,
            bin_s=config.bin_s,
            tpot_s=slo.tpot_s,
            simulated_requests=config.oracle_simulated_requests // (1 if near is None else _NEAR_SHARE),
            least_runs=_LEAST_RUNS // (1 if near is None else _NEAR_SHARE),
            on_run=lambda line: say(f"oracle: {line}"),
        )

    scale = 1.0 if rate_scale is None else rate_scale
    is_rough = rate_scale is None
    for _ in range(_MOST_SCALINGS):
        scenario = scenario_of(config, trace, rate_scale=scale, seed=seed)
        least = least_frac(config, scenario)
        if is_rough:
            plan, _run = planner(scenario, least).plan(is_rough=True)
        else:
            static = smallest_static(
                scenario,
                least,
                tpot_s=slo.tpot_s,
                near=None if near is None or not near.static.is_attained else near.static.sizes,
                on_run=lambda line: say(f"fixed counts: {line}"),
            )
            fixed = {role: int(size) for role, size in static.sizes.items()}
            plan, run = planner(scenario, least).plan(fixed, near=None if near is None else near.plan)
            if rate_scale is not None or plan.peak_replicas >= PEAK_REPLICAS:
                return OracleResult(
                    scenario=scenario,
                    least_frac=least,
                    rate_scale=scale,
                    plan=plan,
                    result=result_of(config, run),
                    static=_bound_result(config, static),
                )
        say(f"rate x {scale:.4g}: the oracle's peak is {plan.peak_replicas} replicas")
        is_rough = is_rough and plan.peak_replicas < PEAK_REPLICAS * _NEAR_FRAC
        scale *= PEAK_REPLICAS * _ABOVE_FRAC / plan.peak_replicas
    raise ValueError(f"no rate was found at which the oracle's peak is {PEAK_REPLICAS} replicas: give --rate-scale")


def find_causal(
    config: SimConfig, oracle: OracleResult, near: BoundResult | None = None, say: Say = silent
) -> BoundResult:
    """The causal bound of a scenario; never above the smallest fixed counts, which need no look ahead either.

    ``near``: that of the same trace with another seed, to begin with.
    """
    scenario = oracle.scenario
    bound = causal_bound(
        scenario,
        oracle.least_frac,
        tpot_s=config.slo.tpot_s,
        near=None if near is None or near.looks_s is None else (near.sizes, near.looks_s),
        on_run=lambda line: say(f"causal bound: {line}"),
    )
    found, static = _bound_result(config, bound), oracle.static
    is_static_better = static.result.outcome.gpu_hours < found.result.outcome.gpu_hours or not found.is_attained
    return static if static.is_attained and is_static_better else found


def no_dearer(oracle: OracleResult, causal: BoundResult) -> OracleResult:
    """The oracle with the causal bound's run where that is cheaper: whoever knows more needs no more.

    The oracle's search is of counts that stay for a bin, and ends when its runs are spent; so that can happen.
    """
    is_cheaper = causal.result.outcome.gpu_hours < oracle.result.outcome.gpu_hours or not oracle.is_attained
    return replace(oracle, result=causal.result) if causal.is_attained and is_cheaper else oracle


def _bound_result(config: SimConfig, bound: Bound) -> BoundResult:
    return BoundResult(
        result=result_of(config, bound.run),
        sizes=bound.sizes,
        is_attained=bound.is_attained,
        looks_s=bound.looks_s,
    )


def run_aggregated(config: SimConfig, oracle: OracleResult) -> Result:
    """The oracle's GPUs as engines without a prefill pool: every prompt is computed where it decodes."""
    scenario, plan = oracle.scenario, oracle.plan
    keys = {key.role: key for key in scenario.pools}
    gpus = {role: scenario.pools[keys[role]].gpus_per_replica for role in Role}
    key = keys[Role.DECODE]
    pairs = zip(plan.counts[Role.PREFILL], plan.counts[Role.DECODE], strict=True)
    counts = [max(1, round((p * gpus[Role.PREFILL] + d * gpus[Role.DECODE]) / gpus[Role.DECODE])) for p, d in pairs]
    alone = replace(scenario, profiles={key: scenario.profiles[key]}, pools={key: scenario.pools[key]})
    steps = [(at * plan.bin_s, n) for at, n in enumerate(counts) if not at or n != counts[at - 1]]
    return result_of(config, run_schedule(alone, {key: steps}))


def run_named(config: SimConfig, name: str, scenario: Scenario, first: Mapping[PoolKey, int]) -> Result:
    """One policy of a configuration, from these counts on."""
    return result_of(config, run_policy(scenario, config.autoscale_config(name), first))


def result_of(config: SimConfig, run: Run) -> Result:
    """A run summed up at the configuration's prices."""
    costs = {PoolKey(group.name, role): group.pool(role).cost_per_gpu_hour for group in config.groups for role in Role}
    return Result(outcome=outcome(run, {key: costs[key] for key in run.scenario.pools}), timeline=_timeline(run))


def _timeline(run: Run) -> list[tuple[float, int, int]]:
    """Replicas that run, at every change."""
    edges: list[tuple[float, Role, int]] = []
    for life in run.fleet.lives:
        if life.ready_s is not None:
            edges.append((life.ready_s, life.key.role, 1))
            if life.stopped_s is not None:
                edges.append((life.stopped_s, life.key.role, -1))
    counts, points = dict.fromkeys(Role, 0), dict[float, tuple[float, int, int]]()
    for at_s, role, way in sorted(edges, key=lambda edge: edge[0]):
        counts[role] += way
        points[at_s] = (at_s, counts[Role.PREFILL], counts[Role.DECODE])
    return list(points.values())
