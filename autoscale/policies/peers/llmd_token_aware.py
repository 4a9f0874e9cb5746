"""llm-d's token-aware autoscaling: prefill is sized by the seconds of its backlog, decode by its KV usage.

KEDA makes a Horizontal Pod Autoscaler (HPA) for each role. The HPA keeps the total of a metric per replica at a target.

Source: ``guides/workload-autoscaling/keda-epp-token-aware`` of llm-d (commit 560d420, after TokenScale, arXiv
2512.03416): both ScaledObjects of its ``pd-disaggregation``, and the calibration of V_P in its README. The HPA's part
is GetExternalPerPodMetricReplicas of Kubernetes.
"""

import math
from dataclasses import dataclass
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
    """The targets of both roles, the speed of prefill, and how fast the HPAs may add and remove replicas."""

    kind: Literal["llmd_token_aware"] = "llmd_token_aware"
    prefill_tokens_per_s: float | None = Field(None, gt=0.0)
    """Prompt tokens per second of one prefill replica, as calibrated (the guide's peakPrefillThroughput, V_P). Left
    out: ``peak_prefill_tokens_per_s`` of the profiles."""
    prefill_wait_s: float = Field(1.5, gt=0.0)
    """Target of the backlog per prefill replica, seconds. The default suits a TTFT objective of 2 s. The guide takes
    the objective less the time of the mean prompt (its tokens / V_P), and 60 to 70 % of that for a high quantile."""
    decode_kv_frac: float = Field(0.8, gt=0.0, le=1.0, description="Target of the KV usage per decode replica, 0..1.")
    up: ScalingRulesConfig = ScalingRulesConfig(window_s=0.0, step_replicas=1, period_s=180.0)
    down: ScalingRulesConfig = ScalingRulesConfig(window_s=300.0, step_replicas=1, period_s=300.0)


def peak_prefill_tokens_per_s(prefill: EngineProfile, decode: EngineProfile) -> float:
    """Prompt tokens per second of one prefill replica: ``V_P = chunk / TTFT``, for one prompt on idle engines.

    ``chunk``: tokens of the prompt, as many as one prefill step takes. ``TTFT``: prefill, transfer and the first decode
    step.
    """
    chunk = prefill.max_batch_tokens
    ttft_s = prefill.prefill.seconds_for(chunk) + prefill.handoff.seconds_for(chunk)
    return chunk / (ttft_s + decode.decode.seconds_for(1, chunk))


def replicas_for_total(total: float, current: int, target: float, tolerance: float) -> int:
    """``ceil(total / target)``; ``current`` if the metric per replica is near its target.

    ``tolerance``: share of the target that counts as near.

    Source: GetExternalPerPodMetricReplicas, which KEDA's ``metricType: AverageValue`` means.
    """
    if current > 0 and abs(1.0 - total / (target * current)) <= tolerance + EPSILON:
        return current
    return whole(total / target)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metric:
    """The total of a metric over a role's replicas, and its target per replica."""

    name: str
    total: float
    target: float


class LlmdTokenAware(Policy[LlmdTokenAwareConfig]):
    """Prefill replicas from the seconds of queued prompt tokens, decode replicas from their KV usage."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """Size each role by its metric; a role without reports stays as it is."""
        config, memory = self._config, dict(snapshot.state.memory)
        if "synced_s" in memory and not is_due(snapshot, memory, "synced_s", config.sync_s):
            return standing(snapshot, f"the HPA looks every {config.sync_s:g} s", memory=memory)
        memory["synced_s"] = (snapshot.now_s,)
        metrics = self._metrics(snapshot)
        if not metrics:
            return decided(snapshot, None, "no replica reports its prefill backlog or its KV", memory=memory)
        present = desired_replicas(snapshot.state.desired)
        wanted, shown = {role: float(present[role]) for role in Role}, list[Shown]()
        for role, metric in metrics.items():
            current = present[role]
            desired = replicas_for_total(metric.total, current, metric.target, config.tolerance_frac)
            wanted[role], series = paced(desired, current, snapshot.now_s, str(role), memory, config)
            memory.update(series)
            shown.append(Shown(name=metric.name, value=metric.total / max(1, current), target=metric.target))
        return decided_by(snapshot, wanted, shown, memory=memory)

    def _metrics(self, snapshot: Snapshot) -> dict[Role, _Metric]:
        """The metric of each role with reports. Replicas without a report add nothing, as in Prometheus' sum."""
        config, serving = self._config, serving_replicas(snapshot)
        queued = [tokens for r in serving[Role.PREFILL] if (tokens := r.queued_prefill_tokens) is not None]
        kv_fracs = [frac for r in serving[Role.DECODE] if (frac := r.kv_usage_frac) is not None]
        metrics: dict[Role, _Metric] = {}
        if queued:
            tokens_per_s = config.prefill_tokens_per_s or peak_prefill_tokens_per_s(config.prefill, config.decode)
            backlog_s = math.fsum(queued) / tokens_per_s
            metrics[Role.PREFILL] = _Metric(name="prefill_backlog_s", total=backlog_s, target=config.prefill_wait_s)
        if kv_fracs:
            metrics[Role.DECODE] = _Metric(name="decode_kv", total=math.fsum(kv_fracs), target=config.decode_kv_frac)
        return metrics
