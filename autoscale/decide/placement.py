"""Turns the replica counts of a service into counts of each pool: which groups grow and which shrink (pure).

A leader is a replica of the ratio's larger role (decode if both are equal); a follower is a replica of the other role.
A group grows by whole units: one leader and the followers that the ratio requires with it. A unit that no group can
take stays pending: wanted, without room. Source: HeteroScale Algorithm 4 for one request.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from autoscale.decide.group import Group
from autoscale.decide.slots import Slots
from autoscale.decide.spread import Spread
from autoscale.decide.supply import Limit, Supply
from autoscale.headcount import EPSILON_REPLICAS, smallest_replicas, standard_replicas
from autoscale.ratio import PdRatio
from autoscale.types import PoolKey, PoolStats
from kvtransfer.topology import Offer, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The placement of a service's replicas.

    Attributes:
        counts: serving replicas of each pool, with stuck ones. ``place`` counts warm replicas here too; ``placing``
            moves them to ``warm``.
        warm: running replicas of each pool beyond the serving ones, which get no requests yet.
        pending: standard replicas of each role that no group has room for; stuck ones do not count as placed.
        passed_over: groups without room for a new replica, by name, each with the reason.
        nodes: nodes that new replicas of a growing pool may be on: no scarcer ones than those that had room. Empty: all
            nodes that its demand allows and that are not cordoned.
    """

    counts: Mapping[PoolKey, int]
    warm: Mapping[PoolKey, int] = field(default_factory=dict)
    pending: Mapping[Role, float] = field(default_factory=lambda: dict.fromkeys(Role, 0.0))
    passed_over: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[PoolKey, tuple[str, ...]] = field(default_factory=dict)


def place(
    counts: Mapping[Role, float],
    current: Mapping[PoolKey, int],
    pools: Sequence[PoolStats],
    ratio: PdRatio,
    *,
    slots: Slots | None = None,
    limits: Sequence[Limit] = (),
    overdue: Collection[PoolKey] = (),
    spare_followers: float = 0.0,
    offers: Mapping[PoolKey, Offer] = MappingProxyType({}),
) -> Placed:
    """Spread a service's replicas over its groups, each near the ratio, with as few moves as possible.

    1. A leader goes to the first group in this order: least scarce switches (HeteroScale section 3.4); preferred GPU
       types; lowest cost of a standard leader with its followers, on the nodes that they would be on; shortest way of
       KV; groups with leaders before empty ones; fewest leaders. So an expensive variant grows only when all cheaper
       ones are full (WVA section V-C). It grows no sooner if a small replica of it would be enough: a load that rises
       in small steps would fill it first.
    2. Leaders are removed in the opposite order.
    3. A group keeps only the leaders for which it can have followers. Followers that the lowest counts of other groups
       require stay there.
    4. A follower goes to the group that is furthest below the ratio, since KV moves only inside a group.
    5. A replica counts as its pool's capacity (``PoolLimits``), so the replicas of each role are worth at least the
       wanted standard replicas.

    Args:
        counts: wanted standard replicas of each role, serving and warm ones alike.
        current: replicas of each pool before this placement.
        pools: all pools of the service: two of each group, or one at the ratio 0:1.
        ratio: P/D ratio that each group keeps. Beside aggregated groups, whose replicas do the work of both roles at a
            ratio of their own, the others keep the ratio of what is left of ``counts``.
        slots: free room of nodes, from which placed replicas are taken; ``None``: room is unlimited.
        limits: GPUs by type that each budget leaves, from which placed replicas are taken.
        overdue: pools with replicas that have waited for a node for too long; other groups get replicas in their place.
        spare_followers: standard followers that may be added beyond ``counts``. A group that serves has one replica of
            each role at any ratio, so a leader in an empty group may need a follower more than the ratio requires.
        offers: pools that wait for a node which does not exist yet.
    """
    by_group = _by_group(pools)
    ratio = _ratio_of_pairs(counts, current, pools, ratio)
    groups = [Group(name, by_role, current, ratio, slots) for name, by_role in by_group.items()]
    supply = Supply(groups, slots, limits, offers)
    spread = Spread(groups, ratio, supply)
    spread.reserve(overdue)  # first, so that no new replica gets the room of a replica that is starting
    followers = spread.fit_leaders(counts, spare_followers)
    spread.fit_followers({**counts, ratio.follower: followers}, counts[ratio.follower] + spare_followers)
    # Only now is it known which groups lack followers.
    spread.rescue({**counts, ratio.follower: followers})
    spread.drop_useless_prefill()
    placed = {group.pools[role].key: group.placed(role) for group in groups for role in Role}
    missing = {role: counts[role] - sum(group.standard(role) for group in groups) for role in Role}
    return Placed(
        counts={pool.key: placed[pool.key] for pool in pools},
        pending={role: count if count > EPSILON_REPLICAS else 0.0 for role, count in missing.items()},
        passed_over={group.name: group.passed_over for group in groups if group.passed_over},
        nodes=supply.nodes(),
    )


def _ratio_of_pairs(
    counts: Mapping[Role, float], current: Mapping[PoolKey, int], pools: Sequence[PoolStats], ratio: PdRatio
) -> PdRatio:
    """The ratio of the groups with prefill: ``ratio``, or that of the work that aggregated groups leave to them."""
    aggregated = [pool for pool in pools if pool.limits.prompt_capacity]
    if not aggregated:
        return ratio
    work = standard_replicas({pool.key: current.get(pool.key, 0) for pool in aggregated}, aggregated)
    left = {role: counts[role] - work[role] for role in Role}
    return PdRatio.of(left, smallest_replicas(pool for pool in pools if not pool.limits.prompt_capacity))


def _by_group(pools: Sequence[PoolStats]) -> dict[str, dict[Role, PoolStats]]:
    """The pools of each group by role; an aggregated group gets an empty prefill pool."""
    by_group: dict[str, dict[Role, PoolStats]] = {}
    for pool in pools:
        by_group.setdefault(pool.key.group, {})[pool.key.role] = pool
    for name, by_role in by_group.items():
        for role in set(Role).difference(by_role):
            by_role[role] = PoolStats.absent(PoolKey(name, role))
    return by_group
