"""One service as a user configures it: its model, engines, groups, routing and sizing (pure; no ray, no vllm)."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.tuning import Pools
from autoscale.topology_config import TopologyConfig
from autoscale.types import PoolKey, PoolLimits
from deployments.pool_config import EngineKwargs, GroupConfig, RoleConfig
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
    """Folder on each node's own disk, as a whole path, for a copy of the source's files. The first replica on a node or
    `tandem stage` copies them once. Only for a source that is a folder: files of a hub are in its own cache. Left out,
    engines read the source itself."""

    @model_validator(mode="after")
    def _check_stage(self) -> Self:
        if self.stage_folder is None:
            return self
        if self.folder is None:
            raise ValueError(f"stage_folder copies folders, and source is the hub id {self.source!r}: leave it out")
        if not self.stage_folder.is_absolute():
            raise ValueError(
                f"stage_folder {self.stage_folder} is relative, and replicas start in another folder: "
                "give the whole path"
            )
        return self

    @property
    def folder(self) -> Path | None:
        """The model's folder; ``None``: ``source`` is a hub id."""
        if not self.source.startswith(("/", "./", "../", "~")):
            return None
        try:
            return Path(self.source).expanduser().resolve()
        except RuntimeError:  # no such user
            return Path(self.source)


class ServiceConfig(StrictConfig):
    """One model: its engines, the groups that they are in, and how it is sized and routed."""

    model: ModelConfig
    engine_kwargs: EngineKwargs = Field(default_factory=dict)
    """vLLM engine arguments of both roles, by name."""
    groups: tuple[GroupConfig, ...] = Field(min_length=1)
    """Deployment groups of the model, each with its prefill and decode pool."""
    router: RouterConfig = RouterConfig()
    admission: ObjectivesConfig | None = None
    """Objectives of this model alone; they replace all objectives of ingress.admission. {}: the model has none. Left
    out, those of ingress.admission hold."""
    autoscale: AutoscaleConfig | None = None
    """How prefill and decode are sized together. Left out, the counts of replicas stay as they are."""

    @model_validator(mode="after")
    def _check_aggregated(self) -> Self:
        without = [group.name for group in self.groups if group.prefill is None]
        others = [group.name for group in self.groups if group.prefill is not None]
        if without and others:
            raise ValueError(
                f"group {without[0]!r} has no prefill and {others[0]!r} has: one policy sizes both by one ratio, so "
                "make them two services"
            )
        if self.autoscale is not None and self.autoscale.pd_ratio.is_aggregated != bool(without):
            has = f"{without[0]!r} has no prefill" if without else f"{others[0]!r} has prefill"
            raise ValueError(
                f"autoscale.pd_ratio is {self.autoscale.pd_ratio}, and group {has}: 0:1 is the ratio of groups with "
                "prefill: null, and of no others; in quotes"
            )
        return self

    @model_validator(mode="after")
    def _check_autoscale(self) -> Self:
        pools = self.roles()
        if self.autoscale is None:
            bounded = [str(key) for key, pool in pools.items() if pool.max_replicas is not None]
            if bounded:
                raise ValueError(
                    f"max_replicas of {bounded[0]} does nothing without autoscale: add it, or use replicas"
                )
            asleep = [str(key) for key, pool in pools.items() if not pool.replicas]
            if asleep:
                raise ValueError(
                    f"{asleep[0]} has 0 replicas, and without autoscale nothing wakes it: add it, or give 1"
                )
            return self
        unbounded = [str(key) for key, pool in pools.items() if pool.max_replicas is None]
        if unbounded:
            raise ValueError(f"autoscale needs max_replicas of every role: {unbounded[0]} has none")
        for key, pool in pools.items():
            types, has = self.autoscale.gpu_types.get(key.role), pool.placement.accelerator_type
            if types is not None and has not in types:
                raise ValueError(
                    f"autoscale.gpu_types takes {', '.join(types)} for {key.role}, and {key} has {has}: add it to the "
                    "types, or leave the group out"
                )
        return self

    def admission_in(self, endpoint: AdmissionConfig) -> AdmissionConfig:
        """The endpoint's bounds with the objectives of this service."""
        slo = {} if self.autoscale is None else self.autoscale.slo.model_dump(exclude={"quantile_frac"})
        return endpoint.of_service(self.admission, slo)

    @property
    def max_model_len(self) -> int | None:
        """The context that every group has, tokens; ``None``: the model's own."""
        lengths = [{**self.engine_kwargs, **group.decode.engine_kwargs}.get("max_model_len") for group in self.groups]
        limits = [length for length in lengths if isinstance(length, int)]
        return min(limits) if len(limits) == len(lengths) else None

    @property
    def prefill_replicas(self) -> int:
        """Replicas that compute prompts, as deployed, in all groups."""
        return sum(group.computes_prompts.replicas for group in self.groups)

    def roles(self) -> dict[PoolKey, RoleConfig]:
        """Every pool by its key."""
        return {key: pool for group in self.groups for key, pool in group.pools().items()}

    def pools(self, topology: TopologyConfig | None = None) -> Pools:
        """Limits of each pool, for the autoscaler."""
        return Pools(
            {
                key: self._limits(group, key, pool, topology)
                for group in self.groups
                for key, pool in group.pools().items()
            }
        )

    def _limits(
        self, group: GroupConfig, key: PoolKey, pool: RoleConfig, topology: TopologyConfig | None
    ) -> PoolLimits:
        labels = DEFAULT_LABELS if topology is None else topology.labels
        costs = {} if topology is None else topology.cost_per_gpu_hour
        kind = pool.placement.accelerator_type
        types = () if self.autoscale is None else self.autoscale.gpu_types.get(key.role, ())
        return PoolLimits(
            lowest_replicas=pool.replicas,
            highest_replicas=pool.max_replicas or pool.replicas,
            link_tier=labels.link_tier(
                group.computes_prompts.placement.node_labels, group.decode.placement.node_labels
            ),
            # An emulated engine takes none, and counts in a budget like those that it stands for.
            gpus_per_replica=pool.gpus_per_replica or (pool.workers if pool.emulator is not None else 0),
            demand=pool.demand,
            cost=pool.gpus_per_replica * costs.get(kind or "", 0.0),
            preference=types.index(kind) if kind in types else 0,
            affinity=group.affinity,
            is_preemptible=group.is_preemptible,
        )
