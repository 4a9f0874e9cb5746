"""The Python SDK: deploy an application from the same declarative config as the YAML, watch it, talk to it, end it."""

import copy
import logging
import math
import os
import re
import signal
import socket
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from deployments.environment import hard_stop
from deployments.ports import EVERY_ADDRESS, free_ports
from serve_app.cluster import DeployError, LocalCluster, NodeSpec, driver_environment, local_cluster_address
from serve_app.config import AppConfig
from serve_app.preflight import check_machine
from serve_app.validate import ConfigError, load_serve_yaml
from serve_app.worker_groups import is_plain_label

if TYPE_CHECKING:
    import psutil
    from openai import OpenAI

    from serve_app.ray_control import Control

_POLL_S = 0.5
_CONNECT_TIMEOUT_S = 5.0
_CAUSE_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What Serve says of an application: its state, a message, and replica states per deployment."""

    state: str
    message: str
    replicas: dict[str, dict[str, int]]


def deploy(
    source: Path | str | Mapping[str, Any],
    *,
    address: str | None = None,
    nodes: Sequence[NodeSpec] | None = None,
    environment: dict[str, str] | None = None,
    start_timeout_s: float = 600.0,
    on_status: Callable[[Status], None] | None = None,
) -> "App":
    """Deploy one application and wait until it answers.

    Args:
        source: a Serve YAML, or the same as a mapping; it names exactly one application.
        address: a running Ray cluster (``auto`` finds this machine's). ``None`` starts a cluster here that ends with
            this process.
        nodes: the nodes of that cluster; by default one that the replicas fit on.
        environment: more variables for its processes.
        start_timeout_s: how long to wait.
        on_status: called with every new status while waiting.

    Raises:
        ConfigError: the configuration or this machine does not do; nothing was started.
        DeployError: the application did not start. A cluster that was started here has been ended; on a running one
            the application stays, for ``tandem status`` to look at.
    """
    if address is None:
        driver_environment()
    import ray  # not before the environment is set

    from serve_app.ray_schema import check_engines

    document, config = _read(source)
    if ray.is_initialized():
        raise DeployError(
            "this process is connected to a Ray cluster already: call ray.shutdown() first, or deploy from another"
        )
    host, port = str(document["http_options"]["host"]), int(document["http_options"]["port"])
    if address is None and "metrics_port" not in config.ingress.model_fields_set:
        # Two clusters of this machine have the same default.
        document, config = _with_metrics_port(document, free_ports(1)[0])
    cluster = None
    if address is None:
        check_machine(config, host=host, port=port)
    check_engines(config)
    if address is None:
        environment = {**hard_stop(config.ingress.request_timeout_s), **(environment or {})}
        cluster = LocalCluster(nodes or [NodeSpec(cpus=_cpus(config))], environment=environment)
    app = App(document, config, cluster, address or (cluster.address if cluster else "auto"), host, port)
    app.start(start_timeout_s, on_status)
    return app


def connect(address: str) -> None:
    """Connect this process to a Ray cluster; ``auto`` is also the one that `tandem serve` has started here.

    Raises:
        DeployError: there is none at ``address``.
    """
    if address == "auto" and "RAY_ADDRESS" not in os.environ:
        address = local_cluster_address() or address
    import ray

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        if match := re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d+)", address):
            # Ray itself tries a port where nobody listens for over ten minutes.
            socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_TIMEOUT_S).close()
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="warning")
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise DeployError(
            f"no Ray cluster at {address!r}: {textwrap.shorten(str(error), _CAUSE_CHARS, placeholder=' ...')}"
        ) from None
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler aborts with a stack dump.
        signal.signal(signal.SIGTERM, terminate)


class App:
    """A deployed application; a context manager that leaves it, which ends a cluster that ``deploy`` started."""

    def __init__(
        self,
        document: dict[str, Any],
        config: AppConfig,
        cluster: LocalCluster | None,
        address: str,
        host: str,
        port: int,
        *,
        health_path: str = "/health",
    ) -> None:
        self.config = config
        self.name = str(document["applications"][0].get("name", "default"))
        self.url = f"http://{host}:{port}"
        self._document = document
        self._cluster = cluster
        self._address = address
        self._health_path = health_path

    def start(self, timeout_s: float, on_status: Callable[[Status], None] | None = None) -> None:
        """Connect, submit, and wait until it answers; leave again when that fails.

        Raises:
            DeployError: it did not start.
        """
        try:
            connect(self._address)
            if self._cluster is not None:
                self._check_placeable()
            self._submit(self._document)
            self.wait_ready(timeout_s, on_status)
        except BaseException as error:
            self.close()
            if type(error).__module__.startswith("ray."):
                raise DeployError(f"application {self.name}: {_first_cause([str(error)])}") from error
            raise

    def _check_placeable(self) -> None:
        """A cluster of this machine gets no other nodes, so what none of them offers would be waited for in vain."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        own = {} if self.config.topology is None else self.config.topology.gpu_resources
        for key, pool in ((key, pool) for group in self.config.groups for key, pool in group.pools().items()):
            gpu = pool.placement.accelerator_type
            labels = {name: value for name, value in pool.placement.node_labels.items() if is_plain_label(value)}
            if gpu is not None and not any(
                own.get(gpu, f"accelerator_type:{gpu}") in node["Resources"] for node in nodes
            ):
                raise DeployError(
                    f"groups.{key.group}.{key.role}: this machine has no GPU of type {gpu}; deploy onto a Ray cluster "
                    "that has with `tandem deploy`"
                )
            if labels and not any(labels.items() <= node["Labels"].items() for node in nodes):
                raise DeployError(
                    f"groups.{key.group}.{key.role}: no node here has the labels {labels}; deploy onto a Ray "
                    "cluster that has with `tandem deploy`, or leave node_labels out"
                )

    def _submit(self, document: dict[str, Any]) -> None:
        import ray
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        schema = ServeDeploySchema.model_validate(document)
        serve.start(proxy_location=schema.proxy_location, http_options=schema.http_options.model_dump())
        client = _get_global_client()
        live, wanted = client.http_config, schema.http_options
        if (live.host, live.port) != (wanted.host, wanted.port):
            raise ConfigError(
                f"http_options: {wanted.host}:{wanted.port} was asked for, but Serve already runs on this cluster at "
                f"{live.host}:{live.port} and cannot move: set these, or end it with `serve shutdown`"
            )
        if wanted.host in EVERY_ADDRESS:
            # The proxy may be on the head node alone.
            self.url = f"http://{ray.get_runtime_context().gcs_address.rsplit(':', 1)[0]}:{wanted.port}"
        others = sorted(set(serve.status().applications) - {self.name})
        if others:
            raise ConfigError(
                f"this cluster already runs {', '.join(others)}, which deploying {self.name} would delete (a Serve "
                "config is the whole of a cluster): delete it first with `tandem delete`, or use another cluster"
            )
        # An application-level autoscaling policy can only come in by this door (Serve's REST API uses it too).
        client.deploy_apps(schema)

    def update(
        self,
        source: Path | str | Mapping[str, Any],
        *,
        timeout_s: float = 600.0,
        on_status: Callable[[Status], None] | None = None,
    ) -> None:
        """Go over to another configuration while it serves: replicas are replaced, a few at a time.

        All of them, whatever has changed in ``args``, since Serve makes one version of them; ``control.tune`` replaces
        none. What an old replica has begun it ends, and prefill stays until its KV has been read.

        Args:
            source: a Serve YAML of the same application, or the same as a mapping.
            timeout_s: how long to wait.
            on_status: called with every new status while waiting.

        Raises:
            ConfigError: the configuration does not do; nothing was changed.
            DeployError: it is not what runs after ``timeout_s``.
        """
        from serve_app.ray_schema import check_engines

        document, config = _read(source)
        if (name := str(document["applications"][0].get("name", "default"))) != self.name:
            raise ConfigError(f"applications.0.name: {name!r} is not {self.name!r}, which runs: deploy it by itself")
        if self._cluster is not None and "metrics_port" not in config.ingress.model_fields_set:
            document, config = _with_metrics_port(document, self.config.ingress.metrics_port)
        check_engines(config)
        self._submit(document)
        self._document, self.config = document, config
        self.wait_ready(timeout_s, on_status)

    def wait_ready(self, timeout_s: float, on_status: Callable[[Status], None] | None = None) -> None:
        """Wait until the application runs and its endpoint answers.

        Raises:
            DeployError: it failed, or did not get there in time.
        """
        deadline = time.monotonic() + timeout_s
        last = None
        while time.monotonic() < deadline:
            status = self.status()
            if on_status is not None and status != last:
                on_status(status)
            last = status
            if status.state in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise DeployError(f"application {self.name}: {_first_cause(self._failures() or [status.message])}")
            if status.state == "RUNNING" and self.is_answering():
                return
            if not self.is_alive:
                raise DeployError("the local Ray cluster has ended")
            time.sleep(_POLL_S)
        raise DeployError(
            f"application {self.name} was not ready after {timeout_s:g} s: {last}. Where max_surge_frac is more "
            "than 0, replicas of a new configuration wait for room beside the old ones"
        )

    def _failures(self) -> list[str]:
        """What failed deployments say; the application's own message names them only."""
        from ray import serve

        application = serve.status().applications[self.name]
        return [d.message for d in application.deployments.values() if d.status.value == "DEPLOY_FAILED"]

    def is_answering(self) -> bool:
        """Whether the endpoint answers that it is healthy."""
        try:
            with urllib.request.urlopen(f"{self.url}{self._health_path}", timeout=10) as response:  # noqa: S310
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def status(self) -> Status:
        """What Serve says now."""
        from ray import serve

        application = serve.status().applications.get(self.name)
        if application is None:
            return Status(state="NOT_STARTED", message="", replicas={})
        return Status(
            state=str(application.status.value),
            message=application.message,
            replicas={name: dict(deployment.replica_states) for name, deployment in application.deployments.items()},
        )

    @property
    def metrics_url(self) -> str:
        """The metrics page: beside the API if it is there, else as a node with an ingress replica reaches its own."""
        ingress = self.config.ingress
        if ingress.metrics_on_public_port:
            return f"{self.url}/metrics"
        host = "127.0.0.1" if ingress.metrics_host in EVERY_ADDRESS else ingress.metrics_host
        return f"http://{host}:{ingress.metrics_port}/metrics"

    @property
    def is_alive(self) -> bool:
        """Whether the cluster that ``deploy`` started still runs; true on one that it did not start."""
        return self._cluster is None or self._cluster.is_alive

    def processes(self) -> list["psutil.Process"]:
        """Every process of the cluster that ``deploy`` started; none of one that it did not start."""
        return [] if self._cluster is None else self._cluster.processes()

    @property
    def control(self) -> "Control":
        """How it is sized: ``status``, ``tune``, ``scale``, ``pause``, ``resume``, as the commands of these names.

        Raises:
            ConfigError: it has several services: ``control_of`` takes one.
            DeployError: it is not autoscaled.
        """
        from serve_app.ray_control import Control

        return Control(self.name)

    def control_of(self, model: str) -> "Control":
        """The same of one of several services, by its model's name.

        Raises:
            ConfigError: there is no such service.
            DeployError: it is not autoscaled.
        """
        from serve_app.ray_control import Control

        return Control(self.name, model)

    def client(self, api_key: str = "none") -> "OpenAI":
        """The official client, pointed at this application; ``api_key`` where it asks for one."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key)

    def drain(self, timeout_s: float | None = None) -> int | None:
        """Take no new request (503), and wait until the others have been answered; then end it within a minute.

        Args:
            timeout_s: how long to wait; ``None``: as long as a request may take.

        Returns:
            How many requests were left; ``None`` where a replica of the endpoint did not say.
        """
        from serve_app.ray_drain import drain

        return drain(self.name, self.config.ingress.request_timeout_s if timeout_s is None else timeout_s)

    def delete(self) -> None:
        """Delete the application once it has answered what it has begun; a cluster of ``deploy``'s goes with it.

        Raises:
            DeployError: it is still there after a quarter of an hour.
        """
        from serve_app.ray_drain import delete

        try:
            delete(self.name, self.config.ingress.request_timeout_s)
        finally:
            self.close()

    def close(self) -> None:
        """Leave: ends everything where ``deploy`` started the cluster, else only the connection."""
        import ray
        from ray.serve import context

        if context._global_client is not None:
            for handle in context._global_client.handle_cache.values():
                if handle.is_initialized and handle._is_router_running_in_separate_loop():
                    handle.shutdown()  # its thread would go on reporting to a Serve that is no more (DECISIONS 145)
        ray.shutdown()
        if self._cluster is not None:
            self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(source: Path | str | Mapping[str, Any]) -> tuple[dict[str, Any], AppConfig]:
    """A Serve YAML or its mapping as this machine's Serve gets it."""
    from serve_app.ray_schema import single_app_config

    document = load_serve_yaml(Path(source)) if isinstance(source, (str, Path)) else copy.deepcopy(dict(source))
    config = single_app_config(document)
    # Serve's own default is every interface.
    document["http_options"] = {"host": "127.0.0.1", "port": 8000, **(document.get("http_options") or {})}
    args = document["applications"][0]["args"]
    for service, of in zip(config.services, args.get("services", [args]), strict=True):
        if service.model.folder is not None:  # Serve's tasks run elsewhere than here
            of["model"]["source"] = str(service.model.folder)
    return document, config


def _with_metrics_port(document: dict[str, Any], port: int) -> tuple[dict[str, Any], AppConfig]:
    args = document["applications"][0]["args"]
    args["ingress"] = {**(args.get("ingress") or {}), "metrics_port": port}
    return _read(document)


def _cpus(config: AppConfig) -> int:
    """What every replica that there may be takes, those of an update included, and a little more."""
    total = (config.ingress.replicas + 1) * config.ingress.cpus_per_replica
    for group in config.groups:
        for pool in group.pools().values():
            placement = pool.placement
            most = pool.max_replicas or pool.replicas
            total += (most + math.ceil(most * pool.max_surge_frac)) * (
                placement.cpus_per_replica + pool.workers * placement.cpus_per_worker
            )
    return math.ceil(total) + 1


def _first_cause(messages: Sequence[str]) -> str:
    """One line out of Serve's tracebacks: the last exception of the first one, with what it says over several lines."""
    lines = messages[0].splitlines()
    raised = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    text = " ".join(" ".join(lines[raised[-1] if raised else 0 :]).split())
    if len(text) > _CAUSE_CHARS:  # what a program that failed says last matters as much as who reports it
        text = f"{text[: _CAUSE_CHARS // 2]} ... {text[-_CAUSE_CHARS // 2 :]}"
    return text or "no message"
