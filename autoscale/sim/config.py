"""SimConfig: a virtual cluster, the objectives, and the policies to compare (pure, but for loading)."""

from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.dual_ratio import AttentionFfn
from autoscale.decide.tuning import merged
from autoscale.documents import first_fault, load_mapping
from autoscale.engines.profile import EngineProfile, ProfileRef
from autoscale.engines.variants import TypicalLengthsConfig, worths
from autoscale.extension import Extensible, Extension
from autoscale.policies import OWN_POLICIES
from autoscale.policies.peers import SIM_POLICIES, SimPolicyConfig
from autoscale.policies.policy import ProfiledConfig
from autoscale.policies.static import StaticConfig
from autoscale.sim.fleet import VirtualPool
from autoscale.types import PoolKey
from kvtransfer.cost import CROSS_SWITCH_FRAC
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import LinkTier, Role
from router.admission_config import AdmissionConfig, ObjectivesConfig
from router.config import RouterConfig

# Names of the bounds: rows of a report that are not policies.
BOUNDS = ("oracle", "causal_bound", "smallest_static", "aggregated")


class SimAutoscaleConfig(AutoscaleConfig):
    """An application's autoscale section, but its policy may also be a policy of another system."""

    policies = SIM_POLICIES
    refused_policies = ()

    # The base class allows fewer policies. The override is safe because configurations are frozen.
    policy: Annotated[SimPolicyConfig | Extension, Extensible(OWN_POLICIES)]  # type: ignore[assignment]


