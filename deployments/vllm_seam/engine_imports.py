"""Imported by a fork server: everything that an engine needs on this machine, so that a fork has it."""

import importlib
import logging
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

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


def compile_sampler() -> None:
    """Compile vLLM's sampler on CPU, so that no fork does: an engine compiles it at its first request that samples.

    The result holds for engines with one thread. For others at least PyTorch's compiler is ready. With one thread no
    OpenMP threads start, which a fork would lack.

    Needs: ``vllm.v1.sample.ops.topk_topp_sampler.compiled_random_sample``, which takes logits; and
    ``torch._inductor.config.compile_threads``.
    Without it: an engine compiles at its start, 5 s of a core.
    """
    import torch
    import torch._inductor.config
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    inductor: Any = torch._inductor.config
    threads, compile_threads = torch.get_num_threads(), inductor.compile_threads
    try:
        from vllm.v1.sample.ops.topk_topp_sampler import compiled_random_sample

        torch.set_num_threads(1)
        inductor.compile_threads = 1  # more would be processes of this one, which a fork cannot use
        with torch.inference_mode():  # as in an engine: PyTorch compiles again for another mode
            for rows in (1, 2):  # one row, and any other number of them, are compiled apart
                compiled_random_sample(torch.zeros(rows, 64))
    except Exception as error:  # such as a machine without a C++ compiler
        logger.info("the sampler is compiled by each engine: %s", error)
    finally:
        torch.set_num_threads(threads)
        inductor.compile_threads = compile_threads


import_all()
compile_sampler()
