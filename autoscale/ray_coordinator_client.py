"""The policy's calls of the coordinator, the actor that stores an application's configuration and controller states.

They run in a thread of their own, because Serve's controller waits for each call of the policy, and only to send a call
takes longer than all else that the policy does there. Two queues connect the thread with the policy: ``cycles`` goes
to the coordinator, ``news`` comes from it.

There are three calls: ``join`` gets the settings (configurations, pools, topology) and the stored controller states;
``sync`` sends plans and log lines, and gets the settings; ``awaited`` gets the services that sleep and for which
requests wait.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any
from weakref import ref

import ray

# The module, not its object ``VICTIMS``: see ``ray_victims``.
from autoscale import ray_victims
from autoscale.decide.status import CYCLE, SETTINGS, CycleRecord, PlanRecord, Settings
from autoscale.extension import DEFERRED
from autoscale.forecast.forecaster import ForecastState
from autoscale.policies.heteroscale import Signal
from autoscale.types import Places, Plan, PoolKey, Snapshot
from kvtransfer.topology import Node
from router.ray_actors import is_another
from router.ray_coordinator import find_coordinator

# Time between two rounds of the thread, seconds: half of the time between two calls of the policy.
_ROUND_S = 0.05
# Time between two look-ups of the coordinator while the client has none, seconds.
_LOOKUP_S = 1.0
# Time between two look-ups while the client has a coordinator, seconds: a redeploy may have replaced it.
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
        labels: labels of the node that does not exist yet and for which new replicas of a pool wait.
        faults: what is wrong with the figures of other sources, by service.
        signals: the observed signals, by service.
        forecasts: what is remembered of forecasts, of the services where it has changed.
    """

    decided: Mapping[str, tuple[Snapshot, Plan]]
    lines: list[str]
    nodes: Sequence[Node] | None
    places: Places | None
    starts: Mapping[PoolKey, tuple[str, ...]]
    labels: Mapping[PoolKey, Mapping[str, str]] = field(default_factory=dict)
    faults: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    signals: Mapping[str, Mapping[Signal, float]] = field(default_factory=dict)
    forecasts: Mapping[str, ForecastState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cycle:
    """A cycle to send.

    Attributes:
        ticked: its result.
        lines: lines for the decision log, those of ``ticked`` included.
        call_p99_s: 99th percentile of the duration of the policy's calls, seconds, for the status.
    """

    ticked: Ticked
    lines: list[str]
    call_p99_s: float


@dataclass(frozen=True, slots=True)
class News:
    """What has changed at the coordinator; ``None``: no change.

    Attributes:
        settings: settings of a new version.
        awaited: services that sleep and for which requests wait.
        confirmed: replica counts of plans that the coordinator has stored.
        error: an error of the thread, to be logged.
    """

    settings: Settings | None = None
    awaited: frozenset[str] | None = None
    confirmed: Mapping[PoolKey, int] | None = None
    error: Exception | None = None


class CoordinatorClient:
    """One application's coordinator as the policy's process knows it.

    Attributes:
        cycles: cycles to send. The newest one replaces older ones that were not sent, but no log line and no state of
            a forecast is dropped.
        news: what the coordinator has sent, in order.
    """

    def __init__(self, app: str) -> None:
        self.cycles: SimpleQueue[Cycle] = SimpleQueue()
        self.news: SimpleQueue[News] = SimpleQueue()
        self._app = app
        self._handle: Any = None  # the coordinator's; ``None``: it is not found, or a call of it failed
        self._looked_s = -float("inf")  # time of the last look-up
        self._version: int | None = None  # version of the settings that were read last
        self._awaited: frozenset[str] = frozenset()
        self._reply: Future[Any] | None = None  # answer to ``join`` or ``sync``; one call at a time
        self._awaiting: Future[Any] | None = None  # answer to ``awaited``
        self._newest: Cycle | None = None  # the newest cycle, until it is sent
        self._lines: list[str] = []  # log lines to send with it
        self._sent_lines: list[str] = []  # lines that were sent and are not confirmed
        # States of forecasts to send with it, and those that were sent and are not confirmed.
        self._forecasts: dict[str, ForecastState] = {}
        self._sent_forecasts: dict[str, ForecastState] = {}
        self._sent_counts: Mapping[PoolKey, int] | None = None  # of plans that were sent and are not confirmed

    def start(self) -> None:
        """Call the coordinator in a thread from now on, until this client is no longer referenced."""
        Thread(target=_run, args=(ref(self),), name="tandem-coordinator", daemon=True).start()

    def step(self, clock_s: float) -> None:
        """Read answers that have come, and send the newest cycle unless an answer is still to come.

        ``clock_s``: monotonic time.
        """
        self._look_up(clock_s)
        if self._handle is None:
            return
        try:
            self._listen()
            if self._reply is not None and self._reply.done():
                reply, self._reply = self._reply, None
                self._read(reply.result())
                self._sent_lines, self._sent_forecasts = [], {}
        except ray.exceptions.RayError:
            self._use(None)  # the coordinator restarts; the settings that it sent last stay in use
            return
        self._send()

    def _look_up(self, clock_s: float) -> None:
        """Find the coordinator again and again: a redeployed application has a new one, but the old one may answer."""
        if clock_s - self._looked_s < (_LOOKUP_S if self._handle is None else _RELOOK_S):
            return
        self._looked_s = clock_s
        handle = find_coordinator(self._app)
        if is_another(handle, self._handle):
            self._version = None  # versions of two coordinators cannot be compared
            self._use(handle)
            self._reply = handle.join.remote().future()

    def _listen(self) -> None:
        """Keep one call of the coordinator open, which is answered when ``awaited`` changes, or after some seconds."""
        if self._awaiting is not None and self._awaiting.done():
            awaiting, self._awaiting = self._awaiting, None
            self._awaited = frozenset(awaiting.result())
            self.news.put(News(awaited=self._awaited))
        if self._awaiting is None:
            self._awaiting = self._handle.awaited.remote(sorted(self._awaited)).future()

    def _read(self, reply: dict[str, Any]) -> None:
        """Take an answer to ``join`` or ``sync``."""
        settings = SETTINGS.validate_python(reply, context=DEFERRED)
        is_new, self._version = settings.version != self._version, settings.version
        self.news.put(News(settings=settings if is_new else None, confirmed=self._sent_counts))

    def _send(self) -> None:
        """Send the newest cycle and all lines, unless an answer is still to come."""
        self._drain()
        if self._reply is not None or self._newest is None:
            return
        newest, self._newest = self._newest, None
        self._sent_lines, self._lines = self._lines, []
        self._sent_forecasts, self._forecasts = self._forecasts, {}
        plans = [plan for _, plan in newest.ticked.decided.values()]
        self._sent_counts = {key: count for plan in plans for key, count in plan.counts.items()}
        cycle = CYCLE.dump_python(_record(newest, self._sent_forecasts), mode="json")
        self._reply = self._handle.sync.remote(cycle, self._sent_lines).future()

    def _drain(self) -> None:
        """Take the cycles that the policy has left to send."""
        while not self.cycles.empty():
            self._newest = self.cycles.get()
            self._lines += self._newest.lines
            self._forecasts |= self._newest.ticked.forecasts

    def _use(self, handle: Any) -> None:
        """Use this coordinator from now on, or none. What was sent but not confirmed is sent again."""
        self._handle, self._awaiting, self._reply = handle, None, None
        self._forecasts, self._sent_forecasts = self._sent_forecasts | self._forecasts, {}
        self._lines, self._sent_lines, self._sent_counts = [*self._sent_lines, *self._lines], [], None


def _record(cycle: Cycle, forecasts: Mapping[str, ForecastState]) -> CycleRecord:
    """A cycle as the coordinator gets it; ``forecasts``: states of forecasts to store."""
    ticked = cycle.ticked
    return CycleRecord(
        services={
            name: PlanRecord(
                plan=plan,
                running={pool.key: tuple(r.replica_id for r in pool.replicas) for pool in snapshot.pools},
                draining={pool.key: pool.draining for pool in snapshot.pools},
                latency=snapshot.latency,
                traffic=snapshot.traffic,
                collector_faults=ticked.faults.get(name, ()),
                signals=ticked.signals.get(name, {}),
                forecast=snapshot.forecast,
            )
            for name, (snapshot, plan) in ticked.decided.items()
        },
        nodes=None if ticked.nodes is None else tuple(ticked.nodes),
        places=ticked.places,
        policy_call_p99_s=cycle.call_p99_s,
        is_hooked=ray_victims.VICTIMS.is_hooked,
        forecasts=forecasts,
    )


def _run(client_ref: "ref[CoordinatorClient]") -> None:
    """Rounds of a client, until the policy is no longer in use."""
    while (client := client_ref()) is not None:
        try:
            client.step(time.monotonic())
        except Exception as error:  # in the thread nothing would report it
            client.news.put(News(error=error))
        del client  # otherwise this frame would keep it
        time.sleep(_ROUND_S)
