"""AppConfig: everything a user may say about one Tandem application, checked before anything starts."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from autoscale.config import AutoscaleConfig
from autoscale.documents import load_mapping
from autoscale.tuning import PoolLimits, Pools, check_fits
from autoscale.types import PoolKey
from deployments.config import GroupConfig, IngressConfig, ModelConfig, RoleConfig, check_engine_kwargs
from kvtransfer.connector import LEASES, ConnectorConfig
from kvtransfer.topology import DEFAULT_LABELS, TopologyConfig, TopologyLabels, link_tier, named_tier
from router.admission import ObjectivesConfig
from router.config import RouterConfig

# What floating point adds to parts of GPUs.
_EPSILON = 1e-6


class ServiceConfig(BaseModel):
    """One model: its engines, the groups that they are in, and how it is sized and routed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: ModelConfig
    engine_kwargs: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments of both roles.")
    groups: tuple[GroupConfig, ...] = Field(min_length=1)
    router: RouterConfig = RouterConfig()
    admission: ObjectivesConfig | None = Field(
        None, description="The model's own objectives instead of those of ingress.admission; {} are none."
    )
    autoscale: AutoscaleConfig | None = Field(
        None, description="How both roles are sized together; left out, they stay."
    )

    @field_validator("engine_kwargs")
    @classmethod
    def _reject_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_engine_kwargs(value)

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

    def roles(self) -> dict[PoolKey, RoleConfig]:
        """Every pool by its key."""
        return {key: pool for group in self.groups for key, pool in group.pools().items()}

    def pools(self, topology: TopologyConfig | None = None) -> Pools:
        """What each pool was deployed with, for the autoscaler."""
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
            link_tier=link_tier(
                group.computes_prompts.placement.node_labels, group.decode.placement.node_labels, labels
            ),
            # An emulated engine takes none, and counts in a budget like those that it stands for.
            gpus_per_replica=pool.gpus_per_replica or (pool.workers if pool.emulator is not None else 0),
            demand=pool.demand,
            cost=pool.gpus_per_replica * costs.get(kind or "", 0.0),
            preference=types.index(kind) if kind in types else 0,
            affinity=group.affinity,
            is_preemptible=group.is_preemptible,
        )


_OF_ONE_SERVICE = tuple(ServiceConfig.model_fields)


