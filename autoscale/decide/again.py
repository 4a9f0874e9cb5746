"""Replicas that wait for a node ask for another one if theirs does not come, or if another has room by now (pure).

A placement group that waits keeps its labels. So Serve must stop such a replica and start it again, with the labels of
another node. It never has fewer replicas of a pool than its lowest count, so those cannot be withdrawn instead.
"""

from dataclasses import replace

from autoscale.decide.draft import Draft
from autoscale.decide.limits import asked_s, stuck_replicas
from autoscale.decide.slots import Slots, Taken, nodes_of
from autoscale.decide.supply import no_scarcer
from autoscale.types import Note, NoteKind, PoolStats
from kvtransfer.topology import NodeSet


def ask_again(draft: Draft) -> None:
    """A stage: choose other nodes for replicas that wait for a node; ``Plan.again`` names their pools.

    Stuck replicas ask if their node type was given up, and then every ``no_node_s`` if any node has room. Replicas
    whose type Ray chose, before the first plan, wait as long as a node of the next type may take. If all replicas of a
    pool that wait for a possible node find room on existing ones by now, they ask for these.
    """
    draft.again = []
    overdue, before = draft.overdue, draft.snapshot.state.desired_and_warm
    if draft.slots is None or draft.config.is_frozen:
        return
    for pool in draft.pools:
        wanted = draft.state.desired_and_warm.get(pool.key, 0)
        if pool.demand is None or pool.key not in draft.state.unplaced_since_s or wanted > before.get(pool.key, 0):
            continue  # it waits for nothing, or it has just got nodes for more replicas
        if pool.key in draft.state.offers:
            _ask_for_existing(draft, draft.slots, pool, wanted - (pool.held_replicas or 0))
        elif pool.key in overdue and (count := stuck_replicas(pool, wanted)):
            _ask_for_any(draft, draft.slots, pool, count)


def _ask_for_existing(draft: Draft, slots: Slots, pool: PoolStats, count: int) -> None:
    """Let the replicas that wait for a possible node ask for existing ones to which their labels do not lead."""
    if not _is_due(draft, pool) or pool.key in draft.state.existing_tried:
        return
    offered = slots.nodes_of_offer(draft.state.offers[pool.key])
    taken = _take(slots, pool, count, slots.topology.existing & ~offered)
    if len(taken) == count:  # with fewer, those that get no room would lose their request for a node
        _choose(draft, slots, pool, taken)
    else:
        _give_back(slots, taken)


def _ask_for_any(draft: Draft, slots: Slots, pool: PoolStats, count: int) -> None:
    """Let stuck replicas for which no node will come ask for any node with room."""
    key, state = pool.key, draft.state
    possible = slots.topology.everywhere & ~slots.topology.existing
    if key not in state.again_s and (taken := _take(slots, pool, count, possible)):
        # Ray chose their type, and a node of it may still come.
        since_s, _ = state.unplaced_since_s[key]
        offer = slots.topology.nodes[taken[0][0][0]].offer
        if offer is not None and draft.now_s - since_s > offer.start_s:
            _choose(draft, slots, pool, taken)
        else:
            _give_back(slots, taken)
        return
    if not _is_due(draft, pool):
        return
    taken = []
    existing_tried = key in state.again_s and key not in draft.snapshot.state.offers
    if existing_tried:
        taken = _take(slots, pool, count, possible)
    if taken:
        draft.state = replace(state, existing_tried=(*state.existing_tried, key))
    else:
        taken = _take(slots, pool, count, slots.topology.everywhere)
    if taken:
        _choose(draft, slots, pool, taken)


def _is_due(draft: Draft, pool: PoolStats) -> bool:
    """Whether the replicas of a pool have waited for ``no_node_s`` since they last asked."""
    return draft.now_s - asked_s(draft.state, pool.key) > draft.config.no_node_s


def _choose(draft: Draft, slots: Slots, pool: PoolStats, taken: list[Taken]) -> None:
    """Write other nodes for the replicas of a pool that wait into the draft."""
    assert pool.demand is not None
    key, state, now_s = pool.key, draft.state, draft.now_s
    names = no_scarcer(slots, pool.demand, nodes_of(taken))
    offer = slots.topology.offer_of.get(names[0]) if names else None
    others = {other: each for other, each in state.offers.items() if other != key}
    draft.again.append(key)
    draft.placed = replace(draft.placed, nodes={**draft.placed.nodes, key: names})
    state = replace(state, offers=others if offer is None else {**others, key: offer})
    if key in draft.overdue:
        draft.state = replace(state, again_s={**state.again_s, key: now_s})
    else:  # no other group stands in for them: they get the whole time again
        held = pool.held_replicas or 0
        draft.state = replace(state, unplaced_since_s={**state.unplaced_since_s, key: (now_s, held)})
    where = "a node that exists" if offer is None else f"a node of type {offer.node_type}"
    draft.notes.append(Note(NoteKind.NO_NODE, f"{key} waited for a node that has not come, and asks for {where}"))


def _give_back(slots: Slots, taken: list[Taken]) -> None:
    for room in taken:
        slots.give_back(room)


def _take(slots: Slots, pool: PoolStats, count: int, among: NodeSet) -> list[Taken]:
    """Take room for at most ``count`` replicas, on nodes to which one label selector leads."""
    assert pool.demand is not None
    taken: list[Taken] = []
    while len(taken) < count and (room := slots.take(pool.demand, among)) is not None:
        if not slots.starts_together(nodes_of((*taken, room))):
            slots.give_back(room)
            break
        taken.append(room)
    return taken
