"""The files of a LoRA adapter: whether they fit the model, and a digest of them.

vLLM copies a matrix into a larger one without an error, so an adapter of a smaller model would be loaded and would
answer nonsense. So the shapes are compared here. It loads adapters from pickled files too; here they must be
safetensors.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from router.adapters import AdapterFault, FaultKind

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # beginning of every name of a weight in a file of PEFT
_MOST_HEADER_BYTES = 100 << 20  # as in the safetensors library
_READ_BYTES = 4 << 20
_DIGEST_BYTES = 8  # of the files of a name; two versions are equal by chance with a probability below 1e-18
Shapes = Mapping[str, tuple[int, ...]]


class AdapterError(Exception):
    """An adapter cannot be loaded."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.fault = AdapterFault(kind=kind, message=message)


def load_checked(name: str, folder: Path, *, most_rank: int, base: Path | None) -> str:
    """Check an adapter's files, and return their digest.

    ``most_rank``: the engine's max_lora_rank. ``base``: folder of the model; ``None``: shapes are not compared.
    Raises AdapterError: they are missing, or do not fit.
    """
    config = _load_config(name, folder)
    if config["r"] > most_rank:
        raise AdapterError(
            FaultKind.UNFIT,
            f"the adapter {name!r} has rank {config['r']}, and the engines take at most {most_rank}: set max_lora_rank "
            "in engine_kwargs",
        )
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise AdapterError(FaultKind.MISSING, f"the adapter {name!r} has no file {WEIGHTS_FILE} in {folder}")
    shapes = _load_shapes(weights)
    if base is not None:
        fault = shape_fault(shapes, _load_base_shapes(base))
        if fault is not None:
            raise AdapterError(FaultKind.UNFIT, f"the adapter {name!r} is not of this model: {fault}")
    return _load_digest(folder)


def shape_fault(adapter: Shapes, base: Shapes) -> str | None:
    """Which matrix of an adapter does not fit the model's; ``None``: none is known not to fit."""
    modules = {
        name.removeprefix(_PREFIX).rpartition(".lora_")[0]: name
        for name in adapter
        if name.endswith((".lora_A.weight", ".lora_B.weight"))
    }
    if not modules:
        return "it has no weight of LoRA"
    known = {module for module in modules if f"{module}.weight" in base}
    for module in sorted(modules):
        prefix = modules[module].rpartition(".lora_")[0]
        if module not in known:
            if known and ".layers." in module:  # otherwise the model's files have other names
                return f"the model has no {module}"
            continue
        base_shape = base[f"{module}.weight"]
        a, b = adapter.get(f"{prefix}.lora_A.weight"), adapter.get(f"{prefix}.lora_B.weight")
        if a is None or b is None:
            return f"{module} has no lora_{'A' if a is None else 'B'}"
        product = (b[0], a[-1])
        if len(base_shape) == 2 and product != base_shape:
            size = " x ".join(map(str, base_shape))
            return f"{module} has {product[0]} x {product[1]} weights, and the model's has {size}"
    return None


def _load_config(name: str, folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError:
        raise AdapterError(FaultKind.MISSING, f"the adapter {name!r} has no file {CONFIG_FILE} in {folder}") from None
    except ValueError as error:
        raise AdapterError(FaultKind.UNFIT, f"{CONFIG_FILE} of the adapter {name!r} is no JSON: {error}") from None
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int) or rank < 1:
        raise AdapterError(FaultKind.UNFIT, f"{CONFIG_FILE} of the adapter {name!r} has no rank r: got {rank!r}")
    return config


def _load_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes in a safetensors file, by name. Raises AdapterError: it is no such file."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MOST_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            header = json.loads(file.read(size))
        return {name: tuple(value["shape"]) for name, value in header.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(FaultKind.UNFIT, f"{path.name} is no safetensors file: {error}") from None


def _load_base_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: shape for path in sorted(folder.glob("*.safetensors")) for name, shape in _load_shapes(path).items()}


def _load_digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()
