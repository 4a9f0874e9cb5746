"""One pool and one deployment group as a user configures them (pure; no ray, no vllm)."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from autoscale.decide.dual_ratio import AttentionFfn
from autoscale.types import Demand, PoolKey
from kvtransfer.selectors import values
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Affinity, LinkTier, Role

# Engine arguments that a user may not set: the field that sets each; ``None``: Tandem alone chooses the value.
_OWNED_ENGINE_KWARGS = {
    "model": "model.source",
    "served_model_name": "model.id",
    "tensor_parallel_size": "the role's tensor_parallel_size",
    "pipeline_parallel_size": "the role's pipeline_parallel_size",
    "kv_transfer_config": "kv_transfer",
    "data_parallel_size": "the role's replicas",
    "kv_events_config": "router.policy",
    "enable_lora": "model.adapters or model.adapters_folder",
    "lora_modules": "model.adapters",
    "worker_extension_cls": None,
    "distributed_executor_backend": None,
    "disable_log_stats": None,
    "enable_request_id_headers": None,
}

# Key of LLMConfig.experimental_configs that carries an EmulatorConfig; LLMConfig has no field for it.
EMULATOR_KEY = "tandem_emulator"


def _check_selector(selector: str) -> str:
    values(selector)  # raises ValueError for a malformed one
    return selector


def _check_engine_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    for key in kwargs:
        if key in _OWNED_ENGINE_KWARGS:
            field = _OWNED_ENGINE_KWARGS[key]
            remedy = f"set {field} instead" if field else "Tandem alone chooses its value; leave it out"
            raise ValueError(f"engine argument {key!r} may not be set here: {remedy}")
    return kwargs


# Arguments of vLLM's engine by name, without those that other fields set.
EngineKwargs = Annotated[dict[str, Any], AfterValidator(_check_engine_kwargs)]
# Ray label selector: for each label key the value that a node must have, or an expression.
Selector = dict[str, Annotated[str, AfterValidator(_check_selector)]]


class PlacementConfig(StrictConfig):
    """Resources and nodes of one replica's engine workers: Serve's placement-group bundles and label selectors."""

    accelerator_type: str | None = None
    """GPU type as Ray names it, such as H100 or A100-80G. Left out, the engine runs on CPU cores."""
    gpus_per_worker: float = Field(1.0, gt=0.0, le=1.0)
    """GPUs of each engine worker; workers with a fraction share a GPU."""
    cpus_per_worker: float = Field(1.0, ge=0.0)
    """Ray CPUs in the bundle of each engine worker."""
    cpus_per_replica: float = Field(1.0, ge=0.0)
    """Ray CPUs of the Serve replica itself, for front end and tokeniser, beside those of the first worker."""
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    """How Ray spreads the bundles of one replica over nodes; STRICT_PACK puts all on one node."""
    node_labels: Selector = Field(default_factory=dict)
    """Ray label selector of each bundle, such as {tandem.io/s1: switch-a}. Values may be 'v', '!v', 'in(a,b)' or
    '!in(a,b)'."""


class EmulatorConfig(StrictConfig):
    """An emulated engine, which waits for as long as a real engine would compute."""

    profile: Path
    """Path of an EngineProfile, such as configs/profiles/h100_llama70b_fp8_tp1.json."""
    start_s: float | None = Field(None, ge=0.0)
    """Time from a replica's start until it is ready, seconds, without the time of imports. Left out, the profile's."""
    time_factor: float = Field(1.0, gt=0.0, le=1000.0)
    """Seconds of the emulated engine that pass in one real second."""
    max_running: int | None = Field(None, ge=1)
    """Most requests in a batch. Left out, the profile's."""
    chunk_s: float = Field(0.1, ge=0.0)
    """The tokens of this time, seconds, are sent as one chunk."""


class EngineSleepConfig(StrictConfig):
    """vLLM's sleep mode: an idle engine keeps its process and frees its GPU's memory; the next request wakes it."""

    after_s: float = Field(300.0, ge=1.0)
    """Time without a request after which the engine sleeps, seconds."""
    level: Literal[1, 2] = 1
    """1: the weights move to the node's memory. 2: they are dropped, and read again from the model's files."""


