"""SimConfig: a virtual cluster, the objectives, and the policies that are compared on it (pure)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from autoscale.config import AutoscaleConfig
from autoscale.documents import first_fault, load_mapping
from autoscale.policies import POLICIES
from autoscale.policies.profiled import ProfiledConfig
from autoscale.policies.static import StaticConfig
from autoscale.profile import EngineProfile, ProfileRef
from autoscale.sim.fleet import VirtualPool
from autoscale.tuning import merged
from autoscale.types import PoolKey
from kvtransfer.cost import CROSS_SWITCH_FRAC
from kvtransfer.topology import LinkTier, Role
from router.config import RouterConfig

# Rows of a report that are no policies.
BOUNDS = ("oracle", "causal_bound", "smallest_static", "aggregated")


class _Sim(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SimPoolConfig(_Sim):
    """The replicas of one role."""

    profile: ProfileRef = Field(description="An EngineProfile's file, relative to the configuration's.")
    lowest_replicas: int = Field(1, ge=1)
    highest_replicas: int = Field(256, ge=1, le=4096)
    start_s: float | None = Field(None, ge=0.0, description="From asked for to ready; the profile's.")
    cost_per_gpu_hour: float = Field(1.0, ge=0.0, description="In whatever currency; replicas are added where cheap.")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.lowest_replicas > self.highest_replicas:
            raise ValueError(
                f"lowest_replicas ({self.lowest_replicas}) is more than highest_replicas ({self.highest_replicas})"
            )
        return self

    @property
    def gpus(self) -> int:
        """GPUs of one replica; an engine on CPU counts as one."""
        return max(1, self.profile.gpus)

    @property
    def ready_after_s(self) -> float:
        """From asked for to ready, seconds."""
        return self.profile.start_s if self.start_s is None else self.start_s


class SimGroupConfig(_Sim):
    """A prefill and a decode pool between which KV moves."""

    name: str = Field("g0", min_length=1, description="Each group has its own.")
    prefill: SimPoolConfig
    decode: SimPoolConfig
    link_tier: LinkTier = Field(LinkTier.S1, description="The lowest switch that both pools are under.")
    uplink_bytes_per_s: float | None = Field(
        None, gt=0.0, description="What all transfers between the two pools share; none: only each replica's own card."
    )

    def pool(self, role: Role) -> SimPoolConfig:
        """The pool of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def link_frac(self) -> float:
        """Share of the profiles' bandwidth that is left between the two pools."""
        return CROSS_SWITCH_FRAC if self.link_tier is LinkTier.S2 else 1.0


class SimFailureConfig(_Sim):
    """Replicas that die."""

    at_s: float = Field(ge=0.0)
    role: Role
    group: str | None = Field(None, description="Its name; the first.")
    replicas: int = Field(1, ge=1)


class SimSloConfig(_Sim):
    """The objectives of each request: the same for every policy."""

    ttft_least_s: float = Field(1.0, gt=0.0, description="Time to first token that is always allowed.")
    ttft_unloaded_factor: float = Field(
        3.0, ge=1.0, description="And so many times what a request of its length takes on idle engines."
    )
    tpot_s: float = Field(0.05, gt=0.0, description="Time per output token after the first.")
    attainment_frac: float = Field(0.994, gt=0.0, lt=1.0, description="The share of requests that both must hold for.")


