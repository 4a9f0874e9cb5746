"""What a user says about a model, its engines and where they run (pure; no ray, no vllm)."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from autoscale.slots import Demand
from autoscale.types import PoolKey
from kvtransfer.selectors import values
from kvtransfer.topology import Affinity, LinkTier, Role
from router.admission import AdmissionConfig
from router.rate_limit import KeyLimits

# Set from other fields, or fixed by the design; in engine_kwargs they would contradict them.
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

# Where LLMConfig carries an EmulatorConfig; it has no field of its own for it.
EMULATOR_KEY = "tandem_emulator"
# And where it carries ModelConfig.stage_folder.
STAGE_KEY = "tandem_stage_folder"


def _checked(selector: str) -> str:
    values(selector)
    return selector


# Node labels, and what of each is wanted, in Ray's words.
Selector = dict[str, Annotated[str, AfterValidator(_checked)]]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(_Config):
    """The one model that an application serves."""

    id: str = Field(min_length=1, description="The name that clients ask for.")
    source: str = Field(
        min_length=1,
        description="A folder (starting with '/', './', '../' or '~') with config.json, weights and tokenizer, "
        "or a hub id.",
    )

    stage_folder: Path | None = Field(
        None,
        description="A folder on each node's own disk, into which the source's files are copied once, by the first "
        "replica there or by `tandem stage`; the whole path. Only of a source that is a folder: a hub's files are in "
        "its own cache.",
    )

    @model_validator(mode="after")
    def _check_stage(self) -> Self:
        if self.stage_folder is None:
            return self
        if self.folder is None:
            raise ValueError(f"stage_folder copies folders, and source is the hub id {self.source!r}: leave it out")
        if not self.stage_folder.is_absolute():
            raise ValueError(
                f"stage_folder {self.stage_folder} is relative, and replicas start elsewhere: give the whole path"
            )
        return self

    @property
    def folder(self) -> Path | None:
        """The model's folder, or ``None`` where ``source`` is a hub id."""
        if not self.source.startswith(("/", "./", "../", "~")):
            return None
        try:
            return Path(self.source).expanduser().resolve()
        except RuntimeError:  # no such user
            return Path(self.source)


class PlacementConfig(_Config):
    """Where one replica's engine workers run; becomes Serve placement-group bundles and their label selectors."""

    accelerator_type: str | None = Field(
        None, description="GPU type as Ray names it (H100, A100-80G, ...). None runs the engine on CPU cores."
    )
    gpus_per_worker: float = Field(
        1.0, gt=0.0, le=1.0, description="GPU of each engine worker; a part of one may be shared with others."
    )
    cpus_per_worker: float = Field(1.0, ge=0.0, description="Ray CPUs in the bundle of each engine worker.")
    cpus_per_replica: float = Field(
        1.0,
        ge=0.0,
        description="Ray CPUs of the Serve replica itself (front end, tokeniser), added to the first bundle.",
    )
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "STRICT_PACK", description="How the bundles of one replica spread over nodes; STRICT_PACK keeps them on one."
    )
    node_labels: Selector = Field(
        default_factory=dict,
        description="Ray label selector that each bundle demands, such as {tandem.io/s1: switch-a}. "
        "Values may be 'v', '!v', 'in(a,b)' or '!in(a,b)'.",
    )


class EmulatorConfig(_Config):
    """Which engine is emulated."""

    profile: Path = Field(description="An EngineProfile, such as configs/profiles/h100_llama70b_fp8_tp1.json.")
    start_s: float | None = Field(None, ge=0.0, description="From asked for to ready, beyond imports; the profile's.")
    time_factor: float = Field(1.0, gt=0.0, le=1000.0, description="How many seconds of the engine pass in one here.")
    max_running: int | None = Field(None, ge=1, description="Requests in the batch at one time; the profile's.")
    chunk_s: float = Field(0.1, ge=0.0, description="Tokens that come within this time are sent as one chunk.")


class RoleConfig(_Config):
    """One pool: the replicas of one role in one group."""

    replicas: int = Field(
        1,
        ge=0,
        le=1024,
        description="Replicas, each one engine; with autoscale the count at start and the lowest. With 0 of both roles "
        "the group sleeps until there is need for it.",
    )
    max_replicas: int | None = Field(None, ge=1, le=1024, description="With autoscale: the most there may be.")
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    placement: PlacementConfig = PlacementConfig()
    emulator: EmulatorConfig | None = Field(None, description="Keep an engine's time instead of running it.")
    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="vLLM engine arguments of this role; they win over the application's."
    )
    cores_per_worker: int = Field(
        1, ge=1, description="On CPU: cores that each engine worker is bound to, the least claimed on its node."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the replicas and engines.")
    graceful_shutdown_timeout_s: float = Field(
        600.0,
        gt=0.0,
        description="How long a stopping replica may finish what it has in flight (Serve's default is 20).",
    )
    max_surge_frac: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="When the configuration changes, old replicas stop first, a fifth of them at a time and at least "
        "one, so a pool of one answers nobody until its new one is there. More than 0: so many of them, at least one, "
        "start first; they wait for room.",
    )
    engine_silence_s: float = Field(
        15.0,
        gt=0.0,
        le=3600.0,
        description="An engine that answers nothing for so long hangs, and its replica ends; it answers between two "
        "steps. Choose more than the longest step.",
    )
    max_ongoing_requests: int = Field(
        1000, ge=1, description="Requests that Serve sends one replica at a time; the engine queues and batches them."
    )

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
        """What one replica takes of a node."""
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

    @field_validator("engine_kwargs")
    @classmethod
    def _reject_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_engine_kwargs(value)


