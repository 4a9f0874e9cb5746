"""One cycle over all services of an application: by priority, each with what those before it have left (pure).

HeteroScale Algorithm 4 over services, and WVA's constrained mode (Greedy-by-Saturation): of services that matter alike
the one with the least spare capacity comes first, and then the cheaper one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autoscale.config import AutoscaleConfig
from autoscale.controller import Controller
from autoscale.placement import held_gpus
from autoscale.ratio import PdRatio
from autoscale.sleep import is_asleep
from autoscale.slots import Slots
from autoscale.types import Plan, PoolKey, PoolStats, Snapshot
from autoscale.warm import asked, shared
from kvtransfer.topology import Node, NodeSet, Role, Topology

_EPSILON = 1e-6


def tick_all(
    controllers: Mapping[str, Controller],
    snapshots: Mapping[str, Snapshot],
    *,
    nodes: Sequence[Node] | None = None,
    budget_gpus: Mapping[str, float] | None = None,
    warm_replicas: int = 0,
    lacking_types: frozenset[str] = frozenset(),
) -> dict[str, tuple[Snapshot, Plan]]:
    """The plan of every service at one instant, and the snapshot from which it follows.

    Args:
        controllers: by service.
        snapshots: of the same services, without nodes, budgets and claims.
        nodes: of the cluster, with what nobody holds; ``None``: nobody looks.
        budget_gpus: the most GPUs of each type that all services together may hold.
        warm_replicas: that run for whichever service needs them, and are not routed to before; one each in turn of
            those that are awake, the most important first and of these who has some.
        lacking_types: of GPUs, those that were lacking in the cycle before, of which nobody has warm replicas.
    """
    slots = None if nodes is None else Slots(Topology(nodes))
    left = dict(budget_gpus or {})
    for snapshot in snapshots.values():
        for kind, gpus in held_gpus(snapshot.pools, asked(snapshot.state)).items():
            if kind in left:
                left[kind] -= gpus
    claims: dict[str, dict[PoolKey, int]] = {}
    decided: dict[str, tuple[Snapshot, Plan]] = {}
    order = in_order({name: controllers[name].config for name in snapshots}, snapshots)
    warm = _warm(controllers, snapshots, order, warm_replicas, lacking_types)
    for number, name in enumerate(order):
        snapshot = replace(snapshots[name], gpus_left=dict(left), claims=claims.get(name, {}), warm_replicas=warm[name])
        free = None if slots is None else slots.left()
        plan = controllers[name].tick(snapshot, slots)
        if slots is not None and free is not None:
            # Only what a plan was made from: of thousands of nodes that would be most of the cycle.
            was_placed = asked(plan.state) != asked(snapshot.state) or plan.pending or plan.passed_over
            seen = slots.nodes((pool.demand for pool in snapshot.pools), free) if was_placed else ()
            snapshot = replace(snapshot, nodes=seen)
        decided[name] = snapshot, plan
        before = held_gpus(snapshot.pools, asked(snapshot.state))
        for kind, gpus in held_gpus(snapshot.pools, asked(plan.state)).items():
            if kind in left:
                left[kind] -= max(0.0, gpus - before.get(kind, 0.0))
        if plan.pending:
            config = controllers[name].config
            less = [other for other in order[number + 1 :] if controllers[other].config.priority < config.priority]
            others = {other: snapshots[other] for other in reversed(less)}
            ratios = {other: controllers[other].config.pd_ratio for other in less}
            _claim(snapshot, plan, others, ratios, slots, claims)
    return decided


def lacking_types(decided: Mapping[str, tuple[Snapshot, Plan]]) -> frozenset[str]:
    """The types of GPU that what is pending would take."""
    return frozenset(
        kind
        for snapshot, plan in decided.values()
        for pool in snapshot.pools
        if plan.pending.get(pool.key.role) and pool.demand is not None
        for kind in pool.demand.gpus_by_type()
    )


def _warm(
    controllers: Mapping[str, Controller],
    snapshots: Mapping[str, Snapshot],
    order: Sequence[str],
    together: int,
    lacking: frozenset[str],
) -> dict[str, int]:
    """How many warm replicas each service may have."""
    able = [name for name in order if not is_asleep(snapshots[name]) and not lacking & _types(snapshots[name])]
    able.sort(key=lambda name: (-controllers[name].config.priority, not snapshots[name].state.warm))
    given = shared(together, able)
    return {name: controllers[name].config.warm_replicas + given[name] if name in given else 0 for name in order}


def _types(snapshot: Snapshot) -> set[str]:
    return {kind for pool in snapshot.pools if pool.demand is not None for kind in pool.demand.gpus_by_type()}


def in_order(configs: Mapping[str, AutoscaleConfig], snapshots: Mapping[str, Snapshot]) -> list[str]:
    """Services as they are placed: the most important first, then who has the least spare, then the cheapest."""

    def key(name: str) -> tuple[float, float, float, str]:
        snapshot = snapshots[name]
        costs = [pool.cost for pool in snapshot.pools]
        return -configs[name].priority, _spare_frac(snapshot), min(costs, default=0.0), name

    return sorted(snapshots, key=key)


def _spare_frac(snapshot: Snapshot) -> float:
    """The share of its KV cache that a service has free, of the role that has less; all of it where nobody says."""
    spare = 1.0
    for role in Role:
        replicas = [r for pool in snapshot.pools if pool.key.role is role for r in pool.replicas]
        used = [r.kv_usage_frac for r in replicas if r.kv_usage_frac is not None]
        if used:
            spare = min(spare, 1.0 - math.fsum(used) / len(used))
    return spare


def _claim(
    claimant: Snapshot,
    plan: Plan,
    others: Mapping[str, Snapshot],
    ratios: Mapping[str, PdRatio],
    slots: Slots | None,
    claims: dict[str, dict[PoolKey, int]],
) -> None:
    """What less important services are to give up for what has no place: the least important of them first.

    Variants that are marked so go first, others only down to their lowest counts, both in whole units. What is on its
    way out already is not asked for twice.
    """
    missing, where = _lacking(claimant, plan, slots)
    for snapshot in others.values():
        for pool in snapshot.pools:
            leaving = max(0, _here(pool) - asked(snapshot.state).get(pool.key, 0)) + len(pool.draining)
            _give(pool, leaving, missing, where, slots)
    for name, snapshot in others.items():
        mine = claims.setdefault(name, {})
        for leader, follower in _givers(snapshot, ratios[name]):
            counts = {p.key: mine.get(p.key, snapshot.state.desired.get(p.key, 0)) for p in (leader, follower)}
            share = ratios[name].follower_share
            while counts[leader.key] > leader.lowest_replicas and any(gpus > _EPSILON for gpus in missing.values()):
                fewer = counts[leader.key] - 1
                rest = max(follower.lowest_replicas, math.ceil(fewer * share - _EPSILON))
                gone = max(0, counts[follower.key] - rest)
                helps = _give(leader, 1, missing, where, slots) + _give(follower, gone, missing, where, slots)
                if not helps:
                    break
                counts = {leader.key: fewer, follower.key: counts[follower.key] - gone}
                mine.update(counts)


def _lacking(claimant: Snapshot, plan: Plan, slots: Slots | None) -> tuple[dict[str, float], dict[str, NodeSet]]:
    """GPUs by type that what is pending would take in the group that comes first, and on which nodes they may be."""
    missing: dict[str, float] = {}
    where: dict[str, NodeSet] = {}
    for role, count in plan.pending.items():
        pools = [pool for pool in claimant.pools if pool.key.role is role and pool.demand is not None]
        first = min(pools, key=lambda pool: (pool.preference, pool.cost, pool.key.group), default=None)
        if first is None or first.demand is None:
            continue
        for kind, gpus in first.demand.gpus_by_type().items():
            missing[kind] = missing.get(kind, 0.0) + count * gpus
        for pool in pools:
            nodes = 0 if slots is None or pool.demand is None else slots.candidates(pool.demand)
            for kind in {} if pool.demand is None else pool.demand.gpus_by_type():
                where[kind] = where.get(kind, 0) | nodes
    return missing, where


def _givers(snapshot: Snapshot, ratio: PdRatio) -> Iterable[tuple[PoolStats, PoolStats]]:
    """The groups of a service, the leader's pool first; those that are marked so, then the dearest."""
    pools = {pool.key: pool for pool in snapshot.pools}
    leaders = [pool for pool in snapshot.pools if pool.key.role is ratio.leader]
    for leader in sorted(leaders, key=lambda pool: (not pool.is_preemptible, -pool.cost, pool.key.group)):
        key = PoolKey(leader.key.group, ratio.follower)
        yield leader, pools.get(key) or PoolStats.absent(key)


def _here(pool: PoolStats) -> int:
    return len(pool.replicas) if pool.held_replicas is None else pool.held_replicas


def _give(
    pool: PoolStats, count: int, missing: dict[str, float], where: Mapping[str, NodeSet], slots: Slots | None
) -> bool:
    """Count what so many replicas of a pool free towards what is missing; whether any of it helps."""
    if pool.demand is None or not count:
        return False
    helps = False
    for kind, gpus in pool.demand.gpus_by_type().items():
        is_there = slots is None or slots.candidates(pool.demand) & where.get(kind, 0)
        if is_there and missing.get(kind, 0.0) > _EPSILON:
            missing[kind] -= count * gpus
            helps = True
    return helps
