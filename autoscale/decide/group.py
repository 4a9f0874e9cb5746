"""One group during placement: its counts, the followers that its leaders need, and its rank (pure).

A leader is a replica of the ratio's larger role (decode if both are equal); a follower is a replica of the other role.
The replicas of an aggregated group, which do the work of both roles, are leaders that need no followers.
The rank decides which group gets the next leader, and which group loses one.
"""

import math
from collections.abc import Collection, Mapping
from functools import cached_property

from autoscale.decide.limits import stuck_replicas
from autoscale.decide.slots import Slots, nodes_of
from autoscale.ratio import PdRatio, whole
from autoscale.types import PoolKey, PoolStats
from kvtransfer.topology import Role, SubgroupPriority

# A group may have this many followers more or fewer than the ratio gives to its leaders. It is the default of
# ``gate.band_replicas``: if a group is further off the ratio, the gate does not let all of its replicas serve.
_BAND_REPLICAS = 1.0
# Added before a count is rounded down, so that 2.9999999999 counts as 3.
_EPSILON = 1e-9


class Group:
    """Replica counts of one group's pools; placement changes them step by step.

    Attributes:
        is_aggregated: whether its replicas do the work of both roles, beside groups with a prefill pool.
        counts: replicas of each role, without stuck ones.
        stuck: replicas of each role that ``lowest_replicas`` requires and that have waited for a node for too long.
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
        self._ratio = ratio
        self.is_aggregated = pools[Role.DECODE].limits.prompt_capacity > 0.0
        self.leader = pools[Role.DECODE if self.is_aggregated else ratio.leader]
        self.follower = pools[Role.PREFILL if self.is_aggregated else ratio.follower]
        share = 0.0 if self.is_aggregated else ratio.follower_share
        self._followers_per_leader = share * self.leader.limits.capacity / self.follower.limits.capacity
        self.counts = {
            role: min(max(current.get(pool.key, 0), pool.limits.lowest_replicas), pool.limits.highest_replicas)
            for role, pool in pools.items()
        }
        self.stuck = dict.fromkeys(Role, 0)
        self.closed = set[Role]()
        self.passed_over = ""
        # For each role: the roles whose replicas do its work, with the standard replicas that each of them is worth.
        self._worth = {
            role: [(own, worth) for own, pool in pools.items() if (worth := pool.capacity_in(role))] for role in Role
        }
        leader, follower = self.leader.limits, self.follower.limits
        self._preference = leader.preference + follower.preference
        self._slots = slots
        self._scarcity, self.cannot_grow = _scarcity_and_fault(pools.values(), slots)

    def close(self, role: Role) -> None:
        """Close a role for this cycle: count only its replicas that are on nodes.

        Of the others, those that ``lowest_replicas`` requires become stuck, and the rest is dropped.
        """
        pool = self.pools[role]
        self.closed.add(role)
        self.stuck[role] = stuck_replicas(pool, self.counts[role])
        self.counts[role] = pool.held_replicas or 0
        self.passed_over = self.why_full(pool)

    def rank_to_grow(self) -> tuple[float, ...]:
        """The group with the lowest rank gets the next leader; scarcity and cost are those of nodes with free room."""
        leader_scarcity, leader_cost = self._room(self.leader)
        follower_scarcity, follower_cost = self._room(self.follower)
        return self._rank(max(leader_scarcity, follower_scarcity), self._cost_of_leader(leader_cost, follower_cost))

    def rank_to_shrink(self) -> tuple[float, ...]:
        """The group with the highest rank loses the next leader; scarcity and cost are those of its nodes."""
        return self._rank(self._scarcity, self._cost)

    @cached_property
    def _cost(self) -> float:
        """Cost per hour of a standard leader with its followers on the group's nodes of now."""
        return self._cost_of_leader(self._cost_on_nodes(self.leader), self._cost_on_nodes(self.follower))

    def _cost_on_nodes(self, pool: PoolStats) -> float:
        """Mean cost per hour of the replicas of a pool, by the prices of their nodes as far as these have their own."""
        if self._slots is None or pool.demand is None:
            return pool.limits.cost
        nodes, index = self._slots.topology.nodes, self._slots.topology.index
        own = (nodes[index[name]].saves_per_gpu_hour for names in pool.on.values() for name in names if name in index)
        prices = [price for price in own if price is not None]
        return math.fsum(prices) / len(prices) * pool.demand.gpus if prices else pool.limits.cost

    def _rank(self, scarcity: SubgroupPriority, cost: float) -> tuple[float, ...]:
        """The six parts of rule 1 of ``placement.place``, compared from left to right."""
        tier, leaders = self.leader.limits.link_tier, self.leaders
        return scarcity, self._preference, cost, tier, not leaders, self.standard(self._ratio.leader)

    def _cost_of_leader(self, leader: float, follower: float) -> float:
        """Cost per hour of a standard leader with its followers, from the costs of one replica of each role."""
        return (leader + self._followers_per_leader * follower) / self.leader_capacity

    def _room(self, pool: PoolStats) -> tuple[SubgroupPriority, float]:
        """Scarcity of the nodes that one more replica would be on, and its cost of an hour there.

        Without room: the scarcity of all nodes of the group. A node of a declared type may have a price of its own.
        """
        if self._slots is None or pool.demand is None:
            return SubgroupPriority.S2_HOMOGENEOUS, pool.limits.cost
        # Room is taken only to see where it is.
        taken = self._slots.take(pool.demand)
        if taken is None:
            return self._scarcity, pool.limits.cost
        self._slots.give_back(taken)
        topology = self._slots.topology
        node = topology.nodes[taken[0][0]]
        price = node.saves_per_gpu_hour if node.offer is None else node.offer.cost_per_gpu_hour
        return topology.priority(nodes_of([taken])), pool.limits.cost if price is None else price * pool.demand.gpus

    @property
    def leaders(self) -> int:
        """Replicas of the pool of leaders."""
        return self.counts[self.leader.key.role]

    @leaders.setter
    def leaders(self, count: int) -> None:
        self.counts[self.leader.key.role] = count

    @property
    def followers(self) -> int:
        """Replicas of the pool of followers."""
        return self.counts[self.follower.key.role]

    @followers.setter
    def followers(self, count: int) -> None:
        self.counts[self.follower.key.role] = count

    @property
    def leader_capacity(self) -> float:
        """Standard leaders that one more replica of the pool of leaders adds."""
        return self.capacity_of(self._ratio.leader)

    def capacity_of(self, role: Role) -> float:
        """Standard replicas of a role that one more replica of the pool of leaders adds."""
        return self.leader.capacity_in(role)

    @property
    def follower_capacity(self) -> float:
        """Standard followers that one more replica of the pool of followers adds."""
        return self.follower.limits.capacity

    def standard(self, role: Role) -> float:
        """Standard replicas of a role; those of an aggregated group do the work of both roles."""
        return sum([self.counts[own] * worth for own, worth in self._worth[role]])

    def placed(self, role: Role) -> int:
        """Replicas of a role, stuck ones included."""
        return self.counts[role] + self.stuck[role]

    @property
    def _lowest_followers(self) -> int:
        """The lowest count of followers, less those of them that are stuck."""
        return max(0, self.follower.limits.lowest_replicas - self.stuck[self.follower.key.role])

    def fewest_to_serve(self, more_leaders: int = 0) -> int:
        """The fewest followers with which all leaders may serve; without leaders, the lowest count of followers."""
        leaders = self.leaders + more_leaders
        if leaders <= 0 or not self._followers_per_leader:
            return self._lowest_followers
        # ``whole`` rounds up.
        return max(self._lowest_followers, 1, whole(leaders * self._followers_per_leader - _BAND_REPLICAS))

    def fewest_that_stay(self) -> int:
        """The fewest followers that stay: the lowest count, but at least one if the group serves."""
        needs_one = self.leaders > 0 and self._followers_per_leader > 0.0
        return max(1 if needs_one else 0, self._lowest_followers)

    def at_ratio(self, more_leaders: int = 0) -> int:
        """The followers that the ratio requires with the leaders, rounded up."""
        leaders = self.leaders + more_leaders
        return max(self.fewest_to_serve(more_leaders), whole(leaders * self._followers_per_leader))

    def most_to_serve(self) -> int:
        """The most followers that may serve with the leaders."""
        if not self.leaders:
            return 0
        most = math.floor(self.leaders * self._followers_per_leader + _BAND_REPLICAS + _EPSILON)
        return max(self.fewest_to_serve(), most)

    def surplus(self) -> float:
        """Followers above the ratio; negative below it."""
        return self.followers - self.leaders * self._followers_per_leader

    def leaders_to_relieve(self) -> int:
        """Number of leaders that must leave before the group needs one follower less.

        For a group whose leaders need followers, so the ratio is not 0. The last follower is needed as long as there is
        a leader; a group whose leaders require at most one gets 0 or less here, so it is emptied before other groups.
        """
        # The formula of ``fewest_to_serve``, solved for the leaders.
        followers = self.fewest_to_serve() - 1
        allowed_leaders = math.floor((followers + _BAND_REPLICAS) / self._followers_per_leader + _EPSILON)
        return self.leaders - allowed_leaders

    def allows(self, pool: PoolStats, step: int) -> bool:
        """Whether a pool's bounds allow to add ``step`` replicas, or to remove them if it is negative."""
        return pool.limits.lowest_replicas <= self.placed(pool.key.role) + step <= self.highest(pool)

    def highest(self, pool: PoolStats) -> int:
        """The most replicas that a pool may have in this cycle."""
        return self.placed(pool.key.role) if pool.key.role in self.closed else pool.limits.highest_replicas

    def why_full(self, pool: PoolStats) -> str:
        """Message why a pool takes no more replicas."""
        if pool.key.role in self.closed:
            return f"{pool.key} found no node for the replicas that it should get"
        return f"{pool.key} is at its {pool.limits.highest_replicas} replicas"


def _scarcity_and_fault(pools: Collection[PoolStats], slots: Slots | None) -> tuple[SubgroupPriority, str | None]:
    """Scarcity of a group's nodes, and why the group may not grow, if its nodes are too far apart for its affinity."""
    nodes = 0 if slots is None else slots.candidates_of_any(pool.demand for pool in pools)
    if slots is None or not nodes:
        return SubgroupPriority.S2_HOMOGENEOUS, None
    topology, affinity = slots.topology, min(pool.limits.affinity for pool in pools)
    scarcity = topology.priority(nodes)
    if topology.tier(nodes) <= affinity:
        return scarcity, None
    first = nodes & -nodes  # the lowest bit of the set: its first node
    near_first = next((below for below in topology.domains[affinity].values() if below & first), first)
    first_node = next(topology.listed(first))
    far_node = next(topology.listed(nodes & ~near_first), None)
    if far_node is None:
        fault = f"{first_node.name} has no label for it"
    else:
        fault = f"{first_node.name} and {far_node.name} do not share one"
    return scarcity, f"its affinity requires one {affinity.name.lower()} above all its nodes: {fault}"
