"""Replicas that a lowest count requires ask for another node if the one that they wait for does not come (pure).

Other replicas are withdrawn if their node does not come, and requested again elsewhere. Serve never has fewer replicas
of a pool than its lowest count, so these go on waiting, and a placement group that waits keeps its labels. So Serve
must stop such a replica and start it again, with the labels of another node.
"""

from dataclasses import replace

from autoscale.decide.draft import Draft
from autoscale.decide.limits import stuck_replicas
from autoscale.decide.possible import accepted
from autoscale.decide.supply import Supply
from autoscale.types import Note, NoteKind, PoolStats


def ask_again(draft: Draft) -> None:
    """A stage: on a cluster that grows, choose other nodes for stuck replicas; ``Plan.again`` names their pools."""
    draft.again = []
    overdue = [pool for pool in draft.pools if pool.key in draft.overdue]
    if draft.slots is None or draft.config.is_frozen or not draft.slots.topology.offers:
        return
    for pool in overdue:
        if _has_waited_in_vain(draft, pool):
            _choose_other_nodes(draft, pool)


def _has_waited_in_vain(draft: Draft, pool: PoolStats) -> bool:
    """Whether no node can be expected any more for the replicas of an overdue pool.

    Before the first plan Ray chooses the node type, so a node of any type may still come.
    """
    assert draft.slots is not None
    if pool.key in draft.snapshot.state.offers:
        return pool.key not in draft.state.offers  # given up in this tick
    since_s, _ = draft.state.unplaced_since_s[pool.key]
    return draft.now_s - since_s > max(offer.start_s for offer in draft.slots.topology.offers)


def _choose_other_nodes(draft: Draft, pool: PoolStats) -> None:
    state, placed = draft.state, draft.placed
    count = stuck_replicas(pool, state.desired_and_warm.get(pool.key, 0))
    supply = Supply((), draft.slots, ())
    if not count or supply.take_room([(pool, count)]) is not None:
        return
    nodes = supply.nodes()
    assert draft.slots is not None
    offers = accepted(nodes, draft.slots.topology.offer_of)
    draft.again.append(pool.key)
    draft.placed = replace(placed, nodes={**placed.nodes, **nodes})
    draft.state = replace(
        state,
        offers={**state.offers, **offers},
        unplaced_since_s={**state.unplaced_since_s, pool.key: (draft.now_s, pool.held_replicas or 0)},
    )
    where = f"a node of type {offers[pool.key].node_type}" if pool.key in offers else "a node that exists"
    text = f"no node has come for {count} of {pool.key}: it asks for {where}"
    draft.notes.append(Note(NoteKind.NO_NODE, text))
