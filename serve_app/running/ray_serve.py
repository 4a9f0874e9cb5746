"""Serve of a running cluster: connecting to it, submitting a configuration, reading its state, leaving it."""

import logging
import os
import re
import signal
import socket
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.machine.claims import EVERY_ADDRESS
from serve_app.checks.yaml_checks import ConfigError
from serve_app.local.cluster import DeployError, local_cluster_address

# Longest wait for a connection, seconds: enough for lost packets to be sent again. A port without a listener refuses at
# once.
_CONNECT_TIMEOUT_S = 5.0
# Longest cause of a failure in a message, characters.
_CAUSE_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What Serve reports about an application.

    ``state``: Serve's word, such as ``RUNNING``; ``NOT_STARTED`` if Serve does not know the application. ``replicas``:
    deployment -> replica state -> number of replicas.
    """

    state: str
    message: str
    replicas: dict[str, dict[str, int]]


def connect(address: str) -> None:
    """Connect this process to a Ray cluster; ``auto`` also finds the one that `tandem serve` started here.

    Raises DeployError if no cluster answers at ``address``.
    """
    if address == "auto" and "RAY_ADDRESS" not in os.environ:
        address = local_cluster_address() or address
    import ray

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    terminate = signal.getsignal(signal.SIGTERM)  # ray.init replaces it
    try:
        if match := re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d+)", address):
            # Ray itself tries a port without a listener for more than ten minutes.
            socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_TIMEOUT_S).close()
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="warning")
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        cause = textwrap.shorten(str(error), _CAUSE_CHARS, placeholder=" ...")
        raise DeployError(f"no Ray cluster at {address!r}: {cause}") from None
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler aborts with a stack dump.
        signal.signal(signal.SIGTERM, terminate)


def submit(document: dict[str, Any], application: str) -> str:
    """Give Serve a whole configuration, start Serve if it does not run, and return the endpoint's URL.

    Needs: ``ray.serve.context._get_global_client`` and its ``http_config`` and ``deploy_apps``; an application-level
    autoscaling policy can reach Serve only this way or by its REST API.
    Without it: nothing is deployed; the error names the missing part.

    Raises:
        ConfigError: Serve listens elsewhere, or runs other applications, which the configuration would delete.
    """
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(document)
    serve.start(proxy_location=schema.proxy_location, http_options=schema.http_options.model_dump())
    client = _get_global_client()
    current, wanted = client.http_config, schema.http_options
    if (current.host, current.port) != (wanted.host, wanted.port):
        raise ConfigError(
            f"http_options: {wanted.host}:{wanted.port} is wanted, but Serve already runs on this cluster at "
            f"{current.host}:{current.port} and cannot move: set these, or end it with `serve shutdown`"
        )
    others = sorted(set(serve.status().applications) - {application})
    if others:
        raise ConfigError(
            f"this cluster already runs {', '.join(others)}, which deploying {application} would delete (a Serve "
            "config is the whole of a cluster): delete it first with `tandem delete`, or use another cluster"
        )
    client.deploy_apps(schema)
    return _url(wanted)


def endpoint_url() -> str:
    """The URL at which Serve of the connected cluster listens.

    Needs: ``ray.serve.context._get_global_client`` and its ``http_config``.
    Without it: the commands that send requests need ``--url``.

    Raises DeployError: Serve does not run there.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.exceptions import RayServeException

    try:
        return _url(_get_global_client().http_config)
    except RayServeException:
        raise DeployError("Serve does not run on this cluster: deploy an application first") from None


def _url(http: Any) -> str:
    """The URL of Serve's HTTP options."""
    import ray

    host = http.host
    if host in EVERY_ADDRESS:
        host = ray.get_runtime_context().gcs_address.rsplit(":", 1)[0]  # the head node always has a proxy
    return f"http://{host}:{http.port}"


def status_of(application: str) -> Status:
    """What Serve reports now."""
    from ray import serve

    current = serve.status().applications.get(application)
    if current is None:
        return Status(state="NOT_STARTED", message="", replicas={})
    return Status(
        state=str(current.status.value),
        message=current.message,
        replicas={name: dict(deployment.replica_states) for name, deployment in current.deployments.items()},
    )


def failure_of(application: str) -> str:
    """The cause of a failed start in one line.

    The deployments' messages have it; the application's own message only names the deployments.
    """
    from ray import serve

    current = serve.status().applications[application]
    messages = [d.message for d in current.deployments.values() if d.status.value == "DEPLOY_FAILED"]
    return first_cause(messages or [current.message])


def first_cause(messages: Sequence[str]) -> str:
    """The last exception of the first message, which has Serve's traceback: all lines of the exception as one."""
    lines = messages[0].splitlines()
    exceptions = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    begin = exceptions[-1] if exceptions else 0
    text = " ".join(" ".join(lines[begin:]).split())
    if len(text) > _CAUSE_CHARS:  # the beginning names the exception, the end has the last output of a failed program
        text = f"{text[: _CAUSE_CHARS // 2]} ... {text[-_CAUSE_CHARS // 2 :]}"
    return text or "no message"


def leave() -> None:
    """Disconnect this process from its cluster.

    The handles are shut down first: their threads would go on reporting to a Serve that has ended (DECISIONS 145).

    Needs: ``ray.serve.context._global_client.handle_cache`` and ``_is_router_running_in_separate_loop`` of a handle.
    Without it: the process fails when it leaves.
    """
    import ray
    from ray.serve import context

    if context._global_client is not None:
        for handle in context._global_client.handle_cache.values():
            if handle.is_initialized and handle._is_router_running_in_separate_loop():
                handle.shutdown()
    ray.shutdown()