class GroupConfig(_Config):
    """A deployment group (HeteroScale section 3.4): prefill and decode between which KV moves, of one variant.

    Without prefill it is one aggregated pool, whose decode replicas prefill for themselves.
    """

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$", description="Lower case, digits, dashes.")
    node_labels: Selector = Field(
        default_factory=dict,
        description="What the nodes of both roles must have, such as {tandem.io/s1: switch-a}: a group's domain.",
    )
    affinity: Affinity = Field(
        LinkTier.NONE,
        validate_default=True,
        description="What all nodes of the group must be under together: s0, s1, s2, cluster, data_centre or none.",
    )
    is_preemptible: bool = Field(
        False,
        description="Its replicas go first where more important services lack room, so it has none that must stay.",
    )
    prefill: RoleConfig | None = Field(
        RoleConfig(), description="null: decode replicas compute prompts too, in every group of the service."
    )
    decode: RoleConfig = RoleConfig()

    @model_validator(mode="before")
    @classmethod
    def _hand_labels_down(cls, value: Any) -> Any:
        """Both roles get the group's labels; their own win."""
        if not isinstance(value, dict) or not isinstance(value.get("node_labels"), dict):
            return value
        handed = dict(value)
        for role in Role:
            if role in value and value[role] is None:
                continue
            pool = dict(value.get(role) or {})
            placement = dict(pool.get("placement") or {})
            placement["node_labels"] = {**value["node_labels"], **(placement.get("node_labels") or {})}
            handed[role] = {**pool, "placement": placement}
        return handed

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        prefill = self.prefill
        if prefill is not None and bool(prefill.replicas) != bool(self.decode.replicas):
            raise ValueError(
                f"group {self.name!r}: prefill has {prefill.replicas} replicas and decode {self.decode.replicas}: "
                "a group sleeps with 0 of both, or has at least one of each"
            )
        if self.is_preemptible and self.decode.replicas:
            of_prefill = "" if prefill is None else f"{prefill.replicas} prefill and "
            raise ValueError(
                f"group {self.name!r} is_preemptible and must keep {of_prefill}{self.decode.replicas} decode "
                "replicas: give it 0, or another group what must stay"
            )
        return self

    @model_validator(mode="after")
    def _check_parallel(self) -> Self:
        if self.prefill is not None and self.prefill.pipeline_parallel_size > 1:
            raise ValueError(
                f"group {self.name!r}: prefill.pipeline_parallel_size is {self.prefill.pipeline_parallel_size}, and "
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


class IngressConfig(_Config):
    """The HTTP endpoint's replicas."""

    replicas: int = Field(2, ge=1, le=256, description="With one, nobody is answered while it is replaced.")
    cpus_per_replica: float = Field(1.0, ge=0.0)
    node_labels: Selector = Field(
        default_factory=dict, description="Ray label selector of the nodes that they run on, as of the roles."
    )
    request_timeout_s: float = Field(
        300.0,
        gt=0.0,
        le=86_400.0,
        description="A request that takes longer ends with an error. No more than graceful_shutdown_timeout_s of "
        "every decode role, which is how long a replica that is to go may finish.",
    )
    retries: int = Field(
        2,
        ge=0,
        le=10,
        description="How often a request whose decode replica was lost goes to another one. A stream goes on where it "
        "was; a request that ends every engine it meets ends no more than one and these.",
    )
    max_body_bytes: int = Field(32 << 20, ge=1024, description="A longer request body is refused (413).")
    max_bodies_bytes: int = Field(
        512 << 20,
        ge=1024,
        description="Memory of the bodies of all requests that a replica holds at a time, of which one API key gets "
        "half; who would be beyond is refused (429).",
    )
    body_timeout_s: float = Field(
        30.0, gt=0.0, le=86_400.0, description="A body that has not come as a whole by then is refused (408)."
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="A longer prompt is refused (400) before anything is computed; the model's context."
    )
    api_keys_file: Path | None = Field(
        None,
        description="Clients must send a key whose hash stands in this file (`tandem key` makes them); it is read on "
        "every node with an ingress replica, again when it changes. Left out, everybody may ask.",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="The address on which every node with an ingress replica serves the application's metrics. Nobody "
        "is asked for a key there: let only who collects them reach it.",
    )
    metrics_port: int = Field(
        9464, ge=1, le=65_535, description="Its port; another one for each application of a cluster."
    )
    metrics_on_public_port: bool = Field(
        False, description="Serve the metrics beside the API too, to whoever may ask there."
    )

    admission: AdmissionConfig = AdmissionConfig()

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        admission = self.admission
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes ({self.max_bodies_bytes}) is less than max_body_bytes ({self.max_body_bytes})"
            )
        if self.api_keys_file is None and (admission.keys or admission.key != KeyLimits()):
            raise ValueError("admission.key and admission.keys are limits of API keys: give api_keys_file too")
        return self

    @field_validator("api_keys_file")
    @classmethod
    def _check_keys(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        try:
            path = value.expanduser()
        except RuntimeError:
            raise ValueError(f"api_keys_file {value} is of a user who is unknown here: give the whole path") from None
        if not path.is_absolute():
            raise ValueError(f"api_keys_file {value} is relative, and replicas start elsewhere: give the whole path")
        return path


def check_engine_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse engine arguments that other fields set.

    Raises:
        ValueError: names the argument and the field to use instead.
    """
    for key in value:
        if key in _OWNED_ENGINE_KWARGS:
            field = _OWNED_ENGINE_KWARGS[key]
            use = f"set {field} instead" if field else "Tandem relies on its default; leave it out"
            raise ValueError(f"engine argument {key!r} is not yours to set here: {use}")
    return value
