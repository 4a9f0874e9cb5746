"""WVA: sizes each role by itself, so that its replicas keep a distance from saturation (WVA sections III and V).

A replica is *saturated* if one of its metrics is at its limit or above. The *spare* is the distance below this limit
that the replicas should keep in the mean. A replica of a slower group (WVA's variant) is saturated by a shorter queue,
and weighs less in sums and means: both in proportion to its capacity.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from autoscale.headcount import EPSILON_REPLICAS, smallest_replicas
from autoscale.policies.policy import (
    Policy,
    admitted_replicas,
    demand_factor,
    present_replicas,
    queue_at_endpoint,
    ratio_of,
)
from autoscale.ratio import whole
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# Tolerance for rounding errors of a spare, in the metric's unit.
_EPSILON = 1e-9


class Load(NamedTuple):
    """The load of one replica."""

    metrics: tuple[float, float]  # KV usage (0..1), and waiting requests for each standard replica that it is worth
    weight: float = 1.0  # standard replicas that it is worth
    group: str = ""
    cost: float = 0.0  # cost of a standard replica of the group


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limits of one metric, in its unit."""

    saturated: float  # a replica is saturated from this value on (tau)
    spare: float  # distance from ``saturated`` that replicas should have in the mean (gamma)


class WvaConfig(StrictConfig):
    """The loads at which a replica is saturated, and the spare that it should have below them.

    The defaults are from the paper's section V-A; the queue's spare is from its code, since the paper gives none.
    """

    kind: Literal["wva"] = "wva"
    saturated_kv_frac: float = Field(0.8, gt=0.0, le=1.0, description="KV usage of a saturated replica (tau_kv).")
    saturated_waiting_requests: float = Field(5.0, gt=0.0)
    """Queue of a saturated replica of the first group (tau_q); that of another group is in proportion to its speed."""
    spare_kv_frac: float = Field(0.3, ge=0.0)
    """If the KV usage is on average closer to saturation than this, replicas are added (gamma_kv)."""
    spare_waiting_requests: float = Field(3.0, ge=0.0)
    """If the queue is on average closer to saturation than this number of requests, replicas are added (gamma_q)."""
    prefill_aggression_frac: float = Field(1.0, gt=0.0)
    """Factor on both spares of prefill; above 1 it scales out sooner and further."""
    decode_aggression_frac: float = Field(1.0, gt=0.0)
    """Factor on both spares of decode; above 1 it scales out sooner and further."""
    unsaturated_replicas: int = Field(2, ge=2)
    """Least number of unsaturated replicas at which a replica may leave (MinNonSaturatedReplicasForScaleDown)."""

    @model_validator(mode="after")
    def _check_spares(self) -> "WvaConfig":
        for limit in (limit for role in Role for limit in self.limits(role)):
            if limit.spare >= limit.saturated:
                raise ValueError(
                    f"a spare of {limit.spare:g}, aggression included, leaves nothing to use below a saturation of "
                    f"{limit.saturated:g}: lower the spare or the aggression"
                )
        return self

    def limits(self, role: Role) -> tuple[Limit, Limit]:
        """The limits of KV usage and of waiting requests of a role."""
        aggression = self.prefill_aggression_frac if role is Role.PREFILL else self.decode_aggression_frac
        return (
            Limit(saturated=self.saturated_kv_frac, spare=self.spare_kv_frac * aggression),
            Limit(saturated=self.saturated_waiting_requests, spare=self.spare_waiting_requests * aggression),
        )


def replicas_for_load(load: float, limit: Limit) -> float:
    """Standard replicas for the load of a whole role: ``n = (Load_current + delta_safety) / tau``, not rounded.

    delta_safety is the spare of all n replicas, n gamma. So n = Load_current / (tau - gamma), and with n replicas the
    mean spare is at least gamma at once.

    Source: WVA Eq. 4.
    """
    return load / (limit.saturated - limit.spare)


