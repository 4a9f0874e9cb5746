"""One service as a user configures it: its model, engines, groups, routing and sizing (pure; no ray, no vllm)."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.tuning import Pools
from autoscale.documents import first_fault
from autoscale.engines.variants import TypicalLengthsConfig, Worth
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.topology_config import TopologyConfig
from autoscale.types import PoolKey, PoolLimits
from deployments.adapters_config import AdapterConfig, check_names, check_pools, whole_path
from deployments.pool_config import EngineKwargs, GroupConfig, RoleConfig
from deployments.pooling_config import check_groups, check_policy, check_same_kind, is_pooling
from deployments.profile_match import check_parallelism, differences, policy_profiles
from deployments.variants import check_known, worths
from kvtransfer.labels import DEFAULT_LABELS
from kvtransfer.strict_config import StrictConfig
from router.admission_config import AdmissionConfig, ObjectivesConfig
from router.config import RouterConfig

# Key of LLMConfig.experimental_configs that carries ModelConfig.stage_folder; LLMConfig has no field for it.
STAGE_KEY = "tandem_stage_folder"


class ModelConfig(StrictConfig):
    """The model of a service."""

    id: str = Field(min_length=1)
    """Name of the model in clients' requests."""
    source: str = Field(min_length=1)
    """Folder with config.json, weights and tokenizer, which starts with '/', './', '../' or '~'; or the id of a model
    in a hub."""

    stage_folder: Path | None = None
    """Whole path of a folder on each node's own disk, for a copy of the source's files. The first replica on a node or
    `tandem stage` copies them once. Only for a source that is a folder: files of a hub are in its own cache. Left out,
    engines read the source itself."""

    adapters: tuple[AdapterConfig, ...] = ()
    """LoRA adapters that all replicas of both roles load at their start. Clients name one in the place of the
    model."""
    adapters_folder: Path | None = None
    """Whole path of the folder below which `POST /v1/load_lora_adapter` may load adapters, on every node with a replica
    of the model. Left out, none is loaded at run time."""

    @field_validator("adapters_folder")
    @classmethod
    def _check_adapters_folder(cls, value: Path | None) -> Path | None:
        return None if value is None else whole_path("adapters_folder", value)

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        check_names(self.id, self.adapters)
        return self

    @property
    def has_adapters(self) -> bool:
        """Whether its engines take adapters."""
        return bool(self.adapters) or self.adapters_folder is not None

    @model_validator(mode="after")
    def _check_stage_source(self) -> Self:
        if self.stage_folder is not None and self.folder is None:
            raise ValueError(
                f"stage_folder is for a source that is a folder, and source is the hub id {self.source!r}: "
                "leave stage_folder out, or set source to a folder"
            )
        return self

    @model_validator(mode="after")
    def _check_stage_path(self) -> Self:
        if self.stage_folder is not None and not self.stage_folder.is_absolute():
            raise ValueError(
                f"stage_folder {self.stage_folder} is relative, and replicas start in another folder: "
                "give the whole path"
            )
        return self

    @property
    def folder(self) -> Path | None:
        """The absolute path of the model's folder; ``None``: ``source`` is a hub id."""
        if not self.source.startswith(("/", "./", "../", "~")):
            return None
        try:
            return Path(self.source).expanduser().resolve()
        except RuntimeError:  # "~name", and this machine has no user of that name
            return Path(self.source)


class StartHostsConfig(StrictConfig):
    """Processes that wait on each node with everything imported, for the next replica of any service."""

    per_node: int = Field(0, ge=0, le=64)
    """Start hosts that wait on each node that could run a replica. Each takes about 1.5 GB of the node's memory, and no
    GPU. A replica that starts takes one. 0: none, and replicas import everything at their start."""


