"""Common parts of policies: the base class, questions about a snapshot, a configuration with engine profiles (pure)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import ClassVar, Generic, Self, TypeVar

from pydantic import Field, model_validator

from autoscale.engines.candidates import check_alike
from autoscale.engines.lengths import Lengths
from autoscale.engines.profile import EngineProfile, ProfileRef
from autoscale.headcount import smallest_replicas, standard_replicas
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, ReplicaStats, Shown, Snapshot, Traffic
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

C = TypeVar("C", bound=StrictConfig)  # configuration class of a policy
# Share of a configured start time, bandwidth or rate by which the observed one may differ before a decision names it. A
# smaller one would name ordinary variations.
DRIFT_FRAC = 0.25
# Observed decode steps replace those of a profile only beyond this share: a mean over batches of different size may be
# this far from a step of the mean batch, and times vary from window to window.
STEP_NOISE_FRAC = 0.1
# Refused requests of this time count as waiting, seconds: one interval of decisions by default. They are part of the
# offered rate too, so a whole window of them would count the demand twice.
_REFUSED_S = 5.0


class Policy(ABC, Generic[C]):
    """A rule that sizes prefill and decode together.

    Attributes:
        config_class: class of the settings of a policy of one's own; the built-in ones are in ``PolicyConfig``.
        is_fit_for_aggregated: whether it also fits services whose groups have no prefill (``pd_ratio`` 0:1): the decode
            replicas that it wants there do all the work.
        is_fit_for_pooling: whether it also fits pooling models: their answers have no output tokens, so it may not size
            by these or by the lengths of answers.
        has_own_ratio: whether it sizes each role by itself, so that ``pd_ratio`` does not change its counts.
    """

    config_class: ClassVar[type[StrictConfig]]
    is_fit_for_aggregated: ClassVar[bool] = False
    is_fit_for_pooling: ClassVar[bool] = False
    has_own_ratio: ClassVar[bool] = False

    def __init__(self, config: C, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config
        self._ratio = ratio
        self._slo = slo

    @abstractmethod
    def decide(self, snapshot: Snapshot) -> Decision:
        """The replicas of each role that the policy wants; ``wanted`` is ``None`` if the counts should stay."""


def replicas_of(snapshot: Snapshot, role: Role) -> list[ReplicaStats]:
    """The running replicas of a role, over all groups."""
    return [replica for pool in snapshot.pools if pool.key.role is role for replica in pool.replicas]


def present_replicas(snapshot: Snapshot) -> dict[Role, float]:
    """Standard replicas of each role that should serve now (``autoscale.headcount``)."""
    return standard_replicas(snapshot.state.desired, snapshot.pools)


def ratio_of(wanted: Mapping[Role, float], snapshot: Snapshot) -> PdRatio:
    """The ratio of two counts in standard replicas; a part of a replica counts as one of the smallest."""
    return PdRatio.of(wanted, smallest_replicas(snapshot.pools))


def weighted_replicas(snapshot: Snapshot, role: Role) -> list[tuple[ReplicaStats, float]]:
    """The running replicas that do a role's work, each with the standard replicas that it is worth in this role.

    The replicas of aggregated groups do the work of both roles.
    """
    weighted = list[tuple[ReplicaStats, float]]()
    if role is Role.PREFILL and not any(
        pool.key.role is role or pool.limits.prompt_capacity for pool in snapshot.pools
    ):
        role = Role.DECODE  # no group has a prefill pool
    for pool in snapshot.pools:
        if weight := pool.capacity_in(role):
            weighted += [(replica, weight) for replica in pool.replicas]
    return weighted


def admitted_replicas(snapshot: Snapshot, role: Role) -> list[tuple[ReplicaStats, float]]:
    """The ``weighted_replicas`` that get requests; before the first admission, all of them."""
    admitted, weighted = frozenset(snapshot.state.admitted), weighted_replicas(snapshot, role)
    return [entry for entry in weighted if entry[0].replica_id in admitted] if admitted else weighted


def weight_of(replicas: Iterable[tuple[ReplicaStats, float]]) -> float:
    """The standard replicas that these are worth together."""
    return math.fsum(weight for _, weight in replicas)


def without_blind_removal(wanted: Mapping[Role, float], snapshot: Snapshot) -> dict[Role, float]:
    """The wanted replicas; at least the present ones if a part of the traffic may not have been observed."""
    least = dict.fromkeys(Role, 0.0) if snapshot.traffic.is_whole else present_replicas(snapshot)
    return {role: max(wanted[role], least[role]) for role in Role}


def demand_factor(snapshot: Snapshot, slo: SloConfig) -> float:
    """Offered requests per served one, at least 1: by this factor the work that engines do is below the demand.

    Engines at their limit show their capacity and not the demand, and requests that the endpoint holds back do not
    reach them at all. While the objectives are met all requests are served, so the factor is 1.
    """
    traffic = snapshot.traffic
    if slo.is_met(snapshot.latency) or not traffic.requests_per_s or not traffic.served_per_s or not traffic.is_whole:
        return 1.0
    return max(1.0, traffic.requests_per_s / traffic.served_per_s)


def queue_at_endpoint(snapshot: Snapshot) -> float:
    """Requests that wait at the endpoint, and those that it refused lately: without admission they would wait, too.

    Refusals from before the last replica entered do not count. They say nothing about the replicas that serve now.
    """
    traffic, settled_s = snapshot.traffic, snapshot.state.settled_s
    is_from_before = settled_s is not None and snapshot.now_s < settled_s
    return traffic.waiting_requests + (0.0 if is_from_before else traffic.refused_per_s * _REFUSED_S)


def observed_lengths(traffic: Traffic) -> Lengths | None:
    """The distribution of the lengths of the offered requests; ``None``: no length was observed.

    The lengths are of requests that reached decode, or ended there. Admission refuses long prompts first, so the
    offered ones are longer. The lengths are multiplied, so that their means are the offered ones.
    """
    inputs, outputs = traffic.input_tokens_mean, traffic.output_tokens_mean
    if not inputs or not outputs:
        return None
    lengths = Lengths.independent(
        traffic.input_lengths or ((inputs, 1.0),), traffic.output_lengths or ((outputs, 1.0),)
    )
    return lengths.scaled(inputs, outputs)


def is_latency_current(snapshot: Snapshot) -> bool:
    """Whether a policy may add replicas because of the present latencies.

    It may if the latencies show the effect of all replicas that it wanted before.
    """
    state = snapshot.state
    # Whether a replica was lost after the last scale-out.
    has_lost_since = state.lost_s is not None and state.lost_s > (state.scaled_out_s or 0.0)
    # A replica that starts in place of a lost one is not waited for: no latency was the reason for it.
    if not has_lost_since and any(len(pool.replicas) < state.desired.get(pool.key, 0) for pool in snapshot.pools):
        return False
    return is_latency_settled(snapshot)


def is_latency_settled(snapshot: Snapshot) -> bool:
    """Whether the present latencies show the effect of all replicas that serve; others may still start.

    If withdrawn replicas can return at once, nothing is to be waited for.
    """
    state = snapshot.state
    if state.withdrawn:
        return True
    # A request that gets its first token now has arrived a TTFT ago, perhaps before the last replica served.
    arrived_s = snapshot.now_s - (snapshot.latency.ttft_s or 0.0)
    is_settled = state.settled_s is None or arrived_s >= state.settled_s
    # In an overload the TTFT grows with the queue, so its age alone would delay the next replicas more and more.
    is_settled = is_settled or (snapshot.now_s >= (state.settled_s or 0.0) and is_backlog_growing(state.backlog))
    return is_settled and not _has_new_replica(snapshot)


def is_backlog_growing(backlog: Sequence[tuple[float, float]]) -> bool:
    """Whether more prompt tokens wait now than at the begin of the window; ``backlog``: times and tokens."""
    return len(backlog) > 1 and backlog[-1][1] > backlog[0][1]


def _has_new_replica(snapshot: Snapshot) -> bool:
    """Whether a replica runs that did not run at the last tick."""
    state = snapshot.state
    earlier_ids = {*state.admitted, *state.held, *state.withdrawn, *state.victims}
    return bool(state.admitted) and any(
        replica.replica_id not in earlier_ids for pool in snapshot.pools for replica in pool.replicas
    )


class EnginesConfig(StrictConfig):
    """The engines of both roles in the first group."""

    prefill: ProfileRef = Field(description="The profile of a prefill replica, or the path of its file.")
    decode: ProfileRef = Field(description="The profile of a decode replica, or the path of its file.")

    @model_validator(mode="after")
    def _check_alike(self) -> Self:
        check_alike((self.prefill, self.decode))
        return self

    @property
    def uses_forecast(self) -> bool:
        """Whether the policy plans with the snapshot's forecast of the load."""
        return False

    def with_observed(self, state: ControllerState) -> Self:
        """The configuration with link and decode steps as observed; before that, as in the profiles."""
        changes: dict[str, EngineProfile] = {}
        profiles: dict[str, EngineProfile] = {"prefill": self.prefill, "decode": self.decode}
        if (bytes_per_s := state.link_bytes_per_s) is not None:
            for name, profile in profiles.items():
                handoff = profile.handoff.model_copy(update={"bytes_per_s": bytes_per_s})
                changes[name] = profiles[name] = profile.model_copy(update={"handoff": handoff})
        factor = self.step_factor(state)
        if factor is not None and abs(factor - 1.0) > STEP_NOISE_FRAC:
            changes["decode"] = profiles["decode"].with_steps(factor)
        return self.model_copy(update=changes) if changes else self

    def step_factor(self, state: ControllerState) -> float | None:
        """Duration of the observed decode steps, in multiples of the profile's; ``None``: none was observed.

        Steps outside the profile's points do not count, since there the profile itself is uncertain.
        """
        factors = [
            step.seconds / self.decode.decode.seconds_for(round(step.batch), step.context_tokens)
            for _, step in state.steps
            if self.decode.decode.covers(step.batch, step.context_tokens)
        ]
        return median(factors) if factors else None

    def drifts(self, state: ControllerState) -> tuple[list[Shown], list[str]]:
        """Link and decode steps as observed beside those of the profiles, and a sentence on each that has drifted."""
        shown, drifts = list[Shown](), list[str]()
        if (observed := state.link_bytes_per_s) is not None:
            configured = (self.decode.link or self.decode.handoff).bytes_per_s
            shown.append(Shown(name="link_bytes_per_s", value=observed, target=configured))
            if abs(observed - configured) > DRIFT_FRAC * configured:
                drifts.append(f"KV is pulled at {observed / 1e9:.3g} GB/s, the profile has {configured / 1e9:.3g} GB/s")
        if (factor := self.step_factor(state)) is not None:
            shown.append(Shown(name="decode_step_factor", value=factor, target=1.0))
            if abs(factor - 1.0) > DRIFT_FRAC:
                drifts.append(
                    f"decode steps take {factor:.2f} times as long as the profile {self.decode.name} says: measure it "
                    "again with `tandem profile`"
                )
        return shown, drifts


