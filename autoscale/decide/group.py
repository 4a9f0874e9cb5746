"""One group while it is placed: its counts, what they need of each other, and its rank among groups (pure)."""

import math
from collections.abc import Collection, Mapping

from autoscale.decide.limits import stuck_replicas
from autoscale.decide.slots import Slots
from autoscale.ratio import PdRatio, whole
from autoscale.types import PoolKey, PoolStats
from kvtransfer.topology import NodeSet, Role, SubgroupPriority

# How far a group may be from the ratio, replicas of the smaller role: what the gate admits by default.
_BAND_REPLICAS = 1.0
_EPSILON = 1e-9


class Group:
    """Counts of one group's pools, which the placement moves.

    Attributes:
        counts: replicas of each role, without stuck ones.
        stuck: replicas of each role that the lowest count asks for and that have been on no node for too long.
        closed: roles that take no more replicas in this cycle.
        passed_over: why the group was to grow and could not; empty: it was not.
        cannot_grow: why it takes no replica at all; ``None``: it may.
    """

    def __init__(
        self,
        name: str,
        pools: Mapping[Role, PoolStats],
        current: Mapping[PoolKey, int],
        ratio: PdRatio,
        slots: Slots | None,
    ) -> None:
        self.name, self.pools = name, pools
        self.leader, self.follower = pools[ratio.leader], pools[ratio.follower]
        self._share = ratio.follower_share
        self.counts = {
            role: min(max(current.get(pool.key, 0), pool.limits.lowest_replicas), pool.limits.highest_replicas)
            for role, pool in pools.items()
        }
        self.stuck = dict.fromkeys(Role, 0)
        self.closed = set[Role]()
        self.passed_over = ""
        self._slots = slots
        self._scarcity, self.cannot_grow = _scarcity_and_fault(pools.values(), slots)

    def close(self, role: Role) -> None:
        """Give up replicas that have waited for a node for too long; those of the lowest count stay asked for."""
        pool = self.pools[role]
        self.closed.add(role)
        self.stuck[role] = stuck_replicas(pool, self.counts[role])
        self.counts[role] = pool.held_replicas or 0
        self.passed_over = self.full(pool)

    def rank(self) -> tuple[float, ...]:
        """The lower, the sooner leaders are added to it."""
        return self._rank(max(self._scarcity_of_room(pool) for pool in self.pools.values()))

    def standing(self) -> tuple[float, ...]:
        """The higher, the sooner leaders are taken from it."""
        return self._rank(self._scarcity)

    def _rank(self, scarcity: SubgroupPriority) -> tuple[float, ...]:
        leader, follower = self.leader.limits, self.follower.limits
        cost = leader.cost + self._share * follower.cost
        preference = leader.preference + follower.preference
        return scarcity, preference, cost, leader.link_tier, not self.leaders, self.leaders

    def _scarcity_of_room(self, pool: PoolStats) -> SubgroupPriority:
        """Scarcity of the least scarce nodes that have room for one replica."""
        if self._slots is None or pool.demand is None:
            return SubgroupPriority.S2_HOMOGENEOUS
        taken = self._slots.take(pool.demand)
        if taken is None:
            return self._scarcity
        self._slots.give_back(taken)
        return self._slots.topology.priority(sum(1 << index for index, _, _ in taken))

    @property
    def leaders(self) -> int:
        """Replicas of the ratio's larger role."""
        return self.counts[self.leader.key.role]

    @property
    def followers(self) -> int:
        """Replicas of the ratio's smaller role."""
        return self.counts[self.follower.key.role]

    def placed(self, role: Role) -> int:
        """Replicas of a role, stuck ones too."""
        return self.counts[role] + self.stuck[role]

    @property
    def _tied_up(self) -> int:
        """Followers that the lowest count keeps, without stuck ones."""
        return max(0, self.follower.limits.lowest_replicas - self.stuck[self.follower.key.role])

    def needed(self, more_leaders: int = 0) -> int:
        """The fewest followers with which all leaders may serve; a group that sleeps needs none."""
        leaders = self.leaders + more_leaders
        if leaders <= 0 or not self._share:
            return self._tied_up
        return max(self._tied_up, 1, whole(leaders * self._share - _BAND_REPLICAS))

    def least(self) -> int:
        """The fewest followers that stay: one where the group serves, and those that it must keep."""
        return max(self.leaders > 0 and self._share > 0.0, self._tied_up)

    def due(self, more_leaders: int = 0) -> int:
        """The followers that belong to the leaders at the ratio."""
        leaders = self.leaders + more_leaders
        return max(self.needed(more_leaders), whole(leaders * self._share))

    def most(self) -> int:
        """The most followers that may serve beside the leaders."""
        if not self.leaders:
            return 0
        return max(self.needed(), math.floor(self.leaders * self._share + _BAND_REPLICAS + _EPSILON))

    def surplus(self) -> float:
        """Followers above the ratio."""
        return self.followers - self.leaders * self._share

    def until_relieved(self) -> int:
        """How many leaders must leave before the group needs a follower less."""
        return self.leaders - math.floor((self.needed() - 1 + _BAND_REPLICAS) / self._share + _EPSILON)

    def can(self, pool: PoolStats, step: int) -> bool:
        """Whether a pool's bounds allow this many more, or fewer."""
        return pool.limits.lowest_replicas <= self.placed(pool.key.role) + step <= self.highest(pool)

    def highest(self, pool: PoolStats) -> int:
        """The most that a pool may have now."""
        return self.placed(pool.key.role) if pool.key.role in self.closed else pool.limits.highest_replicas

    def full(self, pool: PoolStats) -> str:
        """Why a pool takes no more."""
        if pool.key.role in self.closed:
            return f"what {pool.key} was to have has found no node"
        return f"{pool.key} is at its {pool.limits.highest_replicas} replicas"


def _scarcity_and_fault(pools: Collection[PoolStats], slots: Slots | None) -> tuple[SubgroupPriority, str | None]:
    """How scarce a group's nodes are, and why it may not grow: its nodes lie further apart than they may."""
    nodes: NodeSet = 0
    if slots is not None:
        for pool in pools:
            nodes |= 0 if pool.demand is None else slots.candidates(pool.demand)
    if slots is None or not nodes:
        return SubgroupPriority.S2_HOMOGENEOUS, None
    affinity = min(pool.limits.affinity for pool in pools)
    scarcity = slots.topology.priority(nodes)
    if slots.topology.tier(nodes) <= affinity:
        return scarcity, None
    ends = [node.name for node in slots.topology.listed(nodes & -nodes | 1 << nodes.bit_length() - 1)]
    where = f"under no one {affinity.name.lower()}, as its affinity demands"
    return scarcity, f"its nodes lie {where}: {' and '.join(ends)} do not"
