"""One cycle over all services of an application: by priority, each with the room that earlier ones left (pure).

A service that finds no room may claim room of less important services (``claims``). These come later in the cycle, so
their plans obey the claim at once.

Source: HeteroScale Algorithm 4 over services, and WVA's constrained mode (Greedy-by-Saturation): among services of
equal priority, the one with the least spare capacity comes first, and then the cheaper one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice

from autoscale.decide.claims import Claimed, Shortage, claim, has_leaving
from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.draft import unchanged
from autoscale.decide.limits import held_gpus
from autoscale.decide.slots import Slots
from autoscale.extension import error_text
from autoscale.types import ControllerState, Plan, Snapshot
from kvtransfer.topology import Role

# Most services that claim room in one cycle; the others claim in a later cycle. Trying out claims takes most of such a
# cycle's time, and a cycle shall take less than a second (docs/decisions/placement.md 174).
_MOST_CLAIMANTS = 16

# Gets the name of a service whose tick fails, and the error.
OnError = Callable[[str, Exception], None]


def tick_all(
    controllers: Mapping[str, Controller],
    snapshots: Mapping[str, Snapshot],
    *,
    slots: Slots | None = None,
    budget_gpus: Mapping[str, float] | None = None,
    warm_replicas: int = 0,
    lacking_types: frozenset[str] = frozenset(),
    on_error: OnError | None = None,
) -> dict[str, tuple[Snapshot, Plan]]:
    """Plan every service at one instant; returns each plan with the snapshot that it follows from.

    Args:
        controllers: the controller of each service.
        snapshots: snapshots of the same services, without nodes, budgets and claims.
        slots: free room of the cluster, from which this call takes the room of placed replicas; its nodes store their
            scarcity (``Topology.with_scarcity``). ``None``: placement ignores nodes.
        budget_gpus: most GPUs of each type that all services together may hold.
        warm_replicas: warm replicas that the services share. Services that are awake get one each in turn: the most
            important first, and among equals the one that has some already.
        lacking_types: what ``lacking_types()`` returned for the last cycle; services on these types get no warm
            replicas.
        on_error: called if the tick of a service fails. Its counts stay, and the other services are decided. ``None``:
            the error ends the cycle.
    """
    budget_left = dict(budget_gpus or {})
    for snapshot in snapshots.values():
        _spend(budget_left, held_gpus(snapshot.pools, snapshot.state.desired_and_warm))
    order = in_order({name: controllers[name].config for name in snapshots}, snapshots)
    warm = _warm_replicas(controllers, snapshots, order, warm_replicas, lacking_types)
    with_leaving = [name for name in order if has_leaving(snapshots[name])]
    claims: dict[str, Claimed] = {}
    claimants = 0
    decided: dict[str, tuple[Snapshot, Plan]] = {}
    for number, name in enumerate(order):
        claimed = claims.get(name, Claimed())  # by services earlier in the order
        snapshot = replace(
            snapshots[name],
            gpus_left=dict(budget_left),
            claims=claimed.most_replicas,
            claimed=tuple(claimed.replica_ids),
            warm_replicas=warm[name],
        )
        snapshot, plan = decided[name] = _tick(name, controllers[name], snapshot, slots, on_error)
        _spend(budget_left, _added_gpus(snapshot, plan.state))
        if plan.pending and claimants < _MOST_CLAIMANTS:
            shortage = Shortage(controllers[name].config, snapshot, plan, slots, budget_left)
            others = [snapshots[other] for other in with_leaving if other != name]
            givers = {  # the least important service first
                other: (controllers[other].config, snapshots[other])
                for other in reversed(order[number + 1 :])
                if controllers[other].config.priority < controllers[name].config.priority
                and not controllers[other].config.is_frozen
            }
            if claim(shortage, others, givers, claims):
                claimants += 1
    return decided


def _tick(
    name: str, controller: Controller, snapshot: Snapshot, slots: Slots | None, on_error: OnError | None
) -> tuple[Snapshot, Plan]:
    """The plan of a service, or one that keeps its counts if its tick fails; and the snapshot that it follows from."""
    try:
        return _planned(controller, snapshot, slots)
    except Exception as error:
        if on_error is None:
            raise
        on_error(name, error)
        return snapshot, unchanged(snapshot, f"no decision: {error_text(error)}; the counts stay")


def _planned(controller: Controller, snapshot: Snapshot, slots: Slots | None) -> tuple[Snapshot, Plan]:
    """The plan of a service, and its snapshot with the nodes that the plan may depend on."""
    if slots is None:
        return snapshot, controller.tick(snapshot)
    free = slots.free()  # before the plan takes room
    plan = controller.tick(snapshot, slots)
    # Other snapshots get no nodes: copying thousands of nodes for each service would take most of the cycle's time.
    is_dependent = _depends_on_nodes(snapshot, plan)
    nodes = slots.nodes((pool.demand for pool in snapshot.pools), free) if is_dependent else ()
    return replace(snapshot, nodes=nodes), plan


def _spend(budget_left: dict[str, float], gpus: Mapping[str, float]) -> None:
    for kind in budget_left:
        budget_left[kind] -= gpus.get(kind, 0.0)


def _added_gpus(snapshot: Snapshot, state: ControllerState) -> dict[str, float]:
    """GPUs by type that a plan adds. A plan that needs fewer frees none yet: replicas that leave still hold theirs."""
    before = held_gpus(snapshot.pools, snapshot.state.desired_and_warm)
    after = held_gpus(snapshot.pools, state.desired_and_warm)
    return {kind: max(0.0, gpus - before.get(kind, 0.0)) for kind, gpus in after.items()}


def _depends_on_nodes(snapshot: Snapshot, plan: Plan) -> bool:
    """Whether a plan may depend on the free room of nodes, or on the replicas on the scarcest nodes."""
    before, after = snapshot.state, plan.state
    has_sought_room = (
        after.desired_and_warm != before.desired_and_warm or plan.pending or plan.passed_over or plan.nodes
    )
    has_chosen_replicas = after.warm or plan.victims != before.victims or plan.withdrawn != tuple(before.withdrawn)
    return bool(has_sought_room or has_chosen_replicas)


def lacking_types(decided: Mapping[str, tuple[Snapshot, Plan]]) -> frozenset[str]:
    """The GPU types that pending replicas need."""
    return frozenset(
        kind
        for snapshot, plan in decided.values()
        for pool in snapshot.pools
        if plan.pending.get(pool.key.role)
        for kind in pool.gpus_by_type()
    )


def _warm_replicas(
    controllers: Mapping[str, Controller],
    snapshots: Mapping[str, Snapshot],
    order: Sequence[str],
    shared_replicas: int,
    lacking: frozenset[str],
) -> dict[str, int]:
    """Warm replicas that each service may have: those of its own configuration, and its share of the shared ones.

    A service that sleeps, or that uses a GPU type in ``lacking``, gets 0. ``order``: services in the order of
    placement. ``shared_replicas``: warm replicas that the services share.
    """
    eligible = [
        name
        for name in order
        if not snapshots[name].state.is_asleep
        and not any(kind in lacking for pool in snapshots[name].pools for kind in pool.gpus_by_type())
    ]
    eligible.sort(key=lambda name: (-controllers[name].config.priority, not snapshots[name].state.warm))
    warm = dict.fromkeys(order, 0)
    for name, share in shared(shared_replicas, eligible).items():
        warm[name] = controllers[name].config.warm_replicas + share
    return warm


def shared(warm_replicas: int, order: Sequence[str]) -> dict[str, int]:
    """Each service's share of an application's warm replicas, given out one by one in the order of services."""
    share = dict.fromkeys(order, 0)
    for name in islice(cycle(order), warm_replicas):
        share[name] += 1
    return share


def in_order(configs: Mapping[str, AutoscaleConfig], snapshots: Mapping[str, Snapshot]) -> list[str]:
    """Services in the order of placement: by priority, then the least spare capacity first, then the cheapest."""

    def key(name: str) -> tuple[float, float, float, str]:
        snapshot = snapshots[name]
        costs = [pool.limits.cost for pool in snapshot.pools]
        return -configs[name].priority, _spare_frac(snapshot), min(costs, default=0.0), name

    return sorted(snapshots, key=key)


def _spare_frac(snapshot: Snapshot) -> float:
    """The mean free share of the KV cache, in the role where it is smaller; 1 if no replica reports it."""
    used: dict[Role, list[float]] = {role: [] for role in Role}
    for pool in snapshot.pools:
        used[pool.key.role] += [r.kv_usage_frac for r in pool.replicas if r.kv_usage_frac is not None]
    return min([1.0, *(1.0 - math.fsum(fracs) / len(fracs) for fracs in used.values() if fracs)])