class ProfiledConfig(EnginesConfig):
    """The engines of both roles in the first group, and the time that they take to start."""

    prefill_start_s: float | None = Field(None, ge=0.0)
    """Time from the request for a prefill replica until it is ready, seconds; left out: as in its profile. It holds
    until the first start has been observed; then the median of the last starts does."""
    decode_start_s: float | None = Field(None, ge=0.0)
    """Time from the request for a decode replica until it is ready, seconds; left out: as in its profile. It holds
    until the first start has been observed; then the median of the last starts does."""

    def with_observed(self, state: ControllerState) -> Self:
        """The configuration with start times, link and decode steps as observed; before that, as configured."""
        learned = {f"{role}_start_s": state.start_s(role) for role in Role}
        changes = {name: seconds for name, seconds in learned.items() if seconds is not None}
        observed = super().with_observed(state)
        return observed.model_copy(update=changes) if changes else observed

    def start_s(self, role: Role) -> float:
        """Seconds from the request for a replica of a role until it is ready."""
        if role is Role.PREFILL:
            return self.prefill.start_s if self.prefill_start_s is None else self.prefill_start_s
        return self.decode.start_s if self.decode_start_s is None else self.decode_start_s


P = TypeVar("P", bound=ProfiledConfig)  # configuration class of a policy with profiles