class SimPoolConfig(StrictConfig):
    """The replicas of one role."""

    profile: ProfileRef = Field(description="File of an EngineProfile, relative to the configuration's file.")
    attention_ffn: AttentionFfn | None = Field(
        None,
        description='Attention and FFN instances of each prefill replica, such as "1:3" in quotes. The profile has the '
        "speed of a whole replica, and the GPUs of one instance.",
    )
    lowest_replicas: int = Field(1, ge=1)
    highest_replicas: int = Field(256, ge=1, le=4096)
    start_s: float | None = Field(
        None,
        ge=0.0,
        description="Seconds from the request for a replica until it is ready; left out: as in the profile.",
    )
    cost_per_gpu_hour: float = Field(
        1.0, ge=0.0, description="Price of a GPU-hour in any currency; replicas are added to the cheapest pools."
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.lowest_replicas > self.highest_replicas:
            raise ValueError(
                f"lowest_replicas ({self.lowest_replicas}) is more than highest_replicas ({self.highest_replicas})"
            )
        return self

    @property
    def gpus(self) -> int:
        """GPUs of one replica, of all its instances; an engine on CPU counts as one GPU."""
        return max(1, self.profile.gpus) * (1 if self.attention_ffn is None else self.attention_ffn.instances)

    @property
    def ready_after_s(self) -> float:
        """``start_s``, or the profile's if that is left out, seconds."""
        return self.profile.start_s if self.start_s is None else self.start_s


class SimGroupConfig(StrictConfig):
    """A prefill pool and the decode pool to which its KV moves; or one pool that computes prompts and answers."""

    name: str = Field("g0", min_length=1, description="Name of the group, different from all others.")
    prefill: SimPoolConfig | None = Field(
        description="The prefill pool. With null, decode replicas compute prompts too; the first group may have null "
        "only if all groups have it."
    )
    decode: SimPoolConfig
    link_tier: LinkTier = Field(LinkTier.S1, description="Tier of the lowest switch that both pools are under.")
    uplink_bytes_per_s: float | None = Field(
        None,
        gt=0.0,
        description="Bandwidth that all transfers between the pools share; left out: only their own cards limit them.",
    )

    @model_validator(mode="after")
    def _check_decode_is_whole(self) -> Self:
        if self.decode.attention_ffn is not None:
            raise ValueError("decode.attention_ffn: only prefill replicas have attention and FFN instances")
        return self

    @property
    def pools(self) -> dict[Role, SimPoolConfig]:
        """The pools by role, prefill first; a group without prefill has one."""
        prefill = {} if self.prefill is None else {Role.PREFILL: self.prefill}
        return {**prefill, Role.DECODE: self.decode}

    def pool(self, role: Role) -> SimPoolConfig:
        """The pool that does a role's work."""
        return self.pools.get(role, self.decode)

    @property
    def link_frac(self) -> float:
        """Share of the profiles' bandwidth that is available between the two pools."""
        return CROSS_SWITCH_FRAC if self.link_tier is LinkTier.S2 else 1.0


class SimFailureConfig(StrictConfig):
    """Replicas that die at the same time."""

    at_s: float = Field(ge=0.0)
    role: Role
    group: str | None = Field(None, description="Name of the replicas' group; left out: the first group.")
    replicas: int = Field(1, ge=1)


class SimSloConfig(StrictConfig):
    """The objectives of each request, the same for every policy."""

    ttft_least_s: float = Field(1.0, gt=0.0, description="Least TTFT objective of a request, seconds.")
    ttft_unloaded_factor: float = Field(
        3.0, ge=1.0, description="TTFT objective as a multiple of the request's TTFT on idle engines."
    )
    tpot_s: float = Field(0.05, gt=0.0, description="Objective of the time per output token after the first, seconds.")
    attainment_frac: float = Field(
        0.994, gt=0.0, lt=1.0, description="Share of requests that must keep both objectives."
    )


class SimConfig(StrictConfig):
    """The configuration of ``tandem simulate``."""

    groups: tuple[SimGroupConfig, ...] = Field(
        min_length=1,
        description="Deployment groups, such as one for each GPU type. Policies that size by profiles use those of "
        "the first group, and count a replica of another group as its own profile says.",
    )
    typical_lengths: TypicalLengthsConfig = TypicalLengthsConfig()
    slo: SimSloConfig = SimSloConfig()
    router: RouterConfig = RouterConfig()
    admission: ObjectivesConfig | None = Field(
        None,
        description="Objectives by which the endpoint lets requests wait or refuses them under every policy, as in "
        "ingress.admission; from_slo takes those of slo. Left out: every request goes on to the engines at once.",
    )
    autoscale: dict[str, Any] = Field(
        default_factory=dict, description="An application's autoscale section without its policy, for every policy."
    )
    policies: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Changes of autoscale by name of a policy; without policy.kind the name is the kind.",
    )
    prefix_block_tokens: int = Field(512, ge=1, description="Prompt tokens of one entry of a trace's hash_ids.")
    failures: tuple[SimFailureConfig, ...] = Field((), description="Failures under every policy; the bounds have none.")
    warm_up_s: float = Field(
        60.0, ge=0.0, description="Time at the start in which counts stay and nothing is measured, seconds."
    )
    oracle_simulated_requests: int = Field(
        1_000_000, ge=1, description="Most requests that the oracle simulates, in all its plans together."
    )
    bin_s: float = Field(15.0, gt=0.0, description="Time for which the oracle's counts stay, seconds.")

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
        if self.groups[0].prefill is None and any(group.prefill is not None for group in self.groups):
            raise ValueError(
                f"groups: {names[0]!r} comes first and has no prefill pool, and others have one: put a group with a "
                "prefill pool first, since its replicas are the standard for the others"
            )
        if len({(group.link_frac, group.uplink_bytes_per_s) for group in self.groups}) > 1:  # a scenario has one link
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
                    f"{', '.join(BOUNDS)} are the bounds"
                )
            policy = self.autoscale_config(name).policy
            if isinstance(policy, StaticConfig):
                self._check_counts(name, policy)
        return self

    def _check_counts(self, name: str, policy: StaticConfig) -> None:
        for role, count in ((Role.PREFILL, policy.prefill), (Role.DECODE, policy.decode)):
            pools = [group.pools[role] for group in self.groups if role in group.pools]
            low, high = sum(pool.lowest_replicas for pool in pools), sum(pool.highest_replicas for pool in pools)
            if not low <= count <= high:
                raise ValueError(f"policies.{name}.policy.{role}: {count} is not from {low} to {high}, as groups allow")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML.

        Raises:
            ValueError: it cannot be read, or a value is wrong; names the file and the field.
        """
        document = load_mapping(path, "groups, and perhaps slo, router, autoscale, policies")
        try:
            return cls.model_validate(_with_paths(document, path.parent))
        except ValidationError as error:
            raise ValueError(f"{path}: {first_fault(error)}") from None

    def autoscale_config(self, name: str) -> SimAutoscaleConfig:
        """The controller's configuration for a policy, with the first group's profiles if it sizes by profiles.

        Raises:
            ValueError: the name is neither in ``policies`` nor a kind, a policy of one's own cannot be loaded, or a
                field is wrong.
        """
        if name not in self.policies and not _is_kind(name):
            names = sorted({*self.policies, *SIM_POLICIES})
            raise ValueError(
                f"there is no policy {name!r}: choose among {', '.join(names)}, or give package.module:Class"
            )
        changes = self.policies.get(name, {})
        policy = {"kind": name, **changes.get("policy", {})}
        if not _is_kind(policy["kind"]):
            raise ValueError(
                f"policies.{name}: give policy.kind, one of {', '.join(sorted(SIM_POLICIES))}, or package.module:Class"
            )
        if needs_profiles(policy["kind"]):
            for role in Role:
                pool = self.groups[0].pool(role)
                policy.setdefault(str(role), pool.profile)
                policy.setdefault(f"{role}_start_s", pool.ready_after_s)
        settings = merged(self.autoscale, changes)
        if settings.get("pd_ratio") == "auto":
            engines = {str(role): self.groups[0].pool(role).profile for role in Role}
            settings["auto_ratio"] = engines | (settings.get("auto_ratio") or {})
        try:
            return SimAutoscaleConfig.model_validate({**settings, "policy": policy})
        except ValidationError as error:
            raise ValueError(f"policies.{name}: {first_fault(error)}") from None

    @property
    def admission_config(self) -> AdmissionConfig | None:
        """The endpoint's rules; ``None``: every request goes on to the engines at once."""
        if self.admission is None:
            return None
        return AdmissionConfig().of_service(
            self.admission, {"ttft_s": self.slo.ttft_least_s, "tpot_s": self.slo.tpot_s}
        )

    @property
    def is_one_pair(self) -> bool:
        """Whether there is one group, with a prefill pool."""
        return len(self.groups) == 1 and self.groups[0].prefill is not None

    def check_one_pair(self, what: str) -> None:
        """Raises ValueError: there are several groups, or one without prefill, but ``what`` needs one with prefill."""
        if len(self.groups) > 1:
            raise ValueError(f"{what}: needs a configuration with one group, got {len(self.groups)}: leave one of them")
        if not self.is_one_pair:
            raise ValueError(f"{what}: needs a group with a prefill pool: give groups.0.prefill")

    def profiles(self) -> dict[PoolKey, EngineProfile]:
        """The engine of each pool."""
        return {PoolKey(group.name, role): pool.profile for group in self.groups for role, pool in group.pools.items()}

    def pools(self) -> dict[PoolKey, VirtualPool]:
        """Limits and start time of each pool; the first group's replicas are the standard for their capacities."""
        aggregated = {group.name for group in self.groups if group.prefill is None}
        worth = worths(self.profiles(), aggregated, self.groups[0].name, self.typical_lengths, self.slo.tpot_s)
        return {
            PoolKey(group.name, role): VirtualPool(
                lowest_replicas=pool.lowest_replicas,
                highest_replicas=pool.highest_replicas,
                start_s=pool.ready_after_s,
                gpus_per_replica=pool.gpus,
                capacity=worth[PoolKey(group.name, role)].own,
                prompt_capacity=worth[PoolKey(group.name, role)].prompts,
                link_tier=group.link_tier,
                cost=pool.cost_per_gpu_hour * pool.gpus,
            )
            for group in self.groups
            for role, pool in group.pools.items()
        }


def _is_kind(name: Any) -> bool:
    return isinstance(name, str) and (name in SIM_POLICIES or OWN_POLICIES.is_named(name))


def needs_profiles(kind: str) -> bool:
    """Whether a kind of policy sizes by engine profiles. Raises ValueError: a policy of one's own cannot be loaded."""
    if kind not in SIM_POLICIES:
        return issubclass(OWN_POLICIES.load(kind).config_class, ProfiledConfig)
    # Each kind has one configuration class in the union of all policies.
    (config,) = (each for each in get_args(SimPolicyConfig) if each.model_fields["kind"].default == kind)
    return issubclass(config, ProfiledConfig)


def _with_paths(value: Any, folder: Path) -> Any:
    """A document, or a value in it, in which the paths of profiles begin with the folder."""
    if isinstance(value, list):
        return [_with_paths(each, folder) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: str(folder / each) if name == "profile" and isinstance(each, str) else _with_paths(each, folder)
        for name, each in value.items()
    }
