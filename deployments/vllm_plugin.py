"""What Tandem installs into vLLM: core binding, one process per CPU engine, a quiet NIXL thread, two watches, a filter.

vLLM loads the entry point ``vllm.general_plugins`` in the front end (the Serve replica), in the engine core and in
each worker.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from deployments.ports import listener

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0
_NIXL_POLL_US = 1
_SIDE_CHANNEL_THREAD = "nixl_handshake_listener"
_DUMP_LOGGER = "vllm.logging_utils.dump_input"
_IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def register() -> None:
    """Entry point: the front end decides how the engine runs; the processes that it starts prepare themselves."""
    logging.getLogger(_DUMP_LOGGER).addFilter(_has_no_text)
    parent = multiprocessing.parent_process()
    if parent is None:
        _keep_worker_in_engine_core()
        return
    threading.Thread(target=_exit_with_parent, args=(parent,), name="tandem-parent-watch", daemon=True).start()
    _bind_cores()
    _quieten_nixl()
    threading.excepthook = partial(_end_with_side_channel, threading.excepthook)


def _has_no_text(record: logging.LogRecord) -> bool:
    """Drop vLLM's dump of the requests in a step that failed, unless it is known to have no text of them.

    It leaves prompts out, not stop strings, bad words and schemas (vllm/logging_utils/dump_input.py:79). The engine's
    configuration and its counts stay.
    """
    return str(record.msg).startswith(("Dumping input data for V1 LLM engine", "Dumping scheduler stats"))


def _exit_with_parent(parent: multiprocessing.process.BaseProcess) -> None:
    # An engine core whose replica was killed lives on, with its memory and its NIXL port, and the next replica
    # hangs on that port. The sentinel tells at once; the poll covers a sentinel that another child inherited.
    while os.getppid() == parent.pid:
        parent.join(timeout=_WATCH_INTERVAL_S)
    os._exit(1)


def _end_with_side_channel(report: Callable[[Any], Any], failure: Any) -> None:
    """End an engine whose NIXL side channel has ended, which vLLM does not notice: nobody could shake hands with it.

    Where the port was taken after this replica had claimed it, vLLM waits for its listener for ever.
    """
    report(failure)
    if failure.thread is not None and failure.thread.name == _SIDE_CHANNEL_THREAD:
        host, port = (os.environ.get(f"VLLM_NIXL_SIDE_CHANNEL_{name}", "") for name in ("HOST", "PORT"))
        holder = listener(host, int(port)) if port.isdigit() else None
        logger.error(
            "the NIXL side channel on %s:%s has ended: %s; the port is held by %s; this engine ends",
            *(host, port, failure.exc_value, holder),
        )
        os._exit(1)


def _keep_worker_in_engine_core() -> None:
    """On a machine without GPUs, run an engine's only worker inside its engine core, if its cores are given.

    vLLM's CPU platform always starts a worker process, since OpenMP reads its threads and cores when a process starts
    (vllm/platforms/cpu.py:276); ``_bind_cores`` sets both from inside. The queue between the two processes spins in
    ``sched_yield`` for a second after every message (distributed/device_communicators/shm_broadcast.py:134): on a
    shared core that doubled TPOT, and on Linux 6.18 token streams stalled for a second at a time.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep(vllm_config: Any) -> None:
        check(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.world_size == 1 and _given_cores():
            parallel.distributed_executor_backend = _IN_PROCESS_EXECUTOR

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)


def _bind_cores() -> None:
    """Bind this process to the cores of ``VLLM_CPU_OMP_THREADS_BIND`` and keep the NIXL connector from rebinding it.

    On the CPU platform the connector pins every engine's main thread to the last core of each NUMA node
    (vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py:474), so a prefill and a decode engine on one
    machine would share that core. It does so only where the platform reports a topology.
    """
    cores = _given_cores()
    if not cores:
        return
    import torch
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    logger.info("bound to cores %s", sorted(cores))


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


def _given_cores() -> set[int]:
    return _bound_cores(os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"))


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
