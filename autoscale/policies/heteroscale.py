"""HeteroScale: proportional control on one signal for both roles, latency as a safety net (section 3.3, Appendix B)."""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from autoscale.policies.policy import Policy, has_shown_what_it_did, replicas_of
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# Algorithm 3: factor of the replicas after a severe breach of a latency objective.
_SEVERE = 1.2
# Algorithm 3: factor after a moderate breach.
_MODERATE = 1.1
# Algorithm 3: factor while the latency is far below its objective.
_RELAX = 0.95
# A backlog below this share of its mean over the window is falling.
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


# The role of each signal that grows with the load, and the field of its replicas that shows it.
_LINEAR = {
    Signal.DECODE_TPS: (Role.DECODE, "decode_tokens_per_s"),
    Signal.PREFILL_TPS: (Role.PREFILL, "prefill_tokens_per_s"),
    Signal.PREFILL_GPU_UTILIZATION: (Role.PREFILL, "gpu_utilization_frac"),
    Signal.DECODE_GPU_UTILIZATION: (Role.DECODE, "gpu_utilization_frac"),
    Signal.PREFILL_SM_ACTIVITY: (Role.PREFILL, "sm_activity_frac"),
    Signal.DECODE_SM_ACTIVITY: (Role.DECODE, "sm_activity_frac"),
}


class LatencyStepsConfig(StrictConfig):
    """Latencies at which the safety net acts, as shares of the objective (Algorithm 3)."""

    severe_frac: float = Field(1.2, gt=0.0)
    """From this share of the latency objective on, a fifth more replicas (alpha_out)."""
    moderate_frac: float = Field(0.9, gt=0.0)
    """From this share of the latency objective on, a tenth more replicas (beta_out)."""
    relaxed_frac: float = Field(0.4, ge=0.0)
    """Up to this share of the objective, a twentieth fewer (gamma_in), where a latency is the signal."""

    @model_validator(mode="after")
    def _check_order(self) -> "LatencyStepsConfig":
        if not self.relaxed_frac < self.moderate_frac <= self.severe_frac:
            raise ValueError(
                f"relaxed_frac ({self.relaxed_frac:g}) < moderate_frac ({self.moderate_frac:g}) <= severe_frac "
                f"({self.severe_frac:g}) must hold, or one step would hide another"
            )
        return self


class HeteroScaleConfig(StrictConfig):
    """The signal, what one replica should show of it, and the safety net."""

    kind: Literal["heteroscale"] = "heteroscale"
    signal: Signal = Signal.DECODE_TPS
    target: float | None = Field(None, gt=0.0)
    """The signal of one replica at the load you want it to run at: tokens/s, or 0..1 for utilisation and SM activity.
    ttft and tpot take theirs from the objective."""
    latency: LatencyStepsConfig = LatencyStepsConfig()
    backlog_floor_tokens: float = Field(2048.0, ge=0.0)
    """A backlog is at least this many prompt tokens that wait for prefill."""

    @model_validator(mode="after")
    def _check_target(self) -> "HeteroScaleConfig":
        if self.signal not in _LINEAR:
            if self.target is not None:
                raise ValueError(f"target ({self.target:g}) does nothing for {self.signal}: set slo.{self.signal}_s")
        elif self.target is None:
            raise ValueError(
                f"target is missing: what one replica shows of {self.signal} at the load you want (for decode_tps its "
                "tokens/s at about 80 % of the most that meets your objective)"
            )
        elif self.signal not in (Signal.DECODE_TPS, Signal.PREFILL_TPS) and self.target > 1.0:
            raise ValueError(f"target ({self.target:g}) of {self.signal} is a share of 1: give 0.7 for 70 %")
        return self


def negative_feedback(current_replicas: float, latency_s: float, target_s: float, steps: LatencyStepsConfig) -> float:
    """Replicas expected for a latency (Algorithm 3).

    The printed last branch returns ScaleIn for any latency while only the cooldown for scaling out runs. The paper's
    text says that a breach adds replicas, and so does this function.
    """
    if latency_s >= target_s * steps.severe_frac:
        return current_replicas * _SEVERE
    if latency_s >= target_s * steps.moderate_frac:
        return current_replicas * _MODERATE
    if latency_s <= target_s * steps.relaxed_frac:
        return current_replicas * _RELAX
    return current_replicas


