"""AppConfig: everything a user may say about one Tandem application, checked before anything starts."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from autoscale.config import AutoscaleConfig
from autoscale.tuning import PoolLimits, Pools, check_fits
from deployments.config import GroupConfig, IngressConfig, ModelConfig, check_engine_kwargs
from kvtransfer.connector import LEASES, ConnectorConfig
from kvtransfer.topology import link_tier
from router.config import RouterConfig


class AppConfig(BaseModel):
    """The ``args`` of an application in Serve's YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: ModelConfig
    engine_kwargs: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments of both roles.")
    groups: tuple[GroupConfig, ...] = Field(min_length=1)
    kv_transfer: ConnectorConfig = ConnectorConfig()
    router: RouterConfig = RouterConfig()
    ingress: IngressConfig = IngressConfig()
    autoscale: AutoscaleConfig | None = Field(
        None, description="How both roles are sized together; left out, they stay."
    )

    @field_validator("engine_kwargs")
    @classmethod
    def _reject_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_engine_kwargs(value)

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        names = [group.name for group in self.groups]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"groups: the name {twice[0]!r} is used twice; each group needs its own")
        return self

    @model_validator(mode="after")
    def _check_leases(self) -> Self:
        for group in self.groups:
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
            kept_s, prefill_s = LEASES * self.kv_transfer.lease_s, group.prefill.graceful_shutdown_timeout_s
            if kept_s > prefill_s:
                raise ValueError(
                    f"group {group.name!r}: prefill.graceful_shutdown_timeout_s ({prefill_s:g}) is less than "
                    f"{LEASES:g} x kv_transfer.lease_s ({kept_s:g}): a replica that is to go would end before decode "
                    "has read what it computed; raise the first or lower the second"
                )
        return self

    @model_validator(mode="after")
    def _check_autoscale(self) -> Self:
        pools = {key: pool for group in self.groups for key, pool in group.pools().items()}
        if self.autoscale is None:
            bounded = [str(key) for key, pool in pools.items() if pool.max_replicas is not None]
            if bounded:
                raise ValueError(
                    f"max_replicas of {bounded[0]} does nothing without autoscale: add it, or use replicas"
                )
            return self
        unbounded = [str(key) for key, pool in pools.items() if pool.max_replicas is None]
        if unbounded:
            raise ValueError(f"autoscale needs max_replicas of every role: {unbounded[0]} has none")
        check_fits(self.autoscale, self.pools())
        return self

    def pools(self) -> Pools:
        """What each pool was deployed with, for the autoscaler."""
        return Pools(
            {
                key: PoolLimits(
                    lowest_replicas=pool.replicas,
                    highest_replicas=pool.max_replicas or pool.replicas,
                    link_tier=link_tier(group.prefill.placement.node_labels, group.decode.placement.node_labels),
                    # An emulated engine takes none, and counts in a budget like those that it stands for.
                    gpus_per_replica=pool.gpus_per_replica if pool.emulator is None else pool.workers,
                )
                for group in self.groups
                for key, pool in group.pools().items()
            }
        )
