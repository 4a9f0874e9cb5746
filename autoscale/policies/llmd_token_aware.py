"""llm-d's token-aware path: prefill by seconds of backlog, decode by KV, each behind a KEDA-made HPA of its own.

Source: ``guides/workload-autoscaling/keda-epp-token-aware`` of llm-d (commit 560d420, after TokenScale, arXiv
2512.03416), both ScaledObjects of its ``pd-disaggregation`` and the calibration of V_P in its README; the HPA's part is
GetExternalPerPodMetricReplicas of Kubernetes.
"""

import math
from typing import Literal

from pydantic import Field

from autoscale.headcount import desired_replicas
from autoscale.policies.hpa import ScalingRulesConfig, paced
from autoscale.policies.independent import decided, is_due, serving_replicas, standing
from autoscale.policies.profiled import ProfiledConfig
from autoscale.profile import EngineProfile
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role

_EPSILON = 1e-9


class LlmdTokenAwareConfig(ProfiledConfig):
    """The two thresholds, prefill's velocity, and the pace of both."""

    kind: Literal["llmd_token_aware"] = "llmd_token_aware"
    prefill_tokens_per_s: float | None = Field(
        None, gt=0.0, description="peakPrefillThroughput (V_P) as calibrated; None: as the profiles have it."
    )
    prefill_wait_s: float = Field(
        1.5,
        gt=0.0,
        description="Seconds of backlog per replica. It suits a TTFT of 2 s; the guide's rule is the objective less "
        "ISL / V_P, and 60 to 70 % of that for a tail.",
    )
    decode_kv_frac: float = Field(0.8, gt=0.0, le=1.0, description="KV usage per replica.")
    tolerance_frac: float = Field(0.1, ge=0.0, lt=1.0, description="The HPA's: so near its target nothing moves.")
    sync_s: float = Field(15.0, gt=0.0, description="Time between two decisions, the HPA's.")
    up: ScalingRulesConfig = ScalingRulesConfig(window_s=0.0, step_replicas=1, period_s=180.0)
    down: ScalingRulesConfig = ScalingRulesConfig(window_s=300.0, step_replicas=1, period_s=300.0)


def peak_prefill_tokens_per_s(prefill: EngineProfile, decode: EngineProfile) -> float:
    """``V_P = chunk / TTFT``, where TTFT on an idle stack is prefill, transfer and the first decode step.

    Args:
        prefill: of one prefill replica; the chunk is what one of its steps takes.
        decode: of one decode replica.
    """
    chunk = prefill.max_batch_tokens
    ttft_s = prefill.prefill.seconds_for(chunk) + prefill.handoff.seconds_for(chunk)
    return chunk / (ttft_s + decode.decode.seconds_for(1, chunk))


def replicas_for_total(total: float, current: int, target: float, tolerance: float) -> int:
    """``ceil(total / target)``, unless the mean of the replicas that there are is near enough (AverageValue).

    Args:
        total: the metric over all replicas.
        current: replicas wanted so far.
        target: what one replica should have of it.
        tolerance: how far the mean may be from the target, as a share.
    """
    if current > 0 and abs(1.0 - total / (target * current)) <= tolerance + _EPSILON:
        return current
    return math.ceil(total / target - _EPSILON)


class LlmdTokenAware:
    """The policy; see ``decide``."""

    def __init__(self, config: LlmdTokenAwareConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config
        velocity = config.prefill_tokens_per_s
        self._velocity = peak_prefill_tokens_per_s(config.prefill, config.decode) if velocity is None else velocity

    def decide(self, snapshot: Snapshot) -> Decision:
        """Each role by its own total over the replicas that show it; one that nobody shows stays as it is."""
        config, memory = self._config, dict(snapshot.state.memory)
        if "synced_s" in memory and not is_due(snapshot, memory, "synced_s", config.sync_s):
            return standing(snapshot, f"the HPA looks every {config.sync_s:g} s", memory=memory)
        memory["synced_s"] = (snapshot.now_s,)
        serving, present = serving_replicas(snapshot), desired_replicas(snapshot.state.desired)
        queued = [q for r in serving[Role.PREFILL] if (q := r.queued_prefill_tokens) is not None]
        kv = [used for r in serving[Role.DECODE] if (used := r.kv_usage_frac) is not None]
        totals: dict[Role, tuple[str, float, float]] = {}
        if queued:
            totals[Role.PREFILL] = ("prefill_backlog_s", math.fsum(queued) / self._velocity, config.prefill_wait_s)
        if kv:
            totals[Role.DECODE] = ("decode_kv", math.fsum(kv), config.decode_kv_frac)
        if not totals:
            return decided(snapshot, None, "no replica reports its prefill backlog or its KV", memory=memory)
        wanted, shown = {role: float(present[role]) for role in Role}, list[Shown]()
        for role, (name, total, target) in totals.items():
            desired = replicas_for_total(total, present[role], target, config.tolerance_frac)
            wanted[role], series = paced(
                desired, present[role], snapshot.now_s, str(role), memory, up=config.up, down=config.down
            )
            memory.update(series)
            shown.append(Shown(name=name, value=total / max(1, present[role]), target=target))
        reason = ", ".join(f"{entry.name} {entry.value:.4g} for {entry.target:.4g}" for entry in shown)
        return decided(snapshot, wanted, reason, memory=memory, shown=tuple(shown))
