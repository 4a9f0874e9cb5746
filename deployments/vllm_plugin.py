"""What Tandem installs into every vLLM engine process: core binding, a quiet NIXL thread, a parent-death watch.

vLLM loads the entry point ``vllm.general_plugins`` in the front end, in the engine core and in each worker. In the
front end (the Serve replica) ``register`` does nothing.
"""

import logging
import multiprocessing
import os
import threading
import time
from typing import Any

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0
_NIXL_POLL_US = 1
_RECENT_S = 1.0
_RECENT_WAIT_MS = 1
_IDLE_WAIT_MS = 100


def register() -> None:
    """Entry point: prepare this process, if it is a child that vLLM started."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    threading.Thread(target=_exit_with_parent, args=(parent,), name="tandem-parent-watch", daemon=True).start()
    _bind_cores()
    _quieten_nixl()


def _exit_with_parent(parent: multiprocessing.process.BaseProcess) -> None:
    # An engine core whose replica was killed lives on, with its memory and its NIXL port, and the next replica
    # hangs on that port. The sentinel tells at once; the poll covers a sentinel that another child inherited.
    while os.getppid() == parent.pid:
        parent.join(timeout=_WATCH_INTERVAL_S)
    os._exit(1)


def _bind_cores() -> None:
    """Bind this process to the cores of ``VLLM_CPU_OMP_THREADS_BIND`` and keep the NIXL connector from rebinding it.

    On the CPU platform the connector pins every engine's main thread to the last core of each NUMA node
    (vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py:474), so a prefill and a decode engine on one
    machine would share that core. It does so only where the platform reports a topology.
    """
    cores = _bound_cores(os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"))
    if not cores:
        return
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])
    os.sched_setaffinity(0, cores)
    _sleep_between_steps()
    logger.info("bound to cores %s", sorted(cores))


def _sleep_between_steps() -> None:
    """Let engine processes wait for each other asleep rather than spinning.

    vLLM's shared-memory queue calls ``sched_yield`` in a loop for a second after every message
    (vllm/distributed/device_communicators/shm_broadcast.py:134). Where engine core, worker and front end share a core,
    that second is taken from the others: token streams stalled for 1.0 s at a time on Linux 6.18. Waiting for the
    queue's own notification costs nothing; a notification can get lost (its socket drops what does not fit), so the
    wait is bounded.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    notified_wait = SpinCondition.wait

    def bounded_wait(self: Any, timeout_ms: int | None = None) -> None:
        is_recent = time.monotonic() <= self.last_read + _RECENT_S
        bound_ms = _RECENT_WAIT_MS if is_recent else _IDLE_WAIT_MS
        self.busy_loop_s = -1.0
        notified_wait(self, bound_ms if timeout_ms is None else min(bound_ms, timeout_ms))

    SpinCondition.wait = bounded_wait


def _quieten_nixl() -> None:
    """Let NIXL's progress thread sleep until there is something to progress.

    NIXL's Python API sets the thread's poll timeout to 0 whatever its caller asks, so an idle engine burns a whole
    core per worker (nixl_cu13/_api.py:213). With any other timeout the thread sleeps in poll() and the kernel wakes it
    on events at once; the timeout only bounds how late it sees work that raises none.
    """
    try:
        import vllm.distributed.nixl_utils  # noqa: F401  sets what UCX reads when nixl is imported
        from nixl import _api as nixl_api
    except ImportError:
        return
    config_class = nixl_api.nixlBind.nixlAgentConfig

    class QuietAgentConfig(config_class):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, _NIXL_POLL_US if name == "pthrDelay" and value == 0 else value)

    nixl_api.nixlBind.nixlAgentConfig = QuietAgentConfig


def _bound_cores(spec: str) -> set[int]:
    """Cores of a binding such as ``0-2,5|6``; empty for ``auto``, ``nobind`` and anything unreadable."""
    cores: set[int] = set()
    for part in spec.replace("|", ",").split(","):
        first, _, last = part.partition("-")
        try:
            cores.update(range(int(first), int(last or first) + 1))
        except ValueError:
            return set()
    return cores
