"""A server process that has imported vLLM; a replica's engine is a fork of it, and starts without imports."""

import importlib
import logging
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

logger = logging.getLogger(__name__)

# Set in the process that has started a fork server, and in all processes below it.
_VARIABLE = "TANDEM_FORK_SERVER"
# Modules of vLLM that choose how the processes of an engine start.
_STARTERS = ("vllm.v1.engine.utils", "vllm.v1.engine.coordinator", "vllm.v1.executor.multiproc_executor")


class _Process(ForkServerProcess):
    """A fork with the environment of the process that asks for it: the server's own is older."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def start_fork_server() -> None:
    """Start this process's fork server. It imports vLLM while the caller goes on."""
    forkserver.set_forkserver_preload(["deployments.vllm_seam.engine_imports"])
    forkserver.ensure_running()
    os.environ[_VARIABLE] = "1"


def use_fork_server() -> None:
    """Let vLLM fork the processes of an engine from the fork server, if this process has one.

    vLLM starts them anew in a Ray actor, since a fork of a process with Ray's threads could block. The fork server has
    one thread, and has not touched a GPU.

    Needs: ``get_mp_context`` of vLLM's modules that start processes, looked up at each call.
    Without it: an engine imports vLLM again, some seconds of a core for each of its processes.
    """
    if os.environ.get(_VARIABLE) != "1":
        return
    for name in _STARTERS:
        module: Any = importlib.import_module(name)
        if not callable(getattr(module, "get_mp_context", None)):
            logger.warning("%s has no get_mp_context in this vLLM: its processes start without the fork server", name)
            continue
        module.get_mp_context = _Context
