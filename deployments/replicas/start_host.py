"""A start host: a worker process that has imported what a replica needs, and waits until a replica takes it.

It belongs to no model. Each host notes every few seconds in Ray's key-value store that it waits, so that the
coordinator can count the hosts of a node. It ends if no coordinator asks for hosts any more.
"""

import logging
import os
import threading
from contextlib import suppress

import ray

from deployments.serve_seam.host_notes import BEAT_S, environment_key, host_key, keeper_key
from deployments.serve_seam.start_hosts import hook_variables, own_runtime_env
from deployments.vllm_seam.fork_server import start_fork_server
from router import ray_kv

logger = logging.getLogger(__name__)

_IMPORT_PATH = "deployments.replicas.start_host.prepare"  # of the function that Ray calls
# A host without a coordinator's note for this time ends, seconds: a restart of a coordinator takes less.
_ORPHAN_S = 120.0
_KIND_VARIABLE = "TANDEM_START_HOST"  # has the kind of a host


def variables(host_kind: str) -> dict[str, str]:
    """Variables that make a process a start host of a kind."""
    return {**hook_variables(_IMPORT_PATH), _KIND_VARIABLE: host_kind}


class _Waiting(threading.Thread):
    """Notes that this process waits for a replica."""

    def __init__(self, host_kind: str) -> None:
        super().__init__(name="tandem-start-host", daemon=True)
        self._kind, self._taken = host_kind, threading.Event()
        node = ray.get_runtime_context().get_node_id()
        self._key = host_key((host_kind, node, str(os.getpid())))
        self._keeper = keeper_key(host_kind)

    def run(self) -> None:
        keeper, unchanged_s, beat = None, 0.0, 0
        while not self._is_taken():
            latest = keeper
            with suppress(Exception):  # Ray's store restarts: this counts as no news, and the next round tries again
                ray_kv.put(self._key, str(beat).encode())
                latest = ray_kv.get(self._keeper)
            keeper, unchanged_s = latest, unchanged_s + BEAT_S if latest == keeper else 0.0
            if unchanged_s > _ORPHAN_S and not self._is_taken():
                os._exit(0)
            beat += 1
            self._taken.wait(BEAT_S)
        with suppress(Exception):  # a note that stays counts as that of a host that has died
            ray_kv.delete(self._key)

    def _is_taken(self) -> bool:
        """Whether a replica has this process, or another actor: an engine's workers inherit a replica's environment."""
        return self._taken.is_set() or ray.get_runtime_context().get_actor_id() is not None

    def take(self, app: str) -> None:
        self._taken.set()
        with suppress(Exception):  # the coordinator then uses the environment that the build has computed
            ray_kv.put(environment_key(app, self._kind), own_runtime_env().encode())


# Registry: the thread that notes that this process waits. Ray calls ``prepare``, and passes its result to no caller.
_WAITING: list[_Waiting] = []


def prepare() -> None:
    """Make this process a start host. An error is logged, and the process then imports later what it lacks."""
    try:
        start_fork_server()
        waiting = _Waiting(os.environ[_KIND_VARIABLE])
        waiting.start()
        _WAITING.append(waiting)
        import deployments.replicas.decode
        import deployments.replicas.prefill  # noqa: F401
    except Exception:
        logger.exception("this process is no complete start host: a replica that takes it starts slowly")


def take(app: str) -> None:
    """Called by a replica: this process waits no longer."""
    for waiting in _WAITING:
        waiting.take(app)
