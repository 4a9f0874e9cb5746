"""The values of the control plane: pools and their replicas, a snapshot, and the plan made from it (pure).

A tick is one decision about one service: a snapshot goes in, a plan comes out. Leaders are the replicas of the ratio's
larger role. ``autoscale.decide`` explains the other terms.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from autoscale.load_forecast import LoadForecast
from autoscale.ratio import PdRatio
from kvtransfer.topology import LinkTier, Node, Offer, Role

# Name of the endpoint's deployment, which is no pool.
ENDPOINT = "ingress"

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


class PoolKey(NamedTuple):
    """All replicas of one role in one deployment group: one Serve deployment, which is named ``role:group``.

    A tuple, since a tick looks up pools some thousand times, and a tuple's hash takes a quarter of a dataclass's.
    """

    group: str
    role: Role

    @classmethod
    def parse(cls, deployment_name: str) -> Self:
        """The pool of a deployment; a ValueError if the name is not ``prefill:GROUP`` or ``decode:GROUP``."""
        role, separator, group = deployment_name.partition(":")
        if not separator or not group or role not in set(Role):
            raise ValueError(f"deployment {deployment_name!r} is no pool: expected 'prefill:GROUP' or 'decode:GROUP'")
        return cls(group, Role(role))

    def __str__(self) -> str:
        return f"{self.role}:{self.group}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In logs a pool is written as the name of its deployment."""
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls.parse(value),
            serialization=core_schema.to_string_ser_schema(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Nodes, GPUs and CPUs that one replica needs.

    Attributes:
        selector: labels that a node must have.
        gpu_type: type of the replica's GPUs; ``None``: it has no GPU.
        workers: number of workers of its engine; each is one bundle of the replica's placement group.
        gpus_per_worker: GPUs of each bundle, perhaps a fraction.
        cpus_per_worker: CPUs of each bundle.
        cpus_per_replica: further CPUs, on the node of the first worker.
        strategy: how Ray spreads the bundles over nodes.
        parts: demands of the instances that a replica consists of, such as attention and FFN instances; empty: it is
            one instance. If there are parts, the fields above do not count. All parts are under one switch of tier
            ``within`` (HeteroScale section 3.4, disaggregated MoE).
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
class DecodeStep:
    """Means over steps of an engine in which no prompt was computed: batch, context of a request, and duration."""

    batch: float
    context_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """One running replica, and the load of its engine in the last window; ``None``: not observed.

    Attributes:
        observed_s: time of its last report, or of its first appearance if it has not reported; controller's clock.
        decode_tokens_per_s: output tokens.
        prefill_tokens_per_s: computed prompt tokens, without tokens from a prefix cache.
        running_requests: requests in the engine's batch.
        waiting_requests: requests in the engine's queue.
        deferred_requests: requests that wait for KV from another engine.
        queued_prefill_tokens: prompt tokens that the replica must still compute.
        unread_kv_requests: prompts whose KV a prefill engine keeps until decode has pulled it.
        handoff_s: mean time of the window's handoffs, from prefill's answer to the first token.
        pull_bytes_per_s: mean bandwidth of the window's pulls of KV.
        decode_step: the window's steps without prompts.
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
    pull_bytes_per_s: float | None = None
    decode_step: DecodeStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Properties of a pool that only a redeploy changes.

    Attributes:
        link_tier: how far KV travels inside the group.
        capacity: work that one replica does, in *standard replicas*: replicas of the service's first group.
        prompt_capacity: prompts that a replica of an aggregated group computes beside its answers, in standard prefill
            replicas; 0 in groups with a prefill pool, and in services without one.
        demand: needs of one replica; ``None``: placement ignores nodes.
        cost: cost of a replica hour, in any currency; 0 for all pools: costs are unknown.
        preference: position of the pool's GPU type in the service's order of preference; 0 is the first choice.
        affinity: highest level at which all nodes of the group must share a switch.
        is_preemptible: whether the pool's replicas are the first to leave if more important services lack room.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    lowest_replicas: int
    highest_replicas: int
    gpus_per_replica: float = 0.0
    capacity: float = 1.0
    prompt_capacity: float = 0.0
    link_tier: LinkTier = LinkTier.S2
    demand: Demand | None = None
    cost: float = 0.0
    preference: int = 0
    affinity: LinkTier = LinkTier.NONE
    is_preemptible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """One pool: its running replicas, Serve's target count, and its limits.

    Attributes:
        replicas: running replicas, the oldest first.
        draining: victims that have stopped serving but still hold their GPUs.
        held_replicas: number of replicas on nodes, without victims; ``None``: placement ignores nodes. They are not
            the ``held`` replicas of the state.
        on: nodes of each replica that is on nodes, by replica id, with victims.
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
        """Needs of one replica; ``None``: placement ignores nodes."""
        return self.limits.demand

    def capacity_in(self, role: Role) -> float:
        """Standard replicas of a role that one replica is worth; one of an aggregated group does the work of both."""
        if self.key.role is role:
            return self.limits.capacity
        return self.limits.prompt_capacity if role is Role.PREFILL else 0.0

    @classmethod
    def absent(cls, key: PoolKey) -> Self:
        """A pool without replicas, for the role that an aggregated group lacks."""
        limits = PoolLimits(lowest_replicas=0, highest_replicas=0)
        return cls(key=key, replicas=(), target_replicas=0, limits=limits)

    def bounded(self, lowest_replicas: int, highest_replicas: int) -> Self:
        """The same pool with other bounds."""
        if (lowest_replicas, highest_replicas) == (self.limits.lowest_replicas, self.limits.highest_replicas):
            return self
        limits = replace(self.limits, lowest_replicas=lowest_replicas, highest_replicas=highest_replicas)
        return replace(self, limits=limits)

    def gpus_by_type(self) -> dict[str, float]:
        """GPUs of one replica, by type; empty: placement ignores nodes."""
        return {} if self.demand is None else self.demand.gpus_by_type()


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Latency of the last window, seconds: quantiles, and one mean; ``None``: no request was measured.

    Attributes:
        ttft_s: quantile of the TTFT. A request that still waits for its first token counts with its time until now, so
            that a stalled service does not look idle. The time of a long prompt is scaled by ``SloConfig.ttft_share``.
        tpot_s: quantile of the TPOT.
        ttft_mean_s: mean TTFT of requests that got their first token, not scaled.
        refused_frac: share of the offered requests that were refused for lack of capacity. Their first token never
            comes, so they count as requests that miss the TTFT objective.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_mean_s: float | None = None
    refused_frac: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Requests per second that the endpoint refused for one reason and one priority, for lack of capacity."""

    reason: str
    priority: str
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests that users sent in the last window; ``None``: not observed.

    If the endpoint reports, rate and lengths are those of the offered requests: requests that were served, that wait at
    the endpoint, or that it refused for lack of capacity. Requests that a limit of their own key refuses do not count.
    Otherwise they are those of the requests that reached decode.

    Attributes:
        served_per_s: requests per second that got their first token.
        waiting_requests: requests that wait at the endpoint now.
        waiting_tokens: prompt tokens of the requests that wait at the endpoint.
        refused: requests per second that the endpoint refused, by reason and priority.
        input_tokens_weighted_mean: mean prompt length, each prompt weighted by its tokens. It is the prompt length of
            an average prompt token, and exceeds the plain mean if lengths vary.
        input_lengths: distribution of the prompts that reached decode: lengths in tokens, each with its share of the
            prompts; empty: not observed. Its mean is that of these prompts.
        output_lengths: distribution of the answers that ended, in the same form.
        cached_frac: share of prompt tokens that the prefix caches of the computing engines held.
        is_whole: whether the requests of all replicas of the endpoint and of decode were observed.
        quietest: the endpoint's replica whose last report is the oldest, and the time of that report; ``None``: the
            endpoint does not report.
    """

    requests_per_s: float | None = None
    served_per_s: float | None = None
    waiting_requests: float = 0.0
    waiting_tokens: float = 0.0
    refused: tuple[Refused, ...] = ()
    input_tokens_mean: float | None = None
    input_tokens_weighted_mean: float | None = None
    output_tokens_mean: float | None = None
    input_lengths: tuple[tuple[float, float], ...] = ()
    output_lengths: tuple[tuple[float, float], ...] = ()
    cached_frac: float | None = None
    is_whole: bool = True
    quietest: tuple[str, float] | None = None

    @property
    def refused_per_s(self) -> float:
        """Requests per second that the endpoint refused for lack of capacity."""
        return math.fsum(refused.requests_per_s for refused in self.refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSums:
    """Sums over the requests of an interval, from which their mean request follows.

    Attributes:
        requests: number of the requests.
        prefill_s: time of their prompts on a prefill engine, by its profile.
        input_tokens: tokens of their prompts.
        output_tokens: tokens of their answers.
        context_tokens: for each output token, the KV of its request at that time.
    """

    requests: float = 0.0
    prefill_s: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    context_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRatio:
    """A P/D ratio that follows the traffic (``pd_ratio: auto``).

    Attributes:
        ratio: the one in force.
        since_s: begin of the running interval, after which the ratio may change.
        sums: the requests of the running interval.
        optimal: prefill per decode that the requests of the last interval asked for, without limits; ``None``: no
            interval has ended.
    """

    ratio: Annotated[PdRatio, BeforeValidator(PdRatio.stored)]
    since_s: float
    sums: RequestSums = RequestSums()
    optimal: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """The controller's whole memory between two ticks: part of every snapshot and of every plan.

    So a log replays from any line, and a restarted controller continues where the last one stopped.

    Attributes:
        ticked_s: time of the last tick.
        desired: number of replicas of each pool that should serve, without withdrawn ones.
        desired_before: value of ``desired`` before the withdrawn replicas left.
        tried: number of leaders that the policy wanted at the last scale-in.
        missed: about the last harmful scale-in, after which latency missed its objective or the counts grew again while
            its replicas were withdrawn: the number of leaders that the policy wanted, and the number of such scale-ins
            in a row.
        scaled_out_s: time of the last scale-out.
        scaled_in_s: time of the last scale-in.
        admitted: replicas that get requests.
        held: running replicas that get no requests yet: they wait for the other role, or are warm.
        withdrawn: replicas that get no more requests but may return, each with the time when it was withdrawn.
        victims: replicas that must stop.
        backlog: points of the last window: time, and prompt tokens of the requests that waited anywhere.
        missing_since_s: pools with fewer running replicas than Serve's target. For each: when the number of running
            replicas last rose or was first too low, and this number.
        capped: pools that lack room for more replicas. For each: until when it gets no more, and how many have room.
        lost_s: when a replica that was no victim last vanished.
        settled_s: one window after a replica was last admitted. From then on, the window has only latencies after it.
        yielding: pools whose room a more important service needs. For each: until when, and the most replicas that it
            may have.
        idle_since_s: time since when no request has come.
        warm: number of running replicas of each pool beyond ``desired``, which get no requests.
        unplaced_since_s: pools with replicas on no node. For each: when the number of replicas on nodes last rose or
            was first too low, and this number.
        memory: series of numbers that the policy remembers, by name.
        asked_s: pools with replicas that start: when the plan asked for each, the oldest first.
        starts_s: durations of the last starts of each pool, seconds, the oldest first.
        offers: pools with replicas that wait for a node which does not exist yet, and for what kind of node.
        refused: node types that are not requested, since a node did not come in time. For each: until when.
        again_s: pools with replicas that waited for a node type which was given up, until all of the pool are on nodes.
            For each: when they last asked for a node.
        existing_tried: pools in ``offers`` whose replicas asked for room on existing nodes before, and got none.
        steps: of the last windows, the time, and a mean step of the decode replicas that are standard replicas.
        followed: the ratio of ``pd_ratio: auto``; ``None``: the ratio is configured, or no tick has computed it.
        links: of each group, the time of the last windows in which KV was pulled, and the pulls' bandwidth, bytes/s.
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
    asked_s: Mapping[PoolKey, tuple[float, ...]] = field(default_factory=dict)
    starts_s: Mapping[PoolKey, tuple[float, ...]] = field(default_factory=dict)
    links: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    steps: tuple[tuple[float, DecodeStep], ...] = ()
    offers: Mapping[PoolKey, Offer] = field(default_factory=dict)
    refused: Mapping[str, float] = field(default_factory=dict)
    again_s: Mapping[PoolKey, float] = field(default_factory=dict)
    existing_tried: tuple[PoolKey, ...] = ()
    followed: FollowedRatio | None = None

    def ratio(self, configured: PdRatio) -> PdRatio:
        """The ratio of the service: the one that follows the traffic, or the configured one."""
        return configured if self.followed is None else self.followed.ratio

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bandwidth of the slowest group's link, bytes/s: its fastest window; ``None``: nothing was pulled."""
        return min((max(value for _, value in points) for points in self.links.values()), default=None)

    def start_s(self, role: Role) -> float | None:
        """Median duration of the last starts of a role, over its pools, seconds; ``None``: none was observed."""
        durations_s = [each for key, durations in self.starts_s.items() if key.role is role for each in durations]
        return median(durations_s) if durations_s else None

    @property
    def longest_start_s(self) -> float | None:
        """Median duration of the starts of the slowest pool, seconds; ``None``: none was observed."""
        return max((median(durations_s) for durations_s in self.starts_s.values() if durations_s), default=None)

    @property
    def is_asleep(self) -> bool:
        """Whether no replica should serve."""
        return not any(self.desired.values())

    @property
    def missed_once_more(self) -> tuple[float, int] | None:
        """``missed`` after the last scale-in was harmful, too."""
        return self.missed if self.tried is None else (self.tried, 1 + (0 if self.missed is None else self.missed[1]))

    @property
    def desired_and_warm(self) -> dict[PoolKey, int]:
        """Replicas of each pool that should run."""
        return {key: count + self.warm.get(key, 0) for key, count in self.desired.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The controller's whole input at one instant.

    Attributes:
        now_s: wall-clock time, so that it means the same to the next process.
        is_recovering: Serve's controller has just started and does not know its replicas yet.
        is_awaited: the service sleeps and requests wait for it.
        nodes: nodes with the room that earlier services of the cycle left; ``None``: placement ignores nodes.
        gpus_left: GPUs by type that the application's budgets leave to this service.
        claims: pools whose room a more important service needs, each with the most replicas that it may keep.
        claimed: replicas whose room the more important service needs.
        warm_replicas: number of warm replicas that the service may have now; ``None``: as configured.
        forecast: the load one start ahead; ``None``: it is not forecast, or not yet.
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
    forecast: LoadForecast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A signal that a policy used for its decision, for logs: its value and its target, in the signal's own unit."""

    name: str
    value: float
    target: float


class PolicyFault(StrEnum):
    """Why a policy has made no decision that can be followed."""

    RAISED = "raised"
    INVALID = "invalid"  # an answer that is no decision, or has counts or other values out of range
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The wish of a policy.

    Attributes:
        wanted: standard replicas of each role, perhaps a fraction, out of bounds or off the ratio; ``None``: change
            nothing. A replica of the first group is one; another one counts as its pool's ``capacity``.
        ratio: ratio to keep instead of the configured one; ``None``: the configured one.
        is_step: exempt from the guard's hysteresis, since it is a step of a feedback loop or a fixed count.
        is_urgent: skips cooldown and damping, never bounds or budget.
        memory: the policy's memory in the next snapshot's state; ``None``: the memory does not change.
        fault: set by the controller in place of a decision that failed; ``None``: the policy has decided.
    """

    wanted: Mapping[Role, float] | None
    reason: str
    ratio: Annotated[PdRatio, BeforeValidator(PdRatio.stored)] | None = None
    is_step: bool = False
    is_urgent: bool = False
    shown: tuple[Shown, ...] = ()
    memory: Mapping[str, tuple[float, ...]] | None = None
    fault: PolicyFault | None = None

    def leaders(self, ratio: PdRatio) -> float | None:
        """The fewest leaders with which both roles have their wanted replicas; ``None``: the policy changes nothing."""
        return None if self.wanted is None else ratio.leaders(self.wanted)


class NoteKind(StrEnum):
    """Why a plan differs from its policy's wish."""

    COOLDOWN = "cooldown"
    REPLICA_LOST = "replica_lost"
    NO_COUNTS = "no_counts"  # no counts at the ratio fit bounds, budget and room
    BOUNDS = "bounds"  # bounds, budget or room changed the counts
    STEP = "step"  # the change was larger than one tick may make
    BUDGET = "budget"  # no GPUs for counts set by hand, or for more replicas before others have left
    OBSERVING = "observing"  # the configuration allows no change
    LATENCY_MISSED = "latency_missed"  # no replica leaves while a latency misses its objective
    FLOOR = "floor"  # fewer replicas than a floor of ``autoscale.floors``
    WOKEN_GROUP = "woken_group"  # groups that begin to serve need more followers than were wanted
    NO_NODE = "no_node"  # a node that Ray's autoscaler was to add has not come in time
    UNKNOWN = "unknown"  # older versions stored the text alone


@dataclass(frozen=True, slots=True)
class Note:
    """One change that the controller made to a decision: a kind for programs, a text for people."""

    kind: NoteKind
    text: str


# A note as logs and stored states have it: older versions stored the text alone.
StoredNote = Annotated[
    Note, BeforeValidator(lambda note: Note(NoteKind.UNKNOWN, note) if isinstance(note, str) else note)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of a tick.

    A running replica that is not in ``admitted``, ``withdrawn`` or ``victims`` is held: it waits until the other role
    has caught up, or it is warm.

    Attributes:
        counts: number of replicas of each pool that Serve shall run, with withdrawn ones.
        admitted: replicas that get requests.
        reinstated: withdrawn replicas that are admitted again.
        held_back: changes that the guard and later stages made to the decision.
        pending: standard replicas of each role that no group has room for.
        passed_over: groups without room for a new replica, each with the reason.
        nodes: nodes on which new replicas of a pool may start; a pool that is left out may use all nodes.
        again: pools whose replicas that wait for a node must be stopped, so that Serve starts them again on ``nodes``.
    """

    counts: Mapping[PoolKey, int]
    admitted: tuple[str, ...]
    withdrawn: tuple[str, ...]
    reinstated: tuple[str, ...] = ()
    victims: tuple[str, ...]
    decision: Decision
    held_back: tuple[StoredNote, ...] = ()
    state: ControllerState
    pending: Mapping[Role, float] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[PoolKey, tuple[str, ...]] = field(default_factory=dict)
    again: tuple[PoolKey, ...] = ()

    def ratio(self, configured: PdRatio) -> PdRatio:
        """The ratio that the plan keeps: the policy's own, or else that of the service."""
        return self.decision.ratio or self.state.ratio(configured)


# Pool and nodes of each replica that is on nodes, by replica id.
Places = Mapping[str, tuple[PoolKey, tuple[str, ...]]]
