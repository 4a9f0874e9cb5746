"""The coordinator of an application: what the control plane knows that must outlive Serve's controller.

One actor per application, started, watched and ended by Serve with the ingress deployment. It holds the configuration
of every service with what was tuned since, the controllers' states, what is cordoned, and who is admitted, which every
router asks for; it writes the decision log. It decides nothing.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from prometheus_client.metrics_core import Metric
from pydantic import ValidationError
from ray import serve
from ray.experimental import internal_kv
from ray.serve.config import DeploymentActorConfig

from autoscale.config import AutoscaleConfig
from autoscale.decision_log import config_line
from autoscale.tuning import Pools, differing, merged, tuned
from deployments.explain import explain
from deployments.scaling_metrics import scaling_metrics
from kvtransfer.topology import TopologyConfig
from router.ray_actors import keep_announced
from router.ray_coordinator import coordinator_key, is_alive, state_key, state_of

logger = logging.getLogger("ray.serve")

_WATCH_S = 5.0
# A policy that has said nothing for so long is taken for dead; Serve's controller restarts in about ten seconds.
_SILENCE_S = 60.0
_SILENCE_INTERVALS = 5
_LOG_BYTES = 64 << 20
# A service that sleeps is woken while somebody has asked for it of late.
_WAKE_S = 5.0


class _Service:
    """How one service is sized."""

    def __init__(self, base: AutoscaleConfig, pools: Pools, kept: Mapping[str, Any]) -> None:
        self.base, self.pools = base, pools
        self.changes: dict[str, Any] = kept.get("changes", {})
        self.config = tuned(base, self.changes, pools)
        self.why = "start"

    def said(self) -> dict[str, Any]:
        """What the policy must know of it."""
        return {
            "config": self.config.model_dump(mode="json"),
            "pools": self.pools.model_dump(mode="json"),
            "why": self.why,
        }


class Coordinator:
    """See the module; every method is called by other processes."""

    def __init__(self, *, services: Mapping[str, Mapping[str, Any]], topology: Mapping[str, Any] | None) -> None:
        self._app = app = serve.get_deployment_actor_context().app_name
        self._topology = None if topology is None else TopologyConfig.model_validate(topology)
        self._name = ray.get_runtime_context().get_actor_name() or ""
        self._log_path = _log_path(app)
        # A redeployed application has another actor name: its replicas are new, and so is its configuration.
        kept = state_of(app, self._name)
        if not _is_of_this_deployment(app, kept):
            kept = {}
        self._services = {
            name: _Service(
                AutoscaleConfig.model_validate(of["config"]),
                Pools.model_validate(of["pools"]),
                kept.get("services", {}).get(name, {}),
            )
            for name, of in services.items()
        }
        self._version = kept.get("version", 0)
        self._cordoned: set[str] = set(kept.get("cordoned", ()))
        self._update: dict[str, Any] | None = kept.get("update")
        self._heard_s = time.monotonic()
        self._routes = 0
        self._changed = asyncio.Event()
        self._asked_s: dict[str, float] = {}
        self._was_asked = asyncio.Event()
        # Two versions of an application have one coordinator each; when the known one ends, the other speaks up.
        self._announcing = asyncio.get_running_loop().create_task(keep_announced(coordinator_key(app), self._name))

    async def join(self) -> dict[str, Any]:
        """What a policy that has just started must know: the configurations, and the states of the one before it."""
        states = {name: of["plan"]["state"] for name, of in self._seen().items()}
        return {**self._said(), "states": states}

    async def sync(self, update: dict[str, Any]) -> dict[str, Any]:
        """Take the plans from the policy and tell it the configurations that hold."""
        before = self._admitted()
        lines = update.pop("lines")
        self._update = update
        self._heard_s = time.monotonic()
        if self._admitted() != before:
            self._routes += 1
            self._changed.set()
            self._changed = asyncio.Event()
        if lines:
            self._keep()
            await asyncio.to_thread(self._write, lines)
        return self._said()

    async def watch(self, version: int) -> tuple[int, dict[str, list[str]] | None]:
        """Who is admitted of each pool, as soon as it is not what the caller has seen, or after a few seconds.

        ``None`` while the policy is silent: replicas that have come since are in nobody's plan.
        """
        if version == self._routes:
            try:
                async with asyncio.timeout(_WATCH_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
        slowest_s = max(service.config.interval_s for service in self._services.values())
        silence_s = max(_SILENCE_S, _SILENCE_INTERVALS * slowest_s)
        if self._update is None or time.monotonic() - self._heard_s > silence_s:
            return self._routes, None
        return self._routes, self._admitted()

    async def wake(self, service: str) -> None:
        """Requests wait for a service that sleeps."""
        is_news = service not in self._awaited()
        self._asked_s[service] = time.monotonic()
        if is_news:
            self._was_asked.set()
            self._was_asked = asyncio.Event()

    async def awaited(self, known: list[str]) -> list[str]:
        """The services for which requests wait, as soon as they are not those known, or after a few seconds."""
        if sorted(known) == self._awaited():
            try:
                async with asyncio.timeout(_WATCH_S):
                    await self._was_asked.wait()
            except TimeoutError:
                pass
        return self._awaited()

    async def tune(self, service: str, changes: dict[str, Any], why: str) -> str | None:
        """Change the configuration of a running service.

        Args:
            service: its model's name.
            changes: as the configuration is nested; an empty mapping returns to what was deployed.
            why: who asked, for the log.

        Returns:
            What is wrong with it, or ``None``: it holds from the next tick on.
        """
        of = self._services[service]
        together = merged(of.changes, changes) if changes else {}
        try:
            config = tuned(of.base, together, of.pools)
        except ValidationError as error:
            return explain(error)
        except ValueError as error:
            return str(error)
        of.config, of.changes, of.why = config, together, why
        self._version += 1
        self._keep()
        return None

    async def cordon(self, name: str, is_cordoned: bool) -> None:
        """Let a node, or all nodes under a switch, take nothing new; or let them take it again."""
        if is_cordoned:
            self._cordoned.add(name)
        else:
            self._cordoned.discard(name)
        self._version += 1
        self._keep()

    async def status(self) -> dict[str, Any]:
        """Everything that can be shown; of each service under its name."""
        update = {name: value for name, value in (self._update or {}).items() if name != "services"}
        seen = self._seen()
        return {
            "log_path": str(self._log_path),
            "cordoned": sorted(self._cordoned),
            "topology": None if self._topology is None else self._topology.model_dump(mode="json"),
            **update,
            "services": {
                name: {
                    "config": of.config.model_dump(mode="json"),
                    "tuned": differing(of.changes, of.base.model_dump(mode="json")),
                    "pools": of.pools.model_dump(mode="json"),
                    **seen.get(name, {}),
                }
                for name, of in self._services.items()
            },
        }

    async def metrics(self) -> list[Metric]:
        """Everything that is a number, for Prometheus."""
        return scaling_metrics(await self.status(), time.time())

    def _seen(self) -> dict[str, Any]:
        """What the policy has said last of each service."""
        return {} if self._update is None else dict(self._update["services"])

    def _admitted(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for of in self._seen().values():
            admitted = frozenset(of["plan"]["admitted"])
            found |= {pool: [name for name in names if name in admitted] for pool, names in of["running"].items()}
        return found

    def _awaited(self) -> list[str]:
        since_s = time.monotonic() - _WAKE_S
        return sorted(name for name, at_s in self._asked_s.items() if at_s > since_s)

    def _said(self) -> dict[str, Any]:
        return {
            "version": self._version,
            "services": {name: of.said() for name, of in self._services.items()},
            "topology": None if self._topology is None else self._topology.model_dump(mode="json"),
            "cordoned": sorted(self._cordoned),
        }

    def _keep(self) -> None:
        kept = {
            "services": {name: {"changes": of.changes} for name, of in self._services.items()},
            "version": self._version,
            "cordoned": sorted(self._cordoned),
            "update": self._update,
        }
        internal_kv._internal_kv_put(state_key(self._app, self._name), json.dumps(kept).encode(), overwrite=True)

    def _write(self, lines: list[str]) -> None:
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            if self._log_path.exists() and self._log_path.stat().st_size > _LOG_BYTES:
                self._log_path.replace(self._log_path.with_suffix(".1.jsonl"))
                now_s, why = time.time(), "the log begins anew"
                lines = [*(config_line(name, of.config, now_s, why) for name, of in self._services.items()), *lines]
            with self._log_path.open("a") as log:
                log.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            logger.warning("the decision log %s cannot be written: %s", self._log_path, error)


def _is_of_this_deployment(app: str, kept: Mapping[str, Any]) -> bool:
    """Whether a replica of what was kept is still there; an application deployed again starts as its config says."""
    of = ((kept.get("update") or {}).get("services") or {}).values()
    running = [(pool, name) for seen in of for pool, names in seen["running"].items() for name in names]
    return any(is_alive(app, pool, name) for pool, name in running)


def _log_path(app: str) -> Path:
    """Beside Ray's own logs, where its log rotation and collection find it."""
    return Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve" / f"tandem_decisions_{app}.jsonl"


def coordinator_actor(
    services: Mapping[str, tuple[AutoscaleConfig, Pools]], topology: TopologyConfig | None
) -> DeploymentActorConfig:
    """The actor as Serve starts it with the ingress deployment."""
    return DeploymentActorConfig(
        name="coordinator",
        actor_class=ray.remote(Coordinator),
        init_kwargs={
            "services": {
                name: {"config": config.model_dump(mode="json"), "pools": pools.model_dump(mode="json")}
                for name, (config, pools) in services.items()
            },
            "topology": None if topology is None else topology.model_dump(mode="json"),
        },
        actor_options={"num_cpus": 0, "max_concurrency": 1000},
    )
