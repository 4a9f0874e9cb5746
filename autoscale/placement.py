"""Replicas of a service -> replicas of each pool: which groups grow and which give (pure).

HeteroScale Algorithm 4 for one request. A group grows by units, a replica of the ratio's larger role and those of the
smaller one that are due with it, or not at all; what finds no group stays pending.
"""

import math
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from autoscale.ratio import PdRatio
from autoscale.slots import Demand, Slots, Taken
from autoscale.types import PoolKey, PoolStats
from kvtransfer.topology import NodeSet, Role, SubgroupPriority

# How far a group may be from the ratio, replicas of the smaller role: what the gate lets serve by default.
_BAND_REPLICAS = 1.0
_EPSILON = 1e-9
# GPUs of each type that a budget leaves.
Limit = MutableMapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a service's replicas go.

    Attributes:
        counts: of each pool.
        pending: replicas of each role that have no place.
        passed_over: groups that were to grow and could not, and why.
        nodes: of each pool with new replicas those that these may be on: none that is scarcer than was found to have
            room; nothing where none is. Cordoned nodes are none of them anyway.
    """

    counts: Mapping[PoolKey, int]
    pending: Mapping[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    passed_over: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[PoolKey, tuple[str, ...]] = field(default_factory=dict)


def place(
    counts: Mapping[Role, int],
    current: Mapping[PoolKey, int],
    pools: Sequence[PoolStats],
    ratio: PdRatio,
    *,
    slots: Slots | None = None,
    limits: Sequence[Limit] = (),
    overdue: Collection[PoolKey] = (),
    spare_followers: int = 0,
) -> Placed:
    """Spread a service's replicas over its groups, each near the ratio, moving as few as possible.

    Leaders are added where switches are least scarce (HeteroScale section 3.4), then where the GPU types are preferred,
    then where they and their followers cost least, so that a dearer variant grows only when all cheaper ones are full
    (WVA section V-C); among such groups where KV travels least, then where there are some, and then where there are
    fewest. They are taken in the opposite order. But no group keeps more of them than followers can be had for: each
    other group ties up its lowest number of those. Followers go where they are furthest below the ratio, since KV moves
    only inside a group. Replicas of a role count alike, whatever they are.

    Args:
        counts: replicas of each role.
        current: of each pool now.
        pools: all pools of the service, two of each group, or one where the ratio is 0:1.
        ratio: to be kept in each group.
        slots: what nodes have room for; ``None``: for everything.
        limits: GPUs by type that budgets leave; what is placed is taken from them.
        overdue: pools of which replicas that have been asked for and have found no room go elsewhere.
        spare_followers: so many more there may be for groups that wake, where no other has room for a leader: one that
            serves has one of each role, whatever the ratio makes of the total.
    """
    by_group: dict[str, dict[Role, PoolStats]] = {}
    for pool in pools:
        absent = {role: PoolStats.absent(PoolKey(pool.key.group, role)) for role in Role}
        by_group.setdefault(pool.key.group, absent)[pool.key.role] = pool
    service = _Service(
        [_Group(name, of, current, ratio, slots) for name, of in by_group.items()],
        ratio,
        slots,
        limits,
    )
    service.reserve(overdue)
    followers = service.fit_leaders(counts, spare_followers)
    service.fit_followers({**counts, ratio.follower: followers})
    service.rescue({**counts, ratio.follower: followers})
    service.give_up()
    placed = {group.of[role].key: group.placed[role] for group in service.groups for role in group.of}
    total = {role: sum(group.count(role) for group in service.groups) for role in Role}
    return Placed(
        counts={pool.key: placed[pool.key] for pool in pools},
        pending={role: max(0, counts[role] - total[role]) for role in Role},
        passed_over={group.name: group.passed_over for group in service.groups if group.passed_over},
        nodes=service.narrowed(),
    )


def held_gpus(pools: Sequence[PoolStats], desired: Mapping[PoolKey, int]) -> dict[str, float]:
    """GPUs by type that a service has or has asked for, those of replicas that are on their way out too."""
    held: dict[str, float] = {}
    for pool in pools:
        here = len(pool.replicas) if pool.held_replicas is None else pool.held_replicas
        leaving = max(len(pool.draining), len(pool.on) - here)
        count = max(here, desired.get(pool.key, 0)) + leaving
        for kind, gpus in {} if pool.demand is None else pool.demand.gpus_by_type().items():
            held[kind] = held.get(kind, 0.0) + count * gpus
    return held


def least_units(pools: Sequence[PoolStats]) -> list[list[Demand]]:
    """Of each group what it takes to begin: one replica of each role that it has."""
    groups: dict[str, list[Demand]] = {}
    for pool in pools:
        if pool.demand is not None:
            groups.setdefault(pool.key.group, []).append(pool.demand)
    return list(groups.values())


class _Group:
    """One group while it is placed."""

    def __init__(
        self,
        name: str,
        of: Mapping[Role, PoolStats],
        current: Mapping[PoolKey, int],
        ratio: PdRatio,
        slots: Slots | None,
    ) -> None:
        self.name, self.of = name, of
        self.leader, self.follower = of[ratio.leader], of[ratio.follower]
        self._share = ratio.follower_share
        self.placed = {
            role: min(max(current.get(p.key, 0), p.lowest_replicas), p.highest_replicas) for role, p in of.items()
        }
        self.passed_over = ""
        self.closed = set[Role]()  # takes no more in this cycle
        self.stuck = dict.fromkeys(Role, 0)  # asked for, and on no node for too long
        self._slots = slots
        self._scarcity, self.cannot_grow = _standing(of.values(), slots)

    def rank(self) -> tuple[float, ...]:
        """The lower, the sooner its leaders come."""
        return self._rank(max(self._scarcity_of_room(pool) for pool in self.of.values()))

    def standing(self) -> tuple[float, ...]:
        """The higher, the sooner its leaders go."""
        return self._rank(self._scarcity)

    def _rank(self, scarcity: SubgroupPriority) -> tuple[float, ...]:
        cost = self.leader.cost + self._share * self.follower.cost
        preference = self.leader.preference + self.follower.preference
        return scarcity, preference, cost, self.leader.link_tier, not self.leaders, self.leaders

    def _scarcity_of_room(self, pool: PoolStats) -> SubgroupPriority:
        """Of the least scarce nodes that have room for one replica."""
        if self._slots is None or pool.demand is None:
            return SubgroupPriority.S2_HOMOGENEOUS
        found = self._slots.take(pool.demand)
        if found is None:
            return self._scarcity
        self._slots.give_back(found)
        return self._slots.topology.priority(sum(1 << index for index, _, _ in found))

    @property
    def leaders(self) -> int:
        """But for those that are stuck."""
        return self.count(self.leader.key.role)

    @leaders.setter
    def leaders(self, count: int) -> None:
        self.placed[self.leader.key.role] = count + self.stuck[self.leader.key.role]

    @property
    def followers(self) -> int:
        """Likewise."""
        return self.count(self.follower.key.role)

    @followers.setter
    def followers(self, count: int) -> None:
        self.placed[self.follower.key.role] = count + self.stuck[self.follower.key.role]

    def count(self, role: Role) -> int:
        """Replicas of a role, but for those that are stuck."""
        return self.placed[role] - self.stuck[role]

    def needed(self, step: int = 0) -> int:
        """The fewest followers with which all leaders may serve; of a group that sleeps, none."""
        leaders = self.leaders + step
        tied_up = max(0, self.follower.lowest_replicas - self.stuck[self.follower.key.role])
        if leaders <= 0 or not self._share:
            return tied_up
        return max(tied_up, 1, math.ceil(leaders * self._share - _BAND_REPLICAS - _EPSILON))

    def least(self) -> int:
        """The followers that it has at least: one where it serves, and those that it must keep."""
        serves = self.leaders > 0 and self._share > 0.0
        return max(serves, self.follower.lowest_replicas - self.stuck[self.follower.key.role])

    def due(self, step: int = 0) -> int:
        """The followers that belong to its leaders at the ratio."""
        return max(self.needed(step), math.ceil((self.leaders + step) * self._share - _EPSILON))

    def most(self) -> int:
        """The most followers that may serve beside its leaders."""
        return (
            max(self.needed(), math.floor(self.leaders * self._share + _BAND_REPLICAS + _EPSILON))
            if self.leaders
            else 0
        )

    def surplus(self) -> float:
        """Followers above the ratio."""
        return self.followers - self.leaders * self._share

    def until_relieved(self) -> int:
        """How many leaders must leave before it needs a follower less."""
        return self.leaders - math.floor((self.needed() - 1 + _BAND_REPLICAS) / self._share + _EPSILON)

    def can(self, pool: PoolStats, step: int) -> bool:
        """Whether a pool's bounds allow one more or one less."""
        return pool.lowest_replicas <= self.placed[pool.key.role] + step <= self.highest(pool)

    def highest(self, pool: PoolStats) -> int:
        """The most that a pool may have now."""
        return self.placed[pool.key.role] if pool.key.role in self.closed else pool.highest_replicas

    def full(self, pool: PoolStats) -> str:
        """Why a pool takes no more."""
        if pool.key.role in self.closed:
            return f"what {pool.key} was to have has found no node"
        return f"{pool.key} is at its {pool.highest_replicas} replicas"


