"""llm-d's token-aware path: prefill by seconds of backlog, decode by KV, each with an HPA made by KEDA.

Source: ``guides/workload-autoscaling/keda-epp-token-aware`` of llm-d (commit 560d420, after TokenScale, arXiv
2512.03416), both ScaledObjects of its ``pd-disaggregation`` and the calibration of V_P in its README; the HPA's part is
GetExternalPerPodMetricReplicas of Kubernetes.
"""

import math
from typing import Literal

from pydantic import Field

from autoscale.engines.profile import EngineProfile
from autoscale.headcount import desired_replicas
from autoscale.policies.peers.hpa import HpaLoopConfig, ScalingRulesConfig, paced
from autoscale.policies.peers.independent import (
    EPSILON,
    decided,
    decided_by,
    is_due,
    serving_replicas,
    standing,
)
from autoscale.policies.policy import Policy, ProfiledConfig
from autoscale.ratio import whole
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role


class LlmdTokenAwareConfig(HpaLoopConfig, ProfiledConfig):
    """The two thresholds, prefill's velocity, and the pace of both."""

    kind: Literal["llmd_token_aware"] = "llmd_token_aware"
    prefill_tokens_per_s: float | None = Field(None, gt=0.0)
    """Calibrated peakPrefillThroughput (V_P); left out: by the profiles."""
    prefill_wait_s: float = Field(1.5, gt=0.0)
    """Target of the backlog per prefill replica. It suits a TTFT of 2 s; the guide's rule is the objective less ISL /
    V_P, and 60 to 70 % of that for a tail."""
    decode_kv_frac: float = Field(0.8, gt=0.0, le=1.0, description="Target of the KV usage per decode replica.")
    up: ScalingRulesConfig = ScalingRulesConfig(window_s=0.0, step_replicas=1, period_s=180.0)
    down: ScalingRulesConfig = ScalingRulesConfig(window_s=300.0, step_replicas=1, period_s=300.0)


def peak_prefill_tokens_per_s(prefill: EngineProfile, decode: EngineProfile) -> float:
    """``V_P = chunk / TTFT``: the batch of one step over prefill, transfer and first decode step on an idle stack."""
    chunk = prefill.max_batch_tokens
    ttft_s = prefill.prefill.seconds_for(chunk) + prefill.handoff.seconds_for(chunk)
    return chunk / (ttft_s + decode.decode.seconds_for(1, chunk))


def replicas_for_total(total: float, current: int, target: float, tolerance: float) -> int:
    """``ceil(total / target)``, unless the mean over the current replicas is near the target (AverageValue)."""
    if current > 0 and abs(1.0 - total / (target * current)) <= tolerance + EPSILON:
        return current
    return whole(total / target)


class LlmdTokenAware(Policy[LlmdTokenAwareConfig]):
    """Prefill replicas from the seconds of queued prompt tokens, decode replicas from their KV usage."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """Size each role by its total over the replicas that report it; a role without reports stays as it is."""
        config, memory = self._config, dict(snapshot.state.memory)
        if "synced_s" in memory and not is_due(snapshot, memory, "synced_s", config.sync_s):
            return standing(snapshot, f"the HPA looks every {config.sync_s:g} s", memory=memory)
        memory["synced_s"] = (snapshot.now_s,)
        serving, present = serving_replicas(snapshot), desired_replicas(snapshot.state.desired)
        queued = [q for r in serving[Role.PREFILL] if (q := r.queued_prefill_tokens) is not None]
        kv = [used for r in serving[Role.DECODE] if (used := r.kv_usage_frac) is not None]
        totals: dict[Role, tuple[str, float, float]] = {}
        if queued:
            velocity = config.prefill_tokens_per_s or peak_prefill_tokens_per_s(config.prefill, config.decode)
            totals[Role.PREFILL] = ("prefill_backlog_s", math.fsum(queued) / velocity, config.prefill_wait_s)
        if kv:
            totals[Role.DECODE] = ("decode_kv", math.fsum(kv), config.decode_kv_frac)
        if not totals:
            return decided(snapshot, None, "no replica reports its prefill backlog or its KV", memory=memory)
        wanted, shown = {role: float(present[role]) for role in Role}, list[Shown]()
        for role, (name, total, target) in totals.items():
            desired = replicas_for_total(total, present[role], target, config.tolerance_frac)
            wanted[role], series = paced(desired, present[role], snapshot.now_s, str(role), memory, config)
            memory.update(series)
            shown.append(Shown(name=name, value=total / max(1, present[role]), target=target))
        return decided_by(snapshot, wanted, shown, memory=memory)
