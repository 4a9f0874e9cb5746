"""The Python SDK: deploy an application from a Serve YAML or the same as a mapping, watch it, call it, end it."""

import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from deployments.machine.claims import EVERY_ADDRESS, free_ports
from deployments.serve_seam.environment import hard_stop
from serve_app.checks.ray_schema import check_engines, read_application
from serve_app.checks.yaml_checks import ConfigError
from serve_app.config import AppConfig
from serve_app.local.cluster import DeployError, LocalCluster, NodeSpec, driver_environment
from serve_app.local.preflight import check_machine, replica_cpus
from serve_app.local.ray_nodes import check_placeable
from serve_app.running import ray_drain
from serve_app.running.ray_control import Control
from serve_app.running.ray_serve import Status, connect, failure_of, first_cause, leave, status_of, submit

if TYPE_CHECKING:
    import psutil
    from openai import OpenAI

__all__ = ["App", "ConfigError", "DeployError", "NodeSpec", "Status", "connect", "deploy"]

# Seconds between two checks whether an application is ready.
_POLL_S = 0.5
# Longest wait for the answer of the health path, seconds; the endpoint first asks every decode pool, for up to 5 s.
_HEALTH_TIMEOUT_S = 10.0

# Called with every new status while an application starts.
OnStatus = Callable[[Status], None]


def deploy(
    source: Path | str | Mapping[str, Any],
    *,
    address: str | None = None,
    nodes: Sequence[NodeSpec] | None = None,
    environment: dict[str, str] | None = None,
    start_timeout_s: float = 600.0,
    on_status: OnStatus | None = None,
) -> "App":
    """Deploy one application and wait until it answers.

    Args:
        source: path of a Serve YAML with exactly one application, or the same as a mapping.
        address: address of a running Ray cluster; ``auto`` finds the cluster of this machine. ``None``: start a local
            cluster, which ends with this process.
        nodes: nodes of a local cluster; by default one node with room for every replica.
        environment: more environment variables for the processes of a local cluster.
        start_timeout_s: longest wait, seconds, until the application answers.
        on_status: called with every new status during the wait.

    Raises:
        ConfigError: the configuration or this machine does not fit. Nothing was submitted, and a local cluster has
            ended.
        DeployError: the application did not start. A local cluster has ended. On a running cluster the application
            stays, so that ``tandem status`` can show it.
    """
    if address is None:
        driver_environment()
    import ray  # only after the environment is set

    # A port of its own for the metrics page: another cluster of this machine may have the default port.
    document, config = _read(source, free_ports(1)[0] if address is None else None)
    if ray.is_initialized():
        raise DeployError(
            "this process is connected to a Ray cluster already: call ray.shutdown() first, or use another process"
        )
    if address is None:
        check_machine(config, host=str(document["http_options"]["host"]), port=int(document["http_options"]["port"]))
    # vLLM checks the arguments of its engines in a process of its own for some seconds; the cluster starts meanwhile.
    with ThreadPoolExecutor(1) as thread:
        engines_check = thread.submit(check_engines, config)
        cluster: LocalCluster | None = None
        if address is None:
            # Time for which a replaced HAProxy still serves its streams; driver_environment does not know the timeout.
            variables = {**hard_stop(config.ingress.request_timeout_s), **(environment or {})}
            cluster = LocalCluster(nodes or [NodeSpec(cpus=replica_cpus(config))], environment=variables)
            address = cluster.address
        app = App(document, config, address, cluster)
        app.start(start_timeout_s, on_status, before_submit=engines_check.result)
    return app