class _Service:
    """All groups of a service, and what there is to take."""

    def __init__(self, groups: Sequence[_Group], ratio: PdRatio, slots: Slots | None, limits: Sequence[Limit]) -> None:
        self.groups = groups
        self._leader, self._follower = ratio.leader, ratio.follower
        self._slots, self._limits = slots, limits
        self._nodes: dict[PoolKey, NodeSet] = {}
        # Who was withdrawn still holds its room, and comes back without another.
        self._withdrawn = {
            pool.key: max(0, (pool.held_replicas or 0) - group.placed[role])
            for group in groups
            for role, pool in group.of.items()
        }

    def reserve(self, overdue: Collection[PoolKey]) -> None:
        """What has been asked for takes its room first; what has waited for some too long is given up.

        It is asked for elsewhere; where there is nothing else, again in the next cycle: the nodes that it was to be on
        may be others by now, such as lost ones. What must stay by the group's lowest count stays asked for, and does
        not count.
        """
        for group in self.groups:
            for role, pool in group.of.items():
                held = group.placed[role] if pool.held_replicas is None else pool.held_replicas
                for _ in range(group.placed[role] - held):
                    if pool.key not in overdue:
                        self._take_room([(pool, 1)])  # budgets count it already
                        continue
                    group.closed.add(role)
                    if group.placed[role] > pool.lowest_replicas:
                        group.placed[role] -= 1
                    else:
                        group.stuck[role] += 1
                if role in group.closed:
                    group.passed_over = group.full(pool)

    def fit_leaders(self, counts: Mapping[Role, int], spare_followers: int) -> int:
        """Leaders come and go, and followers with those that come; how many of these there may be."""
        most = counts[self._follower] + spare_followers
        followers = self._least_followers(counts, most)
        missing = counts[self._leader] - sum(group.leaders for group in self.groups)
        for _ in range(missing):
            # The fewest that do.
            more = next((more for more in range(followers, most + 1) if self._grow(more)), None)
            if more is None:
                break
            followers = more
        for _ in range(-missing):
            giving = [group for group in self.groups if group.can(group.leader, -1)]
            if not giving:
                break
            max(giving, key=_Group.standing).leaders -= 1
        for _ in range(counts[self._leader]):
            if sum(group.needed() for group in self.groups) <= followers:
                break
            if not self._relieve():
                break
        return self._least_followers(counts, most)

    def _least_followers(self, counts: Mapping[Role, int], most: int) -> int:
        """As many as are wanted, or one of each group that serves, and those that others keep."""
        return max(counts[self._follower], min(most, sum(group.least() for group in self.groups)))

    def _grow(self, followers: int) -> bool:
        """One leader more and the followers that are due with it, as far as there are any; whether a group took it."""
        left = followers - sum(group.followers for group in self.groups)
        needed = sum(group.needed() for group in self.groups)
        for group in sorted(self.groups, key=_Group.rank):
            if not group.can(group.leader, 1):
                group.passed_over = group.full(group.leader)
                continue
            least = group.needed(1)
            if needed - group.needed() + least > followers:
                group.passed_over = f"no {self._follower} replica is left for it"
                continue
            wanted = max(group.followers, least, min(group.due(1), group.followers + left))
            most = group.highest(group.follower) - group.stuck[group.follower.key.role]
            wanted = min(wanted, max(group.followers, most))
            if wanted < least:
                group.passed_over = group.full(group.follower)
                continue
            lacking = group.cannot_grow or self._take((group.leader, 1), (group.follower, wanted - group.followers))
            if lacking is not None:
                group.passed_over = lacking
                continue
            group.leaders += 1
            group.followers = wanted
            group.passed_over = ""
            return True
        return False

    def _relieve(self) -> bool:
        """A leader moves from a group that needs more followers than there are to one that needs none more for it."""
        crowded = [g for g in self.groups if g.can(g.leader, -1) and g.needed() > g.follower.lowest_replicas]
        donor = min(crowded, key=_Group.until_relieved, default=None)
        for taker in sorted(self.groups, key=_Group.rank):
            if donor is None or taker is donor or not taker.can(taker.leader, 1) or taker.cannot_grow:
                continue
            if taker.needed(1) == taker.needed() and self._take((taker.leader, 1)) is None:
                donor.leaders -= 1
                taker.leaders += 1
                return True
        return False

    def fit_followers(self, counts: Mapping[Role, int]) -> None:
        """The rest of them, where they are furthest below the ratio; too many go where they are furthest above.

        Where leaders are pending, so are followers in the same share.
        """
        leaders, wanted = sum(group.leaders for group in self.groups), counts[self._follower]
        if leaders < counts[self._leader]:
            wanted = min(wanted, math.ceil(leaders * wanted / counts[self._leader] - _EPSILON))
        missing = wanted - sum(group.followers for group in self.groups)
        full = set[str]()
        for _ in range(missing):
            takers = [g for g in self.groups if g.name not in full and g.followers < g.most() and g.can(g.follower, 1)]
            for group in sorted(takers, key=_Group.surplus):
                lacking = group.cannot_grow or self._take((group.follower, 1))
                if lacking is None:
                    group.followers += 1
                    break
                group.passed_over = lacking
                full.add(group.name)
            else:
                break
        for _ in range(-missing):
            able = [group for group in self.groups if group.can(group.follower, -1)]
            spare = [group for group in able if group.followers > group.needed()]
            # A policy may want fewer than the band; no group that serves is left without any.
            others = [group for group in able if group.followers > group.least()]
            giving = spare or (others if wanted == counts[self._follower] else [])
            if not giving:
                break
            max(giving, key=_Group.surplus).followers -= 1

    def rescue(self, counts: Mapping[Role, int]) -> None:
        """A leader whose group has lost its followers for good moves to where it has some; one at a time.

        That is a group that has some to spare, or has room for the leader and for followers that are missing. It leaves
        when the one before it runs, so that no more than one is under way.
        """
        missing = max(0, counts[self._follower] - sum(group.followers for group in self.groups))
        for starved in self.groups:
            if starved.followers >= starved.needed() or not starved.can(starved.leader, -1):
                continue
            for taker in sorted(self.groups, key=_Group.rank):
                is_waiting = len(taker.leader.replicas) < taker.leader.target_replicas
                more = max(0, taker.due(1) - taker.followers)
                if taker is starved or is_waiting or taker.cannot_grow or not taker.can(taker.leader, 1):
                    continue
                is_full = bool(more) and not taker.can(taker.follower, more)
                if more > missing or is_full:
                    continue
                if self._take((taker.leader, 1), (taker.follower, more)) is None:
                    starved.leaders -= 1
                    taker.leaders += 1
                    taker.followers += more
                    taker.passed_over = ""
                    return

    def give_up(self) -> None:
        """Prefill of a group that has no decode is of no use to anybody; decode alone prefills for itself."""
        for group in self.groups:
            if group.count(Role.DECODE) == 0:
                tied_up = group.of[Role.PREFILL].lowest_replicas
                group.placed[Role.PREFILL] = min(group.placed[Role.PREFILL], max(tied_up, group.stuck[Role.PREFILL]))

    def _take(self, *wanted: tuple[PoolStats, int]) -> str | None:
        """Room for so many replicas of each pool, all or nothing; why there is none."""
        # Who was withdrawn still has its room.
        new = [(pool, max(0, count - self._withdrawn[pool.key])) for pool, count in wanted]
        gpus: dict[str, float] = {}
        for pool, count in new:
            for kind, each in {} if pool.demand is None else pool.demand.gpus_by_type().items():
                gpus[kind] = gpus.get(kind, 0.0) + count * each
        for limit, (kind, needed) in product(self._limits, gpus.items()):
            if limit.get(kind, math.inf) < needed - _EPSILON:
                return f"a budget leaves {max(0.0, limit[kind]):g} GPUs of type {kind}, and {needed:g} are needed"
        if (lacking := self._take_room(new)) is not None:
            return lacking
        for pool, count in wanted:
            self._withdrawn[pool.key] = max(0, self._withdrawn[pool.key] - count)
        for limit, (kind, needed) in product(self._limits, gpus.items()):
            if kind in limit:
                limit[kind] -= needed
        return None

    def _take_room(self, new: Sequence[tuple[PoolStats, int]]) -> str | None:
        if self._slots is None:
            return None
        taken: list[tuple[PoolKey, Taken]] = []
        for pool, count in new:
            for _ in range(count):
                found = [] if pool.demand is None else self._slots.take(pool.demand)
                if found is None:
                    for _, back in taken:
                        self._slots.give_back(back)
                    others = sum(count for _, count in new) - 1
                    beside = f" beside the other {others} of its unit" if others else ""
                    return self._nobody(pool) or f"no node has room for a replica of {pool.key}{beside}"
                taken.append((pool.key, found))
        for key, found in taken:
            self._nodes[key] = self._nodes.get(key, 0) | sum({1 << index for index, _, _ in found})
        return None

    def _nobody(self, pool: PoolStats) -> str | None:
        """Why no node takes a replica of a pool, whoever holds what; ``None``: for no such reason."""
        assert self._slots is not None and pool.demand is not None
        if candidates := self._slots.candidates(pool.demand):
            is_usable = candidates & self._slots.topology.usable
            return None if is_usable else f"every node that {pool.key} may be on is cordoned"
        labels = ", ".join(f"{name}={value}" for name, value in pool.demand.selector.items())
        wanted = [f"GPUs of type {kind}" for kind in pool.demand.gpus_by_type()] + (
            [f"labels {labels}"] if labels else []
        )
        return f"no node that is alive has {' and '.join(wanted)}, as {pool.key} demands"

    def narrowed(self) -> dict[PoolKey, tuple[str, ...]]:
        """See ``Placed.nodes``."""
        if self._slots is None:
            return {}
        found: dict[PoolKey, tuple[str, ...]] = {}
        for pool in (pool for group in self.groups for pool in group.of.values() if pool.key in self._nodes):
            found[pool.key] = () if pool.demand is None else no_scarcer(self._slots, pool.demand, self._nodes[pool.key])
        return found


