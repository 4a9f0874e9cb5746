"""The policy's link to the coordinator, the actor that stores an application's configuration and controller states.

The policy must not wait for the coordinator, since Serve's controller would wait too. So calls are sent, and their
answers are read in a later call of ``Link.poll``. There are three calls: ``join`` gets the settings (configurations,
pools, topology) and the stored controller states; ``sync`` sends plans and log lines, and gets the settings;
``awaited`` gets the services that sleep and for which requests wait.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray

# The module, not its object ``VICTIMS``: see ``ray_victims``.
from autoscale import ray_victims
from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.containment import Call, PolicyLate, Run, directly
from autoscale.decide.controller import Controller
from autoscale.decide.decision_log import config_line
from autoscale.decide.ray_policy_limit import LimitedCalls
from autoscale.decide.status import CYCLE, SETTINGS, CycleRecord, PlanRecord
from autoscale.decide.tuning import Pools
from autoscale.extension import DEFERRED, Extension
from autoscale.policies.heteroscale import Signal
from autoscale.topology_config import TopologyConfig
from autoscale.types import ControllerState, Decision, Places, Plan, PoolKey, Snapshot
from kvtransfer.topology import Node
from router.ray_actors import is_another
from router.ray_coordinator import find_coordinator

# Time between two look-ups of the coordinator while the link has none, seconds.
_LOOKUP_S = 1.0
# Time between two look-ups while the link has a coordinator, seconds: a redeploy may have replaced it.
_RELOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Ticked:
    """The result of one cycle: a tick of each service.

    Attributes:
        decided: snapshot and plan of each service, by name.
        lines: lines for the decision log.
        nodes: nodes of the cluster; ``None``: placement ignores nodes.
        places: nodes of each replica; ``None``: placement ignores nodes.
        starts: nodes on which new replicas of each pool may start.
        faults: what is wrong with the figures of other sources, by service.
        signals: the observed signals, by service.
    """

    decided: Mapping[str, tuple[Snapshot, Plan]]
    lines: list[str]
    nodes: Sequence[Node] | None
    places: Places | None
    starts: Mapping[PoolKey, tuple[str, ...]]
    faults: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    signals: Mapping[str, Mapping[Signal, float]] = field(default_factory=dict)


class Link:
    """The last answers of the coordinator, and the plans and lines to send.

    Attributes:
        controllers: one for each service, with its present configuration.
        pools: pools of each service, as deployed.
        topology: how nodes are read, and shared limits; ``None``: placement ignores nodes.
        cordoned: nodes and switches on which no replica may start.
        awaited: services that sleep and for which requests wait.
        resumed: controller states from before a restart, until the policy takes them.
        confirmed: replica counts of the newest plans that the coordinator has confirmed; ``None``: of no plan yet.
    """

    def __init__(self, app: str, complain: Callable[[BaseException, str], None]) -> None:
        """``complain``: logs an error of a policy, once for each cause (a text); called in the thread of a tick."""
        self.app = app
        self.controllers: dict[str, Controller] = {}
        self.pools: dict[str, Pools] = {}
        self.topology: TopologyConfig | None = None
        self.cordoned: frozenset[str] = frozenset()
        self.awaited: frozenset[str] = frozenset()
        self.resumed: dict[str, ControllerState] | None = None
        self.confirmed: Mapping[PoolKey, int] | None = None
        self._complain = complain
        # Calls of policies of one's own, by service and kind. They outlive a changed configuration: a call may go on.
        self._calls: dict[tuple[str, str], LimitedCalls] = {}
        self._version: int | None = None  # version of the settings that were read last
        self._handle: Any = None  # the coordinator's; ``None``: it is not found, or a call of it failed
        self._lookup: Future[Any] | None = None
        self._looked_s = -float("inf")  # start of the last look-up
        self._reply: Future[Any] | None = None  # answer to ``join`` or ``sync``; one call at a time
        self._awaiting: Future[Any] | None = None  # answer to ``awaited``
        self._update: CycleRecord | None = None  # the newest plans, until they are sent
        self._lines: list[str] = []  # log lines to send with the plans
        self._sent_lines: list[str] = []  # lines that were sent and are not confirmed
        self._sent_counts: Mapping[PoolKey, int] | None = None  # of plans that were sent and are not confirmed
        # Configurations that are not in the log yet: the service, the configuration, and why it changed.
        self._config_lines: list[tuple[str, AutoscaleConfig, str]] = []

    def poll(self, clock_s: float, thread: ThreadPoolExecutor) -> None:
        """Read answers that have come, and send the newest plans if no answer to earlier ones is still to come.

        ``clock_s``: monotonic time. ``thread``: runs the look-ups, which block, and cycles too.
        """
        self._look_up(clock_s, thread)
        if self._handle is None:
            return
        try:
            self._listen()
            if self._reply is not None and self._reply.done():
                reply, self._reply = self._reply, None
                self._read(reply.result())
                self.confirmed = self._sent_counts or self.confirmed  # ``join`` sends no counts
                self._sent_lines = []
        except ray.exceptions.RayError:
            self._use(None)  # the coordinator restarts; the settings that it sent last stay in use
            return
        self._send()

    def _look_up(self, clock_s: float, thread: ThreadPoolExecutor) -> None:
        """Find the coordinator again and again: a redeployed application has a new one, but the old one may answer."""
        if self._lookup is not None and self._lookup.done():
            lookup, self._lookup = self._lookup, None
            handle = lookup.result()
            if is_another(handle, self._handle):
                self._version = None  # versions of two coordinators cannot be compared
                self._use(handle)
                self._reply = handle.join.remote().future()
            return
        interval_s = _LOOKUP_S if self._handle is None else _RELOOK_S
        if self._lookup is None and clock_s - self._looked_s >= interval_s:
            self._looked_s = clock_s
            self._lookup = thread.submit(find_coordinator, self.app)

    def _listen(self) -> None:
        """Keep one call of the coordinator open, which is answered when ``awaited`` changes, or after some seconds."""
        if self._awaiting is not None and self._awaiting.done():
            awaiting, self._awaiting = self._awaiting, None
            self.awaited = frozenset(awaiting.result())
        if self._awaiting is None:
            self._awaiting = self._handle.awaited.remote(sorted(self.awaited)).future()

    def _send(self) -> None:
        """Send the newest plans and all lines, unless an answer is still to come."""
        if self._handle is not None and self._reply is None and self._update is not None:
            update, self._update = self._update, None
            self._sent_lines, self._lines = self._lines, []
            plans = [record.plan for record in update.services.values()]
            self._sent_counts = {key: count for plan in plans for key, count in plan.counts.items()}
            cycle = CYCLE.dump_python(update, mode="json")
            self._reply = self._handle.sync.remote(cycle, self._sent_lines).future()

    def _use(self, handle: Any) -> None:
        """Use this coordinator from now on, or none. Lines that were sent but not confirmed are sent again."""
        self._handle, self._awaiting = handle, None
        self._lines, self._sent_lines, self._sent_counts = [*self._sent_lines, *self._lines], [], None

    def _read(self, reply: dict[str, Any]) -> None:
        """Take the settings in an answer; a service whose configuration has changed gets a new controller."""
        settings = SETTINGS.validate_python(reply, context=DEFERRED)
        if settings.states and not self.controllers:  # the first answer: later, states of this process are newer
            self.resumed = dict(settings.states)
        if settings.version == self._version:
            return
        self._version, self.cordoned, self.topology = settings.version, settings.cordoned, settings.topology
        # Pools of a service that has left stay: a cycle that runs in the thread may still read them.
        self.pools |= {name: service.pools for name, service in settings.services.items()}
        controllers = {}
        for name, service in settings.services.items():
            controller = self.controllers.get(name)
            if controller is None or controller.config != service.config:
                controller = Controller(service.config, self._runner(name, service.config))
                self._config_lines.append((name, service.config, service.why))
            controllers[name] = controller
        self.controllers = controllers

    def _runner(self, service: str, config: AutoscaleConfig) -> Run:
        """How the policy of a service is called: with a limit of time if it is one's own. An error is logged."""
        run, kind = directly, config.policy.kind
        if isinstance(config.policy, Extension):
            calls = self._calls.setdefault((service, kind), LimitedCalls())
            run = partial(calls.run, limit_s=config.policy_timeout_s)

        def logged(call: Call) -> Decision:
            try:
                return run(call)
            except PolicyLate:
                late = f"policy {kind} of {service} takes longer than {config.policy_timeout_s:g} s (policy_timeout_s)"
                self._complain(TimeoutError(late), late)
                raise
            except BaseException as error:
                self._complain(error, f"policy {kind} of {service}: {type(error).__name__}")  # its message may vary
                raise

        return logged

    @property
    def unlogged_configs(self) -> int:
        """Number of configurations that are not in the log yet."""
        return len(self._config_lines)

    def take_config_lines(self, number: int, now_s: float) -> list[str]:
        """The log lines of the first ``number`` configurations that are not in the log yet."""
        taken, self._config_lines = self._config_lines[:number], self._config_lines[number:]
        return [config_line(name, config, now_s, why) for name, config, why in taken]

    def publish(self, ticked: Ticked, lines: list[str], call_p99_s: float) -> None:
        """Send plans and log lines to the coordinator.

        While an answer is still to come, the new plans wait, and replace older plans that wait. Lines are never
        dropped. ``call_p99_s``: 99th percentile of the duration of the policy's calls, for the status.
        """
        self._lines += lines
        self._update = CycleRecord(
            services={
                name: PlanRecord(
                    plan=plan,
                    running={pool.key: tuple(r.replica_id for r in pool.replicas) for pool in snapshot.pools},
                    draining={pool.key: pool.draining for pool in snapshot.pools},
                    latency=snapshot.latency,
                    traffic=snapshot.traffic,
                    collector_faults=ticked.faults.get(name, ()),
                    signals=ticked.signals.get(name, {}),
                )
                for name, (snapshot, plan) in ticked.decided.items()
            },
            nodes=None if ticked.nodes is None else tuple(ticked.nodes),
            places=ticked.places,
            policy_call_p99_s=call_p99_s,
            is_hooked=ray_victims.VICTIMS.is_hooked,
        )
        self._send()
