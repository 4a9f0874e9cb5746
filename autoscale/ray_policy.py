"""The application-level Serve policy: makes snapshots from Serve's contexts, and counts for Serve from plans.

Nothing is decided here. Serve calls the policy several times a second inside its controller, without timeout or
protection. So each call returns the counts of the last plans at once, and counts stay after any error. A cycle (a tick
of each service) runs in a thread of its own, and the coordinator is called in another.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

# The module, not its object: see ``ray_victims``.
from autoscale import ray_victims
from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.cycle import lacking_types, tick_all
from autoscale.decide.decision_log import decision_line, is_news, is_traffic_due, traffic_line
from autoscale.decide.possible import possible_nodes, refused_types, with_savings
from autoscale.decide.slots import Slots
from autoscale.decide.supply import start_nodes
from autoscale.decide.tuning import Pools
from autoscale.extension import error_text
from autoscale.observe.collected import Collected
from autoscale.observe.endpoint_report import figures_of
from autoscale.observe.overrides import with_collected
from autoscale.observe.ray_collectors import Sources
from autoscale.observe.ray_topology import read_nodes, read_places
from autoscale.observe.signals import Reports, Signals
from autoscale.policies.heteroscale import observed_signals
from autoscale.ray_coordinator_client import Ticked
from autoscale.ray_forecasts import Forecasts
from autoscale.ray_link import Link
from autoscale.topology_config import TopologyConfig
from autoscale.types import ENDPOINT, ControllerState, Places, Plan, PoolKey, PoolStats, Snapshot
from kvtransfer.topology import Node, Topology
from router.ray_coordinator import is_alive

logger = logging.getLogger("ray.serve")

# Longest wait for replicas that an earlier controller admitted, seconds; then decisions are made without them.
_RECOVERY_S = 60.0
# Each cause of a failure is logged once; after this number of causes, no more are logged.
_MOST_COMPLAINTS = 100
# Number of calls, the latest ones, from which the reported 99th percentile of their duration is taken.
_MEASURED_CALLS = 1000

# Serve's autoscaling context of each deployment, by Serve's id of the deployment.
Contexts = Mapping[Any, Any]
# Serve's context of each pool, and its series of metrics: points by metric and replica.
Observed = Mapping[PoolKey, tuple[Any, Mapping[str, Mapping[Any, Any]]]]
# Nodes of each replica that is on nodes, by pool.
Nodes = Mapping[PoolKey, Mapping[str, tuple[str, ...]]]


class JointPolicy:
    """Serve's ``policy_function`` for a Tandem application: decides both roles of all its groups and services together.

    Its configuration comes from the application's coordinator, because a change of ``policy_kwargs`` would restart
    every replica.
    """

    def __init__(self, **_: Any) -> None:
        self._link: Link | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-tick")
        self._tick: Future[Ticked] | None = None  # the running cycle
        self._signals: dict[str, Signals] = {}
        self._sources = Sources()
        self._forecasts = Forecasts(self._complain)
        # Results of the last cycle: states and plans by service, lacking GPU types, nodes for new replicas.
        self._states: dict[str, ControllerState] = {}
        self._last: dict[str, Plan] = {}
        self._lacking: frozenset[str] = frozenset()
        self._starts: Mapping[PoolKey, tuple[str, ...]] = {}
        self._counts: dict[PoolKey, int] = {}  # for Serve
        # Running replicas, awaited services, and the time, at the start of the last cycle.
        self._running: dict[PoolKey, tuple[str, ...]] = {}
        self._awaited: frozenset[str] = frozenset()
        self._ticked_s = -float("inf")
        self._started_s = time.monotonic()
        self._taken_over: frozenset[str] = frozenset()  # replicas that an earlier controller admitted
        self._logged_s: dict[str, float] = {}  # time of each service's last line in the log, but for configurations
        self._configs_to_log = 0  # configurations that were not in the log when the last cycle began
        self._complaints: set[str] = set()
        self._keys: dict[Any, PoolKey] = {}  # by Serve's id of the deployment
        self._calls_s: deque[float] = deque(maxlen=_MEASURED_CALLS)  # durations of calls without a tick

    def __call__(self, contexts: Contexts) -> tuple[dict[Any, int], dict[Any, Any]]:
        """Counts of the deployments for Serve; a deployment that is left out keeps its target.

        The second value is the state that Serve stores for a policy: empty, since the coordinator stores ours.
        """
        started_s, tick = time.perf_counter(), self._tick
        try:
            pools = {name: context for name, context in contexts.items() if name.name != ENDPOINT}
            endpoint = next((context for name, context in contexts.items() if name.name == ENDPOINT), None)
            if pools:
                self._step(pools, endpoint)
            counts = {name: self._counts[key] for name in pools if (key := self._key(name)) in self._counts}
        except Exception as error:
            self._complain(error)
            counts = {}
        if self._tick is tick:  # this call has neither begun a cycle nor taken its result
            self._calls_s.append(time.perf_counter() - started_s)
        return counts, {}

    def _key(self, deployment_id: Any) -> PoolKey:
        if deployment_id not in self._keys:
            self._keys[deployment_id] = PoolKey.parse(deployment_id.name)
        return self._keys[deployment_id]

    def _step(self, contexts: Contexts, endpoint: Any) -> None:
        """Read the coordinator's answers, take the result of a cycle that has ended, and begin the next one if due.

        ``contexts``: those of the pools. ``endpoint``: that of the endpoint; ``None``: it has none.
        """
        clock_s = time.monotonic()
        if self._link is None:
            self._link = Link(next(iter(contexts)).app_name, self._complain)
            self._link.client.start()
        link = self._link
        link.poll()
        if link.resumed is not None:
            self._states, link.resumed = link.resumed, None
            self._taken_over = frozenset(replica for state in self._states.values() for replica in state.admitted)
        if link.resumed_forecasts is not None:
            self._forecasts.resume(link.resumed_forecasts)
            link.resumed_forecasts = None
        if self._tick is not None and self._tick.done():
            tick, self._tick = self._tick, None
            self._take(tick.result(), link)
        if self._last:
            # A lower count waits until the coordinator has confirmed its plan. If this process ended earlier, the next
            # process would not know which replicas to stop.
            stored = link.confirmed or self._counts
            self._counts = {
                key: max(count, stored.get(key, count))
                for plan in self._last.values()
                for key, count in plan.counts.items()
            }
        if link.controllers and self._tick is None:
            self._begin_tick(contexts, endpoint, link, clock_s)

    def _begin_tick(self, contexts: Contexts, endpoint: Any, link: Link, clock_s: float) -> None:
        """Begin a cycle if the interval is over, or if the replicas or the awaited services have changed.

        A cycle decides for all services, so the shortest of their intervals counts.
        """
        running = {
            self._key(name): tuple(replica.unique_id for replica in context.running_replicas)
            for name, context in contexts.items()
        }
        configs = [controller.config for controller in link.controllers.values()]
        is_due = running != self._running or link.awaited != self._awaited
        if not is_due and clock_s - self._ticked_s < min(config.interval_s for config in configs):
            return
        self._running, self._awaited, self._ticked_s = running, link.awaited, clock_s
        for name, controller in link.controllers.items():
            signals = self._signals.get(name)
            if signals is None or signals.window_s != controller.config.window_s:
                self._signals[name] = Signals(controller.config.window_s)
        # A configuration that comes while the cycle runs is logged with the next cycle, which is the first to use it.
        self._configs_to_log = link.unlogged_configs
        blank = Snapshot(
            now_s=time.time(),
            pools=(),
            is_recovering=self._is_recovering(clock_s, max(config.window_s for config in configs)),
        )
        blanks = {
            name: replace(blank, state=self._states.get(name, ControllerState()), is_awaited=name in link.awaited)
            for name in link.controllers
        }
        observed = {self._key(name): (context, context.raw_metrics or {}) for name, context in contexts.items()}
        asked = {} if endpoint is None else _reports(endpoint, endpoint.raw_metrics or {}, Collected())
        self._tick = self._thread.submit(self._do_tick, link, link.controllers, observed, asked, blanks)

    def _is_recovering(self, clock_s: float, window_s: float) -> bool:
        """Whether this process still lacks what an earlier controller knew.

        It lacks the rates of replicas in the first half of a window. Serve may lack replicas that are running.
        """
        if not self._taken_over:
            return False
        age_s = clock_s - self._started_s
        lacks_rates = age_s < window_s / 2
        running = {replica for replicas in self._running.values() for replica in replicas}
        lacks_replicas = not self._taken_over <= running
        return lacks_rates or (lacks_replicas and age_s < _RECOVERY_S)

    def _do_tick(
        self,
        link: Link,
        controllers: Mapping[str, Controller],
        observed: Observed,
        asked: Reports,
        blanks: Mapping[str, Snapshot],
    ) -> Ticked:
        """Run a cycle, in the thread.

        ``asked``: reports of the endpoint's replicas. ``blanks``: a snapshot of each service without observations.
        """
        topology = link.topology
        nodes = places = slots = None
        if topology is not None:
            nodes, places = read_nodes(topology, link.cordoned), read_places(link.app)
            slots = _slots(topology, nodes, blanks.values())
        nodes_of_replicas = None if places is None else _by_pool(places)
        collected = {
            name: self._collected(name, controller.config, _running_ids(observed, link.pools[name]))
            for name, controller in controllers.items()
        }
        decided = tick_all(
            controllers,
            {
                name: self._snapshot(
                    name,
                    controller.config,
                    link,
                    observed,
                    asked,
                    blanks[name],
                    nodes_of_replicas,
                    collected[name][0],
                )
                for name, controller in controllers.items()
            },
            slots=slots,
            budget_gpus=None if topology is None else topology.budget_gpus,
            warm_replicas=0 if topology is None else topology.warm_replicas,
            lacking_types=self._lacking,
            on_error=lambda name, error: self._complain(error, f"{name}: {error_text(error)}"),
        )
        lines = []
        for name, (snapshot, plan) in decided.items():
            if is_news(plan, self._last.get(name)):
                lines.append(decision_line(name, snapshot, plan))
            elif is_traffic_due(snapshot.now_s, self._logged_s.get(name)):
                lines.append(traffic_line(name, snapshot.now_s, snapshot.traffic))
            else:
                continue
            self._logged_s[name] = snapshot.now_s
        starts, labels = ({}, {}) if slots is None else self._start_nodes(decided.values(), slots)
        faults = {name: tuple(faults.values()) for name, (_, faults) in collected.items()}
        # Here, not in ``Link.publish``: that runs in Serve's control loop.
        signals = {name: observed_signals(snapshot) for name, (snapshot, _) in decided.items()}
        forecasts = self._forecasts.take_changed()
        return Ticked(decided, lines, nodes, places, starts, labels, faults, signals, forecasts)

    def _start_nodes(
        self, decided: Iterable[tuple[Snapshot, Plan]], slots: Slots
    ) -> tuple[dict[PoolKey, tuple[str, ...]], dict[PoolKey, Mapping[str, str]]]:
        """Where new replicas of each pool may start, from the plans of all services: ``supply.start_nodes``."""
        starts: dict[PoolKey, tuple[str, ...]] = {}
        labels: dict[PoolKey, Mapping[str, str]] = {}
        for snapshot, plan in decided:
            counts, offers = plan.counts, plan.state.offers
            own = start_nodes(self._starts, plan.nodes, counts, snapshot.pools, slots, offers)
            starts, labels = starts | own[0], labels | own[1]
        return starts, labels

    def _collected(
        self, name: str, config: AutoscaleConfig, running: frozenset[str]
    ) -> tuple[Collected, Mapping[str, str]]:
        """Figures of a service from another source, and what is wrong with them; each cause is logged once."""
        figures, faults = self._sources.read(name, config.collector, running)
        for cause, text in faults.items():
            self._complain(ValueError(text), f"{name}: {cause}")
        return figures, faults

    def _snapshot(
        self,
        name: str,
        config: AutoscaleConfig,
        link: Link,
        observed: Observed,
        asked: Reports,
        blank: Snapshot,
        on: Nodes | None,
        collected: Collected,
    ) -> Snapshot:
        """The blank snapshot, filled with the observations of a service.

        ``asked``: reports of the endpoint's replicas. ``on``: nodes of each replica; ``None``: placement ignores nodes.
        ``collected``: figures of another source, which replace those of the replicas.
        """
        signals, limits, victims = self._signals[name], link.pools[name].root, blank.state.victims
        pools = {key: pool for key, pool in observed.items() if key in limits}
        reports = {key: _reports(context, series, collected) for key, (context, series) in pools.items()}
        signals.add(reports, blank.now_s, config.interval_s)
        demand = {
            replica: None if report is None else (report[0], figures_of(report[1], name))
            for replica, report in asked.items()
        }
        signals.add_endpoint(demand, blank.now_s, config.interval_s)
        replicas = {key: signals.replicas(key) for key in pools}
        running = {replica.replica_id for pool in replicas.values() for replica in pool}
        # Victims that Serve does not list any more; their actors may still exist, and then they hold their GPUs.
        stopped = [victim for victim in victims if victim not in running]
        stats = []
        for key, (context, _) in pools.items():
            nodes = {} if on is None else on.get(key, {})
            stats.append(
                PoolStats(
                    key=key,
                    replicas=replicas[key],
                    target_replicas=context.target_num_replicas,
                    limits=replace(
                        limits[key],
                        lowest_replicas=context.capacity_adjusted_min_replicas,
                        highest_replicas=context.capacity_adjusted_max_replicas,
                        demand=None if on is None else limits[key].demand,
                    ),
                    draining=tuple(victim for victim in stopped if is_alive(link.app, str(key), victim)),
                    held_replicas=None if on is None else sum(name not in victims for name in nodes),
                    on=nodes,
                )
            )
        latency = signals.latency(config.slo.quantile_frac)
        seen = replace(blank, pools=tuple(stats), latency=latency, traffic=signals.traffic())
        seen = with_collected(seen, collected)
        return replace(seen, forecast=self._forecasts.observe(name, config, seen, time.monotonic()))

    def _take(self, ticked: Ticked, link: Link) -> None:
        """Take the result of a cycle: pass victims and nodes to the scheduler hook, and plans to the coordinator."""
        plans = {name: plan for name, (_, plan) in ticked.decided.items()}
        self._states = {name: plan.state for name, plan in plans.items()}
        self._starts = ticked.starts
        victims = ray_victims.VICTIMS
        victims.chosen[link.app] = tuple(victim for plan in plans.values() for victim in plan.victims)
        victims.allowed[link.app] = {str(key): names for key, names in ticked.starts.items()}
        victims.labels[link.app] = {str(key): labels for key, labels in ticked.labels.items()}
        victims.again.setdefault(link.app, set()).update(str(key) for plan in plans.values() for key in plan.again)
        victims.cordoned[link.app] = tuple(node.name for node in ticked.nodes or () if node.is_cordoned)
        now_s = next(iter(ticked.decided.values()))[0].now_s  # all snapshots of a cycle have the same
        lines = [*link.take_config_lines(self._configs_to_log, now_s), *ticked.lines]
        link.publish(ticked, lines, _p99(self._calls_s))
        self._last, self._lacking = plans, lacking_types(ticked.decided)

    def _complain(self, error: BaseException, cause: str | None = None) -> None:
        """Log each cause once: a message in each call, several times a second, would hide all other messages.

        ``cause``: text by which the error is known again; left out: its own message.
        """
        message = error_text(error)
        cause = cause or message
        if cause not in self._complaints and len(self._complaints) < _MOST_COMPLAINTS:
            self._complaints.add(cause)
            logger.warning("Tandem's autoscaling: %s", message, exc_info=error)


def _slots(config: TopologyConfig, nodes: Sequence[Node], blanks: Iterable[Snapshot]) -> Slots:
    """The free room of nodes, and of possible nodes whose types no service has given up."""
    refused = {kind for blank in blanks for kind in refused_types(blank.state, blank.now_s)}
    possible = possible_nodes(config, nodes, refused)
    return Slots(Topology([*with_savings(config, nodes), *possible]).with_scarcity())


def _by_pool(places: Places) -> dict[PoolKey, dict[str, tuple[str, ...]]]:
    """The nodes of each replica, by pool."""
    nodes: dict[PoolKey, dict[str, tuple[str, ...]]] = {}
    for replica, (key, names) in places.items():
        nodes.setdefault(key, {})[replica] = names
    return nodes


def _running_ids(observed: Observed, pools: Pools) -> frozenset[str]:
    """The running replicas of some pools."""
    contexts = [context for key, (context, _) in observed.items() if key in pools.root]
    return frozenset(replica.unique_id for context in contexts for replica in context.running_replicas)


def _p99(values: Sequence[float]) -> float:
    """The 99th percentile; 0 without values."""
    return sorted(values)[int(0.99 * len(values))] if values else 0.0


def _reports(
    context: Any, series: Mapping[str, Mapping[Any, Any]], collected: Collected
) -> dict[str, tuple[float, dict[str, float]] | None]:
    """Time and values of the last report of each running replica, by replica id; ``None``: it has not reported.

    ``series``: reported points by metric and replica, the oldest first. ``collected``: gauges from another source,
    which replace reported ones. A metric that is not in the last report is left out, though Serve still has its older
    points.
    """
    reports: dict[str, tuple[float, dict[str, float]] | None] = {}
    for replica in context.running_replicas:
        name = replica.unique_id
        last = {metric: points[replica][-1] for metric, points in series.items() if points.get(replica)}
        newest_s = max((point.timestamp for point in last.values()), default=None)
        if newest_s is None:
            reports[name] = None
            continue
        values = {metric: point.value for metric, point in last.items() if point.timestamp == newest_s}
        reports[name] = newest_s, {**values, **collected.replicas.get(name, {})}
    return reports
