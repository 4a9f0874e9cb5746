"""One trace on one virtual cluster, and its runs: under a policy, or with a schedule of counts (pure)."""

import random
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import attrgetter

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.engines.profile import EngineProfile
from autoscale.ratio import PdRatio
from autoscale.report import RequestRecord, Slo
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.config import SimConfig, SimFailureConfig
from autoscale.sim.fleet import Fleet, VirtualPool
from autoscale.sim.serve import VirtualServe
from autoscale.slo import SloConfig
from autoscale.traces.trace import TraceRequest, scale_rate
from autoscale.types import Plan, PoolKey
from kvtransfer.topology import Role
from router.admission_config import AdmissionConfig
from router.config import RouterConfig

# Time from the last arrival until requests that have not ended are given up, seconds. The time of the longest answer at
# its TPOT objective is added.
_PATIENCE_S = 600.0
# Time between two checks, after the last arrival, whether all requests have ended, seconds.
_CHECK_S = 5.0
# The most requests, after scaling, that fit into memory.
_MOST_REQUESTS = 20_000_000


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A trace, the objectives of its requests, and a cluster; the same for every policy.

    Attributes:
        slos: the objectives of each request of the trace.
        seed: chooses the random numbers with which routers break ties.
        warm_up_s: time at the start in which the first counts stay and nothing is measured, because engines are empty.
        link_frac, uplink_bytes_per_s, prefix_block_tokens: as in ``VirtualCluster``.
        failures: replicas that die under policies, but not in ``run_schedule``.
        admission: rules of the endpoint under policies; ``None``, and in ``run_schedule``: no request is refused.
    """

    trace: Sequence[TraceRequest]
    slos: Sequence[Slo]
    profiles: Mapping[PoolKey, EngineProfile]
    pools: Mapping[PoolKey, VirtualPool]
    router: RouterConfig
    seed: int = 0
    warm_up_s: float = 60.0
    link_frac: float = 1.0
    uplink_bytes_per_s: float | None = None
    prefix_block_tokens: int | None = None
    failures: Sequence[SimFailureConfig] = ()
    admission: AdmissionConfig | None = None

    @property
    def end_s(self) -> float:
        """Time of the last arrival, seconds; GPUs are counted until then."""
        return self.trace[-1].at_s

    @property
    def patience_s(self) -> float:
        """Time from the last arrival until requests that have not ended are given up, seconds."""
        return _PATIENCE_S + max(
            request.output_tokens * slo.tpot_s for request, slo in zip(self.trace, self.slos, strict=True)
        )

    @property
    def measured_trace(self) -> Sequence[TraceRequest]:
        """The requests that arrive after the warm-up."""
        return self.trace[bisect_left(self.trace, self.warm_up_s, key=attrgetter("at_s")) :]

    def limited_to(self, keys: Collection[PoolKey]) -> "Scenario":
        """The scenario with these pools alone."""
        profiles = {key: profile for key, profile in self.profiles.items() if key in keys}
        return replace(self, profiles=profiles, pools={key: pool for key, pool in self.pools.items() if key in keys})

    def cluster(self, slo: SloConfig | None = None) -> VirtualCluster:
        """A cluster without replicas, at which the trace will arrive.

        ``slo``: as in ``VirtualCluster``; ``None``: no policy runs, and no request is refused.
        """
        cluster = VirtualCluster(
            self.profiles,
            self.router,
            random.Random(self.seed),
            link_frac=self.link_frac,
            uplink_bytes_per_s=self.uplink_bytes_per_s,
            prefix_block_tokens=self.prefix_block_tokens,
            slo=slo,
            admission=None if slo is None else self.admission,
            capacities={key: (pool.capacity, pool.prompt_capacity) for key, pool in self.pools.items()},
        )
        cluster.submit(self.trace)
        return cluster


@dataclass(frozen=True, kw_only=True)
class Run:
    """One simulation of a scenario: the timeline of every request, and all replicas.

    ``plans``: (seconds, plan) of each decision; empty without a policy. ``pd_ratio``: the configured ratio; a plan's
    decision may have another one.
    """

    scenario: Scenario
    records: Sequence[RequestRecord]
    fleet: Fleet
    plans: Sequence[tuple[float, Plan]] = ()
    pd_ratio: PdRatio | None = None

    @cached_property
    def measured(self) -> Sequence[RequestRecord]:
        """The requests that arrived after the warm-up."""
        return self.records[bisect_left(self.records, self.scenario.warm_up_s, key=attrgetter("sent_s")) :]

    @property
    def slos(self) -> Sequence[Slo]:
        """The objectives of the measured requests, which are the last ones of the trace."""
        return self.scenario.slos[len(self.scenario.slos) - len(self.measured) :]

    @cached_property
    def is_met(self) -> list[bool]:
        """For each measured request, whether it ended within its objectives."""
        return [slo.is_met(record) for slo, record in zip(self.slos, self.measured, strict=True)]

    @cached_property
    def attainment_frac(self) -> float:
        """Share of the measured requests that ended within their objectives."""
        return sum(self.is_met) / len(self.is_met)

    @cached_property
    def gpu_hours(self) -> float:
        """GPU-hours of all replicas from the warm-up to the last arrival; those that start or drain count too."""
        return sum(self.fleet.gpu_hours(self.scenario.warm_up_s, self.scenario.end_s).values())

    def rank(self, least_frac: float) -> tuple[bool, float]:
        """A sort key, the best run first.

        Runs with at least this attainment come first, by rising GPU-hours. The others follow by falling attainment.
        """
        if self.attainment_frac < least_frac:
            return True, -self.attainment_frac
        return False, self.gpu_hours


def scenario_of(
    config: SimConfig, trace: Sequence[TraceRequest], *, rate_scale: float = 1.0, seed: int = 0
) -> Scenario:
    """A trace, with its rate scaled, on the cluster of a configuration.

    A request's TTFT objective follows from its time on idle engines of the slowest group, whichever group serves it.
    ``seed``: chooses the copies of requests, and breaks the routers' ties.

    Raises:
        ValueError: the scaled trace has no requests, or too many.
    """
    if (most := len(trace) * rate_scale) > _MOST_REQUESTS:
        raise ValueError(
            f"{len(trace):,} requests x {rate_scale:g} are {most:,.0f}, more than {_MOST_REQUESTS:,}: give a smaller "
            "rate scale, or a shorter part of the trace"
        )
    scaled = trace if rate_scale == 1.0 else scale_rate(trace, rate_scale, random.Random(seed))
    if not scaled:
        raise ValueError(f"{len(trace):,} requests x {rate_scale:g} leave none: give a larger rate scale")
    return Scenario(
        trace=scaled,
        slos=_objectives(config, scaled),
        profiles=config.profiles(),
        pools=config.pools(),
        router=config.router,
        seed=seed,
        warm_up_s=config.warm_up_s,
        link_frac=config.groups[0].link_frac,  # links are the same in every group
        uplink_bytes_per_s=config.groups[0].uplink_bytes_per_s,
        prefix_block_tokens=config.prefix_block_tokens,
        failures=config.failures,
        admission=config.admission_config,
    )


def _objectives(config: SimConfig, trace: Sequence[TraceRequest]) -> list[Slo]:
    engines_by_group = [{role: pool.profile for role, pool in group.pools.items()} for group in config.groups]
    # Links are the same in every group.
    link_frac, uplink_bytes_per_s = config.groups[0].link_frac, config.groups[0].uplink_bytes_per_s

    @cache
    def slo(input_tokens: int) -> Slo:
        unloaded_s = max(
            unloaded_ttft_s(
                input_tokens, engines, config.router, link_frac=link_frac, uplink_bytes_per_s=uplink_bytes_per_s
            )
            for engines in engines_by_group
        )
        ttft_s = max(config.slo.ttft_least_s, config.slo.ttft_unloaded_factor * unloaded_s)
        return Slo(ttft_s=ttft_s, tpot_s=config.slo.tpot_s)

    return [slo(request.input_tokens) for request in trace]


def unloaded_ttft_s(
    input_tokens: int,
    profiles: Mapping[Role, EngineProfile],
    router: RouterConfig,
    *,
    link_frac: float = 1.0,
    uplink_bytes_per_s: float | None = None,
) -> float:
    """Time to first token of a request that is alone on one replica of each role, seconds.

    The link is as in ``VirtualCluster``.
    """
    cluster = VirtualCluster(
        {PoolKey("g0", role): profile for role, profile in profiles.items()},
        router,
        random.Random(0),
        link_frac=link_frac,
        uplink_bytes_per_s=uplink_bytes_per_s,
    )
    request = TraceRequest(at_s=0.0, input_tokens=input_tokens, output_tokens=1)
    (record,) = cluster.replay([request], {PoolKey("g0", role): 1 for role in profiles})
    assert record.ttft_s is not None
    return record.ttft_s


def run_policy(scenario: Scenario, config: AutoscaleConfig, counts: Mapping[PoolKey, int]) -> Run:
    """The run of a scenario under the controller; ``counts``: ready replicas of each pool at the start."""
    cluster, controller = scenario.cluster(config.slo), Controller(config)
    serve = VirtualServe(cluster, controller, scenario.pools, decides_from_s=scenario.warm_up_s)
    return run_serve(scenario, serve, counts)


def run_serve(scenario: Scenario, serve: VirtualServe, counts: Mapping[PoolKey, int]) -> Run:
    """The run of a scenario under the controller of ``serve``; ``counts``: as in ``run_policy``.

    ``serve``: has the scenario's cluster, and has not started.
    """
    serve.start(counts)
    first_group = next(iter(scenario.pools)).group
    for each in scenario.failures:
        serve.cluster.at(each.at_s, serve.fail, PoolKey(each.group or first_group, each.role), each.replicas)
    _run(scenario, serve.cluster, serve.fleet)
    return Run(
        scenario=scenario,
        records=serve.cluster.records(),
        fleet=serve.fleet,
        plans=serve.plans,
        pd_ratio=serve.controller.config.ratio,
    )


def run_schedule(scenario: Scenario, schedule: Mapping[PoolKey, Sequence[tuple[float, int]]]) -> Run:
    """The run of a scenario with scheduled counts.

    ``schedule``: by pool, (seconds, ready replicas from then on); the first entry of each pool is at 0.
    A pool that is left out has no replicas.
    """
    cluster = scenario.cluster()
    fleet = Fleet(cluster, scenario.pools, lambda: None)

    def route() -> None:
        for key in schedule:
            cluster.route(key, [life.replica_id for life in fleet.running(key)])

    def change(key: PoolKey, count: int) -> None:
        missing = count - len(fleet.running(key))
        if missing > 0:
            # A new replica is ready now, and its GPUs count from one start before.
            fleet.begin(key, missing, requested_s=cluster.now_s - scenario.pools[key].start_s)
        else:
            fleet.scale(key, count)
        route()

    for key, ((_, first), *later) in schedule.items():
        fleet.begin(key, first)
        for at_s, count in later:
            cluster.at(at_s, change, key, count)
    route()
    _run(scenario, cluster, fleet)
    return Run(scenario=scenario, records=cluster.records(), fleet=fleet)


def _run(scenario: Scenario, cluster: VirtualCluster, fleet: Fleet) -> None:
    """Run the cluster until all requests have ended, or are given up."""
    cluster.run(min(scenario.warm_up_s, scenario.end_s))
    fleet.begin_measuring()
    cluster.run(scenario.end_s)
    fleet.end_measuring()
    until_s, end_s = scenario.end_s, scenario.end_s + scenario.patience_s
    while not cluster.is_done and until_s < end_s:
        until_s += _CHECK_S  # a controller ticks for ever, so the cluster never runs out of events
        cluster.run(until_s)
    cluster.give_up()
