"""The device that a folder of measured tables is of: its facts beside the tables, and the GPU that plans use.

A GPU of a shipped type keeps the facts of its data sheet; only its memory is the measured one.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from autoscale.operators.gpu import GPUS, Gpu, gpu_named
from autoscale.operators.roofline import GEMM

# The file of the facts, beside the tables.
DEVICE_FILE = "device.json"


class DeviceError(ValueError):
    """The facts of a device cannot be read, or are those of another device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What was measured of a device, and what is assumed of it.

    Attributes:
        kind: cpu or cuda.
        name: as the device gives it.
        memory_bytes: its memory.
        reached_flops_per_s: fastest large product by data type, FLOP/s.
        reached_bytes_per_s: fastest copy of its memory, bytes read and written.
        processors: SMs of a GPU, cores of a CPU.
        link_bytes_per_s, link_latency_s: between two devices of a node; assumed.
        idle_power_w, peak_power_w: assumed where ``assumed`` names them.
        assumed: the fields above that were not measured.
    """

    kind: str
    name: str
    memory_bytes: float
    reached_flops_per_s: Mapping[str, float]
    reached_bytes_per_s: float
    processors: int
    link_bytes_per_s: float
    link_latency_s: float
    idle_power_w: float
    peak_power_w: float
    assumed: tuple[str, ...]


def save_device(folder: Path, facts: DeviceFacts) -> None:
    """Write the facts beside the tables of a folder."""
    (folder / DEVICE_FILE).write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")


def load_gpu(name: str, folder: Path | None = None) -> Gpu:
    """The GPU of measured tables, or a shipped type if the folder has no facts of a device.

    ``name``: a shipped type; for measured tables also ``cpu``, ``cuda``, or the name that the device gives itself.

    Raises:
        DeviceError: the facts cannot be read, or the tables are of another device.
        UnknownGpuError: no type has the name.
    """
    if folder is None or not (folder / DEVICE_FILE).exists():
        return gpu_named(name)
    facts = load_device(folder)
    shipped = _shipped(facts)
    names = {facts.kind, facts.name, *([shipped.name] if shipped else ())}
    if _plain(name) not in map(_plain, names):
        raise DeviceError(
            f"the tables in {folder} are of {facts.name}, not of {name}: give one of {', '.join(sorted(names))}"
        )
    return replace(shipped, memory_bytes=facts.memory_bytes) if shipped else _measured(facts)


def _plain(name: str) -> str:
    return name.upper().replace(" ", "-").replace("_", "-")


def _shipped(facts: DeviceFacts) -> Gpu | None:
    """The shipped type whose name is part of the device's name."""
    parts = f"-{_plain(facts.name)}-"
    return next((gpu for gpu in GPUS.values() if facts.kind == "cuda" and f"-{gpu.name}-" in parts), None)


def _measured(facts: DeviceFacts) -> Gpu:
    """A device that is not shipped; its peaks are such that the shares which rooflines take are the reached values."""
    return Gpu(
        name=facts.kind if facts.kind == "cpu" else facts.name,
        memory_bytes=facts.memory_bytes,
        peak_flops_per_s={dtype: each / GEMM.compute_frac for dtype, each in facts.reached_flops_per_s.items()},
        memory_bytes_per_s=facts.reached_bytes_per_s / GEMM.memory_frac,
        sm_count=facts.processors,
        link_bytes_per_s=facts.link_bytes_per_s,
        link_latency_s=facts.link_latency_s,
        kernel_gap_s=0.0,  # the tables hold bursts of calls
        idle_power_w=facts.idle_power_w,
        peak_power_w=facts.peak_power_w,
        is_padding=facts.kind != "cpu",
    )


def load_device(folder: Path) -> DeviceFacts:
    """The facts beside the tables of a folder.

    Raises:
        DeviceError: they cannot be read, or a number is none.
    """
    path = folder / DEVICE_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        numbers = {each.name: found[each.name] for each in fields(DeviceFacts) if each.type is float}
        flops = {str(dtype): _positive(path, dtype, value) for dtype, value in found["reached_flops_per_s"].items()}
        return DeviceFacts(
            kind=str(found["kind"]),
            name=str(found["name"]),
            processors=int(_positive(path, "processors", found["processors"])),
            reached_flops_per_s=flops,
            assumed=tuple(map(str, found["assumed"])),
            **{name: _positive(path, name, value) for name, value in numbers.items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DeviceError):
            raise
        raise DeviceError(f"{path}: cannot be read ({type(error).__name__}: {error}): measure again") from None


def _positive(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise DeviceError(f"{path}: {name} is {value!r}: expected a number above 0")
    return float(value)