class App:
    """A deployed application, made by ``deploy``. As a context manager it calls ``close`` at the end."""

    # Path at which the endpoint answers 200 while it is healthy.
    health_path = "/health"

    def __init__(
        self, document: dict[str, Any], config: AppConfig, address: str, cluster: LocalCluster | None = None
    ) -> None:
        """``cluster``: the local cluster that ``deploy`` started; ``None``: the application is on a running cluster."""
        self.config = config
        self.name = _name(document)
        self.url = ""  # URL of the endpoint; known once the application is submitted
        self._document = document
        self._address = address
        self._cluster = cluster

    def start(
        self,
        timeout_s: float,
        on_status: OnStatus | None = None,
        before_submit: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect, submit, and wait until the application answers; called once, by ``deploy``.

        ``before_submit``: a last check; its errors are raised. After any error the process is disconnected, and a local
        cluster has ended.

        Raises:
            ConfigError: the configuration does not fit the cluster.
            DeployError: the application did not start within ``timeout_s``.
        """
        try:
            with self._ray_errors():
                connect(self._address)
                if self._cluster is not None:
                    check_placeable(self.config)
                before_submit()
                self.url = submit(self._document, self.name)
                self.wait_ready(timeout_s, on_status)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _ray_errors(self) -> Iterator[None]:
        """Turn an error of Ray itself, such as a lost cluster, into a DeployError in one line."""
        try:
            yield
        except Exception as error:
            if type(error).__module__.startswith("ray."):  # no isinstance: Ray may not be imported yet
                raise DeployError(f"application {self.name}: {first_cause([str(error)])}") from error
            raise

    def update(
        self, source: Path | str | Mapping[str, Any], *, timeout_s: float = 600.0, on_status: OnStatus | None = None
    ) -> None:
        """Change to another configuration while the application serves: replicas are replaced, a few at a time.

        Serve replaces every replica, whichever field of ``args`` has changed; ``control.tune`` replaces none. An old
        replica finishes its requests, and an old prefill replica stays until its KV has been read.

        Args:
            source: as in ``deploy``.
            timeout_s: longest wait, seconds, until the application runs with the new configuration.
            on_status: as in ``deploy``.

        Raises:
            ConfigError: the configuration does not fit, or belongs to another application. Nothing was changed.
            DeployError: the application does not run with the new configuration after ``timeout_s``, or the cluster is
                lost.
        """
        document, config = _read(source, None if self._cluster is None else self.config.ingress.metrics_port)
        if (name := _name(document)) != self.name:
            raise ConfigError(
                f"applications.0.name: {name!r} is not {self.name!r}, the application to update: deploy it by itself"
            )
        check_engines(config)
        with self._ray_errors():
            self.url = submit(document, self.name)
            self._document, self.config = document, config
            self.wait_ready(timeout_s, on_status)

    def wait_ready(self, timeout_s: float, on_status: OnStatus | None = None) -> None:
        """Wait until the application runs and its endpoint answers.

        Raises DeployError: the application has failed, is not ready after ``timeout_s``, or its cluster has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        last = None
        while time.monotonic() < deadline_s:
            status = self.status()
            if on_status is not None and status != last:
                on_status(status)
            last = status
            if status.state in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise DeployError(f"application {self.name}: {failure_of(self.name)}")
            if status.state == "RUNNING" and self.is_answering():
                return
            if not self.is_alive:
                raise DeployError("the local Ray cluster has ended")
            time.sleep(_POLL_S)
        raise DeployError(
            f"application {self.name} was not ready after {timeout_s:g} s: {last}. Give it more time or more room: if "
            "max_surge_frac is more than 0, replicas of a new configuration wait for room beside the old ones"
        )

    def is_answering(self) -> bool:
        """Whether the endpoint reports that it is healthy."""
        try:
            url = f"{self.url}{self.health_path}"
            with urllib.request.urlopen(url, timeout=_HEALTH_TIMEOUT_S) as response:  # noqa: S310
                return bool(response.status == 200)
        except (OSError, HTTPException):  # no connection, another status, or no HTTP
            return False

    def status(self) -> Status:
        """The application's state and replicas, as Serve reports them now."""
        return status_of(self.name)

    @property
    def metrics_url(self) -> str:
        """URL of the metrics page.

        It is on the API's port if ``metrics_on_public_port`` is set. Otherwise any node with an ingress replica has the
        page, at ``metrics_host``, or at loopback if that means every address.
        """
        ingress = self.config.ingress
        if ingress.metrics_on_public_port:
            return f"{self.url}/metrics"
        host = "127.0.0.1" if ingress.metrics_host in EVERY_ADDRESS else ingress.metrics_host
        return f"http://{host}:{ingress.metrics_port}/metrics"

    @property
    def is_alive(self) -> bool:
        """Whether the cluster that ``deploy`` started still runs; true for a cluster that it did not start."""
        return self._cluster is None or self._cluster.is_alive

    def processes(self) -> list["psutil.Process"]:
        """Every process of the cluster that ``deploy`` started; empty for a cluster that it did not start."""
        return [] if self._cluster is None else self._cluster.processes()

    @property
    def control(self) -> Control:
        """``control_of`` the application's only service."""
        return self.control_of(None)

    def control_of(self, model: str | None) -> Control:
        """The commands that size a service by hand, such as ``tune``; ``model``: name of its model.

        ``None`` means the application's only service.

        Raises:
            ConfigError: the application has no such service, or has several and ``model`` is ``None``.
            DeployError: the application is not autoscaled.
        """
        return Control(self.name, model)

    def client(self, api_key: str = "none") -> "OpenAI":
        """OpenAI's own client for this application; ``api_key``: needed only if the endpoint has keys."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key)

    def drain(self, timeout_s: float | None = None) -> int | None:
        """Refuse new requests (503), and wait for the running ones.

        End the application within a minute after that, or its endpoint accepts requests again. ``timeout_s``: longest
        wait; ``None``: as long as a request may take. Returns the number of unanswered requests; ``None``: a replica of
        the endpoint did not report.
        """
        return ray_drain.drain(self.name, self.config.ingress.request_timeout_s if timeout_s is None else timeout_s)

    def delete(self) -> None:
        """Drain the application and delete it; a cluster that ``deploy`` started ends too.

        Raises DeployError: the application still exists after a quarter of an hour.
        """
        try:
            ray_drain.delete(self.name, self.config.ingress.request_timeout_s)
        finally:
            self.close()

    def close(self) -> None:
        """Disconnect, and end the cluster if ``deploy`` started it."""
        leave()
        if self._cluster is not None:
            self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name(document: Mapping[str, Any]) -> str:
    return str(document["applications"][0].get("name", "default"))


def _read(source: Path | str | Mapping[str, Any], metrics_port: int | None) -> tuple[dict[str, Any], AppConfig]:
    """A checked Serve YAML or mapping.

    ``metrics_port``: port of the metrics page if the configuration has none; ``None``: the default port.
    """
    document, config = read_application(source)
    if metrics_port is None or "metrics_port" in config.ingress.model_fields_set:
        return document, config
    # Set in the document and read again: Serve builds the application from the document, not from ``config``.
    args = document["applications"][0]["args"]
    args["ingress"] = {**(args.get("ingress") or {}), "metrics_port": metrics_port}
    return read_application(document)
