"""Kubernetes' Horizontal Pod Autoscaler v2, one for each role, with its stabilization and its scaling rules.

Source: ``pkg/controller/podautoscaler`` of Kubernetes 1.33: ``replica_calculator.go`` (calcPlainMetricReplicas, with
pods that have no metrics) and ``horizontal.go`` (computeReplicasForMetrics, stabilizeRecommendationWithBehaviors and
convertDesiredReplicasWithBehaviorRate); defaults as in its documentation, "Default Behavior".

A *recommendation* is the count that the metrics ask for. *Stabilization* replaces it by the one of the last
recommendations that changes the count least. *Scaling rules* then limit the change per period.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean
from typing import Literal

from pydantic import Field

from autoscale.headcount import desired_replicas
from autoscale.policies.peers.independent import (
    EPSILON,
    Memory,
    decided,
    decided_by,
    is_due,
    serving_replicas,
    standing,
)
from autoscale.policies.policy import Policy
from autoscale.ratio import whole
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role


class HpaMetric(StrEnum):
    """A metric of a replica; the HPA moves its mean over a role's replicas to the target."""

    GPU_UTILIZATION = "gpu_utilization_frac"
    KV_USAGE = "kv_usage_frac"
    WAITING_REQUESTS = "waiting_requests"
    RUNNING_REQUESTS = "running_requests"


class HpaMetricConfig(StrictConfig):
    """The metric of one role."""

    metric: HpaMetric = HpaMetric.GPU_UTILIZATION
    target: float = Field(0.8, gt=0.0)
    """Target of the metric's mean: 0..1 for utilization and KV usage, else requests. Kubernetes' default is 80 %."""


class ScalingRulesConfig(StrictConfig):
    """HPAScalingRules of one direction with selectPolicy Max: per period, the larger one of both steps is allowed."""

    window_s: float = Field(ge=0.0, le=3600.0)
    """Stabilization window, seconds: of its recommendations, the one that changes the count least is used."""
    step_replicas: int = Field(0, ge=0, description="Replicas that may be added or removed per period.")
    step_frac: float = Field(0.0, ge=0.0, description="Share of the replicas that may be added or removed per period.")
    period_s: float = Field(15.0, gt=0.0, le=1800.0)


class HpaLoopConfig(StrictConfig):
    """When an HPA acts, and how fast it may add and remove replicas."""

    tolerance_frac: float = Field(0.1, ge=0.0, lt=1.0)
    """Distance of the mean from its target, as a share of the target, up to which the count stays."""
    sync_s: float = Field(15.0, gt=0.0, description="Time between two decisions, seconds.")
    up: ScalingRulesConfig = ScalingRulesConfig(window_s=0.0, step_replicas=4, step_frac=1.0, period_s=15.0)
    down: ScalingRulesConfig = ScalingRulesConfig(window_s=300.0, step_frac=1.0, period_s=15.0)


class HpaConfig(HpaLoopConfig):
    """The metrics of both roles."""

    kind: Literal["hpa"] = "hpa"
    prefill: HpaMetricConfig = HpaMetricConfig()
    decode: HpaMetricConfig = HpaMetricConfig()
    prefill_more: tuple[HpaMetricConfig, ...] = ()
    """Further prefill metrics; of all prefill metrics, the one that needs most replicas counts."""
    decode_more: tuple[HpaMetricConfig, ...] = ()
    """Further decode metrics; of all decode metrics, the one that needs most replicas counts."""

    def metrics(self, role: Role) -> tuple[HpaMetricConfig, ...]:
        """All metrics of a role."""
        return (self.prefill, *self.prefill_more) if role is Role.PREFILL else (self.decode, *self.decode_more)


def replicas_for_metric(values: Sequence[float], missing: int, current: int, target: float, tolerance: float) -> int:
    """``ceil(count * mean / target)``, cautious about replicas without the metric (calcPlainMetricReplicas).

    The count is that of all replicas, with the metric or without; ``current`` is the result if nothing should change.
    ``values``: the metric of the replicas that report it, at least one. ``missing``: number of replicas that do not.
    The missing ones count as idle if replicas would be added, and as at the target if replicas would be removed.
    ``tolerance``: distance from the target up to which nothing changes, as a share of the target.
    """
    usage = fmean(values) / target
    count = len(values) + missing
    mean_usage = usage
    if missing:
        missing_usage = 1.0 if usage < 1.0 else 0.0
        mean_usage = (usage * len(values) + missing * missing_usage) / count
    # The missing replicas may damp a change, but not turn its direction.
    has_turned = (usage - 1.0) * (mean_usage - 1.0) < 0.0
    if abs(1.0 - mean_usage) <= tolerance + EPSILON or has_turned:
        return current
    replicas = whole(mean_usage * count)
    # Low usage never adds replicas and high usage never removes any. ``count`` could ask for that: it may be another
    # number than ``current``.
    would_turn = replicas > current if mean_usage < 1.0 else replicas < current
    return current if missing and would_turn else replicas


