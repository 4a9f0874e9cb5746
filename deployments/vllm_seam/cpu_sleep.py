"""vLLM's sleep mode on CPU, where vLLM has none: the engine keeps its process, and gives its memory back.

Level 1 gives the KV cache back. Level 2 gives the weights back too; vLLM's ``reload_weights`` reads them again. The
addresses stay, so NIXL's registrations hold.
"""

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_PACKED = "cpu_linear"  # vLLM's name of a layer's function with packed weights; a reload makes it again
_LIBC = ctypes.CDLL(None, use_errno=True)


def install() -> None:
    """Give vLLM's CPU worker a ``sleep`` and a ``wake_up``, on a machine without GPUs.

    Needs: ``sleep``, ``wake_up`` and ``model_runner`` of ``vllm.v1.worker.cpu_worker.CPUWorker``; ``kv_caches`` and
    ``get_model`` of its model runner; ``cpu_linear`` of its layers, which ``reload_weights`` makes again.
    Without it: an engine on CPU that should sleep keeps its memory.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_worker import CPUWorker

    CPUWorker.sleep = _sleep
    CPUWorker.wake_up = _wake_up


def _sleep(worker: Any, level: int = 1) -> None:
    tensors: list[Any] = []
    before = _resident_bytes()
    for cache in worker.model_runner.kv_caches:
        tensors += cache if isinstance(cache, list | tuple) else [cache]
    if level == 2:
        model = worker.model_runner.get_model()
        tensors += model.parameters()
        for layer in model.modules():  # the packed weights of a linear layer belong to this function alone
            if hasattr(layer, _PACKED):
                delattr(layer, _PACKED)
    _give_back(tensors)
    _LIBC.malloc_trim(0)
    logger.info("sleep of level %d gave %.2f GB back", level, (before - _resident_bytes()) / 1e9)


def _wake_up(worker: Any, tags: list[str] | None = None) -> None:
    """The kernel gives the pages again, as zeros, when they are touched."""


def _give_back(tensors: Iterable[Any]) -> None:
    """Let the kernel take the whole pages of these tensors; they read as zeros afterwards."""
    for start, length in {
        (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors
    }:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0 and _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), f"memory is not given back: {os.strerror(ctypes.get_errno())}")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