class AppConfig(BaseModel):
    """The ``args`` of an application in Serve's YAML: one service, or ``services`` that share a cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    services: tuple[ServiceConfig, ...] = Field(
        min_length=1, description="Each with what stands beside `model` where there is one."
    )
    kv_transfer: ConnectorConfig = ConnectorConfig()
    ingress: IngressConfig = IngressConfig()
    topology: TopologyConfig | None = Field(
        None,
        description="Given, replicas are asked for where nodes have room for them. Left out, they are asked for, and "
        "wait for room: as where Ray adds nodes.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_service(cls, value: Any) -> Any:
        """An application of one service says no ``services``."""
        if not isinstance(value, dict):
            return value
        own = {name: value[name] for name in _OF_ONE_SERVICE if name in value}
        if "services" in value:
            if own:
                raise ValueError(
                    f"services and {next(iter(own))} are given: {next(iter(own))} is of a service, so put it into one"
                )
            return value
        return {**{name: given for name, given in value.items() if name not in own}, "services": [own]}

    @field_validator("topology", mode="before")
    @classmethod
    def _read_inventory(cls, value: Any) -> Any:
        """An inventory may be a file."""
        if not isinstance(value, dict) or not isinstance(value.get("inventory"), str):
            return value
        path = Path(value["inventory"])
        if not path.is_absolute():
            raise ValueError(
                f"inventory {path} is relative, and the application is built elsewhere: give the whole path"
            )
        hosts = load_mapping(path, "host names, and of each what it is under")
        return {**value, "inventory": hosts}

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for what, names in (
            ("groups: the name", [group.name for group in self.groups]),
            ("services: the model", [service.model.id for service in self.services]),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"{what} {twice[0]!r} is used twice; each needs its own")
        return self

    @model_validator(mode="after")
    def _check_leases(self) -> Self:
        for group in (group for group in self.groups if group.prefill is not None):
            silence_s, lease_s = group.decode.engine_silence_s, self.kv_transfer.lease_s
            if silence_s >= lease_s:
                raise ValueError(
                    f"group {group.name!r}: decode.engine_silence_s ({silence_s:g}) must be less than "
                    f"kv_transfer.lease_s ({lease_s}): an engine that stands still for longer pulls KV that prefill no "
                    "longer keeps"
                )
        return self

    @model_validator(mode="after")
    def _check_ends(self) -> Self:
        for group in self.groups:
            request_s, decode_s = self.ingress.request_timeout_s, group.decode.graceful_shutdown_timeout_s
            if request_s > decode_s:
                raise ValueError(
                    f"group {group.name!r}: ingress.request_timeout_s ({request_s:g}) is more than "
                    f"decode.graceful_shutdown_timeout_s ({decode_s:g}): a replica that is to go would end in the "
                    "middle of what it may finish; raise the second"
                )
            if group.prefill is None:
                continue
            kept_s, prefill_s = LEASES * self.kv_transfer.lease_s, group.prefill.graceful_shutdown_timeout_s
            if kept_s > prefill_s:
                raise ValueError(
                    f"group {group.name!r}: prefill.graceful_shutdown_timeout_s ({prefill_s:g}) is less than "
                    f"{LEASES:g} x kv_transfer.lease_s ({kept_s:g}): a replica that is to go would end before decode "
                    "has read what it computed; raise the first or lower the second"
                )
        return self

    @model_validator(mode="after")
    def _check_affinity(self) -> Self:
        for group in self.groups:
            labels = self.labels
            tier = named_tier(group.computes_prompts.placement.node_labels, group.decode.placement.node_labels, labels)
            if tier > group.affinity:
                raise ValueError(
                    f"group {group.name!r}: affinity is {group.affinity.name.lower()}, and its node_labels pin both "
                    f"roles to no one switch of that level or below: give it {labels.of(group.affinity)}"
                )
        return self

    @model_validator(mode="after")
    def _check_autoscale(self) -> Self:
        sized = [service for service in self.services if service.autoscale is not None]
        if sized and len(sized) < len(self.services):
            missing = next(service.model.id for service in self.services if service.autoscale is None)
            raise ValueError(
                f"services: {missing!r} has no autoscale and others have: one policy sizes all, so give it one (kind "
                "static keeps its counts)"
            )
        if self.topology is not None and not sized:
            raise ValueError("topology does nothing without autoscale: add it, or leave topology out")
        for service in sized:
            assert service.autoscale is not None
            check_fits(service.autoscale, service.pools(self.topology))
        self._check_types()
        self._check_budget()
        return self

    def _check_types(self) -> None:
        """A GPU type that is misspelt would have no limit, or cost nothing and so grow first."""
        types = {
            kind
            for service in self.services
            for pool in service.roles().values()
            for kind in pool.demand.gpus_by_type()
        }
        limits: dict[str, Mapping[str, Any]] = {}
        if self.topology is not None:
            limits["topology.budget_gpus"] = self.topology.budget_gpus
        for service in self.services:
            if service.autoscale is not None:
                limits[f"autoscale.quota_gpus of {service.model.id}"] = service.autoscale.quota_gpus
        for name, limit in limits.items():
            unknown = sorted(limit.keys() - types)
            if unknown:
                has = ", ".join(sorted(types)) or "none"
                raise ValueError(f"{name} has GPUs of type {unknown[0]}, and no group has any (they have {has})")
        costs = {} if self.topology is None else self.topology.cost_per_gpu_hour
        without = sorted(types - costs.keys())
        if costs and without:
            raise ValueError(
                f"topology.cost_per_gpu_hour has no {without[0]}, which would seem to cost nothing: give every type "
                "that groups have"
            )

    def _check_budget(self) -> None:
        """The lowest counts of all services must fit, and those of each its quota; so must one unit of somebody."""
        budget = {} if self.topology is None else self.topology.budget_gpus
        _check_limit("topology.budget_gpus", budget, [pool for of in self.services for pool in of.roles().values()])
        for service in self.services:
            if service.autoscale is None:
                continue
            name = f"autoscale.quota_gpus of {service.model.id}"
            _check_limit(name, service.autoscale.quota_gpus, service.roles().values())
            if service.autoscale.idle_to_zero_s is not None:
                stays = [str(key) for key, pool in service.roles().items() if pool.replicas]
                if stays:
                    raise ValueError(
                        f"autoscale.idle_to_zero_s of {service.model.id} does nothing while {stays[0]} keeps replicas: "
                        "give every group 0 of them, or leave it out"
                    )

    @property
    def labels(self) -> TopologyLabels:
        """Which node labels say what."""
        return DEFAULT_LABELS if self.topology is None else self.topology.labels

    @property
    def groups(self) -> tuple[GroupConfig, ...]:
        """Of all services."""
        return tuple(group for service in self.services for group in service.groups)

    @property
    def model(self) -> ModelConfig:
        """The first service's."""
        return self.services[0].model

    @property
    def is_autoscaled(self) -> bool:
        """Whether a policy sizes the services."""
        return self.services[0].autoscale is not None

    def pools(self) -> dict[str, Pools]:
        """What each pool was deployed with, by service."""
        return {service.model.id: service.pools(self.topology) for service in self.services}


def _check_limit(name: str, limit: Mapping[str, float], pools: Iterable[RoleConfig]) -> None:
    """Whether a limit of GPUs by type holds what these pools keep, and one replica of each kind that they have."""
    least: dict[str, float] = {}
    smallest: dict[str, float] = {}
    for pool in pools:
        for kind, gpus in pool.demand.gpus_by_type().items():
            least[kind] = least.get(kind, 0.0) + pool.replicas * gpus
            smallest[kind] = min(smallest.get(kind, gpus), gpus)
    for kind, gpus in limit.items():
        if least.get(kind, 0.0) > gpus + _EPSILON:
            raise ValueError(
                f"{name}: {gpus:g} GPUs of type {kind} are less than the {least[kind]:g} that the lowest counts of all "
                "groups take: raise it, or lower replicas"
            )
        if smallest.get(kind, 0.0) > gpus + _EPSILON and gpus:  # none at all switches a type off
            raise ValueError(
                f"{name}: {gpus:g} GPUs of type {kind} hold no replica, which takes {smallest[kind]:g}: raise it, or "
                "leave the groups of that type out"
            )
