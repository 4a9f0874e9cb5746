"""Imported by a fork server: everything that an engine needs on this machine, so that a fork has it."""

import importlib
from contextlib import suppress

_MODULES = [
    "deployments.vllm_seam.plugin",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
]
_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker", "cuda": "vllm.v1.worker.gpu_worker"}


def import_all() -> None:
    """Import the modules of an engine. A missing one is left to the engine, which then names it."""
    from vllm.platforms import current_platform

    worker = _WORKERS.get(current_platform.device_type)
    for name in [*_MODULES, *([worker] if worker else [])]:
        with suppress(ImportError):
            importlib.import_module(name)


import_all()
