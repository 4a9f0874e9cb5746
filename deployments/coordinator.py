"""The coordinator of an application: what the control plane knows that must outlive Serve's controller.

One actor per application, started, watched and ended by Serve with the ingress deployment. It holds the configuration
with what was tuned since, the controller's state, and who is admitted, which every router asks for; it writes the
decision log. It decides nothing.
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
from router.ray_actors import keep_announced
from router.ray_coordinator import coordinator_key, is_alive, state_key, state_of

logger = logging.getLogger("ray.serve")

_WATCH_S = 5.0
# A policy that has said nothing for so long is taken for dead; Serve's controller restarts in about ten seconds.
_SILENCE_S = 60.0
_SILENCE_INTERVALS = 5
_LOG_BYTES = 64 << 20


class Coordinator:
    """See the module; every method is called by other processes."""

    def __init__(self, *, config: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        self._app = app = serve.get_deployment_actor_context().app_name
        self._base = AutoscaleConfig.model_validate(config)
        self._pools = Pools.model_validate(pools)
        self._name = ray.get_runtime_context().get_actor_name() or ""
        self._log_path = _log_path(app)
        # A redeployed application has another actor name: its replicas are new, and so is its configuration.
        kept = state_of(app, self._name)
        if not _is_of_this_deployment(app, kept):
            kept = {}
        self._changes: dict[str, Any] = kept.get("changes", {})
        self._config = tuned(self._base, self._changes, self._pools)
        self._version = kept.get("version", 0)
        self._why = "start"
        self._update: dict[str, Any] | None = kept.get("update")
        self._heard_s = time.monotonic()
        self._routes = 0
        self._changed = asyncio.Event()
        # Two versions of an application have one coordinator each; when the known one ends, the other speaks up.
        self._announcing = asyncio.get_running_loop().create_task(keep_announced(coordinator_key(app), self._name))

    async def join(self) -> dict[str, Any]:
        """What a policy that has just started must know: the configuration, and the state of the one before it."""
        state = self._update["plan"]["state"] if self._update else None
        return {**self._said(), "state": state}

    async def sync(self, update: dict[str, Any]) -> dict[str, Any]:
        """Take a plan from the policy and tell it the configuration that holds."""
        admitted = update["plan"]["admitted"]
        is_news = self._update is None or admitted != self._update["plan"]["admitted"]
        lines = update.pop("lines")
        self._update = update
        self._heard_s = time.monotonic()
        if is_news:
            self._routes += 1
            self._changed.set()
            self._changed = asyncio.Event()
        if lines:
            self._keep()
            await asyncio.to_thread(self._write, lines)
        return self._said()

    async def watch(self, version: int) -> tuple[int, list[str] | None]:
        """Who is admitted, as soon as it is not what the caller has seen, or after a few seconds.

        ``None`` while the policy is silent: replicas that have come since are in nobody's plan.
        """
        if version == self._routes:
            try:
                async with asyncio.timeout(_WATCH_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
        silence_s = max(_SILENCE_S, _SILENCE_INTERVALS * self._config.interval_s)
        if self._update is None or time.monotonic() - self._heard_s > silence_s:
            return self._routes, None
        return self._routes, self._update["plan"]["admitted"]

    async def tune(self, changes: dict[str, Any], why: str) -> str | None:
        """Change the configuration of the running application.

        Args:
            changes: as the configuration is nested; an empty mapping returns to what was deployed.
            why: who asked, for the log.

        Returns:
            What is wrong with it, or ``None``: it holds from the next tick on.
        """
        together = merged(self._changes, changes) if changes else {}
        try:
            config = tuned(self._base, together, self._pools)
        except ValidationError as error:
            return explain(error)
        except ValueError as error:
            return str(error)
        self._config, self._changes, self._why = config, together, why
        self._version += 1
        self._keep()
        return None

    async def status(self) -> dict[str, Any]:
        """Everything that can be shown."""
        return {
            "config": self._config.model_dump(mode="json"),
            "tuned": differing(self._changes, self._base.model_dump(mode="json")),
            "log_path": str(self._log_path),
            **(self._update or {}),
        }

    async def metrics(self) -> list[Metric]:
        """Everything that is a number, for Prometheus."""
        return scaling_metrics(await self.status(), time.time())

    def _said(self) -> dict[str, Any]:
        return {
            "version": self._version,
            "why": self._why,
            "config": self._config.model_dump(mode="json"),
            "pools": self._pools.model_dump(mode="json"),
        }

    def _keep(self) -> None:
        kept = {"changes": self._changes, "version": self._version, "update": self._update}
        internal_kv._internal_kv_put(state_key(self._app, self._name), json.dumps(kept).encode(), overwrite=True)

    def _write(self, lines: list[str]) -> None:
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            if self._log_path.exists() and self._log_path.stat().st_size > _LOG_BYTES:
                self._log_path.replace(self._log_path.with_suffix(".1.jsonl"))
                lines = [config_line(self._config, time.time(), "the log begins anew"), *lines]
            with self._log_path.open("a") as log:
                log.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            logger.warning("the decision log %s cannot be written: %s", self._log_path, error)


def _is_of_this_deployment(app: str, kept: Mapping[str, Any]) -> bool:
    """Whether a replica of what was kept is still there; an application deployed again starts as its config says."""
    running = (kept.get("update") or {}).get("running", {})
    return any(is_alive(app, deployment, name) for deployment, names in running.items() for name in names)


def _log_path(app: str) -> Path:
    """Beside Ray's own logs, where its log rotation and collection find it."""
    return Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve" / f"tandem_decisions_{app}.jsonl"


def coordinator_actor(config: AutoscaleConfig, pools: Pools) -> DeploymentActorConfig:
    """The actor as Serve starts it with the ingress deployment."""
    return DeploymentActorConfig(
        name="coordinator",
        actor_class=ray.remote(Coordinator),
        init_kwargs={"config": config.model_dump(mode="json"), "pools": pools.model_dump(mode="json")},
        actor_options={"num_cpus": 0, "max_concurrency": 1000},
    )