def freed_replicas(
    unsaturated: Sequence[Load], limits: Sequence[Limit], fewest: int, most: Mapping[str, int] | None = None
) -> float:
    """Standard replicas that can leave if the other unsaturated ones share their load.

    The replicas of the most expensive groups are the first to leave, as in placement, and of equally expensive ones
    the least loaded. The others share the load in proportion to their weights. No replica may become saturated by that,
    and the mean spare must remain. With fewer than ``fewest`` (at least 2) unsaturated replicas, none leaves. ``most``:
    most replicas of each group that may leave; ``None``: any number.

    Source: WVA section III-C2.
    """

    def order(load: Load) -> tuple[float, float]:
        return -load.cost, max(value / limit.saturated for value, limit in zip(load.metrics, limits, strict=True))

    staying, left = list(unsaturated), list[Load]()
    while len(staying) >= fewest:
        gone = Counter(load.group for load in left)
        first_of_group = dict[str, Load]()
        for load in sorted(staying, key=order):
            if most is None or gone[load.group] < most[load.group]:
                first_of_group.setdefault(load.group, load)
        # If the replica of an expensive group cannot leave, that of a cheaper group may.
        for leaving in first_of_group.values():
            others = _without(leaving, staying)
            if not any(_is_saturated(load, limits) for load in others) and _has_headroom(others, limits):
                staying = others
                left.append(leaving)
                break
        else:
            break
    return _weight(left)


def _without(leaving: Load, loads: Sequence[Load]) -> list[Load]:
    """The loads without the leaving one, once the others share it."""
    others = list(loads)
    others.remove(leaving)
    kv, queue = (value * leaving.weight / _weight(others) for value in leaving.metrics)
    return [each._replace(metrics=(each.metrics[0] + kv, each.metrics[1] + queue)) for each in others]


class Wva(Policy[WvaConfig]):
    """Replicas of each role from the KV usage and the waiting requests of each of its replicas.

    Source: WVA (the llm-d workload variant autoscaler), Eq. 2 to 4.
    """

    is_fit_for_aggregated = True

    def decide(self, snapshot: Snapshot) -> Decision:
        """Size each role by its own saturation; the ratio follows from the counts.

        The counts are totals of a role. Placement chooses each replica's group (WVA's variant), the cheapest first.
        """
        wanted, shown, notes = dict.fromkeys(Role, 0.0), [], []
        present, smallest = present_replicas(snapshot), smallest_replicas(snapshot.pools)
        roles = [role for role in Role if any(pool.key.role is role for pool in snapshot.pools)]
        for role in roles:
            # Requests at the endpoint wait for the role that computes prompts.
            queue = queue_at_endpoint(snapshot) if role is roles[0] else 0.0
            loads, limits = _loads(snapshot, role, demand_factor(snapshot, self._slo), queue), self._config.limits(role)
            if not loads:
                return Decision(
                    wanted=None, reason=f"no {role} replica serves, or one does not report its KV usage and its queue"
                )
            # What aggregated groups compute of the prompts shows in the loads of decode, so it stays as it is here.
            beside = present[role] - _own_replicas(snapshot, role)
            removable = _removable(snapshot, role)
            own = self._replicas(loads, limits, present[role] - beside, smallest[role], removable)
            if all(pool.limits.capacity == smallest[role] for pool in snapshot.pools if pool.key.role is role):
                own = whole(own / smallest[role]) * smallest[role]  # else placement rounds: it chooses the groups
            wanted[role] = beside + own
            notes.append(f"{sum(_is_saturated(load, limits) for load in loads)} of {len(loads)} {role}")
            for name, limit, total in zip(("kv_usage", "queue"), limits, _totals(loads), strict=True):
                target = limit.saturated - limit.spare
                shown.append(Shown(name=f"{role}_{name}", value=total / _weight(loads), target=target))
        reason = f"{' and '.join(notes)} replicas are saturated"
        ratio = ratio_of(wanted, snapshot)
        return Decision(wanted=wanted, reason=reason, ratio=ratio, is_step=True, shown=tuple(shown))

    def _replicas(
        self, loads: Sequence[Load], limits: Sequence[Limit], present: float, smallest: float, most: Mapping[str, int]
    ) -> float:
        """Standard replicas of one role, not rounded; ``loads``: those of its replicas that get requests.

        ``smallest``: standard replicas that a replica of the slowest group is worth. A role that needs one replica more
        wants as much more as this, so that placement adds one replica, whichever group it chooses. ``most``: most
        replicas of each group that may leave.

        While replicas start, the queue adds no more: they will serve a part of it. Otherwise a queue that grows during
        the start would add replicas at every tick.
        """
        totals, serving = _totals(loads), _weight(loads)
        if serving < present - EPSILON_REPLICAS:
            return max(present, replicas_for_load(totals[0], limits[0]))
        unsaturated = [load for load in loads if not _is_saturated(load, limits)]
        if not unsaturated or not _has_headroom(unsaturated, limits):  # Eq. 3
            needed = (replicas_for_load(total, limit) for total, limit in zip(totals, limits, strict=True))
            # A low total may hide a few full replicas: at least one more is needed.
            return max(*needed, serving + smallest)
        return min(present, serving - freed_replicas(unsaturated, limits, self._config.unsaturated_replicas, most))


