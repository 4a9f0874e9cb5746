"""One cycle over all services of an application: by priority, each with what those before it have left (pure).

HeteroScale Algorithm 4 over services, and WVA's constrained mode (Greedy-by-Saturation): of services that matter alike
the one with the least spare capacity comes first, and then the cheaper one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoscale.claims import Claimed, Shortage, claim
from autoscale.config import AutoscaleConfig
from autoscale.controller import Controller
from autoscale.placement import held_gpus
from autoscale.sleep import is_asleep
from autoscale.slots import Slots
from autoscale.types import Plan, Snapshot
from autoscale.warm import asked, shared
from kvtransfer.topology import Node, Role, Topology

# Claims are tried out unit by unit. Of so many in a cycle: once they have their room, others come.
_MOST_CLAIMANTS = 16


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
    slots = None if nodes is None else Slots(Topology(nodes).told())
    left = dict(budget_gpus or {})
    for snapshot in snapshots.values():
        for kind, gpus in held_gpus(snapshot.pools, asked(snapshot.state)).items():
            if kind in left:
                left[kind] -= gpus
    claims: dict[str, Claimed] = {}
    claimants = 0
    decided: dict[str, tuple[Snapshot, Plan]] = {}
    order = in_order({name: controllers[name].config for name in snapshots}, snapshots)
    warm = _warm(controllers, snapshots, order, warm_replicas, lacking_types)
    for number, name in enumerate(order):
        claimed = claims.get(name, Claimed())
        snapshot = replace(
            snapshots[name],
            gpus_left=dict(left),
            claims=claimed.most,
            claimed=tuple(claimed.replicas),
            warm_replicas=warm[name],
        )
        free = None if slots is None else slots.left()
        plan = controllers[name].tick(snapshot, slots)
        if slots is not None and free is not None:
            # Only what a plan was made from: of thousands of nodes that would be most of the cycle.
            looked = _has_looked(snapshot, plan)
            seen = slots.nodes((pool.demand for pool in snapshot.pools), free) if looked else ()
            snapshot = replace(snapshot, nodes=seen)
        decided[name] = snapshot, plan
        before = held_gpus(snapshot.pools, asked(snapshot.state))
        for kind, gpus in held_gpus(snapshot.pools, asked(plan.state)).items():
            if kind in left:
                left[kind] -= max(0.0, gpus - before.get(kind, 0.0))
        if plan.pending and claimants < _MOST_CLAIMANTS:
            shortage = Shortage(controllers[name], snapshot, plan, slots, left)
            others = [snapshots[other] for other in order if other != name]
            givers = {
                other: (controllers[other], snapshots[other])
                for other in reversed(order[number + 1 :])
                if controllers[other].config.priority < controllers[name].config.priority
                and not controllers[other].is_frozen
            }
            claimants += claim(shortage, others, givers, claims)
    return decided


def _has_looked(snapshot: Snapshot, plan: Plan) -> bool:
    """Whether a plan may have depended on nodes: on where there is room, or on who is on the scarcest."""
    before, after = snapshot.state, plan.state
    is_placed = asked(after) != asked(before) or plan.pending or plan.passed_over or plan.nodes
    has_chosen = after.warm or plan.victims != before.victims or plan.withdrawn != tuple(before.withdrawn)
    return bool(is_placed or has_chosen)


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
