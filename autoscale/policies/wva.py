"""WVA: sizes each role by itself, so that its replicas keep a distance from saturation (WVA sections III and V).

A replica is *saturated* if one of its metrics is at its limit or above. The *spare* is the distance below this limit
that the replicas should keep in the mean. A replica of a slower group (WVA's variant) is saturated by a shorter queue,
and weighs less in sums and means: both in proportion to its capacity.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
from autoscale.policies.saturation import (
    Limit,
    Load,
    has_headroom,
    is_saturated,
    leaving_replicas,
    replicas_for_load,
    totals_of,
    weight_of,
)
from autoscale.ratio import whole
from autoscale.types import Decision, PoolStats, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role


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


class Wva(Policy[WvaConfig]):
    """Replicas of each role from the KV usage and the waiting requests of each of its replicas.

    Source: WVA (the llm-d workload variant autoscaler), Eq. 2 to 4.
    """

    is_fit_for_aggregated = True
    is_fit_for_pooling = True
    has_own_ratio = True

    def decide(self, snapshot: Snapshot) -> Decision:
        """Size each role by its own saturation; the ratio follows from the counts.

        The counts are totals of a role. Placement chooses each replica's group (WVA's variant), the cheapest first.
        """
        wanted, shown, notes = dict.fromkeys(Role, 0.0), [], []
        present, smallest = present_replicas(snapshot), smallest_replicas(snapshot.pools)
        by_role = dict[Role, _RoleLoad]()
        pools_of = {role: [pool for pool in snapshot.pools if pool.key.role is role] for role in Role}
        roles = [role for role in Role if pools_of[role]]
        if _is_prefill_aggregated(snapshot):
            roles = [Role.DECODE]  # decode alone shows the load
        for role in roles:
            # Requests at the endpoint wait for the role that computes prompts.
            queue = queue_at_endpoint(snapshot) if role is roles[0] else 0.0
            loads = _loads(snapshot, role, demand_factor(snapshot, self._slo), queue)
            if not loads:
                return Decision(
                    wanted=None, reason=f"no {role} replica serves, or one does not report its KV usage and its queue"
                )
            pools = {pool.key.group: pool for pool in pools_of[role]}
            by_role[role] = _RoleLoad(
                loads=loads,
                limits=self._config.limits(role),
                smallest=smallest[role],
                pools=pools,
                counts={group: snapshot.state.desired.get(pool.key, 0) for group, pool in pools.items()},
            )
        sized = self._sized(by_role)
        for role, of in by_role.items():
            own = sized[role].replicas
            if all(pool.limits.capacity == smallest[role] for pool in of.pools.values()):
                own = whole(own / smallest[role]) * smallest[role]  # else placement rounds: it chooses the groups
            # What aggregated groups compute of the prompts shows in the loads of decode, so it stays as it is here.
            wanted[role] = present[role] - of.present + own
            notes.append(f"{sum(is_saturated(load, of.limits) for load in of.loads)} of {len(of.loads)} {role}")
            for name, limit, total in zip(("kv_usage", "queue"), of.limits, totals_of(of.loads), strict=True):
                target = limit.saturated - limit.spare
                shown.append(Shown(name=f"{role}_{name}", value=total / weight_of(of.loads), target=target))
        if Role.PREFILL not in by_role and present[Role.DECODE]:
            wanted[Role.PREFILL] = wanted[Role.DECODE] * present[Role.PREFILL] / present[Role.DECODE]
        reason = f"{' and '.join(notes)} replicas are saturated"
        ratio = ratio_of(wanted, snapshot)
        return Decision(wanted=wanted, reason=reason, ratio=ratio, is_step=True, shown=tuple(shown))

    def _sized(self, by_role: Mapping[Role, "_RoleLoad"]) -> dict[Role, "_Size"]:
        """The size of each role. The last replica of a group leaves only together with those of the other role.

        Placement keeps it otherwise. If the policy counted on it, another replica that can leave would stay.
        """
        kept: dict[Role, set[str]] = {role: set() for role in by_role}
        sized = {role: self._size(of, kept[role]) for role, of in by_role.items()}
        for role in [*by_role, *by_role]:  # twice: a replica that stays keeps that of the other role
            other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
            if other not in by_role:
                continue
            for group, leaving in sized[role].leaving.items():
                is_last = leaving == by_role[role].counts[group]
                if is_last and sized[other].leaving[group] < by_role[other].counts.get(group, 0):
                    kept[role].add(group)
            sized[role] = self._size(by_role[role], kept[role])
        return sized

    def _size(self, of: "_RoleLoad", kept: Collection[str]) -> "_Size":
        """The size of one role; the groups in ``kept`` keep at least one replica.

        While replicas start, the queue adds no more: they will serve a part of it. Otherwise a queue that grows during
        the start would add replicas at every tick.
        """
        totals, serving = totals_of(of.loads), weight_of(of.loads)
        if serving < of.present - EPSILON_REPLICAS:
            return _Size(max(of.present, replicas_for_load(totals[0], of.limits[0])), Counter())
        unsaturated = [load for load in of.loads if not is_saturated(load, of.limits)]
        if not unsaturated or not has_headroom(unsaturated, of.limits):  # Eq. 3
            needed = (replicas_for_load(total, limit) for total, limit in zip(totals, of.limits, strict=True))
            # A low total may hide a few full replicas: at least one more is needed. If the role wants as much more as a
            # replica of the slowest group, placement adds one replica, whichever group it chooses.
            return _Size(max(*needed, serving + of.smallest), Counter())
        removable = {
            group: of.counts[group] - max(pool.limits.lowest_replicas, group in kept)
            for group, pool in of.pools.items()
        }
        leaving = leaving_replicas(unsaturated, of.limits, self._config.unsaturated_replicas, removable)
        return _Size(min(of.present, serving - weight_of(leaving)), Counter(load.group for load in leaving))


class _Size(NamedTuple):
    """What a role wants."""

    replicas: float  # standard replicas, not rounded
    leaving: Counter[str]  # replicas of each group that can leave


class _RoleLoad(NamedTuple):
    """What is known of a role; counts are without the prompts that aggregated groups compute."""

    loads: Sequence[Load]  # of the replicas that get requests
    limits: tuple[Limit, Limit]
    smallest: float  # standard replicas that a replica of the slowest group is worth
    pools: Mapping[str, PoolStats]  # by group
    counts: Mapping[str, int]  # replicas of each group that should serve

    @property
    def present(self) -> float:
        """Standard replicas that should serve."""
        return math.fsum(self.counts[group] * pool.limits.capacity for group, pool in self.pools.items())


def _is_prefill_aggregated(snapshot: Snapshot) -> bool:
    """Whether the replicas that serve are all of aggregated groups, although others have prefill."""
    admitted = frozenset(snapshot.state.admitted)
    serving = [pool for pool in snapshot.pools if any(replica.replica_id in admitted for replica in pool.replicas)]
    return any(pool.limits.prompt_capacity for pool in serving) and not any(
        pool.key.role is Role.PREFILL for pool in serving
    )


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
