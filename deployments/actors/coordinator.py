"""The coordinator of an application: the state of the control plane that must survive a restart of Serve's controller.

One actor per application; Serve starts, watches and ends it with the ingress deployment. It holds:

- each service's configuration, and its tuning: changes by ``tandem tune`` while the service runs;
- the last plans of the autoscaling policy, with the controllers' states;
- the cordoned nodes, on which no new replica starts;
- the admitted replicas, which get requests; every router fetches them.

It writes the decision log. It decides nothing.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from prometheus_client.metrics_core import Metric
from pydantic import ValidationError
from ray import serve
from ray.serve.exceptions import RayServeException

# The module, not its pydantic adapters (``CYCLE``): Serve copies this file's globals by value, so adapters as well.
from autoscale.decide import status
from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.decision_log import config_line
from autoscale.decide.status import (
    CoordinatorState,
    PlanRecord,
    ServiceSettings,
    ServiceStatus,
    Settings,
    Status,
    forecast_to_json,
    stored_forecast,
    stored_state,
)
from autoscale.decide.tuning import Pools, differing, merged, tuned
from autoscale.extension import DEFERRED
from autoscale.forecast.forecaster import ForecastState
from autoscale.topology_config import TopologyConfig
from autoscale.types import ControllerState
from deployments.actors.scaling_metrics import scaling_metrics
from deployments.actors.start_hosts import StartHosts, keep_start_hosts
from deployments.config import ServiceConfig
from deployments.explain import explain
from deployments.serve_seam.replica_process import serve_logs_folder
from router.ray_actors import Bell, keep_announced
from router.ray_coordinator import coordinator_key, is_alive, load_state, save_state

logger = logging.getLogger("ray.serve")

_WATCH_S = 5.0  # longest wait of a caller for a change, seconds
# Time without a message from the policy after which its plans no longer hold, seconds. Serve's controller, in which the
# policy runs, restarts in about ten seconds.
_SILENCE_S = 60.0
_SILENCE_INTERVALS = 5  # the same in decision intervals of the slowest service; the longer of the two times holds
_LOG_BYTES = 64 << 20  # size at which the decision log begins a new file; one older file stays
# Time for the check of a tuned configuration, seconds: a policy of one's own may be imported for it. It is below the
# time that commands wait for an answer.
_CHECK_S = 5.0
# Fields whose check loads policies and collectors of one's own.
_LOADING_FIELDS = {"policy", "collector", "pd_ratio", "auto_ratio"}
_STATUS_S = 10.0  # longest wait for Serve's answer when an application was deployed, seconds
_KEPT = "kept"  # name under which settings are stored for the next deployment of the application
_WAKE_S = 5.0  # time for which one call of ``wake`` holds, seconds; a request that waits repeats the call


class _AutoscaledService:
    """One autoscaled service: its deployed configuration, and the tuned one."""

    def __init__(self, base: AutoscaleConfig, pools: Pools, changes: Mapping[str, Any]) -> None:
        self.base, self.pools, self.changes = base, pools, changes  # ``base``: as deployed
        self.config = tuned(base, changes, pools, is_checked=True)
        self.why = "start"  # reason of the latest change, for the log

    def status(self, last: PlanRecord | None) -> ServiceStatus:
        """Status for commands and metrics; ``last``: the latest plan."""
        changed = differing(self.changes, self.base.model_dump(mode="json"))
        return ServiceStatus(config=self.config, tuned=changed, pools=self.pools, last=last)


class Coordinator:
    """The actor, whose public methods other processes call with the messages of ``autoscale.decide.status``."""

    def __init__(
        self,
        *,
        services: Sequence[Mapping[str, Any]],
        pools: Mapping[str, Mapping[str, Any]],
        topology: Mapping[str, Any] | None,
        start_hosts: Mapping[str, Any],
        keeps_settings: bool = False,
    ) -> None:
        """Read plain values: ``ServiceConfig`` of the services, ``Pools`` by service, and the other two configurations.

        The pools were computed by the process that built the application, which can read the engine profiles.
        """
        self._app = app = serve.get_deployment_actor_context().app_name
        self._topology = None if topology is None else TopologyConfig.model_validate(topology)
        self._name = ray.get_runtime_context().get_actor_name() or ""
        self._log_path = serve_logs_folder() / f"tandem_decisions_{app}.jsonl"
        # A new version of the application gives the actor another name, under which no state is stored. An application
        # that was deleted and deployed again may have the same name, but the stored replicas are gone.
        state = stored_state(load_state(app, self._name))
        self._deployed_s = _deployed_s(app)
        if not _is_of_this_deployment(app, state, self._deployed_s):
            state = stored_state(load_state(app, _KEPT)) if keeps_settings else CoordinatorState()
        self._keeps_settings = keeps_settings
        if not keeps_settings and load_state(app, _KEPT) is not None:  # settings of long ago do not come back
            save_state(app, _KEPT, CoordinatorState().to_json())
        self._services = {}
        for document in services:
            # The build has checked it. A policy of one's own is not loaded again, since this actor must start anyway.
            service = ServiceConfig.model_validate(document, context=DEFERRED)
            assert service.autoscale is not None  # ``build_graph`` passes autoscaled services alone
            name = service.model.id
            limits = Pools.model_validate(pools[name])
            changes = _fitting(name, service.autoscale, state.changes.get(name, {}), limits)
            self._services[name] = _AutoscaledService(service.autoscale, limits, changes)
        self._version = state.version  # of the settings; a policy reads them again if it has another version
        self._cordoned = set(state.cordoned)
        self._cycle = state.cycle
        stored = {name: stored_forecast(load_state(app, _forecast_key(name))) for name in self._services}
        self._forecasts = {name: forecast for name, forecast in stored.items() if forecast is not None}
        self._synced_s = time.monotonic()  # time of the policy's last message, at first of the start
        self._admitted_version = 0
        self._admitted_changed = Bell()  # wakes callers of ``watch``
        self._tuning = asyncio.Lock()
        self._woken_s: dict[str, float] = {}  # time of the latest ``wake`` of each service, monotonic
        self._awaited_changed = Bell()  # wakes the caller of ``awaited``
        hosts = StartHosts.model_validate(start_hosts)
        if hosts.per_node:
            self._hosting = asyncio.get_running_loop().create_task(keep_start_hosts(app, hosts))
        # Two versions of an application have one coordinator each; when the announced one ends, the other takes over.
        self._announcing = asyncio.get_running_loop().create_task(keep_announced(coordinator_key(app), self._name))

    async def join(self) -> dict[str, Any]:
        """``Settings`` for a policy that has just started, with the states of the previous policy."""
        states = {name: record.plan.state for name, record in self._plans().items()}
        return self._settings(states, self._forecasts)

    async def sync(self, cycle: dict[str, Any], lines: list[str]) -> dict[str, Any]:
        """Store a ``CycleRecord``, write lines to the decision log, and return ``Settings``."""
        before = self._admitted()
        received = status.CYCLE.validate_python(cycle)
        self._cycle = replace(received, forecasts={})
        self._synced_s = time.monotonic()
        if self._admitted() != before:
            self._admitted_version += 1
            self._admitted_changed.ring()
        for name, forecast in received.forecasts.items():
            self._forecasts[name] = forecast
            save_state(self._app, _forecast_key(name), forecast_to_json(forecast))
        if lines:  # a cycle without lines has no new decision, and is not stored
            self._store()
            await asyncio.to_thread(self._write, lines)
        return self._settings()

    async def watch(self, version: int) -> tuple[int, dict[str, list[str]] | None]:
        """The version, and the admitted replicas by pool; ``None``: the policy is silent, so no plan holds.

        Returns at once if the caller's version is old, otherwise after a change or ``_WATCH_S``.
        """
        if version == self._admitted_version:
            await self._admitted_changed.wait(_WATCH_S)
        longest_interval_s = max(service.config.interval_s for service in self._services.values())
        silence_s = max(_SILENCE_S, _SILENCE_INTERVALS * longest_interval_s)
        if self._cycle is None or time.monotonic() - self._synced_s > silence_s:
            return self._admitted_version, None
        return self._admitted_version, self._admitted()

    async def wake(self, service: str) -> None:
        """Note that requests wait for a service that sleeps."""
        is_new = service not in self._awaited()
        self._woken_s[service] = time.monotonic()
        if is_new:
            self._awaited_changed.ring()

    async def awaited(self, before: list[str]) -> list[str]:
        """Services for which requests wait. If ``before`` has the same, waits for a change, at most ``_WATCH_S``."""
        if sorted(before) == self._awaited():
            await self._awaited_changed.wait(_WATCH_S)
        return self._awaited()

    async def tune(self, service: str, changes: dict[str, Any], why: str) -> str | None:
        """Change the configuration of a running service. Returns the error; ``None``: the change is accepted.

        ``changes``: nested like the configuration; an empty mapping restores the deployed configuration. ``why``:
        reason for the log.
        """
        own = self._services[service]
        async with self._tuning:  # a change starts from the one before it
            all_changes = merged(own.changes, changes) if changes else {}
            try:
                # In a thread: an import of a policy of one's own may take long, and routers wait for this actor.
                # Other changes, such as a pause, must work without its package.
                is_checked = not _LOADING_FIELDS & changes.keys()
                check = asyncio.to_thread(tuned, own.base, all_changes, own.pools, is_checked=is_checked)
                config = await asyncio.wait_for(check, _CHECK_S)
            except ValidationError as error:
                return explain(error)
            except TimeoutError:
                return f"the check took longer than {_CHECK_S:g} s: see what the import of the policy does"
            except ValueError as error:
                return str(error)
            own.config, own.changes, own.why = config, all_changes, why
            self._version += 1
            self._store()
        return None

    async def cordon(self, name: str, is_cordoned: bool) -> None:
        """Keep new replicas off a node, or off all nodes under a switch; ``False``: let them start there again."""
        if is_cordoned:
            self._cordoned.add(name)
        else:
            self._cordoned.discard(name)
        self._version += 1
        self._store()

    async def status(self) -> dict[str, Any]:
        """``Status`` of the application."""
        return status.STATUS.dump_python(self._status(), mode="json")

    async def metrics(self) -> list[Metric]:
        """The numbers of the status as Prometheus metrics."""
        return scaling_metrics(self._status(), time.time())

    def _status(self) -> Status:
        plans, cycle = self._plans(), self._cycle
        return Status(
            log_path=str(self._log_path),
            cordoned=tuple(sorted(self._cordoned)),
            topology=self._topology,
            services={name: service.status(plans.get(name)) for name, service in self._services.items()},
            nodes=None if cycle is None else cycle.nodes,
            places=None if cycle is None else cycle.places,
            policy_call_p99_s=None if cycle is None else cycle.policy_call_p99_s,
            is_hooked=cycle is not None and cycle.is_hooked,
        )

    def _plans(self) -> Mapping[str, PlanRecord]:
        """The latest plan of each service."""
        return {} if self._cycle is None else self._cycle.services

    def _admitted(self) -> dict[str, list[str]]:
        """Running replicas that the plans admit, by pool."""
        admitted_by_pool: dict[str, list[str]] = {}
        for record in self._plans().values():
            admitted = frozenset(record.plan.admitted)
            for pool, names in record.running.items():
                admitted_by_pool[str(pool)] = [name for name in names if name in admitted]
        return admitted_by_pool

    def _awaited(self) -> list[str]:
        """Services for which requests wait, sorted by name."""
        since_s = time.monotonic() - _WAKE_S
        return sorted(name for name, at_s in self._woken_s.items() if at_s > since_s)

    def _settings(
        self,
        states: Mapping[str, ControllerState] | None = None,
        forecasts: Mapping[str, ForecastState] | None = None,
    ) -> dict[str, Any]:
        settings = Settings(
            version=self._version,
            services={
                name: ServiceSettings(config=service.config, pools=service.pools, why=service.why)
                for name, service in self._services.items()
            },
            topology=self._topology,
            cordoned=frozenset(self._cordoned),
            states=states or {},
            forecasts=forecasts or {},
        )
        return status.SETTINGS.dump_python(settings, mode="json")

    def _store(self) -> None:
        state = CoordinatorState(
            changes={name: service.changes for name, service in self._services.items()},
            version=self._version,
            cordoned=tuple(sorted(self._cordoned)),
            cycle=self._cycle,
            deployed_s=self._deployed_s,
        )
        save_state(self._app, self._name, state.to_json())
        if self._keeps_settings:
            kept = CoordinatorState(changes=state.changes, cordoned=state.cordoned)
            save_state(self._app, _KEPT, kept.to_json())

    def _write(self, lines: list[str]) -> None:
        """Append lines to the decision log. A file after a full one begins with all configurations."""
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            if self._log_path.exists() and self._log_path.stat().st_size > _LOG_BYTES:
                self._log_path.replace(self._log_path.with_suffix(".1.jsonl"))
                now_s, why = time.time(), "the log begins anew"
                configs = [config_line(name, service.config, now_s, why) for name, service in self._services.items()]
                lines = [*configs, *lines]
            with self._log_path.open("a") as log:
                log.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            logger.warning("the decision log %s cannot be written: %s", self._log_path, error)


def _forecast_key(service: str) -> str:
    """Name under which a service's load is stored. A redeploy does not change it: users stay the same."""
    return f"forecast:{service}"


