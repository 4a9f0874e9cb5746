"""One trace on one virtual cluster, and what a run of it has come to (pure)."""

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from autoscale.config import AutoscaleConfig
from autoscale.controller import Controller
from autoscale.profile import EngineProfile
from autoscale.ratio import PdRatio
from autoscale.report import RequestRecord, Slo
from autoscale.sim.cluster import Saturation, VirtualCluster
from autoscale.sim.fleet import Fleet, VirtualPool
from autoscale.sim.nodes import VirtualNodes
from autoscale.sim.serve import VirtualServe
from autoscale.slo import SloConfig
from autoscale.trace import TraceRequest
from autoscale.types import Plan, PoolKey
from kvtransfer.topology import Node
from router.config import RouterConfig

# A request that has not ended so long after the last one came, and what the longest answer may take, is given up.
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Replicas that die at a time, seconds; the oldest of a pool."""

    at_s: float
    key: PoolKey
    replicas: int = 1


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated: the same for every policy.

    ``slos``: the objective of each request of the trace. ``seed``: of the routers' ties. ``warm_up_s``: a trace begins
    on empty engines and without history, so for so long the first counts stay, and nothing is measured. ``link_frac``
    and after it as in ``VirtualCluster``. ``failures`` happen to policies, not to plans that are known beforehand.
    ``nodes``: where replicas of policies must find room, with what others hold; with ``sees_nodes`` the controller
    places by them, else only Ray does.
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
    failures: Sequence[Failure] = ()
    refuse_at: Saturation | None = None
    switch_uplink_bytes_per_s: float | None = None
    nodes: Sequence[Node] | None = None
    sees_nodes: bool = True

    @property
    def end_s(self) -> float:
        """Until when GPUs are counted: the last arrival."""
        return self.trace[-1].at_s

    @property
    def patience_s(self) -> float:
        """How long after the last arrival requests may still end: an answer takes as long as its objective lets it."""
        return _PATIENCE_S + max(
            request.output_tokens * slo.tpot_s for request, slo in zip(self.trace, self.slos, strict=True)
        )

    @property
    def measured_trace(self) -> Sequence[TraceRequest]:
        """The requests that arrive after the warm-up."""
        return self.trace[bisect_left(self.trace, self.warm_up_s, key=attrgetter("at_s")) :]

    def cluster(self, slo: SloConfig | None = None) -> VirtualCluster:
        """A cluster without replicas, to which the trace is on its way."""
        cluster = VirtualCluster(
            self.profiles,
            self.router,
            random.Random(self.seed),
            link_frac=self.link_frac,
            uplink_bytes_per_s=self.uplink_bytes_per_s,
            switch_uplink_bytes_per_s=self.switch_uplink_bytes_per_s,
            prefix_block_tokens=self.prefix_block_tokens,
            refuse_at=self.refuse_at,
            slo=slo,
        )
        cluster.submit(self.trace)
        return cluster


@dataclass(frozen=True, kw_only=True)
class Run:
    """How every request of a scenario fared, and which replicas there were.

    ``pd_ratio``: the configured one, which a plan's decision may replace.
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
        """Their objectives."""
        return self.scenario.slos[len(self.scenario.slos) - len(self.measured) :]

    @cached_property
    def is_met(self) -> list[bool]:
        """Of each request that is measured, whether it ended within its objectives."""
        return [slo.is_met(record) for slo, record in zip(self.slos, self.measured, strict=True)]

    @property
    def attainment_frac(self) -> float:
        """The share of requests that ended within their objectives."""
        return sum(self.is_met) / len(self.is_met)

    @cached_property
    def gpu_hours(self) -> float:
        """From asked for to gone, between the warm-up and the last arrival."""
        return sum(self.fleet.gpu_hours(self.scenario.warm_up_s, self.scenario.end_s).values())


def run_policy(scenario: Scenario, config: AutoscaleConfig, counts: Mapping[PoolKey, int]) -> Run:
    """A scenario under the controller, from these counts on."""
    cluster = scenario.cluster(config.slo)
    nodes = None if scenario.nodes is None else VirtualNodes(scenario.nodes, random.Random(scenario.seed))
    serve = VirtualServe(
        cluster,
        Controller(config),
        scenario.pools,
        held_s=scenario.warm_up_s,
        nodes=nodes,
        sees_nodes=scenario.sees_nodes,
    )
    serve.start(counts)
    for failure in scenario.failures:
        cluster.at(failure.at_s, serve.fail, failure.key, failure.replicas)
    _run(scenario, cluster, serve.fleet)
    return Run(
        scenario=scenario,
        records=cluster.records(),
        fleet=serve.fleet,
        plans=serve.plans,
        pd_ratio=config.pd_ratio,
    )


def run_schedule(scenario: Scenario, steps: Mapping[PoolKey, Sequence[tuple[float, int]]]) -> Run:
    """A scenario with counts that are known beforehand.

    Args:
        scenario: the scenario.
        steps: of each pool from when on how many replicas are ready; the first at 0.
    """
    cluster = scenario.cluster()
    fleet = Fleet(cluster, scenario.pools, lambda: None)

    def route() -> None:
        for key in steps:
            cluster.route(key, [life.replica_id for life in fleet.running(key)])

    def step(key: PoolKey, count: int) -> None:
        missing = count - len(fleet.running(key))
        if missing > 0:
            fleet.begin(key, missing, asked_s=cluster.now_s - scenario.pools[key].start_s)
        else:
            fleet.scale(key, count)
        route()

    for key, ((_, first), *later) in steps.items():
        fleet.begin(key, first)
        for at_s, count in later:
            cluster.at(at_s, step, key, count)
    route()
    _run(scenario, cluster, fleet)
    return Run(scenario=scenario, records=cluster.records(), fleet=fleet)


def _run(scenario: Scenario, cluster: VirtualCluster, fleet: Fleet) -> None:
    """Let time pass until all requests have ended; after the last arrival slowly, since a controller ticks for ever."""
    cluster.run(min(scenario.warm_up_s, scenario.end_s))
    fleet.begin_measuring()
    cluster.run(scenario.end_s)
    fleet.end_measuring()
    until_s, end_s = scenario.end_s, scenario.end_s + scenario.patience_s
    while not cluster.is_done and until_s < end_s:
        until_s += 5.0
        cluster.run(until_s)
    cluster.give_up()
