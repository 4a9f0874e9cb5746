"""A Ray cluster on this machine that lives exactly as long as its owner."""

import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from deployments.machine.claims import free_ports
from deployments.serve_seam.environment import cluster_environment, serve_environment

# A loopback address; ray.init would replace 127.0.0.1 by the interface's address.
NODE_IP = "127.0.0.2"
# Ray puts UNIX sockets below a cluster's folder, and their paths may have 107 characters at most; TMPDIR can be longer.
CLUSTER_PARENT = "/tmp"  # noqa: S108
# Folder of files that outlive a cluster.
_CACHE = Path("~/.cache/tandem").expanduser()
# Address and token of the cluster that this user started last, for the commands of another terminal.
_CONNECTION_FILE = _CACHE / "local-cluster.json"
# Longest wait for the first node to start, and for each further one, seconds. A start takes some seconds on an idle
# machine and a minute on a busy one. Ray waits 30 s for a node's processes.
_START_TIMEOUT_S, _FURTHER_NODE_S = 120.0, 30.0
# Longest time, seconds, that the guardian has to end before it is killed.
_STOP_TIMEOUT_S = 60.0
# Shared memory of a node's object store. Ray's default, 30 % of the machine's memory, is too much for several nodes on
# one machine. With a smaller store (Ray allows 75 MiB and more) Ray writes objects to disk earlier.
_OBJECT_STORE_BYTES = 256 << 20


class DeployError(RuntimeError):
    """The cluster or the application did not become ready; the message is the first cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One Ray node: logical CPUs, GPUs (``None``: those that Ray finds), labels, and custom resources."""

    cpus: int = 4
    gpus: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    resources: dict[str, float] = field(default_factory=dict)


def driver_environment() -> dict[str, str]:
    """Set the variables that this process needs to connect to a local cluster, and return them.

    Any process that reaches a Ray cluster can run code on it, and Ray listens on every interface. So a local cluster
    requires a token, whatever the user's Ray settings are.

    Raises DeployError: Ray was imported without a token; it reads these variables only at its import.
    """
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise DeployError(
            "ray was imported before, without a token, so a cluster started now would be open to the network: import "
            "ray after driver_environment(), or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN first"
        )
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(16),
        **serve_environment(),
    }
    os.environ.update(variables)
    return variables


class LocalCluster:
    """Ray nodes on the loopback interface, with their own ports and folder, under a guardian process.

    Use it as a context manager, or call ``close``. If its owner dies in any other way, the guardian ends the cluster.
    """

    def __init__(self, nodes: Sequence[NodeSpec] = (NodeSpec(),), *, environment: dict[str, str] | None = None) -> None:
        """Start the nodes, the head first; raises DeployError with Ray's message if one did not start."""
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-", dir=CLUSTER_PARENT))
        port, self._client_port, stats, metrics, fallback = free_ports(5)
        self.address = f"{NODE_IP}:{port}"
        self.environment = {
            **cluster_environment(self.folder, cache=_CACHE, ports=(stats, metrics, fallback)),
            **driver_environment(),
            **(environment or {}),
        }
        # The guardian reads this as its first line.
        plan = {
            "folder": str(self.folder),
            "nodes": [self._arguments(node, is_head=index == 0) for index, node in enumerate(nodes)],
            "environment": self.environment,
        }
        self._log = (self.folder / "guardian.log").open("w")
        self._guardian = subprocess.Popen(
            [sys.executable, "-m", "serve_app.local.guardian"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        try:
            self._start(plan, _START_TIMEOUT_S + _FURTHER_NODE_S * (len(nodes) - 1))
        except DeployError:
            self.close()
            raise
        self._save_connection()

    def add_node(self, node: NodeSpec) -> None:
        """Start one more node; raises DeployError with Ray's message if it did not start. The other nodes run on."""
        self._start(self._arguments(node, is_head=False))

    def _start(self, message: Any, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Send the guardian a message, one line of JSON, and wait until the nodes that the message names run.

        Raises DeployError: a node did not start, the guardian has ended, or it did not answer in time.
        """
        stdin, stdout = self._guardian.stdin, self._guardian.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):  # the guardian has ended, which the missing answer shows
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
        readable, _, _ = select.select([stdout], [], [], timeout_s)
        if not readable:
            raise DeployError(f"Ray did not start on this machine: no answer in {timeout_s:g} s")
        line = stdout.readline()
        if not line:
            raise DeployError(f"Ray did not start on this machine: its guardian process ended{self._end_of_log()}")
        answer = json.loads(line)
        if not answer["ready"]:
            raise DeployError(f"Ray did not start on this machine: {answer['error']}")

    def _end_of_log(self) -> str:
        """The end of the guardian's log, to follow a message; empty if the guardian has removed it."""
        with suppress(OSError):
            words = (self.folder / "guardian.log").read_text().split()
            return f": {' '.join(words[-60:])}" if words else ""
        return ""

    def _arguments(self, node: NodeSpec, *, is_head: bool) -> list[str]:
        """The arguments of ``ray start`` for a node."""
        arguments = [f"--address={self.address}"]
        if is_head:
            arguments = [
                "--head",
                f"--port={self.address.rpartition(':')[2]}",
                f"--temp-dir={self.folder}",
                "--include-dashboard=false",
                f"--ray-client-server-port={self._client_port}",
            ]
        arguments += [
            f"--node-ip-address={NODE_IP}",
            f"--num-cpus={node.cpus}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
        ]
        if node.gpus is not None:
            arguments.append(f"--num-gpus={node.gpus}")
        if node.labels:
            arguments.append("--labels=" + ",".join(f"{key}={value}" for key, value in node.labels.items()))
        if node.resources:
            arguments.append(f"--resources={json.dumps(node.resources)}")
        return arguments

    def _save_connection(self) -> None:
        """Store address and token in a file of this user alone: a new file, since an old one would keep its mode."""
        with suppress(OSError):  # without it, other terminals need --address and the token
            _CONNECTION_FILE.parent.mkdir(parents=True, exist_ok=True)
            _CONNECTION_FILE.unlink(missing_ok=True)
            token = self.environment["RAY_AUTH_TOKEN"]
            connection = {"address": self.address, "token": token, "pid": self._guardian.pid}
            _CONNECTION_FILE.touch(mode=0o600)
            _CONNECTION_FILE.write_text(json.dumps(connection))

    def processes(self) -> list[psutil.Process]:
        """Every process of the cluster: the guardian's descendants, without the guardian itself."""
        return psutil.Process(self._guardian.pid).children(recursive=True)

    @property
    def is_alive(self) -> bool:
        """Whether the guardian still runs."""
        return self._guardian.poll() is None

    def close(self) -> None:
        """End every process of the cluster and wait until they are gone."""
        assert self._guardian.stdin is not None
        with suppress(BrokenPipeError):  # the guardian has ended with a line unread
            self._guardian.stdin.close()
        try:
            self._guardian.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with suppress(psutil.NoSuchProcess):
                for process in self.processes():  # before the guardian: they are found as its descendants
                    process.kill()
            self._guardian.kill()
        assert self._guardian.stdout is not None
        self._guardian.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def local_cluster_address() -> str | None:
    """The address of the cluster that this user started last on this machine, if it still runs.

    Sets the variables of the cluster's token, which Ray reads at its import.
    """
    try:
        connection = json.loads(_CONNECTION_FILE.read_text())
        if not psutil.pid_exists(connection["pid"]):
            return None
    except (OSError, ValueError, KeyError):
        return None
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=connection["token"])
    return str(connection["address"])
