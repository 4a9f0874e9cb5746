"""What the control plane knows and says: pools and their replicas, a snapshot, and the plan made from it (pure)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from autoscale.ratio import PdRatio
from kvtransfer.topology import LinkTier, Node, Role

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


@dataclass(frozen=True, slots=True)
class PoolKey:
    """All replicas of one role in one deployment group: one Serve deployment, which is named ``role:group``."""

    group: str
    role: Role

    @classmethod
    def parse(cls, deployment_name: str) -> Self:
        """The pool of a deployment name; a ValueError if it is not ``prefill:GROUP`` or ``decode:GROUP``."""
        role, separator, group = deployment_name.partition(":")
        if not separator or not group or role not in set(Role):
            raise ValueError(f"deployment {deployment_name!r} is no pool: expected 'prefill:GROUP' or 'decode:GROUP'")
        return cls(group, Role(role))

    def __str__(self) -> str:
        return f"{self.role}:{self.group}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In logs it is the name of its deployment."""
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls.parse(value),
            serialization=core_schema.to_string_ser_schema(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one replica takes.

    Attributes:
        selector: labels that a node must have.
        gpu_type: type of its GPUs; ``None``: it has no GPU.
        workers: workers of its engine; each is one bundle of its placement group.
        gpus_per_worker: may be a fraction.
        cpus_per_worker: CPUs of each bundle.
        cpus_per_replica: further CPUs, on the node of the first worker.
        strategy: how Ray spreads the bundles over nodes.
        parts: instances that the replica consists of, such as attention and FFN instances in their ratio; all of them
            lie under one switch of tier ``within`` (HeteroScale section 3.4, disaggregated MoE).
    """

    selector: Mapping[str, str] = field(default_factory=dict)
    gpu_type: str | None = None
    workers: int = 1
    gpus_per_worker: float = 0.0
    cpus_per_worker: float = 0.0
    cpus_per_replica: float = 0.0
    strategy: Strategy = "STRICT_PACK"
    parts: tuple["Demand", ...] = ()
    within: LinkTier = LinkTier.S1

    @property
    def gpus(self) -> float:
        """GPUs of one replica."""
        return math.fsum(part.gpus for part in self.parts) if self.parts else self.workers * self.gpus_per_worker

    def gpus_by_type(self) -> dict[str, float]:
        """GPUs of one replica, by type."""
        gpus: dict[str, float] = {}
        for part in self.parts or (self,):
            if part.gpu_type is not None:
                gpus[part.gpu_type] = gpus.get(part.gpu_type, 0.0) + part.gpus
        return gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """One running replica, and what its engine did in the last window; ``None``: not observed.

    Attributes:
        observed_s: when the replica last reported, or became known.
        prefill_tokens_per_s: prompt tokens that were computed, without those that a prefix cache had.
        deferred_requests: requests that wait for KV from another engine.
        unread_kv_requests: prompts whose KV prefill keeps until decode has pulled it.
        handoff_s: mean time of the last handoffs, from prefill's answer to the first token.
    """

    replica_id: str
    observed_s: float
    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    running_requests: float | None = None
    waiting_requests: float | None = None
    deferred_requests: float | None = None
    queued_prefill_tokens: float | None = None
    kv_usage_frac: float | None = None
    unread_kv_requests: float | None = None
    gpu_utilization_frac: float | None = None
    sm_activity_frac: float | None = None
    handoff_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What a pool was deployed with; only a redeploy changes it.

    Attributes:
        link_tier: how far KV travels inside the group.
        demand: what a replica takes; ``None``: nodes are not looked at.
        cost: of a replica for an hour, in any currency; 0 for all pools: costs are unknown.
        preference: place of its GPU type among those that the service takes, from 0.
        affinity: the tier under which all nodes of the group must lie together.
        is_preemptible: its replicas leave first where more important services lack room.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    lowest_replicas: int
    highest_replicas: int
    gpus_per_replica: float = 0.0
    link_tier: LinkTier = LinkTier.S2
    demand: Demand | None = None
    cost: float = 0.0
    preference: int = 0
    affinity: LinkTier = LinkTier.NONE
    is_preemptible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """One pool: its running replicas, the count that Serve works towards, and its limits.

    Attributes:
        replicas: running, the oldest first.
        draining: victims that do not run any more, but still hold their GPUs.
        held_replicas: of those that Serve works towards, how many are on a node; ``None``: nodes are not looked at.
        on: the nodes of each replica that is on nodes, those on their way out too.
    """

    key: PoolKey
    replicas: tuple[ReplicaStats, ...]
    target_replicas: int
    limits: PoolLimits
    draining: tuple[str, ...] = ()
    held_replicas: int | None = None
    on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def demand(self) -> Demand | None:
        """What a replica takes; ``None``: nodes are not looked at."""
        return self.limits.demand

    @classmethod
    def absent(cls, key: PoolKey) -> Self:
        """The prefill pool that an aggregated group does not have."""
        limits = PoolLimits(lowest_replicas=0, highest_replicas=0)
        return cls(key=key, replicas=(), target_replicas=0, limits=limits)

    def bounded(self, lowest_replicas: int, highest_replicas: int) -> Self:
        """The same pool with other bounds."""
        if (lowest_replicas, highest_replicas) == (self.limits.lowest_replicas, self.limits.highest_replicas):
            return self
        limits = replace(self.limits, lowest_replicas=lowest_replicas, highest_replicas=highest_replicas)
        return replace(self, limits=limits)

    def gpus_by_type(self) -> dict[str, float]:
        """GPUs of one replica, by type; empty: nodes are not looked at."""
        return {} if self.demand is None else self.demand.gpus_by_type()


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """A quantile of the waiting times of the last window, seconds; ``None``: no request waited.

    Attributes:
        ttft_s: a request that still waits for its first token counts with its time until now, so that a stalled
            service does not look idle. A long prompt counts with the share of its own objective that it took
            (``SloConfig.ttft_share``).
        ttft_mean_s: mean of the requests that got their first token, in plain seconds.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_mean_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What arrived in the last window; ``None``: not observed.

    Attributes:
        input_tokens_weighted_mean: mean length of prompts, each weighted by its tokens: the length of the prompt that
            an average prompt token belongs to. The more lengths vary, the further it is above the plain mean.
        cached_frac: share of the prompt tokens that the engines which should compute them had in their prefix caches.
        is_whole: false: more arrived than was observed.
    """

    requests_per_s: float | None = None
    input_tokens_mean: float | None = None
    input_tokens_weighted_mean: float | None = None
    output_tokens_mean: float | None = None
    cached_frac: float | None = None
    is_whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """All that the controller remembers between two ticks: part of every snapshot and of every plan.

    So a log replays from any line, and a controller that was killed goes on where it was.

    Attributes:
        desired: replicas that should serve, by pool, without withdrawn ones.
        desired_before: what ``desired`` was before the withdrawn replicas left.
        tried: leaders that the policy wanted at the last scale-in.
        missed: leaders that the policy wanted at the last scale-in after which latency was missed, and how many such
            scale-ins followed each other.
        held: run and are not routed to: they wait for the other role, or are warm.
        withdrawn: out of routing since a time; they can come back.
        victims: were told to stop.
        backlog: (time, prompt tokens that waited for prefill).
        missing_since_s: pools with fewer running replicas than Serve works towards: when the count last rose, and
            the count.
        capped: pools for which no room was found: until when they get no more replicas, and how many have found room.
        lost_s: when a replica last vanished that was not told to stop.
        settled_s: from when on all latencies are from after the last replica entered.
        yielding: the most that pools may have while more important services lack their room, and until when.
        idle_since_s: since when no request has come.
        warm: replicas beyond ``desired`` that run and are not routed to.
        unplaced_since_s: pools with replicas on no node: when the count on nodes last rose, and the count.
        memory: series of numbers that the policy keeps for itself.
    """

    ticked_s: float | None = None
    desired: Mapping[PoolKey, int] = field(default_factory=dict)
    desired_before: Mapping[PoolKey, int] = field(default_factory=dict)
    tried: float | None = None
    missed: tuple[float, int] | None = None
    scaled_out_s: float | None = None
    scaled_in_s: float | None = None
    admitted: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    withdrawn: Mapping[str, float] = field(default_factory=dict)
    victims: tuple[str, ...] = ()
    backlog: tuple[tuple[float, float], ...] = ()
    missing_since_s: Mapping[PoolKey, tuple[float, int]] = field(default_factory=dict)
    capped: Mapping[PoolKey, tuple[float, int]] = field(default_factory=dict)
    lost_s: float | None = None
    settled_s: float | None = None
    yielding: Mapping[PoolKey, tuple[float, int]] = field(default_factory=dict)
    idle_since_s: float | None = None
    warm: Mapping[PoolKey, int] = field(default_factory=dict)
    unplaced_since_s: Mapping[PoolKey, tuple[float, int]] = field(default_factory=dict)
    memory: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def is_asleep(self) -> bool:
        """Whether no replica should serve."""
        return not any(self.desired.values())

    @property
    def desired_and_warm(self) -> dict[PoolKey, int]:
        """Replicas of each pool that should run."""
        return {key: count + self.warm.get(key, 0) for key, count in self.desired.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that the controller may know at one instant.

    Attributes:
        now_s: of a wall clock, so that it means the same to the next process.
        is_recovering: Serve's controller has just started and does not know its replicas yet.
        is_awaited: requests wait for this service, which sleeps.
        nodes: with what the services before this one in the cycle left of them; ``None``: nodes are not looked at.
        gpus_left: GPUs by type that budgets of the application leave.
        claims: the most that pools may have from now on, since a more important service lacks their room.
        claimed: replicas that are in the way of that service.
        warm_replicas: how many the service may have now; ``None``: as configured.
    """

    now_s: float
    pools: tuple[PoolStats, ...]
    latency: Latency = Latency()
    traffic: Traffic = Traffic()
    state: ControllerState = ControllerState()
    is_recovering: bool = False
    is_awaited: bool = False
    nodes: tuple[Node, ...] | None = None
    gpus_left: Mapping[str, float] = field(default_factory=dict)
    claims: Mapping[PoolKey, int] = field(default_factory=dict)
    claimed: tuple[str, ...] = ()
    warm_replicas: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A signal that a decision was made from, in its own unit, and what it should be."""

    name: str
    value: float
    target: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy wants.

    Attributes:
        wanted: replicas of each role, not yet whole, bounded or at the ratio; ``None``: leave all as it is.
        ratio: to be kept instead of the configured one.
        is_step: a step of a feedback loop, or a count by itself: the guard's hysteresis does not hold it back.
        is_urgent: skips cooldown and damping, never bounds or budget.
        memory: what the policy will find in the next snapshot's state; ``None``: what is there now.
    """

    wanted: Mapping[Role, float] | None
    reason: str
    ratio: PdRatio | None = None
    is_step: bool = False
    is_urgent: bool = False
    shown: tuple[Shown, ...] = ()
    memory: Mapping[str, tuple[float, ...]] | None = None

    def leaders(self, ratio: PdRatio) -> float | None:
        """Replicas of the ratio's larger role with which both roles have what is wanted."""
        return None if self.wanted is None else ratio.leaders(self.wanted)


class NoteKind(StrEnum):
    """Why a plan differs from what its policy wants."""

    COOLDOWN = "cooldown"
    REPLICA_LOST = "replica_lost"
    NO_COUNTS = "no_counts"
    BOUNDS = "bounds"
    STEP = "step"
    BUDGET = "budget"
    OBSERVING = "observing"
    LATENCY_MISSED = "latency_missed"
    WOKEN_GROUP = "woken_group"
    UNKNOWN = "unknown"  # a version before kinds stored the text alone


@dataclass(frozen=True, slots=True)
class Note:
    """What the controller did to a decision: a kind for programs, a text for people."""

    kind: NoteKind
    text: str


def _with_kind(note: Any) -> Any:
    return Note(NoteKind.UNKNOWN, note) if isinstance(note, str) else note


# A note as logs and stored states hold it: older ones have its text alone.
StoredNote = Annotated[Note, BeforeValidator(_with_kind)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done, and why.

    A replica that runs and is in none of ``admitted``, ``withdrawn`` and ``victims`` is held until the other role has
    caught up.

    Attributes:
        counts: for Serve, by pool; withdrawn replicas are included.
        admitted: replicas that requests are routed to.
        reinstated: replicas that were withdrawn and are admitted again.
        held_back: what the guard did to the decision.
        pending: replicas of each role that have no place.
        passed_over: groups that were no place for them, and why.
        nodes: for new replicas of a pool, the nodes that they may be on; a pool that is left out may be on all.
    """

    counts: Mapping[PoolKey, int]
    admitted: tuple[str, ...]
    withdrawn: tuple[str, ...]
    reinstated: tuple[str, ...] = ()
    victims: tuple[str, ...]
    decision: Decision
    held_back: tuple[StoredNote, ...] = ()
    state: ControllerState
    pending: Mapping[Role, int] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[PoolKey, tuple[str, ...]] = field(default_factory=dict)


# Pool and nodes of each replica that has its room, by the replica's id.
Places = Mapping[str, tuple[PoolKey, tuple[str, ...]]]
