"""What a device is and reaches: its name, memory, cache, the fastest product and the fastest copy."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from autoscale.operators.device import DeviceFacts
from deployments.operator_profiler.kernels import product_call, scaled_call
from deployments.operator_profiler.meter import open_meter
from deployments.operator_profiler.pace import host_clock

_CPU_TYPES = ("fp32", "bf16")
_SQUARE = {"cpu": 1024, "cuda": 8192}  # rows, inputs and outputs of the product
_COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
_TRIES = 3
_ROTATION_OF_CACHE = 3  # what calls use in turns takes this multiple of the largest cache
_CACHE_BYTES = 32 * 2**20  # of a CPU that does not say it
_FP8_CAPABILITY = (8, 9)  # the first GPUs with FP8 units: Ada
_BF16_CAPABILITY = (8, 0)
# Assumed where nothing measures it: PCIe 4.0 x16 between GPUs, and the latency of NCCL over it.
_PCIE_BYTES_PER_S, _PCIE_LATENCY_S = 25e9, 20e-6
_GPU_POWER_W = (60.0, 400.0)
_CORE_POWER_W = (2.0, 8.0)  # of one core of a server, idle and busy: 64 cores take 130 and 500 W


class ProfilingError(ValueError):
    """The operators cannot be measured here as asked."""


def check_device(device: str, dtype: str) -> None:
    """Refuse a device that is not here, and a data type that it does not compute in.

    Raises:
        ProfilingError: one of them.
    """
    if device not in _SQUARE:
        raise ProfilingError(f"--device {device}: give cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ProfilingError(f"--device cuda: torch {torch.__version__} sees no GPU here: give --device cpu")
    if dtype not in data_types(device):
        types = ", ".join(data_types(device))
        raise ProfilingError(f"--dtype {dtype}: {device_name(device)} does not compute in it: give one of {types}")


def data_types(device: str) -> tuple[str, ...]:
    """Types of weights that the device has."""
    if device == "cpu":
        return _CPU_TYPES
    capability = torch.cuda.get_device_capability(0)
    has_bf16, has_fp8 = capability >= _BF16_CAPABILITY, capability >= _FP8_CAPABILITY
    return (*(("bf16",) if has_bf16 else ()), *(("fp8",) if has_fp8 else ()), "fp32")


def default_dtype(device: str) -> str:
    """bf16 on a GPU, fp32 on a CPU: few CPUs have units for bf16, and the others are faster in fp32."""
    return "fp32" if device == "cpu" else "bf16"


def device_name(device: str) -> str:
    """The device's name for itself."""
    if device != "cpu":
        return str(torch.cuda.get_device_properties(0).name)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def free_bytes(device: str) -> float:
    """Memory that is free now."""
    if device != "cpu":
        return float(torch.cuda.mem_get_info()[0])
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return kilobytes[0] * 1024.0 if kilobytes else float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def rotation_bytes(device: str) -> int:
    """Size of weights or KV that calls use in turns, so that the caches do not hold it."""
    if device != "cpu":
        return _ROTATION_OF_CACHE * int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = [_CACHE_BYTES]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}.get(text[-1:], 1) if text[:-1].isdigit() else 0)
    return _ROTATION_OF_CACHE * max(sizes)


def measured_facts(device: str) -> DeviceFacts:
    """What the device reaches, in a few seconds; power and link are mostly assumed."""
    assumed = ["link_bytes_per_s", "link_latency_s", "idle_power_w"]
    reached_bytes_per_s = _copy_bytes_per_s(device)
    if device == "cpu":
        cores = torch.get_num_threads()
        idle_w, peak_w = (cores * each for each in _CORE_POWER_W)
        # Processes of one machine exchange through its memory: written once, read once.
        link, latency_s, processors = reached_bytes_per_s / 2, _PCIE_LATENCY_S, cores
        memory_bytes = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    else:
        limit_w = open_meter(device).facts().get("power_limit_w")
        idle_w, peak_w = _GPU_POWER_W[0], float(limit_w or _GPU_POWER_W[1])
        link, latency_s = _PCIE_BYTES_PER_S, _PCIE_LATENCY_S
        processors = int(torch.cuda.get_device_properties(0).multi_processor_count)
        memory_bytes = float(torch.cuda.mem_get_info()[1])
    if device == "cpu" or peak_w == _GPU_POWER_W[1]:
        assumed.append("peak_power_w")
    return DeviceFacts(
        kind=device,
        name=device_name(device),
        memory_bytes=memory_bytes,
        reached_flops_per_s={dtype: _flops_per_s(device, dtype) for dtype in data_types(device)},
        reached_bytes_per_s=reached_bytes_per_s,
        processors=processors,
        link_bytes_per_s=link,
        link_latency_s=latency_s,
        idle_power_w=idle_w,
        peak_power_w=peak_w,
        assumed=tuple(assumed),
    )


def _flops_per_s(device: str, dtype: str) -> float:
    side = _SQUARE[device] // (2 if dtype == "bf16" and device == "cpu" else 1)
    left = torch.randn(side, side, device=device, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
    call = product_call(left, left, torch.empty_like(left))
    if dtype == "fp8":
        narrow = left.to(torch.float8_e4m3fn)
        call = scaled_call(narrow, narrow, torch.ones((), device=device))
    return 2.0 * side**3 / _least_s(device, call)


def _copy_bytes_per_s(device: str) -> float:
    source = torch.zeros(_COPY_BYTES[device], dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    return 2.0 * source.numel() / _least_s(device, lambda: copied.copy_(source))


def _least_s(device: str, call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    clock = host_clock if device == "cpu" else time.perf_counter
    found = []
    for _ in range(1 + _TRIES):
        began_s = clock()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(clock() - began_s)
    return min(found[1:])
