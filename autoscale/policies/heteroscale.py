"""HeteroScale: proportional control on one signal for both roles, latency as a safety net (section 3.3, Appendix B)."""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autoscale.policies.latency_net import has_shown_what_it_did
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, ReplicaStats, Shown, Snapshot
from kvtransfer.topology import Role

# Algorithm 3: a severe breach adds a fifth, a moderate one a tenth; far below the target a twentieth goes.
_SEVERE, _MODERATE, _RELAX = 1.2, 1.1, 0.95
# A backlog below this share of its mean over the window falls.
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


_LINEAR: dict[Signal, tuple[Role, Callable[[ReplicaStats], float | None]]] = {
    Signal.DECODE_TPS: (Role.DECODE, attrgetter("decode_tokens_per_s")),
    Signal.PREFILL_TPS: (Role.PREFILL, attrgetter("prefill_tokens_per_s")),
    Signal.PREFILL_GPU_UTILIZATION: (Role.PREFILL, attrgetter("gpu_utilization_frac")),
    Signal.DECODE_GPU_UTILIZATION: (Role.DECODE, attrgetter("gpu_utilization_frac")),
    Signal.PREFILL_SM_ACTIVITY: (Role.PREFILL, attrgetter("sm_activity_frac")),
    Signal.DECODE_SM_ACTIVITY: (Role.DECODE, attrgetter("sm_activity_frac")),
}


class LatencyStepsConfig(BaseModel):
    """Where the safety net acts, as multiples of the objective (alpha_out, beta_out and gamma_in of Algorithm 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    severe_frac: float = Field(1.2, gt=0.0, description="From here on a fifth more replicas (alpha_out).")
    moderate_frac: float = Field(0.9, gt=0.0, description="From here on a tenth more (beta_out).")
    relaxed_frac: float = Field(0.4, ge=0.0, description="Up to here a twentieth fewer (gamma_in), as the signal.")

    @model_validator(mode="after")
    def _check_order(self) -> "LatencyStepsConfig":
        if not self.relaxed_frac < self.moderate_frac <= self.severe_frac:
            raise ValueError(
                f"relaxed_frac ({self.relaxed_frac:g}) < moderate_frac ({self.moderate_frac:g}) <= severe_frac "
                f"({self.severe_frac:g}) must hold, or one step would hide another"
            )
        return self


class HeteroScaleConfig(BaseModel):
    """The signal, what one replica should show of it, and the safety net."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["heteroscale"] = "heteroscale"
    signal: Signal = Signal.DECODE_TPS
    target: float | None = Field(
        None,
        gt=0.0,
        description="The signal of one replica at the load you want it to run at: tokens/s, or 0..1 for utilisation "
        "and SM activity. ttft and tpot take theirs from the objective.",
    )
    latency: LatencyStepsConfig = LatencyStepsConfig()
    backlog_floor_tokens: float = Field(
        2048.0, ge=0.0, description="Fewer prompt tokens than this waiting for prefill are no backlog."
    )

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


def proportional(current_replicas: float, metric: float, target: float) -> float:
    """Replicas expected for a metric that grows in proportion to load (Algorithm 2, first line).

    Args:
        current_replicas: replicas that show the metric.
        metric: its mean over them.
        target: what one of them should show.
    """
    return current_replicas * metric / target


def negative_feedback(current_replicas: float, latency_s: float, target_s: float, steps: LatencyStepsConfig) -> float:
    """Replicas expected for a latency (Algorithm 3).

    As printed, its last branch returns ScaleIn whatever the latency was, once the cooldown for scaling out has not
    passed and that for scaling in has; the text says that a breach adds replicas. So the sign is the step's own.
    """
    if latency_s >= target_s * steps.severe_frac:
        return current_replicas * _SEVERE
    if latency_s >= target_s * steps.moderate_frac:
        return current_replicas * _MODERATE
    if latency_s <= target_s * steps.relaxed_frac:
        return current_replicas * _RELAX
    return current_replicas