class SimConfig(_Sim):
    """What ``tandem simulate`` runs on."""

    groups: tuple[SimGroupConfig, ...] = Field(
        min_length=1,
        description="Such as one for each kind of GPU. Policies that size by profiles take the first group's for all.",
    )
    slo: SimSloConfig = SimSloConfig()
    router: RouterConfig = RouterConfig()
    autoscale: dict[str, Any] = Field(
        default_factory=dict, description="As in an application's configuration, without policy: for every policy."
    )
    policies: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="By name, what is put over autoscale; without policy, that of the name."
    )
    prefix_block_tokens: int = Field(512, ge=1, description="Tokens for which one of a trace's hash_ids stands.")
    failures: tuple[SimFailureConfig, ...] = Field((), description="What happens to every policy, not to the bounds.")
    warm_up_s: float = Field(60.0, ge=0.0, description="The first counts stay so long, and nothing is measured.")
    oracle_simulated_requests: int = Field(
        1_000_000, ge=1, description="How many requests all plans that the oracle tries may have together."
    )
    bin_s: float = Field(15.0, gt=0.0, description="How long the counts of the oracle and the causal bound stay.")

    @field_validator("autoscale")
    @classmethod
    def _reject_policy(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "policy" in value:
            raise ValueError("autoscale.policy: give it under policies, by a name")
        return value

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        names = [group.name for group in self.groups]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"groups: two are named {twice[0]!r}: give each its own name")
        if len({(group.link_frac, group.uplink_bytes_per_s) for group in self.groups}) > 1:
            raise ValueError(
                "groups: KV travels alike in all groups of a simulation: give all the same uplink_bytes_per_s, and "
                "link_tier 2 to all or to none"
            )
        for failure in self.failures:
            if failure.group not in (None, *names):
                raise ValueError(f"failures: there is no group {failure.group!r}: choose among {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _check_policies(self) -> Self:
        for name in self.policies:
            if name in BOUNDS or "," in name or not name.strip():
                raise ValueError(
                    f"policies: {name!r} is no name for a policy: --policy has commas between names, and "
                    f"{', '.join(BOUNDS)} are what policies are held against"
                )
            policy = self.autoscale_config(name).policy
            if isinstance(policy, StaticConfig):
                self._check_counts(name, policy)
        return self

    def _check_counts(self, name: str, policy: StaticConfig) -> None:
        for role, count in ((Role.PREFILL, policy.prefill), (Role.DECODE, policy.decode)):
            pools = [group.pool(role) for group in self.groups]
            low, high = sum(pool.lowest_replicas for pool in pools), sum(pool.highest_replicas for pool in pools)
            if not low <= count <= high:
                raise ValueError(f"policies.{name}.policy.{role}: {count} is not from {low} to {high}, as groups allow")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML.

        Raises:
            ValueError: it cannot be read, or says something impossible; names the file and the field.
        """
        document = load_mapping(path, "groups, and perhaps slo, router, autoscale, policies")
        try:
            return cls.model_validate(_with_paths(document, path.parent))
        except ValidationError as error:
            raise ValueError(f"{path}: {first_fault(error)}") from None

    def autoscale_config(self, name: str) -> AutoscaleConfig:
        """What the controller gets for a policy; one that sizes by profiles gets those of the first group.

        Raises:
            ValueError: the name is neither one of ``policies`` nor a policy's, or its fields are wrong.
        """
        if name not in self.policies and name not in POLICIES:
            known = sorted({*self.policies, *POLICIES})
            raise ValueError(f"there is no policy {name!r}: choose among {', '.join(known)}")
        changes = self.policies.get(name, {})
        policy = {"kind": name, **changes.get("policy", {})}
        if policy["kind"] not in POLICIES:
            raise ValueError(f"policies.{name}: give policy.kind, one of {', '.join(sorted(POLICIES))}")
        for role in Role:
            pool = self.groups[0].pool(role)
            if needs_profiles(policy["kind"]):
                policy.setdefault(str(role), pool.profile)
                policy.setdefault(f"{role}_start_s", pool.ready_after_s)
        try:
            return AutoscaleConfig.model_validate({**merged(self.autoscale, changes), "policy": policy})
        except ValidationError as error:
            raise ValueError(f"policies.{name}: {first_fault(error)}") from None

    def check_one_group(self, what: str) -> None:
        """Refuse several groups where there can only be one.

        Raises:
            ValueError: names ``what`` needs it.
        """
        if len(self.groups) > 1:
            raise ValueError(f"{what}: needs a configuration with one group, got {len(self.groups)}: leave one of them")

    def profiles(self) -> dict[PoolKey, EngineProfile]:
        """The engine of each pool."""
        return {PoolKey(g.name, role): g.pool(role).profile for g in self.groups for role in Role}

    def pools(self) -> dict[PoolKey, VirtualPool]:
        """What each pool allows and takes."""
        return {
            PoolKey(group.name, role): VirtualPool(
                lowest_replicas=pool.lowest_replicas,
                highest_replicas=pool.highest_replicas,
                start_s=pool.ready_after_s,
                gpus_per_replica=pool.gpus,
                link_tier=group.link_tier,
                cost=pool.cost_per_gpu_hour * pool.gpus,
            )
            for group in self.groups
            for role, pool in ((role, group.pool(role)) for role in Role)
        }


def needs_profiles(kind: str) -> bool:
    """Whether a policy sizes by the profiles of its engines."""
    return issubclass(POLICIES[kind].__init__.__annotations__["config"], ProfiledConfig)


def _with_paths(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The document with the paths of its profiles from where the configuration is."""

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: str(folder / each) if name == "profile" and isinstance(each, str) else resolved(each)
                for name, each in value.items()
            }
        return [resolved(each) for each in value] if isinstance(value, list) else value

    result: dict[str, Any] = resolved(dict(document))
    return result
