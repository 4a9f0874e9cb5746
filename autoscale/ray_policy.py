"""The application-level Serve policy: contexts -> snapshots, plans -> counts; nothing is decided here.

Serve calls it several times a second inside its controller, without a timeout and without protection. So it returns
what it last said unless a tick is due; ticks run in a thread of their own; nothing waits for the coordinator; and
whatever goes wrong, the counts stay.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import ray

# The module, not its object: this one is copied into the controller by value, with the values of its globals.
from autoscale import ray_victims
from autoscale.collectors import Gauges
from autoscale.config import AutoscaleConfig
from autoscale.controller import Controller
from autoscale.cycle import lacking_types, tick_all
from autoscale.decision_log import NODES, PLAN, STATE, config_line, decision_line, is_news
from autoscale.placement import start_nodes
from autoscale.ray_collectors import collect
from autoscale.ray_topology import Places, read_nodes, read_places
from autoscale.signals import Signals
from autoscale.slots import Slots
from autoscale.tuning import Pools
from autoscale.types import ControllerState, Plan, PoolKey, PoolStats, Snapshot
from kvtransfer.topology import Node, Topology, TopologyConfig
from router.ray_coordinator import find_coordinator, is_alive

logger = logging.getLogger("ray.serve")

_LOOKUP_S = 1.0
_RELOOK_S = 5.0
_RECOVERY_S = 60.0
_COMPLAINTS = 100
_CALLS = 1000  # without a tick, of which the 99th percentile is told

Contexts = Mapping[Any, Any]


class JointPolicy:
    """Serve's ``policy_function`` for a Tandem application: both roles of every group of every service in one answer.

    Its configuration comes from the application's coordinator, not from ``policy_kwargs``: a change of those restarts
    every replica.
    """

    def __init__(self, **_: Any) -> None:
        self._link: _Link | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-tick")
        self._tick: Future[_Ticked] | None = None
        self._signals: dict[str, Signals] = {}
        self._states: dict[str, ControllerState] = {}
        self._last: dict[str, Plan] = {}
        self._lacking: frozenset[str] = frozenset()
        self._starts: Mapping[PoolKey, tuple[str, ...]] = {}
        self._counts: dict[PoolKey, int] = {}
        self._running: dict[PoolKey, tuple[str, ...]] = {}
        self._awaited: frozenset[str] = frozenset()
        self._ticked_s = -float("inf")
        self._started_s = time.monotonic()
        self._taken_over: frozenset[str] = frozenset()
        self._configs_known = 0
        self._complaints: set[str] = set()
        self._keys: dict[Any, PoolKey] = {}
        self._calls_s: deque[float] = deque(maxlen=_CALLS)

    def __call__(self, contexts: Contexts) -> tuple[dict[Any, int], dict[Any, Any]]:
        """Counts for the deployments; one that is missing keeps its target."""
        started_s, tick = time.perf_counter(), self._tick
        try:
            self._step(contexts)
            counts = {name: self._counts[key] for name in contexts if (key := self._key(name)) in self._counts}
        except Exception as error:
            self._complain(error)
            counts = {}
        if self._tick is tick:  # neither begins one nor acts on one
            self._calls_s.append(time.perf_counter() - started_s)
        return counts, {}

    def _key(self, deployment_id: Any) -> PoolKey:
        if deployment_id not in self._keys:
            self._keys[deployment_id] = PoolKey.parse(deployment_id.name)
        return self._keys[deployment_id]

    def _step(self, contexts: Contexts) -> None:
        if not contexts:
            return
        now_s, clock_s = time.time(), time.monotonic()
        if self._link is None:
            self._link = _Link(next(iter(contexts)).app_name)
        link = self._link
        link.poll(clock_s, self._thread)
        if link.resumed is not None:
            self._states, link.resumed = link.resumed, None
            self._taken_over = frozenset(name for state in self._states.values() for name in state.admitted)
        if self._tick is not None and self._tick.done():
            tick, self._tick = self._tick, None
            self._take(tick.result())
        if self._last:
            # A lower count waits until the coordinator holds the plan that it is from: were this process killed in
            # between, the next one would not know whom to stop.
            least = link.confirmed or self._counts
            self._counts = {
                key: max(count, least.get(key, count))
                for plan in self._last.values()
                for key, count in plan.counts.items()
            }
        if not link.controllers or self._tick is not None:
            return
        running = {
            self._key(name): tuple(replica.unique_id for replica in context.running_replicas)
            for name, context in contexts.items()
        }
        configs = [controller.config for controller in link.controllers.values()]
        interval_s = min(config.interval_s for config in configs)
        is_due = running != self._running or link.awaited != self._awaited
        if not is_due and clock_s - self._ticked_s < interval_s:
            return
        self._running, self._awaited, self._ticked_s = running, link.awaited, clock_s
        for name, controller in link.controllers.items():
            known = self._signals.get(name)
            if known is None or known.window_s != controller.config.window_s:
                self._signals[name] = Signals(controller.config.window_s)
        raw = {self._key(name): (context, context.raw_metrics or {}) for name, context in contexts.items()}
        is_recovering = self._is_recovering(clock_s, max(config.window_s for config in configs))
        # A configuration that is read while the tick runs holds from the next one on.
        self._configs_known = link.configs_read
        seen = _Seen(raw, now_s, is_recovering, link.awaited)
        self._tick = self._thread.submit(self._do_tick, link, link.controllers, seen, dict(self._states))

    def _is_recovering(self, clock_s: float, window_s: float) -> bool:
        """Whether replicas that another controller admitted are not known yet to Serve, or their rates to us."""
        if not self._taken_over:
            return False
        age_s = clock_s - self._started_s
        running = {name for names in self._running.values() for name in names}
        return age_s < window_s / 2 or (not self._taken_over <= running and age_s < _RECOVERY_S)

    def _do_tick(
        self,
        link: "_Link",
        controllers: Mapping[str, Controller],
        seen: "_Seen",
        states: Mapping[str, ControllerState],
    ) -> "_Ticked":
        topology = link.topology
        nodes = places = None
        if topology is not None:
            nodes, places = read_nodes(topology, link.cordoned), read_places(link.app)
        on = None if places is None else _by_pool(places)
        snapshots = {
            name: self._snapshot(name, controllers[name], link, seen, states.get(name, ControllerState()), on)
            for name in controllers
        }
        budget_gpus = None if topology is None else topology.budget_gpus
        warm_replicas = 0 if topology is None else topology.warm_replicas
        decided = tick_all(
            controllers,
            snapshots,
            nodes=nodes,
            budget_gpus=budget_gpus,
            warm_replicas=warm_replicas,
            lacking_types=self._lacking,
        )
        lines = [
            decision_line(name, snapshot, plan)
            for name, (snapshot, plan) in decided.items()
            if is_news(plan, self._last.get(name))
        ]
        starts: dict[PoolKey, tuple[str, ...]] = {}
        if nodes is not None:
            slots = Slots(Topology(nodes))
            for snapshot, plan in decided.values():
                starts |= start_nodes(self._starts, plan.nodes, plan.counts, snapshot.pools, slots)
        return _Ticked(decided, lines, nodes, places, starts)

    def _snapshot(
        self,
        name: str,
        controller: Controller,
        link: "_Link",
        seen: "_Seen",
        state: ControllerState,
        on: "Mapping[PoolKey, Mapping[str, tuple[str, ...]]] | None",
    ) -> Snapshot:
        config, signals = controller.config, self._signals[name]
        raw = {key: of for key, of in seen.raw.items() if key in link.pools[name].root}
        known, complaint = collect(config.collector)
        if complaint is not None:
            self._complain(ValueError(complaint))
        signals.add({key: _reports(*of, known) for key, of in raw.items()}, seen.now_s, config.interval_s)
        replicas = {key: signals.replicas(key) for key in raw}
        running = {replica.replica_id for pool in replicas.values() for replica in pool}
        vanished = [victim for victim in state.victims if victim not in running]
        pools = []
        for key, (context, _) in raw.items():
            limits = link.pools[name].root[key]
            draining = tuple(victim for victim in vanished if is_alive(link.app, str(key), victim))
            leaving = {*draining, *state.victims}
            pools.append(
                PoolStats(
                    key=key,
                    replicas=replicas[key],
                    target_replicas=context.target_num_replicas,
                    lowest_replicas=context.capacity_adjusted_min_replicas,
                    highest_replicas=context.capacity_adjusted_max_replicas,
                    gpus_per_replica=limits.gpus_per_replica,
                    link_tier=limits.link_tier,
                    draining=draining,
                    cost=limits.cost,
                    demand=None if on is None else limits.demand,
                    held_replicas=None if on is None else sum(name not in leaving for name in on.get(key, {})),
                    on={} if on is None else on.get(key, {}),
                    preference=limits.preference,
                    affinity=limits.affinity,
                    is_preemptible=limits.is_preemptible,
                )
            )
        return Snapshot(
            now_s=seen.now_s,
            pools=tuple(pools),
            latency=signals.latency(config.slo.quantile_frac),
            traffic=signals.traffic(),
            state=state,
            is_recovering=seen.is_recovering,
            is_awaited=name in seen.awaited,
        )

    def _take(self, ticked: "_Ticked") -> None:
        """Pass the plans on: victims and places to the scheduler, the rest to the coordinator."""
        link = self._link
        assert link is not None
        plans = {name: plan for name, (_, plan) in ticked.decided.items()}
        self._states = {name: plan.state for name, plan in plans.items()}
        hooks = ray_victims.VICTIMS
        hooks.chosen[link.app] = tuple(victim for plan in plans.values() for victim in plan.victims)
        self._starts = ticked.starts
        hooks.allowed[link.app] = {str(key): names for key, names in ticked.starts.items()}
        hooks.cordoned[link.app] = tuple(node.name for node in ticked.nodes or () if node.is_cordoned)
        now_s = next(iter(ticked.decided.values()))[0].now_s
        lines = [*link.take_config_lines(self._configs_known, now_s), *ticked.lines]
        link.publish(ticked, lines, _p99(self._calls_s))
        self._last, self._lacking = plans, lacking_types(ticked.decided)

    def _complain(self, error: Exception) -> None:
        """Say it once per cause: several times a second would hide everything else."""
        cause = f"{type(error).__name__}: {error}"
        if cause not in self._complaints and len(self._complaints) < _COMPLAINTS:
            self._complaints.add(cause)
            logger.warning("Tandem's autoscaling holds: %s", cause, exc_info=error)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one call was shown."""

    raw: Mapping[PoolKey, tuple[Any, Mapping[str, Mapping[Any, Any]]]]
    now_s: float
    is_recovering: bool
    awaited: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Ticked:
    """What one tick came to."""

    decided: Mapping[str, tuple[Snapshot, Plan]]
    lines: list[str]
    nodes: Sequence[Node] | None
    places: Places | None
    starts: Mapping[PoolKey, tuple[str, ...]]