class HeteroScale:
    """The policy; see ``decide``."""

    def __init__(self, config: HeteroScaleConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config
        self._ratio = ratio
        self._slo = slo

    def decide(self, snapshot: Snapshot) -> Decision:
        """Scale out if the signal or a latency asks; scale in only if the signal asks and nothing else objects.

        What objects: a quantile near its objective, a prefill backlog that does not fall, or a replica that serves and
        does not show the signal. An overload of prefill starves decode, whose tokens/s fall with it: read alone, that
        signal would take replicas away just then.
        """
        now = sum(count for key, count in snapshot.state.desired.items() if key.role is self._ratio.leader)
        own = self._proportional(snapshot) if self._config.signal in _LINEAR else self._feedback(snapshot, now)
        net, net_reason = self._safety_net(snapshot, now)
        if own is None:
            nothing = f"nothing shows {self._config.signal}"
            if net > now:
                return self._decision(net, f"{net_reason}; {nothing}", is_step=True)
            return Decision(wanted=None, reason=nothing)
        asked, shown = own
        reason = f"{shown.name} {shown.value:.4g} for {shown.target:.4g}"
        if net > max(asked, now):
            return self._decision(net, net_reason, shown, is_step=True)
        if asked < now and (objection := self._objection(snapshot)):
            return self._decision(now, f"{reason}, but {objection}", shown)
        return self._decision(asked, reason, shown, is_step=self._config.signal not in _LINEAR)

    def _proportional(self, snapshot: Snapshot) -> tuple[float, Shown] | None:
        role, replicas, read = self._readers(snapshot)
        seen = [value for replica in replicas if (value := read(replica)) is not None]
        if not seen or self._config.target is None:
            return None
        mean = math.fsum(seen) / len(seen)
        expected = proportional(len(seen), mean, self._config.target)
        leaders = expected if role is self._ratio.leader else expected / self._ratio.follower_share
        return leaders, Shown(name=self._config.signal, value=mean, target=self._config.target)

    def _readers(self, snapshot: Snapshot) -> tuple[Role, list[ReplicaStats], Callable[[ReplicaStats], float | None]]:
        """The signal's role, its replicas, and what reads the signal of one of them."""
        role, read = _LINEAR[self._config.signal]
        return role, [r for pool in snapshot.pools if pool.key.role is role for r in pool.replicas], read

    def _feedback(self, snapshot: Snapshot, now: int) -> tuple[float, Shown] | None:
        """TTFT or TPOT as the signal itself."""
        is_ttft = self._config.signal is Signal.TTFT
        seen = snapshot.latency.ttft_s if is_ttft else snapshot.latency.tpot_s
        target_s = self._slo.ttft_s if is_ttft else self._slo.tpot_s
        if seen is None and snapshot.traffic.is_whole and snapshot.traffic.requests_per_s == 0.0:
            seen = 0.0  # nobody waits because nobody came
        if seen is None:
            return None
        expected = negative_feedback(now, seen, target_s, self._config.latency)
        # A twentieth of a few replicas is still one.
        shown = Shown(name=self._config.signal, value=seen, target=target_s)
        return expected if expected >= now else math.floor(expected), shown

    def _safety_net(self, snapshot: Snapshot, now: int) -> tuple[float, str]:
        """The larger of what TTFT and TPOT ask for.

        Nothing more while replicas that were asked for do not serve yet, or latencies are still from before they did,
        unless there are some to bring back.
        """
        steps, latency = self._config.latency, snapshot.latency
        seen = (("TTFT", latency.ttft_s, self._slo.ttft_s), ("TPOT", latency.tpot_s, self._slo.tpot_s))
        asked = [
            (negative_feedback(now, value, target, steps), f"{name} {value:.4g} s for {target:.4g} s")
            for name, value, target in seen
            if value is not None
        ]
        most = max(asked, default=(float(now), ""))
        return most if most[0] <= now or has_shown_what_it_did(snapshot) else (float(now), "")

    def _objection(self, snapshot: Snapshot) -> str | None:
        latency, share = snapshot.latency, self._config.latency.moderate_frac
        # From where the safety net would add replicas, taking some away would make it add them again.
        if (latency.ttft_s or 0.0) >= share * self._slo.ttft_s or (latency.tpot_s or 0.0) >= share * self._slo.tpot_s:
            return f"TTFT {_text(latency.ttft_s)} or TPOT {_text(latency.tpot_s)} is near its objective"
        if self._config.signal in _LINEAR:
            _, replicas, read = self._readers(snapshot)
            for replica in replicas:
                if read(replica) is None and replica.replica_id in snapshot.state.admitted:
                    return f"replica {replica.replica_id} does not show {self._config.signal}"
        if any(
            r.queued_prefill_tokens is None for p in snapshot.pools if p.key.role is Role.PREFILL for r in p.replicas
        ):
            return "the prefill backlog is not known"
        if _is_standing(snapshot.state.backlog, self._config.backlog_floor_tokens):
            return f"the prefill backlog of {snapshot.state.backlog[-1][1]:.0f} tokens does not fall"
        return None

    def _decision(self, leaders: float, reason: str, *shown: Shown, is_step: bool = False) -> Decision:
        wanted = {self._ratio.leader: float(leaders), self._ratio.follower: leaders * self._ratio.follower_share}
        return Decision(wanted=wanted, reason=reason, is_step=is_step, shown=shown)


def _text(seen_s: float | None) -> str:
    return "-" if seen_s is None else f"{seen_s:.3g} s"


def _is_standing(backlog: Sequence[tuple[float, float]], floor_tokens: float) -> bool:
    """Whether more prompt tokens than the floor wait, and not clearly fewer than on average before."""
    *before, (_, latest) = backlog or [(0.0, 0.0)]
    mean = math.fsum(tokens for _, tokens in before) / len(before) if before else 0.0
    return latest > floor_tokens and latest >= _FALLING_FRAC * mean
