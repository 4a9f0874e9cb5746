"""What the control plane knows and says: pools and their replicas, a snapshot, and the plan made from it (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from autoscale.ratio import PdRatio
from autoscale.slots import Demand
from kvtransfer.topology import LinkTier, Node, Role


@dataclass(frozen=True, slots=True)
class PoolKey:
    """All replicas of one role in one deployment group: one Serve deployment."""

    group: str
    role: Role

    @property
    def deployment_name(self) -> str:
        """The Serve deployment's name, ``role:group``."""
        return f"{self.role}:{self.group}"

    @classmethod
    def parse(cls, deployment_name: str) -> Self:
        """The pool of a deployment name.

        Raises:
            ValueError: the name is not ``prefill:GROUP`` or ``decode:GROUP``.
        """
        role, separator, group = deployment_name.partition(":")
        if not separator or not group or role not in set(Role):
            raise ValueError(f"deployment {deployment_name!r} is no pool: expected 'prefill:GROUP' or 'decode:GROUP'")
        return cls(group, Role(role))

    def __str__(self) -> str:
        return self.deployment_name

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Logs carry it as its deployment's name."""
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls.parse(value),
            serialization=core_schema.to_string_ser_schema(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """One running replica, and what its engine did in the last window; ``None`` where it was not observed.

    ``prefill_tokens_per_s`` counts prompt tokens that were computed, not those found in a cache. ``deferred_requests``
    wait for KV from another engine; ``handoff_s`` is how long the last ones did on average, from prefill's answer to
    the first token. ``unread_kv_requests`` are prompts whose KV prefill keeps for decode to pull. ``observed_s`` is
    when the replica last reported, or became known.
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
class PoolStats:
    """One pool: its running replicas, oldest first, the count that Serve works towards, and the pool's limits.

    ``link_tier``: how far KV travels inside the group. ``draining``: victims that do not run any more, but have not
    gone yet and hold their GPUs. ``cost``: of a replica for an hour, in any currency; where all are 0, nobody knows.
    ``demand``: what a replica takes, where nodes are looked at; ``held_replicas``: how many of those that Serve works
    towards have it already. ``preference``: the place of its GPU type among those that its service takes, from 0.
    ``affinity``: what all nodes of its group must be under together. ``is_preemptible``: its replicas go first where
    more important services lack room. ``on``: the nodes of each replica that has its room, those on their way out too.
    """

    key: PoolKey
    replicas: tuple[ReplicaStats, ...]
    target_replicas: int
    lowest_replicas: int
    highest_replicas: int
    gpus_per_replica: float = 0
    link_tier: LinkTier = LinkTier.S2
    draining: tuple[str, ...] = ()
    cost: float = 0.0
    demand: Demand | None = None
    held_replicas: int | None = None
    preference: int = 0
    affinity: LinkTier = LinkTier.NONE
    is_preemptible: bool = False
    on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def absent(cls, key: PoolKey) -> Self:
        """What an aggregated group has of prefill."""
        return cls(key=key, replicas=(), target_replicas=0, lowest_replicas=0, highest_replicas=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """A quantile of what users waited in the last window, seconds; ``None`` where nobody waited.

    A request that still waits for its first token counts towards TTFT with the time it has waited so far, so that a
    stalled service is not taken for an idle one. Long prompts count with the share of their own objective that they
    took (``SloConfig.ttft_share``); ``ttft_mean_s`` is the mean of those that got their first token, in plain seconds.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_mean_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What arrived in the last window; ``None`` where nothing was observed, and more where it is not whole.

    ``input_tokens_weighted_mean``: of prompts, each counted as often as it has tokens; how long the prompt is that a
    prompt token belongs to on average. The more lengths vary, the further it is above the mean. ``cached_frac``: the
    share of their tokens that engines found in their prefix caches, where they were to compute them.
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

    ``desired`` counts the replicas that should serve, without those under observation, and ``desired_before`` is what
    it was before they were withdrawn. ``tried``: how many leaders the last scale-in was asked for; ``missed``: that of
    the last whose replicas users have missed, and how many in a row were. ``held`` run and wait for the other role, or
    are warm. ``withdrawn`` are out of routing since a time but can come back; ``victims`` have been told to stop.
    ``backlog``: (time, prompt tokens waiting for prefill). ``missing_since_s``: pools with fewer running replicas than
    Serve works towards, when one last became ready, and how many had. ``capped``: pools for which no room was found,
    until when they are given no more replicas, and how many have found room. ``lost_s``: when a replica last vanished
    that nobody had told to stop. ``settled_s``: from when on latencies are all from after the last replica had entered.
    ``memory``: series of numbers that the policy keeps for itself. ``yielding``: the most that pools may have while
    more important services lack their room, and until when. ``idle_since_s``: since when nobody has asked anything.
    ``warm``: replicas beyond ``desired`` that run and are not routed to. ``unplaced_since_s``: pools of which replicas
    that Serve works towards are on no node yet, when one last found one, and how many were on one.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that the controller may know at one instant.

    ``now_s`` is a wall clock's, so that it means the same to the next process. ``is_recovering``: Serve's controller
    has just started and does not know its replicas yet. ``is_awaited``: requests wait for a service that sleeps.
    ``nodes``: with what those before it in a cycle have left of them; ``None`` where nobody looks at nodes.
    ``gpus_left``: by type, what budgets of the application leave.
    ``claims``: the most that pools may have from now on, since a more important service lacks their room, and
    ``claimed`` the replicas that are in its way.
    ``warm_replicas``: how many it may have now; ``None``: as it is configured.
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
    """What a policy wants: replicas of each role, not yet whole, bounded or at the ratio; ``None`` leaves all as is.

    ``ratio``: to be kept instead of the configured one. ``is_step``: a step of a feedback loop or a count by itself,
    which the guard's hysteresis does not hold back. ``is_urgent`` skips cooldown and damping, never bounds or budget.
    ``memory``: what the policy will find in the next snapshot's state; ``None`` leaves what is there.
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
        if self.wanted is None:
            return None
        return ratio.leaders(self.wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done: counts for Serve, who is routed to, and why.

    ``pending``: replicas of each role that have no place, and ``passed_over`` which groups were no place for them and
    why; ``nodes``: where replicas of a pool that are new are to be, where that is said.
    ``counts`` include replicas under observation. A replica that is running and in none of ``admitted``, ``withdrawn``
    and ``victims`` is held until the other role has caught up. ``held_back`` says what the guard did to the decision.
    """

    counts: Mapping[PoolKey, int]
    admitted: tuple[str, ...]
    withdrawn: tuple[str, ...]
    reinstated: tuple[str, ...]
    victims: tuple[str, ...]
    decision: Decision
    held_back: tuple[str, ...]
    state: ControllerState
    pending: Mapping[Role, int] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[PoolKey, tuple[str, ...]] = field(default_factory=dict)