class LongPromptsConfig(StrictConfig):
    """Groups that only very long prompts go to, so that these prompts delay no others (DOPD section VII).

    Very long prompts are rare, so no forecast sees them. The groups have fixed counts, and the autoscaler does not see
    them: neither their requests nor their GPUs count in its sizes and budgets.
    """

    least_tokens: int = Field(ge=1)
    """Estimated tokens of a prompt from which it goes to these groups. The endpoint estimates them from the prompt's
    bytes, 4 for each token; it counts token ids exactly."""
    groups: tuple[GroupConfig, ...] = Field(min_length=1)
    """Deployment groups for these prompts. While none of them has a replica, the prompts go to the other groups."""
    admission: ObjectivesConfig = ObjectivesConfig()
    """Objectives of these prompts alone. With {} they have none, and none of them is refused for its wait."""

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        for key, pool in ((key, pool) for group in self.groups for key, pool in group.pools().items()):
            if pool.max_replicas is not None or not pool.replicas:
                raise ValueError(
                    f"{key} is for long prompts and has a fixed number of replicas: leave max_replicas out, and set "
                    "replicas to 1 or more"
                )
        return self


class ServiceConfig(StrictConfig):
    """One model: its engines, its groups, and how it is routed and sized."""

    model: ModelConfig
    engine_kwargs: EngineKwargs = Field(default_factory=dict)
    """Arguments of vLLM for both roles, by name and with vLLM's own values. docs/engine_arguments.md says which vLLM
    gets, and what to write instead of the others."""
    groups: tuple[GroupConfig, ...] = Field(min_length=1)
    """Deployment groups of the model. Replicas of the first group are the standard for the capacity of all others."""
    long_prompts: LongPromptsConfig | None = None
    """Groups of their own for very long prompts. Left out, all prompts go to the same groups."""
    typical_lengths: TypicalLengthsConfig = TypicalLengthsConfig()
    router: RouterConfig = RouterConfig()
    admission: ObjectivesConfig | None = None
    """Objectives of this model alone; they replace all objectives of ingress.admission. With {} the model has no
    objectives. Left out, those of ingress.admission hold."""
    autoscale: AutoscaleConfig | None = None
    """How prefill and decode are sized together. Left out, the numbers of replicas stay as they are."""

    @model_validator(mode="after")
    def _check_first_group(self) -> Self:
        first, with_prefill = self.groups[0], [group.name for group in self.groups if group.prefill is not None]
        if first.prefill is None and with_prefill:
            raise ValueError(
                f"group {first.name!r} comes first and has no prefill pool, and group {with_prefill[0]!r} has one: put "
                "a group with a prefill pool first, since its replicas are the standard for the others"
            )
        check_known(self.groups)
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.model.has_adapters:
            check_pools({key: pool for group in self.all_groups for key, pool in group.pools().items()})
        return self

    @model_validator(mode="after")
    def _check_pooling(self) -> Self:
        pools = {key: pool for group in self.all_groups for key, pool in group.pools().items()}
        check_same_kind({key: is_pooling(self.engine_kwargs_of(pool)) for key, pool in pools.items()})
        if not self.is_pooling:
            return self
        check_groups(self.all_groups)
        if self.autoscale is not None:
            check_policy(self.autoscale)
        if self.model.has_adapters:
            raise ValueError("engine_kwargs make it a pooling model, which takes no adapters here: leave adapters out")
        if self.router.follows_prefixes:
            raise ValueError(
                "router.policy is 'prefix', and engine_kwargs make it a pooling model, whose texts are not followed: "
                "choose the policy least_tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_long_prompts(self) -> Self:
        try:
            _ = self.long_service
        except ValidationError as error:
            raise ValueError(f"long_prompts: {first_fault(error)}") from None
        return self

    @model_validator(mode="after")
    def _check_pd_ratio(self) -> Self:
        group, ratio = self.groups[0], None if self.autoscale is None else self.autoscale.ratio
        if ratio is None or ratio.is_aggregated == (group.prefill is None):
            return self
        if group.prefill is None:
            raise ValueError(
                f"autoscale.pd_ratio is {ratio}, and group {group.name!r} has no prefill pool: set pd_ratio to "
                '"0:1", in quotes'
            )
        raise ValueError(
            f"autoscale.pd_ratio is {ratio}, and group {group.name!r} has a prefill pool: set pd_ratio to a ratio "
            'such as "1:3", in quotes, or set prefill of every group to null'
        )

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        for key, pool in self.role_configs().items():
            length = self._max_model_len_of(pool)
            if isinstance(length, bool):  # vLLM would read true as one token
                raise ValueError(
                    f"engine_kwargs of {key}: max_model_len is {length}: set a number of tokens, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _check_prefix_caching(self) -> Self:
        for key, pool in self.role_configs().items():
            kwargs = self.engine_kwargs_of(pool)
            if self.router.follows_prefixes and kwargs.get("enable_prefix_caching") is False:
                raise ValueError(
                    f"router.policy is 'prefix', and engine_kwargs of {key} set enable_prefix_caching to false: leave "
                    "enable_prefix_caching out, or choose the policy least_tokens"
                )
        return self

    @model_validator(mode="after")
    def _check_unused_max_replicas(self) -> Self:
        bounded = [key for key, pool in self.role_configs().items() if pool.max_replicas is not None]
        if self.autoscale is None and bounded:
            raise ValueError(
                f"max_replicas of {bounded[0]} does nothing without autoscale: add autoscale, or set replicas instead"
            )
        return self

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        asleep = [key for key, pool in self.role_configs().items() if not pool.replicas]
        if self.autoscale is None and asleep:
            raise ValueError(
                f"{asleep[0]} has 0 replicas, and without autoscale it never wakes: add autoscale, or set replicas "
                "to 1 or more"
            )
        return self

    @model_validator(mode="after")
    def _check_missing_max_replicas(self) -> Self:
        unbounded = [key for key, pool in self.role_configs().items() if pool.max_replicas is None]
        if self.autoscale is not None and unbounded:
            raise ValueError(
                f"autoscale needs max_replicas of every pool, and {unbounded[0]} has none: set its max_replicas, or "
                "leave autoscale out"
            )
        return self

    @model_validator(mode="after")
    def _check_gpu_types(self) -> Self:
        for key, pool in self.role_configs().items():
            types = None if self.autoscale is None else self.autoscale.gpu_types.get(key.role)
            gpu_type = pool.placement.accelerator_type
            if types is not None and gpu_type not in types:
                remedy = f"add {gpu_type} to them" if gpu_type else f"leave {key.role} out of gpu_types"
                raise ValueError(
                    f"autoscale.gpu_types allows {', '.join(types)} for {key.role}, and {key} has "
                    f"{gpu_type or 'no GPU'}: {remedy}, or set another accelerator_type"
                )
        return self

    @model_validator(mode="after")
    def _check_profiles(self) -> Self:
        for key, pool, profile in policy_profiles(self.autoscale, self.groups[0]):
            check_parallelism(key, pool, profile)
        return self

    def profile_differences(self) -> list[str]:
        """Sentences that say in what engines of the policy's profiles differ from those of the first group."""
        return [
            sentence
            for key, pool, profile in policy_profiles(self.autoscale, self.groups[0])
            for sentence in differences(key, pool, self.model.id, self.engine_kwargs, profile)
        ]

    @property
    def long_service(self) -> Self | None:
        """The service of very long prompts alone, which no policy sizes; ``None``: they have no groups of their own."""
        if (long := self.long_prompts) is None:
            return None
        kept = {name: getattr(self, name) for name in ("model", "engine_kwargs", "typical_lengths", "router")}
        return type(self)(**kept, groups=long.groups, admission=long.admission)

    @property
    def all_groups(self) -> tuple[GroupConfig, ...]:
        """The groups, and after them those of very long prompts."""
        return self.groups if self.long_prompts is None else (*self.groups, *self.long_prompts.groups)

    def admission_in(self, endpoint: AdmissionConfig) -> AdmissionConfig:
        """The endpoint's bounds with the objectives of this service."""
        slo = {} if self.autoscale is None else self.autoscale.slo.model_dump(exclude={"quantile_frac"})
        return endpoint.of_service(self.admission, slo)

    @property
    def max_model_len(self) -> int | None:
        """Lowest context that is set for the decode engines of a group, tokens; ``None``: none is set.

        Groups without a set context have the model's own. It is at least as long, since vLLM refuses to exceed it.
        """
        return min((tokens for tokens in self._contexts() if tokens is not None), default=None)

    @property
    def longest_context_tokens(self) -> int | None:
        """Longest context of a group's decode engines, tokens; ``None``: unknown, since a group has the model's own."""
        contexts = [tokens for tokens in self._contexts() if tokens is not None]
        return max(contexts) if len(contexts) == len(self.groups) else None

    def _contexts(self) -> list[int | None]:
        """Context that is set for the decode engines of each group, tokens; ``None``: vLLM takes the model's own."""
        lengths = [self._max_model_len_of(group.decode) for group in self.groups]
        # -1 is no length: vLLM then takes the model's own, and lowers it if its KV does not fit into the memory.
        return [length if isinstance(length, int) and length > 0 else None for length in lengths]

    def _max_model_len_of(self, pool: RoleConfig) -> Any:
        return self.engine_kwargs_of(pool).get("max_model_len")

    def engine_kwargs_of(self, pool: RoleConfig) -> dict[str, Any]:
        """Arguments of vLLM for the engines of a pool, as they are configured."""
        return {**self.engine_kwargs, **pool.engine_kwargs}

    @property
    def is_pooling(self) -> bool:
        """Whether engine arguments make its model a pooling model: it answers with vectors or scores."""
        return is_pooling(self.engine_kwargs_of(self.groups[0].decode))

    def role_configs(self) -> dict[PoolKey, RoleConfig]:
        """Configuration of every pool of the service, by its key."""
        return {key: pool for group in self.groups for key, pool in group.pools().items()}

    def worths(self) -> dict[PoolKey, Worth]:
        """How much a replica of each pool is worth, beside one of the first group; a ValueError as in ``worths``."""
        autoscale = self.autoscale
        slo, ratio = (SloConfig(), PdRatio(1, 1)) if autoscale is None else (autoscale.slo, autoscale.ratio)
        return worths(self.groups, ratio, self.typical_lengths, slo.tpot_s)

    def pool_limits(self, topology: TopologyConfig | None = None) -> Pools:
        """Limits of each pool, for the autoscaler."""
        worth = self.worths()
        return Pools(
            {
                key: self._limits_of(group, key, pool, worth[key], topology)
                for group in self.groups
                for key, pool in group.pools().items()
            }
        )

    def _limits_of(
        self, group: GroupConfig, key: PoolKey, pool: RoleConfig, worth: Worth, topology: TopologyConfig | None
    ) -> PoolLimits:
        labels = DEFAULT_LABELS if topology is None else topology.labels
        costs = {} if topology is None else topology.cost_per_gpu_hour
        gpu_type = pool.placement.accelerator_type
        types = () if self.autoscale is None else self.autoscale.gpu_types.get(key.role, ())
        return PoolLimits(
            lowest_replicas=pool.replicas,
            highest_replicas=pool.max_replicas or pool.replicas,
            link_tier=labels.link_tier(group.prompt_pool.placement.node_labels, group.decode.placement.node_labels),
            # In a budget, an emulated engine without GPUs counts with one for each worker, as a real engine would.
            gpus_per_replica=pool.gpus_per_replica or (pool.workers if pool.emulator is not None else 0),
            capacity=worth.own,
            prompt_capacity=worth.prompts,
            demand=pool.demand,
            cost=pool.gpus_per_replica * costs.get(gpu_type or "", 0.0),
            preference=types.index(gpu_type) if gpu_type in types else 0,
            affinity=group.affinity,
            is_preemptible=group.is_preemptible,
        )
