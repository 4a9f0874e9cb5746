"""LoRA adapters as a user configures them, and the engine arguments that follow from them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, field_validator

from autoscale.types import PoolKey
from deployments.pool_config import RoleConfig
from kvtransfer.strict_config import StrictConfig

# Key of LLMConfig.experimental_configs that carries the adapters of a model; LLMConfig has no field for them.
ADAPTERS_KEY = "tandem_adapters"
# Slots for adapters in a batch, unless max_loras is set: each takes memory like an adapter of the highest rank, whether
# it is used or not.
_MOST_SLOTS = 8
# Adapters that an engine may load at run time, unless max_cpu_loras is set. It keeps them all in the node's memory.
_RUN_TIME_ADAPTERS = 16
_CONFIG_FILE = "adapter_config.json"


class AdapterConfig(StrictConfig):
    """A LoRA adapter that all replicas of the model load at their start."""

    id: str = Field(min_length=1, max_length=255)
    """Name of the adapter in clients' requests, in the place of the model's."""
    path: Path
    """Whole path of its folder with adapter_config.json and adapter_model.safetensors (PEFT), on every node with a
    replica of the model."""

    @field_validator("path")
    @classmethod
    def _check_path(cls, value: Path) -> Path:
        return whole_path("path", value)


def check_names(model: str, adapters: Sequence[AdapterConfig]) -> None:
    """Raises ValueError: two adapters have one name, or one has the model's."""
    names = [model, *(adapter.id for adapter in adapters)]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"adapters: the name {repeated[0]!r} is used twice; the model and each adapter need their own")


def check_pools(pools: Mapping[PoolKey, RoleConfig]) -> None:
    """Raises ValueError: a pool of a model with adapters cannot have them."""
    for key, pool in pools.items():
        if pool.emulator is not None:
            raise ValueError(f"{key} is emulated, and emulated engines have no adapters: leave adapters out")
        if pool.engine_sleep is not None:
            raise ValueError(
                f"engine_sleep is given for {key}, and adapters are not kept over an engine's sleep: leave one of them "
                "out"
            )


def whole_path(name: str, value: Path) -> Path:
    """The path, if it is absolute; raises ValueError if it is not."""
    if not value.is_absolute():
        raise ValueError(f"{name} {value} is relative, and replicas start in another folder: give the whole path")
    return value


def adapter_arguments(
    adapters: Sequence[AdapterConfig], folder: Path | None, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """vLLM's engine arguments for a model's adapters, without those in ``kwargs``; empty: it has none."""
    if not adapters and folder is None:
        return {}
    slots = int(kwargs.get("max_loras") or min(max(1, len(adapters)), _MOST_SLOTS))
    kept = max(slots, len(adapters) + (0 if folder is None else _RUN_TIME_ADAPTERS))
    arguments: dict[str, Any] = {"enable_lora": True, "max_loras": slots, "max_cpu_loras": kept}
    if (rank := _load_rank(adapters)) is not None:
        arguments["max_lora_rank"] = rank
    return {name: value for name, value in arguments.items() if name not in kwargs}


def _load_rank(adapters: Sequence[AdapterConfig]) -> int | None:
    """The lowest rank of vLLM's that fits all adapters, at least its default; ``None``: vLLM's default fits them.

    Files that this machine does not have count as fitting: their replica then names the rank to set.
    """
    from vllm.config.lora import LoRAConfig, MaxLoRARanks

    ranks = []
    for adapter in adapters:
        try:
            ranks.append(int(json.loads((adapter.path / _CONFIG_FILE).read_text())["r"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    default = LoRAConfig.max_lora_rank
    highest = max(ranks, default=default)
    return next((rank for rank in sorted(get_args(MaxLoRARanks)) if rank >= max(highest, default)), None)