class ProfiledPolicy(Policy[P]):
    """A policy that sizes by engine profiles, start times and links; observed ones replace the configured ones."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """The decision of ``decide_with_observed``. It shows what was observed, and names what has drifted."""
        learned = self._config.with_observed(snapshot.state)
        policy = self if learned is self._config else type(self)(learned, ratio=self._ratio, slo=self._slo)
        decision, shown, drifts = policy.decide_with_observed(snapshot), list[Shown](), list[str]()
        for role in Role:
            if (seconds := snapshot.state.start_s(role)) is not None:
                configured_s = self._config.start_s(role)
                shown.append(Shown(name=f"{role}_start_s", value=seconds, target=configured_s))
                if abs(seconds - configured_s) > DRIFT_FRAC * configured_s:
                    drifts.append(f"{role} replicas start in {seconds:.3g} s, configured are {configured_s:.3g} s")
        engines_shown, engines_drifts = self._config.drifts(snapshot.state)
        reason = "; ".join((decision.reason, *drifts, *engines_drifts))
        return replace(decision, shown=(*decision.shown, *shown, *engines_shown), reason=reason)

    @abstractmethod
    def decide_with_observed(self, snapshot: Snapshot) -> Decision:
        """The decision; the configuration has the observed start times and the observed link."""
