"""What less important services give up for what has no place, and only what would help (pure).

WVA's constrained mode and HeteroScale's priorities. What is given is tried out first: a claim is made where the
claimant would find room on the very nodes that are left, inside its own quota, affinity and budgets. Nobody is asked
for what is on its way out already.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from autoscale.controller import Controller
from autoscale.placement import place
from autoscale.slots import Slots
from autoscale.types import Plan, PoolKey, PoolStats, Snapshot
from autoscale.warm import asked
from kvtransfer.topology import NodeSet

_EPSILON = 1e-9
# Units that are tried out for one claim.
_MOST_UNITS = 32


@dataclass(slots=True)
class Claimed:
    """The most that pools of a service may have, and which of its replicas are in the way."""

    most: dict[PoolKey, int] = field(default_factory=dict)
    replicas: list[str] = field(default_factory=list)


Claims = MutableMapping[str, Claimed]
# A replica that would leave: its pool, and the nodes that it is on.
Given = tuple[PoolStats, tuple[str, ...]]


class Shortage:
    """What one service lacks, and whether it would find it somewhere.

    Args:
        controller: the service's.
        snapshot: what it was decided from.
        plan: what it came to, with something pending.
        slots: what this cycle has left of the nodes; ``None``: nobody looks at nodes.
        budget_gpus: by type, what the application's budget leaves.
    """

    def __init__(
        self,
        controller: Controller,
        snapshot: Snapshot,
        plan: Plan,
        slots: Slots | None,
        budget_gpus: Mapping[str, float],
    ) -> None:
        self._ratio = controller.kept_ratio(plan.decision)
        self._current = plan.state.desired
        # What was granted has its room already.
        self._pools = [
            replace(pool, held_replicas=max(pool.held_replicas or 0, self._current.get(pool.key, 0)))
            for pool in controller.limited(snapshot.pools, plan.state)
        ]
        self._wanted = {
            role: count + sum(n for key, n in self._current.items() if key.role is role)
            for role, count in plan.pending.items()
        }
        self._slots, self._budget = slots, budget_gpus
        self._quota = controller.quota_left(replace(snapshot, state=plan.state))

    @property
    def types(self) -> set[str]:
        """Of GPU that its pools take."""
        return {kind for pool in self._pools if pool.demand is not None for kind in pool.demand.gpus_by_type()}

    def may_use(self, nodes: tuple[str, ...]) -> bool:
        """Whether its pools ask for one of these nodes."""
        if self._slots is None:
            return True
        index = self._slots.topology.index
        return any(name in index and self._wanted_nodes >> index[name] & 1 for name in nodes)

    def is_limited(self, kinds: set[str]) -> bool:
        """Whether a budget leaves it GPUs of these types."""
        return any(kind in self._budget for kind in kinds & self.types)

    @cached_property
    def _wanted_nodes(self) -> NodeSet:
        found = 0
        for pool in self._pools:
            found |= 0 if pool.demand is None or self._slots is None else self._slots.candidates(pool.demand)
        return found

    def pending(self, given: Iterable[Given]) -> int:
        """How many replicas would have no place if these, each of a pool and on nodes, were gone."""
        slots = None if self._slots is None else self._slots.copy()
        budget, quota = dict(self._budget), dict(self._quota)
        for pool, nodes in given:
            assert pool.demand is not None
            if slots is not None and nodes:
                slots.vacate(pool.demand, nodes)
            for kind, gpus in pool.demand.gpus_by_type().items():
                if kind in budget:
                    budget[kind] += gpus
        found = place(self._wanted, self._current, self._pools, self._ratio, slots=slots, limits=(budget, quota))
        return sum(found.pending.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """What a group would give: replicas of its pools and their nodes, and the counts that are left."""

    service: str
    group: str
    left: Mapping[PoolKey, int]
    replicas: tuple[Given, ...]
    names: tuple[str, ...]


def claim(
    shortage: Shortage, others: Iterable[Snapshot], givers: Mapping[str, tuple[Controller, Snapshot]], claims: Claims
) -> bool:
    """Lower what less important services may have, in whole units, by what lets the claimant find room.

    Variants that are marked so go first, then the dearest, none below its lowest counts.

    Args:
        shortage: the claimant's.
        others: all other services, for what of theirs is on its way out.
        givers: by name those that may be asked, the least important first.
        claims: of each service the most that its pools may have; what is claimed is added.

    Returns:
        Whether there was anything to try out.
    """
    gone = [leaving for snapshot in others for leaving in _leaving(snapshot)]
    if not gone and not any(_offered(shortage, givers, claims)):
        return False
    before = shortage.pending(())
    best = shortage.pending(gone)
    if best < before:  # who has made room does not take it back while it is waited for
        for name, (_, snapshot) in givers.items():
            kept = claims.setdefault(name, Claimed()).most
            kept.update({key: min(most, kept.get(key, most)) for key, (_, most) in snapshot.state.yielding.items()})
    units = list(islice(_offered(shortage, givers, claims), _MOST_UNITS)) if best else []
    most = shortage.pending([*gone, *_replicas(units)]) if units else best
    if most == best:
        return True
    needed = next(n for n in range(1, len(units) + 1) if shortage.pending([*gone, *_replicas(units[:n])]) == most)
    for unit in _useful(units[:needed], lambda some: shortage.pending([*gone, *_replicas(some)]) == most):
        claimed = claims.setdefault(unit.service, Claimed())
        claimed.most.update(unit.left)
        claimed.replicas += unit.names
    return True


def _offered(
    shortage: Shortage, givers: Mapping[str, tuple[Controller, Snapshot]], claims: Mapping[str, Claimed]
) -> Iterator[_Unit]:
    """What may be asked for, in turn."""
    for name, of in givers.items():
        yield from _units(name, *of, claims.get(name, Claimed()).most, shortage)


def _useful(units: list[_Unit], is_enough: Callable[[list[_Unit]], bool]) -> list[_Unit]:
    """Without those that change nothing; a group gives its units in turn, so only its last ones can stay."""
    for group in dict.fromkeys(unit.group for unit in units):
        while own := [unit for unit in units if unit.group == group]:
            others = [unit for unit in units if unit is not own[-1]]
            if not is_enough(others):
                break
            units = others
    return units


def _replicas(units: Iterable[_Unit]) -> list[Given]:
    return [replica for unit in units for replica in unit.replicas]


def _leaving(snapshot: Snapshot) -> list[Given]:
    """What is on its way out: on which nodes, where that is known."""
    names = {*snapshot.state.victims, *snapshot.state.withdrawn}
    found: list[Given] = []
    if not names and not any(pool.draining for pool in snapshot.pools):
        return found
    for pool in (pool for pool in snapshot.pools if pool.demand is not None):
        here = dict.fromkeys([*pool.on, *(replica.replica_id for replica in pool.replicas)])
        leaving = dict.fromkeys([*(name for name in here if name in names), *pool.draining])
        found += [(pool, pool.on.get(name, ())) for name in leaving]
    return found


def _units(
    name: str, controller: Controller, snapshot: Snapshot, claimed: Mapping[PoolKey, int], shortage: Shortage
) -> Iterator[_Unit]:
    """The units of a service's groups, in the order in which they would go."""
    ratio, state = controller.config.pd_ratio, snapshot.state
    wanted = asked(state)
    if not any(wanted.values()):
        return
    pools = {pool.key: pool for pool in controller.bounded(snapshot.pools)}
    leaving = {*state.victims, *state.withdrawn}
    leaders = [pool for pool in pools.values() if pool.key.role is ratio.leader]
    for leader in sorted(leaders, key=lambda pool: (not pool.is_preemptible, -pool.cost, pool.key.group)):
        key = PoolKey(leader.key.group, ratio.follower)
        pair = (leader, pools.get(key) or PoolStats.absent(key))
        kinds = {kind for pool in pair if pool.demand is not None for kind in pool.demand.gpus_by_type()}
        if not kinds & shortage.types:
            continue
        counts = {pool.key: claimed.get(pool.key, wanted.get(pool.key, 0)) for pool in pair}
        here = {pool.key: _in_turn(pool, counts[pool.key], leaving, shortage) for pool in pair}
        frees = (name for names in here.values() for name in names if name is not None)
        nodes = {node for name in frees for pool in pair for node in pool.on.get(name, ())}
        if not shortage.may_use(tuple(nodes)) and not shortage.is_limited(kinds):
            continue
        while counts[leader.key] > leader.lowest_replicas:
            fewer = counts[leader.key] - 1
            rest = max(pair[1].lowest_replicas, math.ceil(fewer * ratio.follower_share - _EPSILON))
            after = {leader.key: fewer, key: min(counts[key], rest)}
            given: list[Given] = []
            names: list[str] = []
            for pool in pair:
                for _ in range(counts[pool.key] - after[pool.key]):
                    replica = here[pool.key].pop(0)
                    if replica is not None and pool.demand is not None:
                        given.append((pool, pool.on.get(replica, ())))
                        names.append(replica)
            counts = after
            yield _Unit(
                service=name, group=leader.key.group, left=dict(counts), replicas=tuple(given), names=tuple(names)
            )


def _in_turn(pool: PoolStats, count: int, leaving: set[str], shortage: Shortage) -> list[str | None]:
    """So many replicas of a pool in the order in which they would go; ``None``: one that has no room yet.

    Serve ends those that do not run yet first. Of the others those on nodes that are of use, the youngest first.
    """
    running = [replica.replica_id for replica in reversed(pool.replicas) if replica.replica_id not in leaving]
    running.sort(key=lambda name: not shortage.may_use(pool.on.get(name, ())))
    out = {*leaving, *running, *pool.draining}
    here = [*(name for name in pool.on if name not in out), *running]
    return [*[None] * (count - len(here)), *here[max(0, len(here) - count) :]]