class _Link:
    """The coordinator, as seen from a process that must not wait for it."""

    def __init__(self, app: str) -> None:
        self.app = app
        self.controllers: dict[str, Controller] = {}
        self.pools: dict[str, Pools] = {}
        self.topology: TopologyConfig | None = None
        self.cordoned: frozenset[str] = frozenset()
        self.awaited: frozenset[str] = frozenset()
        self.resumed: dict[str, ControllerState] | None = None
        self._version: int | None = None
        self._handle: Any = None
        self._lookup: Future[Any] | None = None
        self._looked_s = -float("inf")
        self._reply: Future[Any] | None = None
        self._awaiting: Future[Any] | None = None
        self._update: dict[str, Any] | None = None
        self._lines: list[str] = []
        self._sent: list[str] = []  # until the coordinator has answered
        self._config_lines: list[tuple[str, AutoscaleConfig, str]] = []
        self.confirmed: Mapping[PoolKey, int] | None = None  # counts of the last plans that the coordinator holds
        self._sending: Mapping[PoolKey, int] | None = None
        self._published: Mapping[PoolKey, int] = {}

    def poll(self, clock_s: float, thread: ThreadPoolExecutor) -> None:
        """Take what has come, ask for what has not."""
        if self._lookup is not None and self._lookup.done():
            lookup, self._lookup = self._lookup, None
            found = lookup.result()
            # A redeployed application has another coordinator, while the old one may still answer.
            if found is not None and (self._handle is None or found._actor_id != self._handle._actor_id):
                self._handle, self._version = found, None
                self._awaiting = None
                self._take_back()
                self._reply = found.join.remote().future()
        elif self._lookup is None and clock_s - self._looked_s >= (_LOOKUP_S if self._handle is None else _RELOOK_S):
            self._looked_s = clock_s
            self._lookup = thread.submit(find_coordinator, self.app)
        if self._handle is None:
            return
        try:
            self._listen()
            if self._reply is not None and self._reply.done():
                reply, self._reply = self._reply, None
                self._read(reply.result())
                self.confirmed = self._sending or self.confirmed
                self._sent = []
        except ray.exceptions.RayError:
            self._handle = None  # it is being restarted: what it last said still holds
            self._awaiting = None
            self._take_back()
            return
        self._send()

    def _listen(self) -> None:
        """Hear at once of services that sleep and for which requests wait."""
        if self._awaiting is not None and self._awaiting.done():
            awaiting, self._awaiting = self._awaiting, None
            self.awaited = frozenset(awaiting.result())
        if self._awaiting is None:
            self._awaiting = self._handle.awaited.remote(sorted(self.awaited)).future()

    def _send(self) -> None:
        if self._handle is not None and self._reply is None and self._update is not None:
            update, self._update = self._update, None
            self._sent, self._lines = self._lines, []
            update["lines"] = self._sent
            self._sending = self._published
            self._reply = self._handle.sync.remote(update).future()

    def _take_back(self) -> None:
        """What was on its way may never have arrived."""
        self._lines, self._sent, self._sending = [*self._sent, *self._lines], [], None

    def _read(self, said: dict[str, Any]) -> None:
        if said.get("states") and not self.controllers:
            self.resumed = {name: STATE.validate_python(state) for name, state in said["states"].items()}
        if said["version"] == self._version:
            return
        self._version = said["version"]
        self.cordoned = frozenset(said["cordoned"])
        self.topology = None if said["topology"] is None else TopologyConfig.model_validate(said["topology"])
        controllers = {}
        for name, of in said["services"].items():
            config = AutoscaleConfig.model_validate(of["config"])
            known = self.controllers.get(name)
            if known is not None and known.config == config:
                controllers[name] = known
                continue
            controllers[name] = Controller(config)
            self.pools[name] = Pools.model_validate(of["pools"])
            self._config_lines.append((name, config, of["why"]))
        self.controllers = controllers

    @property
    def configs_read(self) -> int:
        """Configurations that the log does not know yet."""
        return len(self._config_lines)

    def take_config_lines(self, number: int, now_s: float) -> list[str]:
        """The log's lines for the first configurations that it does not know yet."""
        taken, self._config_lines = self._config_lines[:number], self._config_lines[number:]
        return [config_line(name, config, now_s, why) for name, config, why in taken]

    def publish(self, ticked: _Ticked, lines: list[str], call_p99_s: float) -> None:
        """Send plans to the coordinator.

        While it still answers to the last ones, later plans replace these, but not their lines.
        """
        self._lines += lines
        self._published = {key: n for _, plan in ticked.decided.values() for key, n in plan.counts.items()}
        self._update = {
            "services": {
                name: {
                    "plan": PLAN.dump_python(plan, mode="json"),
                    "running": {str(pool.key): [r.replica_id for r in pool.replicas] for pool in snapshot.pools},
                    "draining": {str(pool.key): list(pool.draining) for pool in snapshot.pools},
                    "latency": asdict(snapshot.latency),
                    "traffic": asdict(snapshot.traffic),
                }
                for name, (snapshot, plan) in ticked.decided.items()
            },
            "nodes": None if ticked.nodes is None else NODES.dump_python(tuple(ticked.nodes), mode="json"),
            "places": None
            if ticked.places is None
            else {replica: [str(key), list(names)] for replica, (key, names) in ticked.places.items()},
            "policy_call_p99_s": call_p99_s,
            "is_hooked": ray_victims.VICTIMS.is_hooked,
        }
        self._send()


def _by_pool(places: Places) -> dict[PoolKey, dict[str, tuple[str, ...]]]:
    """Of each pool its replicas that have their room, and their nodes."""
    found: dict[PoolKey, dict[str, tuple[str, ...]]] = {}
    for replica, (key, nodes) in places.items():
        found.setdefault(key, {})[replica] = nodes
    return found


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))] if values else 0.0


def _reports(
    context: Any, series: Mapping[str, Mapping[Any, Any]], known: Gauges
) -> dict[str, tuple[float, dict[str, float]] | None]:
    """For each running replica the time and values of the last report, by the names that it used.

    ``known``: what a collector says of replicas, which holds instead.
    """
    reports: dict[str, tuple[float, dict[str, float]] | None] = {}
    for replica in context.running_replicas:
        last = {name: values[replica][-1] for name, values in series.items() if values.get(replica)}
        newest = max((point.timestamp for point in last.values()), default=None)
        reports[replica.unique_id] = (
            None
            if newest is None
            else (
                newest,
                {
                    **{name: point.value for name, point in last.items() if point.timestamp == newest},
                    **known.get(replica.unique_id, {}),
                },
            )
        )
    return reports
