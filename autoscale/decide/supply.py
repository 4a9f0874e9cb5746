"""Supply for new replicas of a service: the GPUs that budgets leave, room on nodes, and nodes to start on (pure)."""

import math
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import product
from types import MappingProxyType

from autoscale.decide.group import Group
from autoscale.decide.slots import Slots, Taken, nodes_of
from autoscale.types import Demand, PoolKey, PoolStats
from kvtransfer.topology import NodeSet, Offer

# Tolerance for rounding errors of GPUs.
_EPSILON = 1e-9
# GPUs of each type that a budget leaves; a type that is left out has no limit.
Limit = MutableMapping[str, float]
# A pool, and the number of replicas that it gains.
Gain = tuple[PoolStats, int]


class Supply:
    """Room on nodes and in budgets, which shrinks as it is taken.

    ``groups``: all groups, before placement changes their counts. ``offers``: offers for which pools wait.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        slots: Slots | None,
        limits: Sequence[Limit],
        offers: Mapping[PoolKey, Offer] = MappingProxyType({}),
    ) -> None:
        self._slots, self._limits, self._offers = slots, limits, offers
        # By pool: nodes on which room was taken for its new replicas.
        self._chosen: dict[PoolKey, tuple[PoolStats, NodeSet]] = {}
        # Replicas on nodes beyond a pool's count are withdrawn. They still hold their room, so a withdrawn replica that
        # comes back takes none.
        self._withdrawn = {
            pool.key: max(0, (pool.held_replicas or 0) - group.counts[role])
            for group in groups
            for role, pool in group.pools.items()
        }

    def take(self, *gains: Gain) -> str | None:
        """Take room for new replicas of each pool, all or nothing; returns why there is no room, or ``None``."""
        new = [(pool, max(0, count - self._withdrawn[pool.key])) for pool, count in gains]
        gpus: dict[str, float] = {}
        for pool, count in new:
            for kind, each in pool.gpus_by_type().items():
                gpus[kind] = gpus.get(kind, 0.0) + count * each
        for limit, (kind, needed) in product(self._limits, gpus.items()):
            if limit.get(kind, math.inf) < needed - _EPSILON:
                return f"a budget leaves {max(0.0, limit[kind]):g} GPUs of type {kind}, and {needed:g} are needed"
        if (lacking := self.take_room(new)) is not None:
            return lacking
        # From here on the call cannot fail, so budgets are spent only now.
        for pool, count in gains:
            self._withdrawn[pool.key] = max(0, self._withdrawn[pool.key] - count)
        for limit, (kind, needed) in product(self._limits, gpus.items()):
            if kind in limit:
                limit[kind] -= needed
        return None

    def has_offer(self, pool: PoolStats) -> bool:
        """Whether replicas of a pool wait for a possible node."""
        return pool.key in self._offers

    def reserve(self, pool: PoolStats) -> None:
        """Take room for one replica that waits for a node: only where its request leads it."""
        if self._slots is not None:
            self.take_room([(pool, 1)], self._slots.nodes_of_offer(self._offers.get(pool.key)))

    def take_room(self, new: Sequence[Gain], among: NodeSet | None = None) -> str | None:
        """Take room on nodes alone, not from budgets, for replicas that hold none yet; otherwise as ``take``.

        ``among``: nodes that the replicas may be on; left out: all that their demand allows.
        """
        if self._slots is None:
            return None
        taken: list[tuple[PoolStats, Taken]] = []
        for pool, count in new:
            for _ in range(count):
                room = [] if pool.demand is None else self._slots.take(pool.demand, among)
                if room is None:
                    self._give_back(taken)
                    return self._why_no_room(pool, sum(count for _, count in new) - 1)
                taken.append((pool, room))
        chosen = dict(self._chosen)
        for pool, room in taken:
            _, nodes = chosen.get(pool.key, (pool, 0))
            chosen[pool.key] = pool, nodes | nodes_of([room])
        for pool, _ in new:
            if pool.key in chosen and not self._slots.starts_together(chosen[pool.key][1]):
                self._give_back(taken)
                return f"other new replicas of {pool.key} start first, on nodes that this one's labels do not lead to"
        self._chosen = chosen
        return None

    def _give_back(self, taken: Sequence[tuple[PoolStats, Taken]]) -> None:
        assert self._slots is not None
        for _, room in taken:
            self._slots.give_back(room)

    def _why_no_room(self, pool: PoolStats, other_replicas: int) -> str:
        assert self._slots is not None and pool.demand is not None
        if candidates := self._slots.candidates(pool.demand):
            if not candidates & self._slots.topology.usable:
                return f"every node that {pool.key} may be on is cordoned"
            beside = f" beside the other {other_replicas} of its unit" if other_replicas else ""
            return f"no node has room for a replica of {pool.key}{beside}"
        one = pool.demand.parts[0] if pool.demand.parts else pool.demand
        labels = ", ".join(f"{name}={value}" for name, value in one.selector.items())
        demanded = [f"GPUs of type {kind}" for kind in pool.gpus_by_type()] + ([f"labels {labels}"] if labels else [])
        return f"no node that is alive has {' and '.join(demanded)}, as {pool.key} demands"

    def nodes(self) -> dict[PoolKey, tuple[str, ...]]:
        """Nodes that new replicas of each growing pool may be on (``placement.Placed.nodes``)."""
        return {
            key: () if pool.demand is None or self._slots is None else no_scarcer(self._slots, pool.demand, nodes)
            for key, (pool, nodes) in self._chosen.items()
        }


def no_scarcer(slots: Slots, demand: Demand, nodes: NodeSet) -> tuple[str, ...]:
    """The nodes that a replica may be on and that are no scarcer than ``nodes``, without cordoned ones.

    Empty: no node is scarcer. The scheduler hook then excludes cordoned nodes alone, and no list of all nodes is sent.
    If some of ``nodes`` are possible ones, the first of them stands for their type.
    """
    topology = slots.topology
    possible = next(topology.listed(nodes & ~topology.existing), None)
    if possible is not None:
        return (possible.name,)
    candidates = slots.candidates(demand) & topology.existing
    scarcest = topology.priority(nodes)
    # Each node is in one subgroup, so the sum of the sets is their union.
    no_scarcer_nodes = sum(subgroup for priority, subgroup in topology.subgroups.items() if priority <= scarcest)
    allowed = candidates & no_scarcer_nodes
    return () if allowed == candidates else tuple(node.name for node in topology.listed(allowed & topology.usable))


def start_nodes(
    before: Mapping[PoolKey, tuple[str, ...]],
    planned: Mapping[PoolKey, tuple[str, ...]],
    counts: Mapping[PoolKey, int],
    pools: Sequence[PoolStats],
    slots: Slots,
    offers: Mapping[PoolKey, Offer],
) -> tuple[dict[PoolKey, tuple[str, ...]], dict[PoolKey, Mapping[str, str]]]:
    """Where replicas of each pool may start: the first result names existing nodes, the second one labels of nodes.

    A pool that is in neither may use all nodes that its demand allows. A pool that grows in this cycle uses its
    ``planned`` nodes (``Placed.nodes``). Until it has its count (``counts``), it goes on using its nodes of the last
    cycle (``before``), without those that are gone or cordoned by now. After that, a replica that replaces a lost one
    goes to no scarcer node than the pool's other replicas are on. A node that does not exist has no id, so the labels
    of its type (``offers``) lead replicas to it.
    """
    topology = slots.topology
    index, usable = topology.index, topology.usable
    nodes: dict[PoolKey, tuple[str, ...]] = {}
    labels: dict[PoolKey, Mapping[str, str]] = {}
    for pool in pools:
        if pool.demand is None:
            continue
        key, is_growing = pool.key, (pool.held_replicas or 0) < counts[pool.key]
        if key in planned:
            names = planned[key]
        elif is_growing:
            names = tuple(name for name in before.get(key, ()) if name in index and usable >> index[name] & 1)
        elif topology.may_grow:  # a node may come for a replica that replaces a lost one
            names = ()
        else:
            own = {index[name] for on in pool.on.values() for name in on if name in index}
            names = no_scarcer(slots, pool.demand, sum(1 << at for at in own)) if own else ()
        waits_for_offer = names[0] in topology.offer_of if names else is_growing and key not in planned
        if waits_for_offer and key in offers:
            labels[key] = dict(offers[key].labels)
        elif names:
            nodes[key] = names
    return nodes, labels
