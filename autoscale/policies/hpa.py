"""Kubernetes' Horizontal Pod Autoscaler v2, one for each role, with its stabilization and its scaling rules.

Source: ``pkg/controller/podautoscaler`` of Kubernetes 1.33: ``replica_calculator.go`` (calcPlainMetricReplicas, with
pods that have no metrics) and ``horizontal.go`` (computeReplicasForMetrics, stabilizeRecommendationWithBehaviors and
convertDesiredReplicasWithBehaviorRate); defaults as in its documentation, "Default Behavior".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from autoscale.headcount import desired_replicas
from autoscale.policies.independent import Memory, decided, is_due, serving_replicas, standing
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, ReplicaStats, Shown, Snapshot
from kvtransfer.topology import Role

# Kubernetes counts in thousandths; what floating point adds to a product is no replica.
_EPSILON = 1e-9


class HpaMetric(StrEnum):
    """What a replica shows; the mean over a role's is held at the target."""

    GPU_UTILIZATION = "gpu_utilization_frac"
    KV_USAGE = "kv_usage_frac"
    WAITING_REQUESTS = "waiting_requests"
    RUNNING_REQUESTS = "running_requests"


_READERS: Mapping[HpaMetric, Callable[[ReplicaStats], float | None]] = {m: attrgetter(m.value) for m in HpaMetric}


class HpaMetricConfig(BaseModel):
    """The metric of one role."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    metric: HpaMetric = HpaMetric.GPU_UTILIZATION
    target: float = Field(
        0.8, gt=0.0, description="Its mean: 0..1 of utilization and KV usage, else requests. Kubernetes' is 80 %."
    )


class ScalingRulesConfig(BaseModel):
    """HPAScalingRules of one direction with selectPolicy Max: the larger of the two steps may be taken per period."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    window_s: float = Field(ge=0.0, le=3600.0, description="The most cautious recommendation of so long counts.")
    step_replicas: int = Field(0, ge=0, description="So many replicas per period.")
    step_frac: float = Field(0.0, ge=0.0, description="Or such a share of them.")
    period_s: float = Field(15.0, gt=0.0, le=1800.0)


