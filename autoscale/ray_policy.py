"""The application-level Serve policy: contexts -> snapshot, plan -> counts; nothing is decided here.

Serve calls it several times a second inside its controller, without a timeout and without protection. So it returns
what it last said unless a tick is due; ticks run in a thread of their own; nothing waits for the coordinator; and
whatever goes wrong, the counts stay.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import ray

# The module, not its object: this one is copied into the controller by value, with the values of its globals.
from autoscale import ray_victims
from autoscale.config import AutoscaleConfig
from autoscale.controller import Controller
from autoscale.decision_log import PLAN, STATE, config_line, decision_line, is_news
from autoscale.signals import Signals
from autoscale.tuning import PoolLimits, Pools
from autoscale.types import ControllerState, Plan, PoolKey, PoolStats, Snapshot
from router.ray_coordinator import find_coordinator, is_alive

logger = logging.getLogger("ray.serve")

_LOOKUP_S = 1.0
_RELOOK_S = 5.0
_RECOVERY_S = 60.0
_COMPLAINTS = 100
_UNKNOWN = PoolLimits(lowest_replicas=1, highest_replicas=1)
_CALLS = 1000  # without a tick, of which the 99th percentile is told

Contexts = Mapping[Any, Any]


class JointPolicy:
    """Serve's ``policy_function`` for a Tandem application: both roles of every group in one answer.

    Its configuration comes from the application's coordinator, not from ``policy_kwargs``: a change of those restarts
    every replica.
    """

    def __init__(self, **_: Any) -> None:
        self._link: _Link | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-tick")
        self._tick: Future[tuple[Snapshot, Plan, list[str]]] | None = None
        self._signals: Signals | None = None
        self._state = ControllerState()
        self._last: Plan | None = None
        self._counts: dict[PoolKey, int] = {}
        self._running: dict[PoolKey, tuple[str, ...]] = {}
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
            self._state, link.resumed = link.resumed, None
            self._taken_over = frozenset(self._state.admitted)
        if self._tick is not None and self._tick.done():
            tick, self._tick = self._tick, None
            self._take(*tick.result())
        if self._last is not None:
            # A lower count waits until the coordinator holds the plan that it is from: were this process killed in
            # between, the next one would not know whom to stop.
            least = link.confirmed or self._counts
            self._counts = {key: max(count, least.get(key, count)) for key, count in self._last.counts.items()}
        if link.controller is None or self._tick is not None:
            return
        running = {
            self._key(name): tuple(replica.unique_id for replica in context.running_replicas)
            for name, context in contexts.items()
        }
        config = link.controller.config
        if running == self._running and clock_s - self._ticked_s < config.interval_s:
            return
        self._running, self._ticked_s = running, clock_s
        if self._signals is None or self._signals.window_s != config.window_s:
            self._signals = Signals(config.window_s)
        raw = {self._key(name): (context, context.raw_metrics or {}) for name, context in contexts.items()}
        is_recovering = self._is_recovering(clock_s, config)
        # A configuration that is read while the tick runs holds from the next one on.
        self._configs_known = link.configs_read
        self._tick = self._thread.submit(
            self._do_tick, link, link.controller, raw, now_s, is_recovering, self._signals, self._state
        )

    def _is_recovering(self, clock_s: float, config: AutoscaleConfig) -> bool:
        """Whether replicas that another controller admitted are not known yet to Serve, or their rates to us."""
        if not self._taken_over:
            return False
        age_s = clock_s - self._started_s
        running = {name for names in self._running.values() for name in names}
        return age_s < config.window_s / 2 or (not self._taken_over <= running and age_s < _RECOVERY_S)

    def _do_tick(
        self,
        link: "_Link",
        controller: Controller,
        raw: Mapping[PoolKey, tuple[Any, Mapping[str, Mapping[Any, Any]]]],
        now_s: float,
        is_recovering: bool,
        signals: Signals,
        state: ControllerState,
    ) -> tuple[Snapshot, Plan, list[str]]:
        interval_s = controller.config.interval_s
        signals.add({key: _reports(context, series) for key, (context, series) in raw.items()}, now_s, interval_s)
        replicas = {key: signals.replicas(key) for key in raw}
        running = {replica.replica_id for pool in replicas.values() for replica in pool}
        vanished = [name for name in state.victims if name not in running]
        snapshot = Snapshot(
            now_s=now_s,
            pools=tuple(
                PoolStats(
                    key=key,
                    replicas=replicas[key],
                    target_replicas=context.target_num_replicas,
                    lowest_replicas=context.capacity_adjusted_min_replicas,
                    highest_replicas=context.capacity_adjusted_max_replicas,
                    gpus_per_replica=link.limits(key).gpus_per_replica,
                    link_tier=link.limits(key).link_tier,
                    draining=tuple(name for name in vanished if is_alive(link.app, str(key), name)),
                )
                for key, (context, _) in raw.items()
            ),
            latency=signals.latency(controller.config.slo.quantile_frac),
            traffic=signals.traffic(),
            state=state,
            is_recovering=is_recovering,
        )
        plan = controller.tick(snapshot)
        return snapshot, plan, [decision_line(snapshot, plan)] if is_news(plan, self._last) else []

    def _take(self, snapshot: Snapshot, plan: Plan, lines: list[str]) -> None:
        """Pass a plan on: victims to the scheduler, the rest to the coordinator."""
        self._state = plan.state
        link = self._link
        assert link is not None
        ray_victims.VICTIMS.chosen[link.app] = plan.victims
        lines = [*link.take_config_lines(self._configs_known, snapshot.now_s), *lines]
        link.publish(snapshot, plan, lines, _p99(self._calls_s))
        self._last = plan

    def _complain(self, error: Exception) -> None:
        """Say it once per cause: several times a second would hide everything else."""
        cause = f"{type(error).__name__}: {error}"
        if cause not in self._complaints and len(self._complaints) < _COMPLAINTS:
            self._complaints.add(cause)
            logger.warning("Tandem's autoscaling holds: %s", cause, exc_info=error)


class _Link:
    """The coordinator, as seen from a process that must not wait for it."""

    def __init__(self, app: str) -> None:
        self.app = app
        self.controller: Controller | None = None
        self._pools = Pools({})
        self.resumed: ControllerState | None = None
        self._version: int | None = None
        self._handle: Any = None
        self._lookup: Future[Any] | None = None
        self._looked_s = -float("inf")
        self._reply: Future[Any] | None = None
        self._update: dict[str, Any] | None = None
        self._lines: list[str] = []
        self._sent: list[str] = []  # until the coordinator has answered
        self._config_lines: list[tuple[AutoscaleConfig, str]] = []
        self.confirmed: Mapping[PoolKey, int] | None = None  # counts of the last plan that the coordinator holds
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
                self._take_back()
                self._reply = found.join.remote().future()
        elif self._lookup is None and clock_s - self._looked_s >= (_LOOKUP_S if self._handle is None else _RELOOK_S):
            self._looked_s = clock_s
            self._lookup = thread.submit(find_coordinator, self.app)
        if self._handle is None:
            return
        if self._reply is not None and self._reply.done():
            reply, self._reply = self._reply, None
            try:
                self._read(reply.result())
            except ray.exceptions.RayError:
                self._handle = None  # it is being restarted: what it last said still holds
                self._take_back()
                return
            self.confirmed = self._sending or self.confirmed
            self._sent = []
        self._send()

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
        if said.get("state") is not None and self.controller is None:
            self.resumed = STATE.validate_python(said["state"])
        if said["version"] != self._version:
            config = AutoscaleConfig.model_validate(said["config"])
            self.controller, self._pools = Controller(config), Pools.model_validate(said["pools"])
            self._version = said["version"]
            self._config_lines.append((config, said["why"]))

    def limits(self, key: PoolKey) -> PoolLimits:
        """What a pool was deployed with."""
        return self._pools.root.get(key, _UNKNOWN)

    @property
    def configs_read(self) -> int:
        """Configurations that the log does not know yet."""
        return len(self._config_lines)

    def take_config_lines(self, number: int, now_s: float) -> list[str]:
        """The log's lines for the first configurations that it does not know yet."""
        taken, self._config_lines = self._config_lines[:number], self._config_lines[number:]
        return [config_line(config, now_s, why) for config, why in taken]

    def publish(self, snapshot: Snapshot, plan: Plan, lines: list[str], call_p99_s: float) -> None:
        """Send a plan to the coordinator.

        While it still answers to the last one, a later plan replaces this one, but not its lines.
        """
        self._lines += lines
        self._published = plan.counts
        self._update = {
            "plan": PLAN.dump_python(plan, mode="json"),
            "running": {str(pool.key): [r.replica_id for r in pool.replicas] for pool in snapshot.pools},
            "draining": {str(pool.key): list(pool.draining) for pool in snapshot.pools},
            "latency": asdict(snapshot.latency),
            "traffic": asdict(snapshot.traffic),
            "policy_call_p99_s": call_p99_s,
            "is_hooked": ray_victims.VICTIMS.is_hooked,
        }
        self._send()


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))] if values else 0.0


def _reports(context: Any, series: Mapping[str, Mapping[Any, Any]]) -> dict[str, tuple[float, dict[str, float]] | None]:
    """For each running replica the time and values of the last report, by the names that it used."""
    reports: dict[str, tuple[float, dict[str, float]] | None] = {}
    for replica in context.running_replicas:
        last = {name: values[replica][-1] for name, values in series.items() if values.get(replica)}
        newest = max((point.timestamp for point in last.values()), default=None)
        reports[replica.unique_id] = (
            None
            if newest is None
            else (newest, {name: point.value for name, point in last.items() if point.timestamp == newest})
        )
    return reports
