"""HeteroScale: one signal sizes both roles in proportion; latency is a safety net (section 3.3, Appendix B).

The signal gives the number of leaders, the replicas of the ratio's larger role; the ratio gives the followers.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from autoscale.headcount import EPSILON_REPLICAS
from autoscale.policies.policy import (
    Policy,
    admitted_replicas,
    demand_factor,
    is_latency_settled,
    present_replicas,
    replicas_of,
    weight_of,
    weighted_replicas,
)
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# Factors on the replicas in Algorithm 3: after a severe breach of a latency objective, after a moderate one, and while
# the latency is far below its objective.
_SEVERE, _MODERATE, _RELAXED = 1.2, 1.1, 0.95
# A backlog falls if it is below this share of its mean over the window. It must fall clearly: on a plateau of overload
# prefill starves decode as well, and a plateau varies a little. The value's reason is not recorded.
_FALLING_FRAC = 0.8


class Signal(StrEnum):
    """The eight candidates of HeteroScale section 4.2."""

    DECODE_TPS = "decode_tps"
    PREFILL_TPS = "prefill_tps"
    PREFILL_GPU_UTILIZATION = "prefill_gpu_utilization"
    DECODE_GPU_UTILIZATION = "decode_gpu_utilization"
    PREFILL_SM_ACTIVITY = "prefill_sm_activity"
    DECODE_SM_ACTIVITY = "decode_sm_activity"
    TTFT = "ttft"
    TPOT = "tpot"


# Signals that grow in proportion to the load: the role of each, and the field of ``ReplicaStats`` with its value. Only
# they have a target; ttft and tpot have an objective instead.
_LINEAR = {
    Signal.DECODE_TPS: (Role.DECODE, "decode_tokens_per_s"),
    Signal.PREFILL_TPS: (Role.PREFILL, "prefill_tokens_per_s"),
    Signal.PREFILL_GPU_UTILIZATION: (Role.PREFILL, "gpu_utilization_frac"),
    Signal.DECODE_GPU_UTILIZATION: (Role.DECODE, "gpu_utilization_frac"),
    Signal.PREFILL_SM_ACTIVITY: (Role.PREFILL, "sm_activity_frac"),
    Signal.DECODE_SM_ACTIVITY: (Role.DECODE, "sm_activity_frac"),
}


# Signals of this kind are tokens/s, the other ones of _LINEAR are shares of 1.
_RATES = frozenset((Signal.DECODE_TPS, Signal.PREFILL_TPS))


class LatencyStepsConfig(StrictConfig):
    """Latencies at which the safety net acts, as shares of the objective (Algorithm 3)."""

    severe_frac: float = Field(1.2, gt=0.0)
    """A latency of at least this share of its objective adds a fifth of the replicas (alpha_out)."""
    moderate_frac: float = Field(0.9, gt=0.0)
    """A latency of at least this share of its objective adds a tenth of the replicas (beta_out)."""
    relaxed_frac: float = Field(0.4, ge=0.0)
    """A latency of at most this share of its objective removes a twentieth of the replicas, if the latency is the
    signal (gamma_in)."""

    @model_validator(mode="after")
    def _check_order(self) -> "LatencyStepsConfig":
        if not self.relaxed_frac < self.moderate_frac <= self.severe_frac:
            raise ValueError(
                f"relaxed_frac ({self.relaxed_frac:g}) < moderate_frac ({self.moderate_frac:g}) <= severe_frac "
                f"({self.severe_frac:g}) must hold, or one step would hide another"
            )
        return self


class HeteroScaleConfig(StrictConfig):
    """The signal, its target per replica, and the safety net."""

    kind: Literal["heteroscale"] = "heteroscale"
    signal: Signal = Signal.DECODE_TPS
    target: float | None = Field(None, gt=0.0)
    """Value of the signal at a replica of the first group at the load that you want: tokens/s, or 0..1 for utilisation
    and SM activity.
    Leave it out for ttft and tpot, whose target is the objective."""
    latency: LatencyStepsConfig = LatencyStepsConfig()
    backlog_floor_tokens: float = Field(2048.0, ge=0.0)
    """Prompt tokens that may wait for prefill without counting as a backlog."""

    @model_validator(mode="after")
    def _check_target(self) -> "HeteroScaleConfig":
        if self.signal not in _LINEAR:
            if self.target is not None:
                raise ValueError(f"target ({self.target:g}) does nothing for {self.signal}: set slo.{self.signal}_s")
        elif self.target is None:
            raise ValueError(
                f"target is missing: give the {self.signal} of one replica at the load that you want (for decode_tps "
                "about 80 % of the tokens/s at which it just meets your objective)"
            )
        elif self.signal not in _RATES and self.target > 1.0:
            raise ValueError(f"target ({self.target:g}) of {self.signal} is a share of 1: give 0.7 for 70 %")
        return self


def negative_feedback(current_replicas: float, latency_s: float, target_s: float, steps: LatencyStepsConfig) -> float:
    """Replicas wanted for a latency (Algorithm 3).

    It differs from the printed algorithm. There, replicas leave at any latency if the cooldown for scaling out runs and
    the cooldown for scaling in has ended. Here a breach adds replicas, as in the paper's text. The guard applies the
    cooldowns.
    """
    if latency_s >= target_s * steps.severe_frac:
        return current_replicas * _SEVERE
    if latency_s >= target_s * steps.moderate_frac:
        return current_replicas * _MODERATE
    if latency_s <= target_s * steps.relaxed_frac:
        return current_replicas * _RELAXED
    return current_replicas


class HeteroScale(Policy[HeteroScaleConfig]):
    """Replicas of both roles at the ratio, from one signal. TTFT and TPOT are a safety net.

    Source: HeteroScale section 3.3, Algorithms 2 and 3 in Appendix B.
    """

    is_fit_for_aggregated = True

    def decide(self, snapshot: Snapshot) -> Decision:
        """Scale out by the signal or by a latency. Scale in by the signal, unless there is an objection.

        Objections are a latency near its objective, a prefill backlog that does not fall, and a serving replica that
        does not report the signal. They are needed since decode's tokens/s fall when an overloaded prefill starves
        decode: that signal alone would remove replicas in the overload.
        """
        present = present_replicas(snapshot)[self._ratio.leader]
        is_linear = self._config.signal in _LINEAR
        by_signal = self._proportional(snapshot) if is_linear else self._feedback(snapshot, present)
        by_latency, latency_reason = self._safety_net(snapshot, present)
        if by_signal is None:
            missing = f"no replica reports {self._config.signal}"
            if by_latency > present:
                return self._decision(by_latency, f"{latency_reason}; {missing}", is_step=True)
            return Decision(wanted=None, reason=missing)
        leaders, shown = by_signal
        reason = f"{shown.name} {shown.value:.4g} for {shown.target:.4g}"
        if by_latency > max(leaders, present):
            return self._decision(by_latency, latency_reason, shown, is_step=True)
        if leaders < present and (objection := self._objection(snapshot)):
            return self._decision(present, f"{reason}, but {objection}", shown)
        return self._decision(leaders, reason, shown, is_step=not is_linear)

    def _proportional(self, snapshot: Snapshot) -> tuple[float, Shown] | None:
        """Leaders for a signal that grows with the load (Algorithm 2); ``None``: no replica reports it."""
        role, _ = _LINEAR[self._config.signal]
        observed = _observed(self._config.signal, snapshot)
        if observed is None or self._config.target is None:
            return None
        mean, reporting = observed
        replicas = reporting * mean / self._config.target  # first line of Algorithm 2
        replicas *= demand_factor(snapshot, self._slo)
        is_of_leaders = role is self._ratio.leader or self._ratio.is_aggregated
        leaders = replicas if is_of_leaders else replicas / self._ratio.follower_share
        return leaders, Shown(name=self._config.signal, value=mean, target=self._config.target)

    def _feedback(self, snapshot: Snapshot, present: float) -> tuple[float, Shown] | None:
        """Leaders for TTFT or TPOT as the signal; ``None``: it was not observed. ``present``: present leaders."""
        is_ttft = self._config.signal is Signal.TTFT
        latency_s = snapshot.latency.ttft_s if is_ttft else snapshot.latency.tpot_s
        target_s = self._slo.ttft_s if is_ttft else self._slo.tpot_s
        if latency_s is None and snapshot.traffic.is_whole and snapshot.traffic.requests_per_s == 0.0:
            latency_s = 0.0  # there was no request
        if latency_s is None:
            return None
        step, leaders = negative_feedback(1.0, latency_s, target_s, self._config.latency), present
        if step > 1.0:
            leaders = self._grown(snapshot, present, step)
        elif step < 1.0 and self._may_shrink(snapshot, present):
            # A twentieth of a few replicas is less than one. Rounded up later, the count would never fall.
            weights = [weight for _, weight in weighted_replicas(snapshot, self._ratio.leader)]
            smallest = min(weights, default=1.0)
            leaders = smallest * math.floor(step * present / smallest + EPSILON_REPLICAS)
        return leaders, Shown(name=self._config.signal, value=latency_s, target=target_s)

    def _safety_net(self, snapshot: Snapshot, present: float) -> tuple[float, str]:
        """Leaders for TTFT or for TPOT, whichever needs more, and the reason; at least ``present``."""
        limits, latency = self._config.latency, snapshot.latency
        latencies = (("TTFT", latency.ttft_s, self._slo.ttft_s), ("TPOT", latency.tpot_s, self._slo.tpot_s))
        steps = [
            (negative_feedback(1.0, value, target, limits), f"{name} {value:.4g} s for {target:.4g} s")
            for name, value, target in latencies
            if value is not None
        ]
        if self._slo.refuses_too_many(latency):
            steps.append((_SEVERE, f"{latency.refused_frac:.0%} of the requests are refused"))
        step, reason = max(steps, default=(1.0, ""))
        return (self._grown(snapshot, present, step), reason) if step > 1.0 else (present, "")

    def _serving(self, snapshot: Snapshot, present: float) -> float:
        """Leaders that serve now: latencies are theirs alone, so they are the base of a feedback step."""
        return min(present, weight_of(admitted_replicas(snapshot, self._ratio.leader)))

    def _may_shrink(self, snapshot: Snapshot, present: float) -> bool:
        """Whether the latency shows the last change of the counts, and no objective is missed."""
        is_all_serving = self._serving(snapshot, present) >= present - EPSILON_REPLICAS
        is_current = not snapshot.state.withdrawn and is_all_serving
        return is_current and self._slo.is_met(snapshot.latency)

    def _grown(self, snapshot: Snapshot, present: float, step: float) -> float:
        """Leaders after a breach; ``step``: the factor of Algorithm 3.

        Leaders that start are in ``present`` but not in the base of the step. So the step is not taken again while they
        start. If users send more than is served, the leaders grow by that factor: a step of a fifth after each start
        could take hours.
        """
        if not is_latency_settled(snapshot):
            return present
        step = max(step, demand_factor(snapshot, self._slo))
        return max(present, step * self._serving(snapshot, present))

    def _objection(self, snapshot: Snapshot) -> str | None:
        """Why no replica may leave now; ``None``: replicas may leave."""
        latency, slo, near_frac = snapshot.latency, self._slo, self._config.latency.moderate_frac
        # At such a latency the safety net would add the replicas again.
        if (latency.ttft_s or 0.0) >= near_frac * slo.ttft_s or (latency.tpot_s or 0.0) >= near_frac * slo.tpot_s:
            return f"TTFT {_text(latency.ttft_s)} or TPOT {_text(latency.tpot_s)} is near its objective"
        if self._config.signal in _LINEAR:
            role, field = _LINEAR[self._config.signal]
            for replica, _ in weighted_replicas(snapshot, role):
                if getattr(replica, field) is None and replica.replica_id in snapshot.state.admitted:
                    return f"replica {replica.replica_id} does not report {self._config.signal}"
        if any(replica.queued_prefill_tokens is None for replica in replicas_of(snapshot, Role.PREFILL)):
            return "the prefill backlog is not known"
        if _is_standing(snapshot.state.backlog, self._config.backlog_floor_tokens):
            return f"the prefill backlog of {snapshot.state.backlog[-1][1]:.0f} tokens does not fall"
        return None

    def _decision(self, leaders: float, reason: str, *shown: Shown, is_step: bool = False) -> Decision:
        wanted = {self._ratio.leader: leaders, self._ratio.follower: leaders * self._ratio.follower_share}
        return Decision(wanted=wanted, reason=reason, is_step=is_step, shown=shown)


def observed_signals(snapshot: Snapshot) -> dict[Signal, float]:
    """The value of each signal as the policy would use it, if observed: means per standard replica, and latencies."""
    signals = {signal: each[0] for signal in _LINEAR if (each := _observed(signal, snapshot)) is not None}
    latencies = {Signal.TTFT: snapshot.latency.ttft_s, Signal.TPOT: snapshot.latency.tpot_s}
    return signals | {signal: value for signal, value in latencies.items() if value is not None}


def _observed(signal: Signal, snapshot: Snapshot) -> tuple[float, float] | None:
    """Mean of a signal that grows with the load, and the standard replicas that report it; ``None``: none does.

    Tokens/s are those of one standard replica: the sum, divided by the standard replicas. A share (of utilisation or SM
    activity) is the mean over replicas, in which each weighs as the standard replicas that it is worth.
    """
    role, field = _LINEAR[signal]
    is_share = signal not in _RATES
    reporting, total = 0.0, list[float]()
    for replica, weight in weighted_replicas(snapshot, role):
        if (value := getattr(replica, field)) is not None:
            reporting += weight
            total.append(value * weight if is_share else value)
    return (math.fsum(total) / reporting, reporting) if total else None


def _text(latency_s: float | None) -> str:
    return "-" if latency_s is None else f"{latency_s:.3g} s"


def _is_standing(backlog: Sequence[tuple[float, float]], floor_tokens: float) -> bool:
    """Whether more prompt tokens than the floor wait, and their number does not fall.

    ``backlog``: pairs of a time and the prompt tokens that waited then.
    """
    *before, (_, latest) = backlog or [(0.0, 0.0)]
    mean = math.fsum(tokens for _, tokens in before) / len(before) if before else 0.0
    return latest > floor_tokens and latest >= _FALLING_FRAC * mean