class HpaConfig(BaseModel):
    """The metrics, and how fast replicas may come and go."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["hpa"] = "hpa"
    prefill: HpaMetricConfig = HpaMetricConfig()
    decode: HpaMetricConfig = HpaMetricConfig()
    prefill_more: tuple[HpaMetricConfig, ...] = Field((), description="Beside it: the one that asks for most counts.")
    decode_more: tuple[HpaMetricConfig, ...] = Field((), description="The same of decode.")
    tolerance_frac: float = Field(0.1, ge=0.0, lt=1.0, description="A mean so close to its target moves nothing.")
    sync_s: float = Field(15.0, gt=0.0, description="Time between two decisions.")
    up: ScalingRulesConfig = ScalingRulesConfig(window_s=0.0, step_replicas=4, step_frac=1.0, period_s=15.0)
    down: ScalingRulesConfig = ScalingRulesConfig(window_s=300.0, step_frac=1.0, period_s=15.0)

    def metrics(self, role: Role) -> tuple[HpaMetricConfig, ...]:
        """Those of a role."""
        return (self.prefill, *self.prefill_more) if role is Role.PREFILL else (self.decode, *self.decode_more)


def replicas_for_metric(values: Sequence[float], missing: int, current: int, target: float, tolerance: float) -> int:
    """``ceil(current * metric / target)``, cautious about replicas that show nothing (calcPlainMetricReplicas).

    Args:
        values: the metric of the replicas that show it, at least one.
        missing: replicas that do not: on a growth they count as idle, on a shrinkage as at the target.
        current: replicas wanted so far.
        target: what the mean should be.
        tolerance: how far the mean may be from it, as a share, without a change.
    """
    usage = math.fsum(values) / len(values) / target
    count = len(values) + missing
    whole = usage if not missing else (usage * len(values) + (missing if usage < 1.0 else 0.0)) / count
    is_turned = (usage - 1.0) * (whole - 1.0) < 0.0
    if abs(1.0 - whole) <= tolerance + _EPSILON or is_turned:
        return current
    replicas = math.ceil(whole * count - _EPSILON)
    is_turned = bool(missing) and (replicas > current if whole < 1.0 else replicas < current)
    return current if is_turned else replicas


def paced(
    desired: int,
    current: int,
    now_s: float,
    series: str,
    memory: Memory,
    *,
    up: ScalingRulesConfig,
    down: ScalingRulesConfig,
) -> tuple[int, dict[str, tuple[float, ...]]]:
    """A recommendation after stabilization and scaling rules.

    Args:
        desired: the recommendation.
        current: replicas wanted so far.
        now_s: the time.
        series: what the names of its series begin with.
        memory: earlier recommendations and changes; a change is seen in the counts, whoever made it.
        up: the rules for more.
        down: the rules for fewer.

    Returns:
        Replicas, and the series for the next time.
    """
    names = [f"{series}_{name}" for name in ("recommended_at_s", "recommended", "changed_at_s", "changed", "count")]
    advised_at, advised, changed_at, changed, count = (memory.get(name, ()) for name in names)
    longest_s = max(up.window_s, down.window_s)
    earlier = [(at, n) for at, n in zip(advised_at, advised, strict=True) if 0.0 < now_s - at < longest_s]
    floor = min([desired, *(n for at, n in earlier if now_s - at < up.window_s)])
    roof = max([desired, *(n for at, n in earlier if now_s - at < down.window_s)])
    stable = int(min(max(current, floor), roof))

    longest_s = max(up.period_s, down.period_s)
    changes = list(zip(changed_at, changed, strict=True))
    if count and count[0] != current:
        changes.append((count[1], current - count[0]))
    changes = [(at, n) for at, n in changes if 0.0 < now_s - at < longest_s]

    if stable > current:
        begin = current - math.fsum(n for at, n in changes if now_s - at < up.period_s)
        most = max(begin + up.step_replicas, math.ceil(begin * (1.0 + up.step_frac) - _EPSILON))
        stable = min(stable, max(current, int(most)))
    elif stable < current:
        begin = current - math.fsum(n for at, n in changes if now_s - at < down.period_s)
        least = min(begin - down.step_replicas, math.floor(begin * (1.0 - down.step_frac) + _EPSILON))
        stable = max(stable, min(current, int(least)))

    earlier.append((now_s, float(desired)))
    kept = [[at for at, _ in earlier], [n for _, n in earlier], [at for at, _ in changes], [n for _, n in changes]]
    series_of = dict(zip(names, map(tuple, [*kept, [float(current), now_s]]), strict=True))
    return stable, series_of


class Hpa:
    """The policy; see ``decide``."""

    def __init__(self, config: HpaConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Each role by the mean of its metric; one that nobody shows stays as it is."""
        config, memory = self._config, dict(snapshot.state.memory)
        if "synced_s" in memory and not is_due(snapshot, memory, "synced_s", config.sync_s):
            return standing(snapshot, f"the HPA looks every {config.sync_s:g} s", memory=memory)
        memory["synced_s"] = (snapshot.now_s,)
        present = desired_replicas(snapshot.state.desired)
        wanted, shown = {role: float(present[role]) for role in Role}, list[Shown]()
        for role, replicas in serving_replicas(snapshot).items():
            metrics, advised = config.metrics(role), list[int]()
            for of in metrics:
                values = [value for replica in replicas if (value := _READERS[of.metric](replica)) is not None]
                if not values:
                    continue
                missing = max(present[role], len(replicas)) - len(values)
                advised.append(replicas_for_metric(values, missing, present[role], of.target, config.tolerance_frac))
                mean = math.fsum(values) / len(values)
                shown.append(Shown(name=f"{role}_{of.metric}", value=mean, target=of.target))
            if not advised:
                continue
            if len(advised) < len(metrics):  # what is not shown might need those that are here
                advised.append(present[role])
            wanted[role], series = paced(
                max(advised), present[role], snapshot.now_s, str(role), memory, up=config.up, down=config.down
            )
            memory.update(series)
        if not shown:
            return decided(snapshot, None, "no replica shows its metric", memory=memory)
        reason = ", ".join(f"{entry.name} {entry.value:.4g} for {entry.target:.4g}" for entry in shown)
        return decided(snapshot, wanted, reason, memory=memory, shown=tuple(shown))
