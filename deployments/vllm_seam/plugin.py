"""Changes that Tandem makes in vLLM's processes: cores, the CPU executor, NIXL's polling, two watches, a log filter.

One watch ends an engine process without a parent, the other an engine without NIXL side channel. vLLM loads the entry
point ``vllm.general_plugins`` in the front end (the Serve replica), in the engine core and in each worker.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deployments.machine.claims import listener
from deployments.vllm_seam import cpu_sleep
from deployments.vllm_seam.fork_server import use_fork_server

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0  # seconds between two checks of an engine process whether its parent still runs
_NIXL_POLL_US = 1  # poll timeout of NIXL's progress thread, microseconds; any value but 0 lets the thread sleep
# vLLM's names of its thread, its logger and its executor.
_SIDE_CHANNEL_THREAD = "nixl_handshake_listener"
_DUMP_LOGGER = "vllm.logging_utils.dump_input"
_IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def register() -> None:
    """Entry point: the front end chooses the executor; the other processes bind cores and watch their parent and NIXL.

    Needs: the entry point ``vllm.general_plugins``, loaded in the front end, the engine core and each worker.
    Without it: the engine runs on cores that it shares with others, and outlives a replica that was killed.
    """
    logging.getLogger(_DUMP_LOGGER).addFilter(_has_no_text)
    use_fork_server()
    parent = multiprocessing.parent_process()
    if parent is None:  # the front end: Ray starts it, and vLLM starts the other processes by multiprocessing
        _keep_worker_in_engine_core()
        return
    threading.Thread(target=_exit_with_parent, args=(parent,), name="tandem-parent-watch", daemon=True).start()
    _bind_cores()
    _quieten_nixl()
    cpu_sleep.install()
    threading.excepthook = partial(_end_with_side_channel, threading.excepthook)


def _has_no_text(record: logging.LogRecord) -> bool:
    """Whether a log record of vLLM's dump after a failed step has no text of requests; the filter drops the others.

    The dump has no prompts, but stop strings, bad words and schemas (vllm/logging_utils/dump_input.py:79). Records with
    the engine's configuration or its counts pass.

    Needs: the logger ``vllm.logging_utils.dump_input``; the beginnings of its two records without text.
    Without it: a failed step writes stop strings, bad words and schemas of its requests into the log.
    """
    return str(record.msg).startswith(("Dumping input data for V1 LLM engine", "Dumping scheduler stats"))


def _exit_with_parent(parent: multiprocessing.process.BaseProcess) -> None:
    # The engine core of a killed replica would keep its memory and its NIXL port, and the next replica would hang on
    # that port. ``join`` returns as soon as the parent ends, unless another child has inherited the parent's sentinel;
    # then the parent's own end is seen. A fork server's child has the server above it, and not its parent.
    while parent.is_alive() and Path(f"/proc/{parent.pid}").exists():
        parent.join(timeout=_WATCH_INTERVAL_S)
    os._exit(1)


def _end_with_side_channel(previous_hook: Callable[[Any], Any], failure: Any) -> None:
    """End an engine whose NIXL side channel has ended: decode engines cannot pull from it, and vLLM does not notice.

    If another process has bound the port that this replica has claimed, vLLM's listener thread fails, and vLLM waits
    for that thread for ever.

    Needs: the name of vLLM's thread, ``nixl_handshake_listener``.
    Without it: such a replica never becomes ready.
    """
    previous_hook(failure)
    if failure.thread is not None and failure.thread.name == _SIDE_CHANNEL_THREAD:
        host, port = (os.environ.get(f"VLLM_NIXL_SIDE_CHANNEL_{name}", "") for name in ("HOST", "PORT"))
        holder = listener(host, int(port)) if port.isdigit() else None
        logger.error(
            "the NIXL side channel on %s:%s has ended: %s; the port is held by %s; this engine ends",
            *(host, port, failure.exc_value, holder or "another process"),
        )
        os._exit(1)


def _keep_worker_in_engine_core() -> None:
    """On a machine without GPUs, run an engine's only worker inside its engine core, if it has cores of its own.

    vLLM's CPU platform always starts a worker process, since OpenMP reads its threads and cores when a process starts
    (vllm/platforms/cpu.py:276); ``_bind_cores`` sets both later. The queue between the two processes spins in
    ``sched_yield`` for a second after every message (distributed/device_communicators/shm_broadcast.py:134). On a
    shared core that doubled TPOT, and on Linux 6.18 token streams stalled for a second at a time.

    Needs: ``vllm.platforms.cpu.CpuPlatform.check_and_update_config``; ``UniProcExecutor``.
    Without it: the engine has two processes, and TPOT on a shared core doubles.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep(vllm_config: Any) -> None:
        check(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.world_size == 1 and _cores_from_environment():
            parallel.distributed_executor_backend = _IN_PROCESS_EXECUTOR

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)


def _bind_cores() -> None:
    """Bind this process to the cores of ``VLLM_CPU_OMP_THREADS_BIND``, and keep the NIXL connector from rebinding it.

    On the CPU platform the connector pins every engine's main thread to the last core of each NUMA node
    (vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py:474), so a prefill and a decode engine on one
    machine would share that core. It does so only if the platform reports a topology; after this call it reports none.

    Needs: ``vllm.platforms.cpu.CpuPlatform.discover_numa_topology``.
    Without it: the engines of one machine share a core.
    """
    cores = _cores_from_environment()
    if not cores:
        return
    import torch
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    logger.info("bound to cores %s", sorted(cores))


def _quieten_nixl() -> None:
    """Let NIXL's progress thread sleep while there is no progress to make.

    NIXL's Python API always sets the thread's poll timeout to 0, so each idle worker uses a whole core
    (nixl_cu13/_api.py:213). With any other timeout the thread sleeps in poll(), and the kernel wakes it at once on
    events. The timeout only limits its delay for work that raises no event.

    Needs: ``nixl._api.nixlBind.nixlAgentConfig`` with the attribute ``pthrDelay``.
    Without it: each idle worker uses a core.
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


def _cores_from_environment() -> set[int]:
    """Cores of all workers of this engine; empty for ``auto``, ``nobind`` and anything unreadable.

    The replica sets the variable (``replicas.engine_host``), such as ``0-2,5|6``; '|' stands between two workers.
    """
    cores: set[int] = set()
    for part in os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto").replace("|", ",").split(","):
        first, _, last = part.partition("-")
        try:
            cores.update(range(int(first), int(last or first) + 1))
        except ValueError:
            return set()
    return cores
