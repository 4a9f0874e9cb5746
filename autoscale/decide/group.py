"""One group during placement: its counts, the followers that its leaders need, and its rank (pure)."""

import math
from collections.abc import Collection, Mapping

from autoscale.decide.limits import stuck_replicas
from autoscale.decide.slots import Slots
from autoscale.ratio import PdRatio, whole
from autoscale.types import PoolKey, PoolStats
from kvtransfer.topology import Role, SubgroupPriority

# Largest distance of a group from the ratio, replicas of the smaller role: the gate's default.
_BAND_REPLICAS = 1.0
_EPSILON = 1e-9


class Group:
    """Counts of one group's pools, which the placement moves.

    Attributes:
        counts: replicas of each role, without stuck ones.
        stuck: replicas of each role that the lowest count requires and that have waited for a node for too long.
        closed: roles that take no more replicas in this cycle.
        passed_over: why the group did not grow although it should; empty if it grew or should not.
        cannot_grow: why the group takes no replica at all; ``None``: it may take some.
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
        """Give up replicas of a role that have waited for a node for too long, except those of the lowest count."""
        pool = self.pools[role]
        self.closed.add(role)
        self.stuck[role] = stuck_replicas(pool, self.counts[role])
        self.counts[role] = pool.held_replicas or 0
        self.passed_over = self.full(pool)

    def rank_to_grow(self) -> tuple[float, ...]:
        """Rank by scarcity of the free room: the group with the lowest rank gets the next leader."""
        return self._rank(max(self._scarcity_of_room(pool) for pool in self.pools.values()))

    def rank_to_shrink(self) -> tuple[float, ...]:
        """Rank by scarcity of all its nodes: the group with the highest rank loses the next leader."""
        return self._rank(self._scarcity)

    def _rank(self, scarcity: SubgroupPriority) -> tuple[float, ...]:
        leader, follower = self.leader.limits, self.follower.limits
        cost = leader.cost + self._share * follower.cost
        preference = leader.preference + follower.preference
        return scarcity, preference, cost, leader.link_tier, not self.leaders, self.leaders

    def _scarcity_of_room(self, pool: PoolStats) -> SubgroupPriority:
        """Scarcity of the least scarce nodes with room for one replica."""
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
        """Replicas of a role, stuck ones included."""
        return self.counts[role] + self.stuck[role]

    @property
    def _lowest_followers(self) -> int:
        """The lowest count of followers, without stuck ones."""
        return max(0, self.follower.limits.lowest_replicas - self.stuck[self.follower.key.role])

    def needed(self, more_leaders: int = 0) -> int:
        """The fewest followers with which all leaders may serve; a group without leaders needs its lowest count."""
        leaders = self.leaders + more_leaders
        if leaders <= 0 or not self._share:
            return self._lowest_followers
        return max(self._lowest_followers, 1, whole(leaders * self._share - _BAND_REPLICAS))

    def least(self) -> int:
        """The fewest followers that stay: the lowest count, and one if the group serves."""
        return max(self.leaders > 0 and self._share > 0.0, self._lowest_followers)

    def due(self, more_leaders: int = 0) -> int:
        """The followers that the leaders have at the ratio."""
        leaders = self.leaders + more_leaders
        return max(self.needed(more_leaders), whole(leaders * self._share))

    def most(self) -> int:
        """The most followers that may serve with the leaders."""
        if not self.leaders:
            return 0
        return max(self.needed(), math.floor(self.leaders * self._share + _BAND_REPLICAS + _EPSILON))

    def surplus(self) -> float:
        """Followers above the ratio."""
        return self.followers - self.leaders * self._share

    def until_relieved(self) -> int:
        """Number of leaders that must leave before the group needs one follower less."""
        return self.leaders - math.floor((self.needed() - 1 + _BAND_REPLICAS) / self._share + _EPSILON)

    def can(self, pool: PoolStats, step: int) -> bool:
        """Whether a pool's bounds allow to add ``step`` replicas, or to remove them if it is negative."""
        return pool.limits.lowest_replicas <= self.placed(pool.key.role) + step <= self.highest(pool)

    def highest(self, pool: PoolStats) -> int:
        """The most replicas that a pool may have in this cycle."""
        return self.placed(pool.key.role) if pool.key.role in self.closed else pool.limits.highest_replicas

    def full(self, pool: PoolStats) -> str:
        """Message that a pool takes no more replicas."""
        if pool.key.role in self.closed:
            return f"what {pool.key} was to have has found no node"
        return f"{pool.key} is at its {pool.limits.highest_replicas} replicas"


def _scarcity_and_fault(pools: Collection[PoolStats], slots: Slots | None) -> tuple[SubgroupPriority, str | None]:
    """Scarcity of a group's nodes, and why the group may not grow: its nodes are further apart than its affinity."""
    nodes = 0 if slots is None else slots.candidates_of_any(pool.demand for pool in pools)
    if slots is None or not nodes:
        return SubgroupPriority.S2_HOMOGENEOUS, None
    topology, affinity = slots.topology, min(pool.limits.affinity for pool in pools)
    scarcity = topology.priority(nodes)
    if topology.tier(nodes) <= affinity:
        return scarcity, None
    first = nodes & -nodes
    near = next((below for below in topology.domains[affinity].values() if below & first), first)
    names = [next(topology.listed(part)).name for part in (first, nodes & ~near) if part]
    fault = f"{' and '.join(names)} do not share one" if len(names) > 1 else f"no label names that of {names[0]}"
    return scarcity, f"its affinity requires one {affinity.name.lower()} above all its nodes: {fault}"