def paced(
    desired: int, current: int, now_s: float, series: str, memory: Memory, config: HpaLoopConfig
) -> tuple[int, dict[str, tuple[float, ...]]]:
    """A recommendation (``desired``) after stabilization and scaling rules; and the series for the next call.

    ``series``: prefix of the names of its series in ``memory``. They are earlier recommendations, recent changes of the
    count, and the count at the last call with its time. Any change of the count, by this policy or not, is noticed at
    the next call, as a difference from the count at the last call. It gets the time of the last call.
    """
    names = [f"{series}_{name}" for name in ("recommended_at_s", "recommended", "changed_at_s", "changed", "count")]
    recommended_at, recommended, changed_at, changed, last_count = (memory.get(name, ()) for name in names)
    up, down = config.up, config.down

    longest_window_s = max(up.window_s, down.window_s)
    earlier = [
        (at, n) for at, n in zip(recommended_at, recommended, strict=True) if 0.0 < now_s - at < longest_window_s
    ]
    # A count below the lowest recommendation of the up window rises to it; one above the highest of the down window
    # falls.
    floor = min([desired, *(n for at, n in earlier if now_s - at < up.window_s)])
    roof = max([desired, *(n for at, n in earlier if now_s - at < down.window_s)])
    stable = int(min(max(current, floor), roof))

    longest_period_s = max(up.period_s, down.period_s)
    changes = list(zip(changed_at, changed, strict=True))
    if last_count and last_count[0] != current:
        changes.append((last_count[1], current - last_count[0]))
    changes = [(at, n) for at, n in changes if 0.0 < now_s - at < longest_period_s]

    # ``before``: the count before the changes of the period. The steps are counted from it.
    if stable > current:
        before = current - math.fsum(n for at, n in changes if now_s - at < up.period_s)
        most = max(before + up.step_replicas, whole(before * (1.0 + up.step_frac)))
        stable = min(stable, max(current, int(most)))
    elif stable < current:
        before = current - math.fsum(n for at, n in changes if now_s - at < down.period_s)
        least = min(before - down.step_replicas, math.floor(before * (1.0 - down.step_frac) + EPSILON))
        stable = max(stable, min(current, int(least)))

    earlier.append((now_s, float(desired)))
    columns = [[at for at, _ in earlier], [n for _, n in earlier], [at for at, _ in changes], [n for _, n in changes]]
    return stable, dict(zip(names, map(tuple, [*columns, [float(current), now_s]]), strict=True))


class Hpa(Policy[HpaConfig]):
    """Replicas of each role from the mean of its metrics over their targets."""

    is_fit_for_aggregated = True

    def decide(self, snapshot: Snapshot) -> Decision:
        """Size each role by the means of its metrics; a role without reports stays as it is."""
        config, memory = self._config, dict(snapshot.state.memory)
        if "synced_s" in memory and not is_due(snapshot, memory, "synced_s", config.sync_s):
            return standing(snapshot, f"the HPA looks every {config.sync_s:g} s", memory=memory)
        memory["synced_s"] = (snapshot.now_s,)
        present = desired_replicas(snapshot.state.desired)
        wanted, shown = {role: float(present[role]) for role in Role}, list[Shown]()
        for role, replicas in serving_replicas(snapshot).items():
            metrics, recommended = config.metrics(role), list[int]()
            for each in metrics:
                values = [value for replica in replicas if (value := getattr(replica, each.metric)) is not None]
                if not values:
                    continue
                missing = max(present[role], len(replicas)) - len(values)  # replicas that start are missing too
                recommended.append(
                    replicas_for_metric(values, missing, present[role], each.target, config.tolerance_frac)
                )
                shown.append(Shown(name=f"{role}_{each.metric}", value=fmean(values), target=each.target))
            if not recommended:
                continue
            if len(recommended) < len(metrics):  # a metric without reports may need the present replicas
                recommended.append(present[role])
            wanted[role], series = paced(max(recommended), present[role], snapshot.now_s, str(role), memory, config)
            memory.update(series)
        if not shown:
            return decided(snapshot, None, "no replica reports its metric", memory=memory)
        return decided_by(snapshot, wanted, shown, memory=memory)