class HeteroScale(Policy[HeteroScaleConfig]):
    """Replicas of both roles at the ratio, from one signal per replica; TTFT and TPOT are a safety net.

    Source: HeteroScale section 3.3, Algorithms 2 and 3 in Appendix B.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        """Scale out by the signal or by a latency; scale in by the signal, unless something objects.

        Objections are: a latency near its objective, a prefill backlog that does not fall, and a serving replica that
        does not report the signal. They are needed since an overloaded prefill starves decode, so that decode's
        tokens/s fall: by that signal alone replicas would leave just then.
        """
        now = sum(count for key, count in snapshot.state.desired.items() if key.role is self._ratio.leader)
        own = self._proportional(snapshot) if self._config.signal in _LINEAR else self._feedback(snapshot, now)
        net, net_reason = self._safety_net(snapshot, now)
        if own is None:
            nothing = f"no replica reports {self._config.signal}"
            if net > now:
                return self._decision(net, f"{net_reason}; {nothing}", is_step=True)
            return Decision(wanted=None, reason=nothing)
        expected, shown = own
        reason = f"{shown.name} {shown.value:.4g} for {shown.target:.4g}"
        if net > max(expected, now):
            return self._decision(net, net_reason, shown, is_step=True)
        if expected < now and (objection := self._objection(snapshot)):
            return self._decision(now, f"{reason}, but {objection}", shown)
        return self._decision(expected, reason, shown, is_step=self._config.signal not in _LINEAR)

    def _proportional(self, snapshot: Snapshot) -> tuple[float, Shown] | None:
        role, field = _LINEAR[self._config.signal]
        values = [value for replica in replicas_of(snapshot, role) if (value := getattr(replica, field)) is not None]
        if not values or self._config.target is None:
            return None
        mean = math.fsum(values) / len(values)
        expected = len(values) * mean / self._config.target  # Algorithm 2, first line
        leaders = expected if role is self._ratio.leader else expected / self._ratio.follower_share
        return leaders, Shown(name=self._config.signal, value=mean, target=self._config.target)

    def _feedback(self, snapshot: Snapshot, now: int) -> tuple[float, Shown] | None:
        """Replicas for TTFT or TPOT as the signal itself."""
        is_ttft = self._config.signal is Signal.TTFT
        latency_s = snapshot.latency.ttft_s if is_ttft else snapshot.latency.tpot_s
        target_s = self._slo.ttft_s if is_ttft else self._slo.tpot_s
        if latency_s is None and snapshot.traffic.is_whole and snapshot.traffic.requests_per_s == 0.0:
            latency_s = 0.0  # no request came
        if latency_s is None:
            return None
        expected = negative_feedback(now, latency_s, target_s, self._config.latency)
        # A twentieth of a few replicas is rounded to one whole replica.
        shown = Shown(name=self._config.signal, value=latency_s, target=target_s)
        return expected if expected >= now else math.floor(expected), shown

    def _safety_net(self, snapshot: Snapshot, now: int) -> tuple[float, str]:
        """The larger of the counts for TTFT and TPOT, and the reason.

        No more than now while the last added replicas have not shown their effect on latencies.
        """
        steps, latency = self._config.latency, snapshot.latency
        latencies = (("TTFT", latency.ttft_s, self._slo.ttft_s), ("TPOT", latency.tpot_s, self._slo.tpot_s))
        counts = [
            (negative_feedback(now, value, target, steps), f"{name} {value:.4g} s for {target:.4g} s")
            for name, value, target in latencies
            if value is not None
        ]
        most = max(counts, default=(float(now), ""))
        return most if most[0] <= now or has_shown_what_it_did(snapshot) else (float(now), "")

    def _objection(self, snapshot: Snapshot) -> str | None:
        """Why no replica may leave now."""
        latency, share = snapshot.latency, self._config.latency.moderate_frac
        # The safety net would add replicas again at this latency.
        if (latency.ttft_s or 0.0) >= share * self._slo.ttft_s or (latency.tpot_s or 0.0) >= share * self._slo.tpot_s:
            return f"TTFT {_text(latency.ttft_s)} or TPOT {_text(latency.tpot_s)} is near its objective"
        if self._config.signal in _LINEAR:
            role, field = _LINEAR[self._config.signal]
            for replica in replicas_of(snapshot, role):
                if getattr(replica, field) is None and replica.replica_id in snapshot.state.admitted:
                    return f"replica {replica.replica_id} does not report {self._config.signal}"
        if any(replica.queued_prefill_tokens is None for replica in replicas_of(snapshot, Role.PREFILL)):
            return "the prefill backlog is not known"
        if _is_standing(snapshot.state.backlog, self._config.backlog_floor_tokens):
            return f"the prefill backlog of {snapshot.state.backlog[-1][1]:.0f} tokens does not fall"
        return None

    def _decision(self, leaders: float, reason: str, *shown: Shown, is_step: bool = False) -> Decision:
        wanted = {self._ratio.leader: float(leaders), self._ratio.follower: leaders * self._ratio.follower_share}
        return Decision(wanted=wanted, reason=reason, is_step=is_step, shown=shown)


def _text(latency_s: float | None) -> str:
    return "-" if latency_s is None else f"{latency_s:.3g} s"


def _is_standing(backlog: Sequence[tuple[float, float]], floor_tokens: float) -> bool:
    """Whether more prompt tokens than the floor wait, and the backlog is not falling."""
    *before, (_, latest) = backlog or [(0.0, 0.0)]
    mean = math.fsum(tokens for _, tokens in before) / len(before) if before else 0.0
    return latest > floor_tokens and latest >= _FALLING_FRAC * mean
