"""One pool and one deployment group as a user configures them (pure; no ray, no vllm)."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from autoscale.types import Demand, PoolKey
from kvtransfer.selectors import values
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Affinity, LinkTier, Role

# Engine arguments that another field sets (named here), or that the design fixes (``None``).
_OWNED_ENGINE_KWARGS = {
    "model": "model.source",
    "served_model_name": "model.id",
    "tensor_parallel_size": "the role's tensor_parallel_size",
    "pipeline_parallel_size": "the role's pipeline_parallel_size",
    "kv_transfer_config": "kv_transfer",
    "data_parallel_size": "the role's replicas",
    "worker_extension_cls": None,
    "distributed_executor_backend": None,
    "disable_log_stats": None,
    "enable_request_id_headers": None,
}

# Key of LLMConfig.experimental_configs that carries an EmulatorConfig; LLMConfig has no field for it.
EMULATOR_KEY = "tandem_emulator"


def _checked(selector: str) -> str:
    values(selector)
    return selector


def _without_owned(value: dict[str, Any]) -> dict[str, Any]:
    for key in value:
        if key in _OWNED_ENGINE_KWARGS:
            field = _OWNED_ENGINE_KWARGS[key]
            use = f"set {field} instead" if field else "Tandem relies on its default; leave it out"
            raise ValueError(f"engine argument {key!r} is not yours to set here: {use}")
    return value


# Arguments of vLLM's engine by name, without those that other fields set.
EngineKwargs = Annotated[dict[str, Any], AfterValidator(_without_owned)]
# Ray label selector: for each label key the value that a node must have, or an expression.
Selector = dict[str, Annotated[str, AfterValidator(_checked)]]


class PlacementConfig(StrictConfig):
    """Where one replica's engine workers run; becomes Serve placement-group bundles and their label selectors."""

    accelerator_type: str | None = None
    """GPU type as Ray names it, such as H100 or A100-80G. Left out, the engine runs on CPU cores."""
    gpus_per_worker: float = Field(1.0, gt=0.0, le=1.0)
    """GPUs of each engine worker; a fraction shares a GPU with others."""
    cpus_per_worker: float = Field(1.0, ge=0.0)
    """Ray CPUs in the bundle of each engine worker."""
    cpus_per_replica: float = Field(1.0, ge=0.0)
    """Ray CPUs of the Serve replica itself, for front end and tokeniser; they are added to the first bundle."""
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    """How Ray spreads the bundles of one replica over nodes; STRICT_PACK puts all on one node."""
    node_labels: Selector = Field(default_factory=dict)
    """Ray label selector of each bundle, such as {tandem.io/s1: switch-a}. Values may be 'v', '!v', 'in(a,b)' or
    '!in(a,b)'."""


class EmulatorConfig(StrictConfig):
    """An emulated engine: it waits for the time that a real engine would compute."""

    profile: Path
    """Path of an EngineProfile, such as configs/profiles/h100_llama70b_fp8_tp1.json."""
    start_s: float | None = Field(None, ge=0.0)
    """Time from a replica's start until it is ready, seconds, beyond the time of imports. Left out, the profile's."""
    time_factor: float = Field(1.0, gt=0.0, le=1000.0)
    """Seconds of the emulated engine that pass in one real second."""
    max_running: int | None = Field(None, ge=1)
    """Requests in the batch at one time. Left out, the profile's."""
    chunk_s: float = Field(0.1, ge=0.0)
    """The tokens of this time, seconds, are sent as one chunk."""