def _loads(snapshot: Snapshot, role: Role, factor: float, queue: float) -> list[Load] | None:
    """The metrics of each replica of a role that gets requests; ``None``: one of them does not report its metrics.

    ``factor``: the KV usage is multiplied by it, so that it is that of all offered requests. ``queue``: requests that
    wait for the role at the endpoint; each replica counts with a part in proportion to its weight.
    """
    loads = list[Load]()
    admitted = {replica.replica_id for replica, _ in admitted_replicas(snapshot, role)}
    replicas = [
        (pool, replica)
        for pool in snapshot.pools
        if pool.key.role is role
        for replica in pool.replicas
        if replica.replica_id in admitted
    ]
    total_weight = math.fsum(pool.limits.capacity for pool, _ in replicas)
    for pool, replica in replicas:
        if replica.kv_usage_frac is None or replica.waiting_requests is None:
            return None
        weight = pool.limits.capacity
        waiting = replica.waiting_requests / weight + queue / total_weight
        loads.append(Load((replica.kv_usage_frac * factor, waiting), weight, pool.key.group, pool.limits.cost / weight))
    return loads


def _removable(snapshot: Snapshot, role: Role) -> dict[str, int]:
    """The replicas of a role that each group has above its lowest count."""
    return {
        pool.key.group: snapshot.state.desired.get(pool.key, 0) - pool.limits.lowest_replicas
        for pool in snapshot.pools
        if pool.key.role is role
    }


def _own_replicas(snapshot: Snapshot, role: Role) -> float:
    """Standard replicas of a role that should serve, without those of aggregated groups for prefill."""
    desired = snapshot.state.desired
    own = (pool for pool in snapshot.pools if pool.key.role is role)
    return math.fsum(desired.get(pool.key, 0) * pool.limits.capacity for pool in own)


def _weight(loads: Sequence[Load]) -> float:
    """Standard replicas that the replicas with these loads are worth."""
    return math.fsum(load.weight for load in loads)


def _totals(loads: Sequence[Load]) -> list[float]:
    """The sum of each metric over replicas, in which each weighs as the standard replicas that it is worth."""
    by_metric = zip(*(load.metrics for load in loads), strict=True)
    weights = [load.weight for load in loads]
    return [math.fsum(v * w for v, w in zip(values, weights, strict=True)) for values in by_metric]


def _is_saturated(load: Load, limits: Sequence[Limit]) -> bool:
    """Whether a replica is saturated in any metric (Eq. 2)."""
    return any(value >= limit.saturated for value, limit in zip(load.metrics, limits, strict=True))


def _has_headroom(loads: Sequence[Load], limits: Sequence[Limit]) -> bool:
    """Whether the mean spare is at least gamma in every metric. If not, the role scales out (Eq. 3)."""
    means = [total / _weight(loads) for total in _totals(loads)]
    mean_spares = (limit.saturated - mean for mean, limit in zip(means, limits, strict=True))
    return all(spare >= limit.spare - _EPSILON for spare, limit in zip(mean_spares, limits, strict=True))