class RoleConfig(StrictConfig):
    """One pool: the replicas of one role in one group."""

    replicas: int = Field(1, ge=0, le=1024)
    """Number of replicas; each is one engine. With autoscale it is the number at the start, and the lowest. With 0 for
    both roles the group sleeps until a request comes."""
    max_replicas: int | None = Field(None, ge=1, le=1024)
    """Highest number of replicas; required with autoscale, and refused without it."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Tensor-parallel workers of each engine."""
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    """Pipeline stages of each engine; prefill must have 1."""
    attention_ffn: AttentionFfn | None = None
    """Attention and FFN instances of each prefill replica, such as "1:3" in quotes. Each instance has the workers and
    GPUs of tensor_parallel_size and placement, and the profile is that of a whole replica. All instances of a replica
    are placed below one S1 switch, or none is. Only for emulated engines: vLLM does not split attention and FFN."""
    placement: PlacementConfig = PlacementConfig()
    emulator: EmulatorConfig | None = None
    """Emulated engine, which waits instead of computing. Left out, vLLM runs."""
    engine_kwargs: EngineKwargs = Field(default_factory=dict)
    """vLLM engine arguments of this role, by name; they override those of the service."""
    profile: Path | None = None
    """Path of the EngineProfile of this pool's engine, from `tandem profile`. With it, a replica counts in autoscaling
    as what it serves beside a replica of the first group. Left out, it is the profile of an emulated engine."""
    capacity: float | None = Field(None, gt=0.0, le=1000.0)
    """Replicas of the first group that one replica of this pool is worth; not for pools of that group itself. Left out,
    it follows from the profiles. Without any profile, all engines count as equally fast."""
    cores_per_worker: int = Field(1, ge=1)
    """Number of CPU cores to which each worker of an engine on CPU is bound: the least claimed cores of its node."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the replicas and their engines."""
    graceful_shutdown_timeout_s: float = Field(600.0, gt=0.0)
    """Time, seconds, that a stopping replica has to finish its requests. Serve's own default of 20 s would cut long
    answers off."""
    max_surge_frac: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the pool's replicas that start before old ones stop when the configuration changes. With more than 0 at
    least one starts, and needs free room. With 0 old replicas stop first, a fifth of them and at least one at a time: a
    pool of one answers nothing until its new replica is ready."""
    engine_silence_s: float = Field(15.0, gt=0.0, le=3600.0)
    """Time, seconds, without any answer after which an engine counts as hanging and its replica ends. An engine answers
    between two steps, so the time must be longer than the longest step."""
    engine_sleep: EngineSleepConfig | None = None
    """When idle engines sleep. Ray keeps a sleeping engine's GPUs reserved, so this helps pools whose workers share a
    GPU (`gpus_per_worker` below 1). Left out, engines never sleep."""
    max_ongoing_requests: int = Field(1000, ge=1)
    """Most requests that Serve sends to one replica at a time; the engine itself queues and batches them."""

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        if self.engine_sleep is not None and self.emulator is not None:
            raise ValueError("engine_sleep is given for an emulated engine, which has no memory to free: leave it out")
        return self

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if self.attention_ffn is not None and self.emulator is None:
            raise ValueError(
                f'attention_ffn is "{self.attention_ffn}", and vLLM does not split attention and FFN: leave it out, or '
                "give an emulator"
            )
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas ({self.max_replicas}) is less than replicas ({self.replicas}): raise the first or lower "
                "the second"
            )
        return self

    @property
    def profile_path(self) -> Path | None:
        """Path of the profile of the pool's engine; ``None``: it is not known how fast the engine is."""
        return self.profile or (None if self.emulator is None else self.emulator.profile)

    @property
    def speed(self) -> float:
        """Speed of the pool's engine as a multiple of that of its profile: an emulated one may be faster or slower."""
        return 1.0 if self.profile is not None or self.emulator is None else self.emulator.time_factor

    @property
    def workers(self) -> int:
        """Engine workers per replica: tensor x pipeline parallel, of all its instances."""
        return self._instance_workers * (1 if self.attention_ffn is None else self.attention_ffn.instances)

    @property
    def _instance_workers(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def gpus_per_replica(self) -> float:
        """GPUs per replica; 0 on CPU."""
        return self.workers * self.placement.gpus_per_worker if self.placement.accelerator_type else 0

    @property
    def demand(self) -> Demand:
        """Resources of one replica."""
        placement = self.placement
        whole = Demand(
            selector=placement.node_labels,
            gpu_type=placement.accelerator_type,
            workers=self.workers,
            gpus_per_worker=placement.gpus_per_worker if placement.accelerator_type else 0.0,
            cpus_per_worker=placement.cpus_per_worker,
            cpus_per_replica=placement.cpus_per_replica,
            strategy=placement.strategy,
        )
        if self.attention_ffn is None or placement.strategy == "STRICT_PACK":
            return whole  # on one node, all instances are below one S1 switch
        instance = replace(whole, workers=self._instance_workers)
        return self.attention_ffn.demand(instance, instance)


class GroupConfig(StrictConfig):
    """A deployment group (HeteroScale section 3.4): a prefill and a decode pool between which KV moves.

    Without prefill it is one aggregated pool, whose decode replicas compute prompts too.
    """

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")
    """Name of the group: lower-case letters, digits and dashes."""
    node_labels: Selector = Field(default_factory=dict)
    """Label selector for the nodes of both roles, such as {tandem.io/s1: switch-a}: the network domain of the group. A
    role's own selector overrides it."""
    affinity: Affinity = Field(LinkTier.NONE, validate_default=True)
    """Lowest network level that all nodes of the group must share: s0, s1, s2, cluster, data_centre or none."""
    is_preemptible: bool = False
    """Whether replicas of this group stop first when a more important service lacks room. If true, replicas must be
    0."""
    prefill: RoleConfig | None = RoleConfig()
    """Prefill pool. With null, decode replicas compute prompts too."""
    decode: RoleConfig = RoleConfig()

    @model_validator(mode="before")
    @classmethod
    def _add_labels_to_roles(cls, value: Any) -> Any:
        """Give both roles the group's labels; a role's own labels override them."""
        if not isinstance(value, dict) or not isinstance(value.get("node_labels"), dict):
            return value
        completed = dict(value)
        for role in Role:
            pool = value.get(role, {})
            placement = pool.get("placement", {}) if isinstance(pool, dict) else None
            if isinstance(placement, dict) and isinstance(labels := placement.get("node_labels", {}), dict):
                labels = {**value["node_labels"], **labels}
                completed[role] = {**pool, "placement": {**placement, "node_labels": labels}}
        return completed

    @model_validator(mode="after")
    def _check_both_sleep(self) -> Self:
        prefill = self.prefill
        if prefill is not None and bool(prefill.replicas) != bool(self.decode.replicas):
            raise ValueError(
                f"group {self.name!r}: prefill has {prefill.replicas} replicas and decode {self.decode.replicas}: "
                "set both to 0, and the group sleeps, or both to 1 or more"
            )
        return self

    @model_validator(mode="after")
    def _check_sleeping_gpus(self) -> Self:
        for key, pool in self.pools().items():
            if self.prefill is not None and pool.engine_sleep is not None and pool.gpus_per_replica:
                raise ValueError(
                    f"group {self.name!r}: engine_sleep is given for {key.role} on GPUs, and vLLM's sleep mode unmaps "
                    "the memory from which NIXL hands KV over: leave engine_sleep out, or set prefill to null"
                )
        return self

    @model_validator(mode="after")
    def _check_preemptible(self) -> Self:
        if self.is_preemptible and self.decode.replicas:
            and_prefill = "" if self.prefill is None else f"{self.prefill.replicas} prefill and "
            raise ValueError(
                f"group {self.name!r} is_preemptible and must keep {and_prefill}{self.decode.replicas} decode "
                "replicas: set replicas to 0, or is_preemptible to false"
            )
        return self

    @model_validator(mode="after")
    def _check_decode_is_whole(self) -> Self:
        if self.decode.attention_ffn is not None:
            raise ValueError(
                f'group {self.name!r}: decode.attention_ffn is "{self.decode.attention_ffn}", and only prefill '
                "replicas have attention and FFN instances: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_prefill_stages(self) -> Self:
        if self.prefill is not None and self.prefill.pipeline_parallel_size > 1:
            raise ValueError(
                f"group {self.name!r}: prefill.pipeline_parallel_size is {self.prefill.pipeline_parallel_size}, and "
                "the NIXL connector in pull mode takes no pipeline-parallel prefill: use tensor_parallel_size instead"
            )
        return self

    @property
    def prompt_pool(self) -> RoleConfig:
        """The pool that computes prompts: prefill, or decode if the group has no prefill."""
        return self.prefill or self.decode

    @property
    def prompt_pool_key(self) -> PoolKey:
        """Key of the pool that computes prompts."""
        return PoolKey(self.name, Role.DECODE if self.prefill is None else Role.PREFILL)

    def pools(self) -> dict[PoolKey, RoleConfig]:
        """The pools of the group by key, prefill first."""
        prefill = {} if self.prefill is None else {PoolKey(self.name, Role.PREFILL): self.prefill}
        return {**prefill, PoolKey(self.name, Role.DECODE): self.decode}
