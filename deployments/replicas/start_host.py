"""A start host: a worker process that has imported what a replica needs, and waits until a replica takes it.

It belongs to no model. Each host notes every few seconds in Ray's key-value store that it waits, so that the
coordinator can count the hosts of a node. It ends if no coordinator asks for hosts any more.
"""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping

import ray

from deployments.serve_seam.start_hosts import hook_variables, own_runtime_env
from deployments.vllm_seam.fork_server import start_fork_server
from router import ray_kv

logger = logging.getLogger(__name__)

_IMPORT_PATH = "deployments.replicas.start_host.prepare"  # of the function that Ray calls
BEAT_S = 5.0  # time between two notes of a host or of a coordinator, seconds
# A host without a coordinator's note for this time ends, seconds: a restart of a coordinator takes less.
_ORPHAN_S = 120.0
_HOSTS, _ENVIRONMENTS, _KEEPERS = (f"tandem:start_hosts:{name}:" for name in ("hosts", "environments", "keepers"))


_KIND_VARIABLE = "TANDEM_START_HOST"  # has the kind of a host


def kind(environment: Mapping[str, str]) -> str:
    """Short name of a pool's own variables: the replicas of all pools with the same ones can take the same hosts."""
    return hashlib.sha256(json.dumps(dict(environment), sort_keys=True).encode()).hexdigest()[:16]


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make a process with a pool's own variables a start host."""
    return {**hook_variables(_IMPORT_PATH), _KIND_VARIABLE: kind(environment)}


def waiting_hosts() -> dict[tuple[str, str, str], bytes]:
    """The latest note of each host by kind, node and process id."""
    notes = {}
    for key in ray_kv.keys(_HOSTS.encode()):
        host_kind, node, process = key.decode().removeprefix(_HOSTS).split(":")
        if (note := ray_kv.get(key)) is not None:
            notes[host_kind, node, process] = note
    return notes


def forget_host(host: tuple[str, str, str]) -> None:
    """Delete the note of a host that has died."""
    ray_kv.delete((_HOSTS + ":".join(host)).encode())


def beat_keeper(host_kind: str, beat: int) -> None:
    """Note that a coordinator still asks for hosts of this kind."""
    ray_kv.put((_KEEPERS + host_kind).encode(), str(beat).encode())


def observed_environment(app: str, host_kind: str) -> str | None:
    """The runtime environment of the latest replica that took a host of this kind; ``None``: there was none yet."""
    note = ray_kv.get(f"{_ENVIRONMENTS}{app}:{host_kind}".encode())
    return None if note is None else note.decode()


class _Waiting(threading.Thread):
    """Notes that this process waits for a replica."""

    def __init__(self, host_kind: str) -> None:
        super().__init__(name="tandem-start-host", daemon=True)
        self._kind, self._taken = host_kind, threading.Event()
        node = ray.get_runtime_context().get_node_id()
        self._key = f"{_HOSTS}{host_kind}:{node}:{os.getpid()}".encode()
        self._keeper = (_KEEPERS + host_kind).encode()

    def run(self) -> None:
        keeper, unchanged_s, beat = ray_kv.get(self._keeper), 0.0, 0
        while not self._taken.is_set():
            ray_kv.put(self._key, str(beat).encode())
            self._taken.wait(BEAT_S)
            beat, latest = beat + 1, ray_kv.get(self._keeper)
            keeper, unchanged_s = latest, unchanged_s + BEAT_S if latest == keeper else 0.0
            if unchanged_s > _ORPHAN_S and not self._taken.is_set():
                ray_kv.delete(self._key)
                os._exit(0)
        ray_kv.delete(self._key)

    def take(self, app: str) -> None:
        self._taken.set()
        ray_kv.put(f"{_ENVIRONMENTS}{app}:{self._kind}".encode(), own_runtime_env().encode())


_WAITING: _Waiting | None = None


def prepare() -> None:
    """Make this process a start host. An error is logged, and the process then imports later what it lacks."""
    global _WAITING
    try:
        start_fork_server()
        _WAITING = _Waiting(os.environ[_KIND_VARIABLE])
        _WAITING.start()
        import deployments.replicas.decode
        import deployments.replicas.prefill  # noqa: F401
    except Exception:
        logger.exception("this process is no complete start host: a replica that takes it starts slowly")


def take(app: str) -> None:
    """Called by a replica: this process waits no longer."""
    if _WAITING is not None:
        _WAITING.take(app)
