"""Replicas that a lowest count requires ask for another node if the one that they wait for does not come (pure).

Other replicas are withdrawn if their node does not come, and requested again elsewhere. Serve never has fewer replicas
of a pool than its lowest count, so these go on waiting, and a placement group that waits keeps its labels. So Serve
must stop such a replica and start it again, with the labels of another node.
"""

import math
from dataclasses import replace

from autoscale.decide.draft import Draft
from autoscale.decide.limits import stuck_replicas
from autoscale.decide.slots import Slots, Taken
from autoscale.decide.supply import no_scarcer
from autoscale.types import Note, NoteKind, PoolStats
from kvtransfer.topology import Node


def ask_again(draft: Draft) -> None:
    """A stage: choose other nodes for stuck replicas that wait for a possible node; ``Plan.again`` has their number.

    They ask again if the type that they wait for is given up, and later as soon as any node has room. Replicas whose
    type Ray chose, before the first plan, wait as long as a node of the next type may take.
    """
    draft.again = {}
    overdue = [pool for pool in draft.pools if pool.key in draft.overdue]
    if draft.slots is None or draft.config.is_frozen:
        return
    for pool in overdue:
        count = stuck_replicas(pool, draft.state.desired_and_warm.get(pool.key, 0))
        if count and pool.demand is not None and _waits_in_vain(draft, pool):
            _choose_other_nodes(draft, draft.slots, pool, count)


def _waits_in_vain(draft: Draft, pool: PoolStats) -> bool:
    """Whether no node is to be added for the stuck replicas of a pool, or no more time is left for it."""
    asked_s = draft.state.again_s.get(pool.key, -math.inf)
    return pool.key not in draft.state.offers and draft.now_s - asked_s > draft.config.no_node_s


def _choose_other_nodes(draft: Draft, slots: Slots, pool: PoolStats, count: int) -> None:
    """Let as many of the stuck replicas ask again as one label selector can lead to nodes with room."""
    state, placed, now_s = draft.state, draft.placed, draft.now_s
    has_waited_by_labels = pool.key in state.again_s
    taken = _take(slots, pool, count)
    first = slots.topology.nodes[taken[0][0][0]] if taken else None
    if first is None or (not has_waited_by_labels and not _is_worth_it(draft, pool, first)):
        for room in taken:
            slots.give_back(room)
        if has_waited_by_labels:  # it goes on waiting by the same labels, and looks for room later
            draft.state = replace(state, again_s={**state.again_s, pool.key: now_s})
        return
    assert pool.demand is not None
    nodes = sum({1 << index for room in taken for index, _, _ in room})
    offers = {} if first.offer is None else {pool.key: first.offer}
    draft.again[pool.key] = len(taken)
    draft.placed = replace(placed, nodes={**placed.nodes, pool.key: no_scarcer(slots, pool.demand, nodes)})
    draft.state = replace(state, offers={**state.offers, **offers}, again_s={**state.again_s, pool.key: now_s})
    where = "a node that exists" if first.offer is None else f"a node of type {first.offer.node_type}"
    text = f"{len(taken)} of {pool.key} waited for a node that did not come, and now wait for {where}"
    draft.notes.append(Note(NoteKind.NO_NODE, text))


def _take(slots: Slots, pool: PoolStats, count: int) -> list[Taken]:
    """Take room for at most ``count`` replicas, on nodes to which one label selector leads."""
    assert pool.demand is not None
    taken: list[Taken] = []
    while len(taken) < count and (room := slots.take(pool.demand)) is not None:
        if not slots.starts_together(sum({1 << index for each in (*taken, room) for index, _, _ in each})):
            slots.give_back(room)
            break
        taken.append(room)
    return taken


def _is_worth_it(draft: Draft, pool: PoolStats, node: Node) -> bool:
    """Whether replicas whose type Ray chose have waited for longer than the possible node may take.

    If an existing node has room, Ray itself leads them there.
    """
    since_s, _ = draft.state.unplaced_since_s[pool.key]
    return node.offer is not None and draft.now_s - since_s > node.offer.start_s
