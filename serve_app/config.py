"""AppConfig: the whole configuration of one Tandem application, checked before anything starts."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from autoscale.decide.tuning import Pools, check_fits
from autoscale.documents import load_mapping
from autoscale.topology_config import TopologyConfig
from deployments.config import ModelConfig, ServiceConfig, StartHostsConfig
from deployments.endpoint.config import IngressConfig
from deployments.pool_config import GroupConfig, RoleConfig
from kvtransfer.connector import MAX_KV_KEEP_LEASES, ConnectorConfig
from kvtransfer.labels import DEFAULT_LABELS, TopologyLabels
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import LinkTier
from serve_app.node_types import node_types

# Largest rounding error of a sum of fractional GPUs, GPUs.
_EPSILON = 1e-6


def _whole_path(name: str, fields: Mapping[str, Any]) -> Path:
    """The path in a field; raises ValueError if it is relative."""
    path = Path(str(fields[name]))
    if not path.is_absolute():
        raise ValueError(f"{name} {path} is relative, and the application is built elsewhere: give the whole path")
    return path


class AppConfig(StrictConfig):
    """The ``args`` of an application in Serve's YAML: one service, or ``services`` that share a cluster."""

    services: tuple[ServiceConfig, ...] = Field(min_length=1)
    """Services of the application. The fields of a single service may stand beside `ingress`, without `services`."""
    kv_transfer: ConnectorConfig = ConnectorConfig()
    ingress: IngressConfig = IngressConfig()
    topology: TopologyConfig | None = None
    """How nodes are read, and the budgets of all services. With it, replicas go to nodes with room, or to nodes that
    Ray's autoscaler may add (node_types). Without it, Ray alone places them, and they wait for room."""
    start_hosts: StartHostsConfig = StartHostsConfig()
    keeps_settings: bool = False
    """Whether what people have tuned, paused, scaled and cordoned holds on after the application is deployed again, or
    deleted and deployed again on the same cluster. Values that do not fit the new configuration are dropped and named
    in the log. With false a new deployment starts as its configuration says."""

    @model_validator(mode="before")
    @classmethod
    def _one_service(cls, value: Any) -> Any:
        """Accept the fields of a single service beside those of the application, without ``services``."""
        if not isinstance(value, dict):
            return value
        service = {name: value[name] for name in ServiceConfig.model_fields if name in value}
        if "services" not in value:
            return {**{name: field for name, field in value.items() if name not in service}, "services": [service]}
        if service:
            name = next(iter(service))
            raise ValueError(f"services and {name} are given: {name} is a field of a service, so put it into one")
        return value

    @field_validator("topology", mode="before")
    @classmethod
    def _read_inventory(cls, value: Any) -> Any:
        """Read the inventory if it is the path of a file."""
        if not isinstance(value, dict) or not isinstance(value.get("inventory"), str):
            return value
        path = _whole_path("inventory", value)
        return {**value, "inventory": load_mapping(path, "host names, each with the switches above it")}

    @field_validator("topology", mode="before")
    @classmethod
    def _read_node_types(cls, value: Any) -> Any:
        """Add the node types of Ray's own configuration."""
        if not isinstance(value, dict) or not value.get("node_types_file"):
            return value
        path = _whole_path("node_types_file", value)
        document = load_mapping(path, "a configuration of Ray's cluster launcher or of KubeRay")
        try:
            types = node_types(document, value.get("gpu_resources") or {})
        except ValueError as error:
            raise ValueError(f"node_types_file {path}: {error}") from None
        own = value.get("node_types") or {}
        return {**value, "node_types": {name: types.get(name, {}) | own.get(name, {}) for name in {**types, **own}}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for kind, names in (
            ("groups: the name", [group.name for group in self.groups]),
            ("services: the model", [service.model.id for service in self.services]),
            (
                "services: the adapter",
                [adapter.id for service in self.services for adapter in service.model.adapters]
                + [service.model.id for service in self.services if len(self.services) > 1],
            ),
        ):
            repeated = [name for name, count in Counter(names).items() if count > 1]
            if repeated:
                raise ValueError(f"{kind} {repeated[0]!r} is used twice; each needs its own")
        for group in self.groups:
            self._check_lease(group)
            self._check_shutdown(group)
            self._check_affinity(group)
            self._check_split(group)
        for service in self.services:
            admission = service.admission or self.ingress.admission
            if admission.from_slo and service.autoscale is None:
                raise ValueError(
                    f"admission.from_slo of {service.model.id}: the service has no autoscale, whose slo it would take: "
                    "give ttft_s, or add autoscale"
                )
        self._check_autoscale()
        if self.start_hosts.per_node and all(service.autoscale is None for service in self.services):
            raise ValueError(
                f"start_hosts.per_node is {self.start_hosts.per_node}, and no service has autoscale, so no replica "
                "starts later: remove start_hosts, or add autoscale"
            )
        return self

    def _check_lease(self, group: GroupConfig) -> None:
        silence_s, lease_s = group.decode.engine_silence_s, self.kv_transfer.lease_s
        if group.prefill is not None and silence_s >= lease_s:
            raise ValueError(
                f"group {group.name!r}: decode.engine_silence_s ({silence_s:g}) must be less than kv_transfer.lease_s "
                f"({lease_s}): an engine that stands still for longer pulls KV that prefill no longer keeps"
            )

    def _check_shutdown(self, group: GroupConfig) -> None:
        request_s, decode_s = self.ingress.request_timeout_s, group.decode.graceful_shutdown_timeout_s
        if request_s > decode_s:
            raise ValueError(
                f"group {group.name!r}: ingress.request_timeout_s ({request_s:g}) is more than "
                f"decode.graceful_shutdown_timeout_s ({decode_s:g}): a replica that stops would cut off requests which "
                "have time left; raise the second"
            )
        if group.prefill is None:
            return
        kv_keep_s, prefill_s = MAX_KV_KEEP_LEASES * self.kv_transfer.lease_s, group.prefill.graceful_shutdown_timeout_s
        if kv_keep_s > prefill_s:
            raise ValueError(
                f"group {group.name!r}: prefill.graceful_shutdown_timeout_s ({prefill_s:g}) is less than "
                f"{MAX_KV_KEEP_LEASES:g} x kv_transfer.lease_s ({kv_keep_s:g}): a replica that stops would end before "
                "decode has read its KV; raise the first or lower the second"
            )

    def _check_affinity(self, group: GroupConfig) -> None:
        tier = self.labels.named_tier(group.prompt_pool.placement.node_labels, group.decode.placement.node_labels)
        if tier > group.affinity:
            raise ValueError(
                f"group {group.name!r}: affinity is {group.affinity.name.lower()}, and its node_labels do not pin both "
                f"roles to one switch of that level or below: give it {self.labels.of(group.affinity)}"
            )

    def _check_split(self, group: GroupConfig) -> None:
        """Instances of a replica that Ray alone places on several nodes must have one S1 switch by their labels."""
        prefill = group.prefill
        if prefill is None or prefill.attention_ffn is None or self.topology is not None:
            return
        own = prefill.placement.node_labels
        if prefill.placement.strategy != "STRICT_PACK" and self.labels.named_tier(own, own) > LinkTier.S1:
            raise ValueError(
                f"group {group.name!r}: attention_ffn needs all instances below one S1 switch, and neither topology "
                f"nor prefill's node_labels name one: give {self.labels.of(LinkTier.S1)}, or strategy STRICT_PACK"
            )

    def _check_autoscale(self) -> None:
        autoscales = {service.model.id: service.autoscale for service in self.services if service.autoscale is not None}
        for service in self.services:
            if autoscales and service.autoscale is None:
                raise ValueError(
                    f"services: {service.model.id!r} has no autoscale and others have: one policy sizes all, so give "
                    "it one (kind static keeps its counts)"
                )
        if self.topology is not None and not autoscales:
            raise ValueError("topology does nothing without autoscale: add it, or leave topology out")
        for service in self.services:
            if service.autoscale is not None:
                check_fits(service.autoscale, service.pool_limits(self.topology))
        topology = self.topology or TopologyConfig()
        pools = {service.model.id: list(service.role_configs().values()) for service in self.services}
        all_pools = [pool for service_pools in pools.values() for pool in service_pools]
        # By name of the field: GPUs by type, and the pools that share them.
        limits = {"topology.budget_gpus": (topology.budget_gpus, all_pools)}
        for model, autoscale in autoscales.items():
            limits[f"autoscale.quota_gpus of {model}"] = (autoscale.quota_gpus, pools[model])
        types = {kind for pool in all_pools for kind in pool.demand.gpus_by_type()}
        # With a misspelt type in a limit, the type that was meant would have no limit.
        for name, (limit, _) in limits.items():
            if unknown := sorted(limit.keys() - types):
                known = ", ".join(sorted(types)) or "none"
                raise ValueError(f"{name} has GPUs of type {unknown[0]}, and no group has any (they have {known})")
        # A type without a cost would grow first, since the cheapest pools do.
        without_cost = sorted(types - topology.cost_per_gpu_hour.keys())
        if topology.cost_per_gpu_hour and without_cost:
            raise ValueError(
                f"topology.cost_per_gpu_hour has no {without_cost[0]}, which would seem to cost nothing: give every "
                "type that groups have"
            )
        for name, (limit, limited_pools) in limits.items():
            _check_limit(name, limit, limited_pools)
        for model, autoscale in autoscales.items():
            _check_node_starts(model, autoscale.no_room_s, topology)
        for service in self.services:
            _check_idle(service)

    @property
    def labels(self) -> TopologyLabels:
        """Node labels that name switches."""
        return DEFAULT_LABELS if self.topology is None else self.topology.labels

    @property
    def groups(self) -> tuple[GroupConfig, ...]:
        """Groups of all services."""
        return tuple(group for service in self.services for group in service.all_groups)

    @property
    def model(self) -> ModelConfig:
        """Model of the first service."""
        return self.services[0].model

    @property
    def is_autoscaled(self) -> bool:
        """Whether a policy sizes the services."""
        return self.services[0].autoscale is not None

    def pools(self) -> dict[str, Pools]:
        """Limits of each pool, by service."""
        return {service.model.id: service.pool_limits(self.topology) for service in self.services}


def _check_node_starts(model: str, no_room_s: float, topology: TopologyConfig) -> None:
    """Check that replicas may wait for a node of each type for as long as it may take."""
    for name, kind in topology.node_types.items():
        if kind.start_s >= no_room_s:
            raise ValueError(
                f"topology.node_types.{name}.start_s ({kind.start_s:g}) is not less than autoscale.no_room_s of "
                f"{model} ({no_room_s:g}): its replicas would be given up before such a node comes; raise the second"
            )


def _check_limit(name: str, limit: Mapping[str, float], pools: Iterable[RoleConfig]) -> None:
    """Check that ``limit``, GPUs by type, suffices for the lowest counts of ``pools``, and for the smallest replica.

    0 GPUs of a type are allowed: its pools then stay empty. ``name``: the limit's field.
    """
    lowest_gpus: dict[str, float] = {}
    smallest_replica_gpus: dict[str, float] = {}
    for pool in pools:
        for kind, gpus in pool.demand.gpus_by_type().items():
            lowest_gpus[kind] = lowest_gpus.get(kind, 0.0) + pool.replicas * gpus
            smallest_replica_gpus[kind] = min(smallest_replica_gpus.get(kind, gpus), gpus)
    for kind, gpus in limit.items():
        if lowest_gpus.get(kind, 0.0) > gpus + _EPSILON:
            raise ValueError(
                f"{name}: {gpus:g} GPUs of type {kind} are less than the {lowest_gpus[kind]:g} that the lowest counts "
                "of all groups take: raise it, or lower replicas"
            )
        if gpus and smallest_replica_gpus.get(kind, 0.0) > gpus + _EPSILON:
            raise ValueError(
                f"{name}: {gpus:g} GPUs of type {kind} hold no replica, which takes {smallest_replica_gpus[kind]:g}: "
                "raise it, or leave the groups of that type out"
            )


def _check_idle(service: ServiceConfig) -> None:
    """Check that a service that goes to zero when it is idle has no pool that always keeps replicas."""
    pools = [str(key) for key, pool in service.role_configs().items() if pool.replicas]
    if pools and service.autoscale is not None and service.autoscale.idle_to_zero_s is not None:
        raise ValueError(
            f"autoscale.idle_to_zero_s of {service.model.id} does nothing while {pools[0]} keeps replicas: give every "
            "group 0 of them, or leave it out"
        )
