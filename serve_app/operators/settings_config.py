"""The settings of a config that ``tandem operators settings`` may change: read, changed, and as a patch."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from autoscale.operators.gpu import Gpu
from autoscale.operators.step_times import ASYNC_HOST, EngineSettings
from deployments.config import ServiceConfig
from deployments.pool_config import GroupConfig, RoleConfig
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError

_GIB = 1024.0**3
# vLLM's own values where a config has none (EngineArgs, usage as a server): tokens of a step, requests of a batch.
_DEFAULTS_LARGE = 8192, 1024  # GPUs of 70 GiB or more, but A100
_DEFAULTS_OTHER = 2048, 256
_DEFAULT_MEMORY_FRAC = 0.9
# Fields of a role that are settings here; all others are arguments of vLLM in engine_kwargs.
_ROLE_FIELDS = ("replicas", "max_replicas", "tensor_parallel_size")

Value = int | bool | str | dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of one role, by its name in the config.

    Attributes:
        before: ``None``: the config leaves it out, and the engine has ``default``.
        expert_load: of ``eplb_config``: as ``EngineSettings.expert_load``, with the copies.
    """

    role: Role | None
    name: str
    before: Value | None
    after: Value | None
    default: Value | None = None
    expert_load: float = 1.0
    why: str

    @property
    def label(self) -> str:
        """Name of the setting in tables."""
        return self.name if self.role is None else f"{self.role}.{self.name}"

    @property
    def is_change(self) -> bool:
        """Whether the engine would differ."""
        return self.after != (self.default if self.before is None else self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleState:
    """Replicas and engine of one role."""

    replicas: int
    engine: EngineSettings

    def with_setting(self, setting: Setting) -> Self:
        """The role with a setting that changes its replicas or its engine; any other setting changes nothing."""
        if isinstance(setting.after, dict) and setting.name == "eplb_config":
            copies = setting.after["num_redundant_experts"]
            load = setting.expert_load
            return replace(self, engine=replace(self.engine, redundant_experts=copies, expert_load=load))
        if not isinstance(amount := setting.after, int):
            return self
        if setting.name == "replicas":
            return replace(self, replicas=amount)
        if setting.name == "tensor_parallel_size":
            return replace(self, engine=replace(self.engine, parallel=amount))
        if setting.name == "max_num_batched_tokens":
            return replace(self, engine=replace(self.engine, max_batch_tokens=amount))
        if setting.name == "max_num_seqs":
            return replace(self, engine=replace(self.engine, max_running=amount))
        return self


def with_settings(states: Mapping[Role, RoleState], settings: Iterable[Setting]) -> dict[Role, RoleState]:
    """Both roles with these settings."""
    found = dict(states)
    for setting in settings:
        if setting.role is not None:
            found[setting.role] = found[setting.role].with_setting(setting)
    return found


def only_group(services: tuple[ServiceConfig, ...]) -> tuple[ServiceConfig, GroupConfig]:
    """The service and the group of a config.

    Raises:
        ConfigError: several, or one without prefill, or pipeline stages.
    """
    if len(services) != 1 or len(services[0].all_groups) != 1:
        raise ConfigError(
            f"the config has {len(services)} service(s) with {sum(len(each.all_groups) for each in services)} groups: "
            "give one with one group, since all replicas of a role get the same settings"
        )
    service, group = services[0], services[0].groups[0]
    if group.prefill is None:
        raise ConfigError(f"group {group.name!r} has no prefill pool: settings are chosen for prefill and decode apart")
    for key, pool in group.pools().items():
        if pool.placement.accelerator_type is None:
            raise ConfigError(f"{key} runs on CPU cores: give it an accelerator_type, whose operators are known")
        if pool.pipeline_parallel_size > 1:
            raise ConfigError(
                f"{key} has pipeline_parallel_size {pool.pipeline_parallel_size}, and times of operators have no "
                "pipeline stages: use tensor_parallel_size instead"
            )
        if not pool.replicas:
            raise ConfigError(f"{key} has 0 replicas: set replicas to what serves now, 1 or more")
    return service, group


def role_state(service: ServiceConfig, pool: RoleConfig, gpu: Gpu, longest_tokens: int) -> RoleState:
    """A role as it is: fields that the config leaves out have vLLM's values for the GPU.

    Raises:
        ConfigError: an engine argument is no number above 0.
    """
    kwargs = service.engine_kwargs_of(pool)
    is_large = gpu.memory_bytes >= 70 * _GIB and gpu.name != "A100"
    tokens, running = _DEFAULTS_LARGE if is_large else _DEFAULTS_OTHER
    engine = EngineSettings(
        parallel=pool.tensor_parallel_size,
        max_batch_tokens=_whole(kwargs, "max_num_batched_tokens", tokens),
        max_running=_whole(kwargs, "max_num_seqs", running),
        memory_frac=_share(kwargs, "gpu_memory_utilization", _DEFAULT_MEMORY_FRAC),
        longest_tokens=longest_tokens,
        host=ASYNC_HOST,
    )
    return RoleState(replicas=pool.replicas, engine=engine)


def _whole(kwargs: Mapping[str, Any], name: str, default: int) -> int:
    value = kwargs.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"engine_kwargs.{name} is {value!r}: give a whole number above 0")
    return value


def _share(kwargs: Mapping[str, Any], name: str, default: float) -> float:
    value = kwargs.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise ConfigError(f"engine_kwargs.{name} is {value!r}: give a share above 0, at most 1")
    return float(value)


def changed(document: Mapping[str, Any], settings: Iterable[Setting]) -> dict[str, Any]:
    """A Serve YAML with these settings; the given one stays as it is."""
    copied = copy.deepcopy(dict(document))
    args = copied["applications"][0]["args"]
    service = args["services"][0] if "services" in args else args
    for setting in settings:
        target, name = _place(service, setting)
        target[name] = setting.after
        if name == "eplb_config":
            target["enable_eplb"] = True
    return copied


def _place(service: dict[str, Any], setting: Setting) -> tuple[dict[str, Any], str]:
    """The mapping that has a setting's field; it is made where it is missing."""
    if setting.role is None:
        return service["autoscale"], setting.name.removeprefix("autoscale.")
    role = service["groups"][0].setdefault(str(setting.role), {})
    if setting.name in _ROLE_FIELDS:
        return role, setting.name
    return role.setdefault("engine_kwargs", {}), setting.name


def json_patch(before: Any, after: Any, path: str = "") -> list[dict[str, Any]]:
    """The operations of RFC 6902 that turn one document into another with the same lists."""
    if isinstance(before, dict) and isinstance(after, dict):
        operations: list[dict[str, Any]] = []
        for name, value in after.items():
            place = f"{path}/{str(name).replace('~', '~0').replace('/', '~1')}"
            if name not in before:
                operations.append({"op": "add", "path": place, "value": value})
            else:
                operations += json_patch(before[name], value, place)
        return operations
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [each for index, pair in pairs for each in json_patch(*pair, f"{path}/{index}")]
    return [] if before == after else [{"op": "replace", "path": path, "value": after}]