def _fitting(service: str, base: AutoscaleConfig, changes: Mapping[str, Any], pools: Pools) -> Mapping[str, Any]:
    """The tuned fields of a service that fit its deployed configuration: all, or those that fit one after the other."""
    with suppress(ValueError):
        tuned(base, changes, pools, is_checked=True)
        return changes
    fitting: dict[str, Any] = {}
    for name, value in changes.items():
        try:
            tuned(base, {**fitting, name: value}, pools, is_checked=True)
        except ValueError as error:
            why = "was tuned before, does not fit the deployment, and is dropped"
            logger.warning("%s of %s %s: %s", name, service, why, error)
        else:
            fitting[name] = value
    return fitting


def _deployed_s(app: str) -> float | None:
    """When an application was deployed last, Unix time; ``None``: Serve does not say.

    Serve stores this time with the configuration, so it outlives Serve's controller.
    """
    thread = ThreadPoolExecutor(1)  # Serve's function blocks without a limit, and Serve waits for this actor's start
    try:
        return thread.submit(serve.status).result(_STATUS_S).applications[app].last_deployed_time_s
    except (KeyError, TimeoutError, RayServeException, ray.exceptions.RayError) as error:
        logger.warning("when %s was deployed is unknown: %r", app, error)
        return None
    finally:
        thread.shutdown(wait=False)


def _is_of_this_deployment(app: str, state: CoordinatorState, deployed_s: float | None) -> bool:
    """Whether a stored state is of this deployment, and not of an earlier one with the same name.

    It is if the application was not deployed since, or if a replica of the stored plans still exists.
    """
    if deployed_s is not None and state.deployed_s == deployed_s:
        return True
    plans = () if state.cycle is None else state.cycle.services.values()
    running = [(str(pool), name) for plan in plans for pool, names in plan.running.items() for name in names]
    return any(is_alive(app, pool, name) for pool, name in running)