def no_scarcer(slots: Slots, demand: Demand, nodes: NodeSet) -> tuple[str, ...]:
    """The nodes that a replica may be on and that are no scarcer than these, but for cordoned ones.

    Nothing where none is scarcer; what is cordoned is said of all pools at once.
    """
    topology, wanted = slots.topology, slots.candidates(demand)
    scarcest = topology.priority(nodes)
    allowed = sum(below for of, below in topology.subgroups.items() if of <= scarcest) & wanted
    return () if allowed == wanted else tuple(node.name for node in topology.listed(allowed & topology.usable))


def start_nodes(
    before: Mapping[PoolKey, tuple[str, ...]],
    planned: Mapping[PoolKey, tuple[str, ...]],
    counts: Mapping[PoolKey, int],
    pools: Sequence[PoolStats],
    slots: Slots,
) -> dict[PoolKey, tuple[str, ...]]:
    """The nodes that replicas of each pool may start on from now on, where that is not every node they ask for.

    Those of the plan, until what it has planned is there. Then a replica that is started again, since one was lost,
    comes to no scarcer node than the others of its pool are on.

    Args:
        before: what this came to in the cycle before.
        planned: ``Placed.nodes``.
        counts: that Serve works towards.
        pools: of the service.
        slots: all nodes of the cluster.
    """
    found: dict[PoolKey, tuple[str, ...]] = {}
    for pool in pools:
        key = pool.key
        if pool.demand is None:
            continue
        if key in planned:
            names = planned[key]
        elif (pool.held_replicas or 0) < counts[key]:
            names = before.get(key, ())
        else:
            index = slots.topology.index
            here = {index[name] for nodes in pool.on.values() for name in nodes if name in index}
            names = no_scarcer(slots, pool.demand, sum(1 << at for at in here)) if here else ()
        if names:
            found[key] = names
    return found


def _standing(pools: Collection[PoolStats], slots: Slots | None) -> tuple[SubgroupPriority, str | None]:
    """How scarce a group's nodes are, and why it may not grow: its nodes lie further apart than they may."""
    nodes: NodeSet = 0
    if slots is not None:
        for pool in pools:
            nodes |= 0 if pool.demand is None else slots.candidates(pool.demand)
    if slots is None or not nodes:
        return SubgroupPriority.S2_HOMOGENEOUS, None
    affinity = min(pool.affinity for pool in pools)
    scarcity = slots.topology.priority(nodes)
    if slots.topology.tier(nodes) <= affinity:
        return scarcity, None
    ends = [node.name for node in slots.topology.listed(nodes & -nodes | 1 << nodes.bit_length() - 1)]
    where = f"under no one {affinity.name.lower()}, as its affinity demands"
    return scarcity, f"its nodes lie {where}: {' and '.join(ends)} do not"