class RoleConfig(StrictConfig):
    """One pool: the replicas of one role in one group."""

    replicas: int = Field(1, ge=0, le=1024)
    """Number of replicas; each is one engine. With autoscale: the number at the start, and the lowest. 0 for both
    roles: the group sleeps until it is needed."""
    max_replicas: int | None = Field(None, ge=1, le=1024)
    """Highest number of replicas; required with autoscale, and refused without it."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Tensor-parallel workers of each engine."""
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    """Pipeline stages of each engine; prefill must have 1."""
    placement: PlacementConfig = PlacementConfig()
    emulator: EmulatorConfig | None = None
    """Emulated engine, which waits instead of computing. Left out, vLLM runs."""
    engine_kwargs: EngineKwargs = Field(default_factory=dict)
    """vLLM engine arguments of this role, by name; they override those of the service."""
    cores_per_worker: int = Field(1, ge=1)
    """CPU cores that each worker of an engine on CPU is bound to; the least claimed cores of the node are chosen."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the replicas and their engines."""
    graceful_shutdown_timeout_s: float = Field(600.0, gt=0.0)
    """Time, seconds, that a stopping replica has to finish its requests. Serve's own default of 20 s would cut long
    answers off."""
    max_surge_frac: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the pool's replicas that start before old ones stop when the configuration changes; at least one if more
    than 0, and they need free room. 0: old replicas stop first, a fifth of them and at least one at a time, so a pool
    of one answers nothing until its new replica is ready."""
    engine_silence_s: float = Field(15.0, gt=0.0, le=3600.0)
    """Time, seconds, without any answer after which an engine counts as hanging and its replica ends. An engine answers
    between two steps: choose more than the longest step takes."""
    max_ongoing_requests: int = Field(1000, ge=1)
    """Requests that Serve sends to one replica at a time; the engine itself queues and batches them."""

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is less than replicas ({self.replicas})")
        return self

    @property
    def workers(self) -> int:
        """Engine workers per replica: tensor x pipeline parallel."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def gpus_per_replica(self) -> float:
        """GPUs per replica; 0 on CPU."""
        return self.workers * self.placement.gpus_per_worker if self.placement.accelerator_type else 0

    @property
    def demand(self) -> Demand:
        """Room that one replica takes on a node."""
        placement = self.placement
        return Demand(
            selector=placement.node_labels,
            gpu_type=placement.accelerator_type,
            workers=self.workers,
            gpus_per_worker=placement.gpus_per_worker if placement.accelerator_type else 0.0,
            cpus_per_worker=placement.cpus_per_worker,
            cpus_per_replica=placement.cpus_per_replica,
            strategy=placement.strategy,
        )


class GroupConfig(StrictConfig):
    """A deployment group (HeteroScale section 3.4): prefill and decode between which KV moves, of one variant.

    Without prefill it is one aggregated pool, whose decode replicas prefill for themselves.
    """

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")
    """Name of the group: lower-case letters, digits and dashes."""
    node_labels: Selector = Field(default_factory=dict)
    """Label selector for the nodes of both roles, such as {tandem.io/s1: switch-a}: the network domain of the group. A
    role's own selector overrides it."""
    affinity: Affinity = Field(LinkTier.NONE, validate_default=True)
    """Lowest network level that all nodes of the group must share: s0, s1, s2, cluster, data_centre or none."""
    is_preemptible: bool = False
    """Whether replicas of this group leave first when a more important service lacks room. If true, replicas must be
    0."""
    prefill: RoleConfig | None = RoleConfig()
    """Prefill pool. null: decode replicas compute prompts too; then no group of the service may have a prefill pool."""
    decode: RoleConfig = RoleConfig()

    @model_validator(mode="before")
    @classmethod
    def _hand_labels_down(cls, value: Any) -> Any:
        """Give both roles the group's labels; their own win."""
        if not isinstance(value, dict) or not isinstance(value.get("node_labels"), dict):
            return value
        completed = dict(value)
        for role in Role:
            if role in value and value[role] is None:
                continue
            pool = dict(value.get(role) or {})
            placement = dict(pool.get("placement") or {})
            placement["node_labels"] = {**value["node_labels"], **(placement.get("node_labels") or {})}
            completed[role] = {**pool, "placement": placement}
        return completed

    @model_validator(mode="after")
    def _check(self) -> Self:
        prefill = self.prefill
        if prefill is not None and bool(prefill.replicas) != bool(self.decode.replicas):
            raise ValueError(
                f"group {self.name!r}: prefill has {prefill.replicas} replicas and decode {self.decode.replicas}: "
                "a group sleeps with 0 of both, or has at least one of each"
            )
        if self.is_preemptible and self.decode.replicas:
            and_prefill = "" if prefill is None else f"{prefill.replicas} prefill and "
            raise ValueError(
                f"group {self.name!r} is_preemptible and must keep {and_prefill}{self.decode.replicas} decode "
                "replicas: give it 0, or another group what must stay"
            )
        if prefill is not None and prefill.pipeline_parallel_size > 1:
            raise ValueError(
                f"group {self.name!r}: prefill.pipeline_parallel_size is {prefill.pipeline_parallel_size}, and "
                "the NIXL connector in pull mode takes no pipeline-parallel prefill: use tensor_parallel_size instead"
            )
        return self

    @property
    def computes_prompts(self) -> RoleConfig:
        """The pool that prefills."""
        return self.prefill or self.decode

    def pools(self) -> dict[PoolKey, RoleConfig]:
        """The pools of the group by key, prefill first."""
        prefill = {} if self.prefill is None else {PoolKey(self.name, Role.PREFILL): self.prefill}
        return {**prefill, PoolKey(self.name, Role.DECODE): self.decode}
