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
from typing import Self

import psutil

from deployments.environment import cluster_environment, serve_environment
from deployments.ports import free_ports
from serve_app.guardian import guardian_plan

# Loopback, but not 127.0.0.1, which ray.init replaces by the interface's address.
NODE_IP = "127.0.0.2"
# Ray puts UNIX sockets below a cluster's folder, and their paths may have 107 characters at most: not TMPDIR.
CLUSTER_PARENT = "/tmp"  # noqa: S108
_CACHE = Path("~/.cache/tandem").expanduser()
# How the commands of another terminal find the cluster that this user started last, and are let in.
_DOOR = _CACHE / "local-cluster.json"
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0


class DeployError(RuntimeError):
    """The cluster or the application did not become ready; the message is the first cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One Ray node: its logical CPUs, its GPUs (``None``: those that Ray finds), its labels and its own resources."""

    cpus: int = 4
    gpus: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    resources: dict[str, float] = field(default_factory=dict)


def driver_environment() -> dict[str, str]:
    """Variables that the process which connects to a local cluster needs too, set in it by this call.

    Whoever can reach a Ray cluster can run code on it, and Ray listens on every interface, so a local one asks for a
    token, whatever the user's own Ray settings say. Ray reads these variables once, when it is imported.

    Raises:
        DeployError: Ray has been imported without them.
    """
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise DeployError(
            "ray was imported before, without a token, so a cluster started now would be open to the network: import "
            "ray after this, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN first"
        )
    mine = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(16),
        **serve_environment(),
    }
    os.environ.update(mine)
    return mine


class LocalCluster:
    """Ray nodes on the loopback interface, their own ports and folder, under a guardian process.

    Use as a context manager, or call ``close``; when the owner dies in any other way the guardian ends everything.
    """

    def __init__(self, nodes: Sequence[NodeSpec] = (NodeSpec(),), *, environment: dict[str, str] | None = None) -> None:
        """Start the nodes; the first is the head.

        Raises:
            DeployError: a node did not start, with Ray's own words.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-", dir=CLUSTER_PARENT))
        port, self._client_port, stats, metrics, fallback = free_ports(5)
        self.address = f"{NODE_IP}:{port}"
        self.environment = {
            **cluster_environment(self.folder, cache=_CACHE, ports=(stats, metrics, fallback)),
            **driver_environment(),
            **(environment or {}),
        }
        plan = guardian_plan(
            self.folder,
            [self._arguments(node, port, head=index == 0) for index, node in enumerate(nodes)],
            self.environment,
        )
        self._log = (self.folder / "guardian.log").open("w")
        self._guardian = subprocess.Popen(
            [sys.executable, "-m", "serve_app.guardian"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        assert self._guardian.stdin is not None
        self._guardian.stdin.write(json.dumps(plan) + "\n")
        self._guardian.stdin.flush()
        try:
            self._await_ready()
        except DeployError:
            self.close()
            raise
        self._open_door()

    def add_node(self, node: NodeSpec) -> None:
        """Start one more node.

        Raises:
            DeployError: it did not start, with Ray's own words; the others go on.
        """
        assert self._guardian.stdin is not None
        port = int(self.address.rpartition(":")[2])
        self._guardian.stdin.write(json.dumps(self._arguments(node, port, head=False)) + "\n")
        self._guardian.stdin.flush()
        self._await_ready()

    def _arguments(self, node: NodeSpec, port: int, *, head: bool) -> list[str]:
        common = [
            f"--node-ip-address={NODE_IP}",
            f"--num-cpus={node.cpus}",
            "--object-store-memory=268435456",
            "--disable-usage-stats",
        ]
        if node.gpus is not None:
            common.append(f"--num-gpus={node.gpus}")
        if node.labels:
            common.append("--labels=" + ",".join(f"{key}={value}" for key, value in node.labels.items()))
        if node.resources:
            common.append(f"--resources={json.dumps(node.resources)}")
        if head:
            return [
                "--head",
                f"--port={port}",
                f"--temp-dir={self.folder}",
                "--include-dashboard=false",
                f"--ray-client-server-port={self._client_port}",
                *common,
            ]
        return [f"--address={NODE_IP}:{port}", *common]

    def _await_ready(self) -> None:
        stdout = self._guardian.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], _START_TIMEOUT_S)
        line = stdout.readline() if readable else ""
        answer = json.loads(line) if line else {"ready": False, "error": f"no answer in {_START_TIMEOUT_S:g} s"}
        if not answer["ready"]:
            raise DeployError(f"Ray did not start on this machine: {answer['error']}")

    def _open_door(self) -> None:
        with suppress(OSError):  # without it, other terminals need --address and the token
            _DOOR.parent.mkdir(parents=True, exist_ok=True)
            _DOOR.unlink(missing_ok=True)
            door = {"address": self.address, "token": self.environment["RAY_AUTH_TOKEN"], "pid": self._guardian.pid}
            _DOOR.touch(mode=0o600)
            _DOOR.write_text(json.dumps(door))

    def processes(self) -> list[psutil.Process]:
        """Every process of the cluster, the guardian's own descendants."""
        return psutil.Process(self._guardian.pid).children(recursive=True)

    @property
    def is_alive(self) -> bool:
        """Whether the guardian still runs."""
        return self._guardian.poll() is None

    def close(self) -> None:
        """End every process of the cluster and wait until they are gone."""
        if self._guardian.stdin is not None and not self._guardian.stdin.closed:
            self._guardian.stdin.close()
        try:
            self._guardian.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Its descendants first: nobody else knows them.
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(self._guardian.pid).children(recursive=True):
                    process.kill()
            self._guardian.kill()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def local_cluster_address() -> str | None:
    """The address of the cluster that this user has started on this machine, if it still runs.

    Sets the token that it asks for, which Ray reads when it is imported.
    """
    try:
        door = json.loads(_DOOR.read_text())
        if not psutil.pid_exists(door["pid"]):
            return None
    except (OSError, ValueError, KeyError):
        return None
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=door["token"])
    return str(door["address"])
