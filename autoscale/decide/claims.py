"""Claims: less important services give up room for replicas of a more important service that finds none (pure).

The claimant is the service that lacks room; givers are services that may have to give it up. A giver gives whole units:
a leader (a replica of the ratio's larger role) with the followers (replicas of the other role) that only it needs. Each
claim is tried out first: with it, the claimant must find room inside its own quota, affinity and budgets. Replicas that
leave already are not claimed. Source: WVA's constrained mode and HeteroScale's priorities.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import islice

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.limits import bounded, kept_ratio, limited, overdue_pools, quota_left, stuck_in
from autoscale.decide.placement import place
from autoscale.decide.slots import Slots
from autoscale.decide.supply import Gain, Limit
from autoscale.headcount import EPSILON_REPLICAS, standard_replicas
from autoscale.ratio import PdRatio, whole
from autoscale.types import Plan, PoolKey, PoolStats, Snapshot
from kvtransfer.topology import Role

# Most units that are tried out for one claim: each trial places the claimant again, and a cycle shall take less than a
# second (docs/decisions/placement.md 174).
_MOST_UNITS = 32


@dataclass(slots=True)
class Claimed:
    """What is claimed of one giver: the most replicas that its pools may have, and replicas whose room is claimed."""

    most_replicas: dict[PoolKey, int] = field(default_factory=dict)
    replica_ids: list[str] = field(default_factory=list)


# By name of the giver.
Claims = MutableMapping[str, Claimed]
# Configuration and snapshot of each giver, by name.
Givers = Mapping[str, tuple[AutoscaleConfig, Snapshot]]
# A replica that would leave: its pool, and the nodes that it is on.
Departure = tuple[PoolStats, tuple[str, ...]]


class Shortage:
    """The replicas that lack room in the claimant's plan, and trials of whether they would find room.

    ``slots`` and ``budget_gpus``: the free room, and the GPUs that budgets leave, after the plan has taken its part.
    """

    def __init__(
        self,
        config: AutoscaleConfig,
        snapshot: Snapshot,
        plan: Plan,
        slots: Slots | None,
        budget_gpus: Mapping[str, float],
    ) -> None:
        ratio, override = plan.ratio(config.ratio), config.override
        self._ratio = ratio if override is None else kept_ratio(config, ratio, override.counts, snapshot.pools)
        pools, state = limited(config, snapshot.pools, plan.state), plan.state
        stuck = stuck_in(pools, state, overdue_pools(state, snapshot.now_s, config.no_node_s) - state.offers.keys())
        self._current = {key: count - stuck.get(key, 0) for key, count in state.desired.items()}
        # Replicas that the plan placed have their room already, so a trial must not take room for them again. Stuck
        # ones have none, though the counts include them.
        self._pools = [
            replace(
                pool.bounded(pool.limits.lowest_replicas - stuck.get(pool.key, 0), pool.limits.highest_replicas),
                held_replicas=max(pool.held_replicas or 0, self._current.get(pool.key, 0)),
            )
            for pool in pools
        ]
        desired = standard_replicas(self._current, self._pools)
        self._wanted = {role: count + desired[role] for role, count in plan.pending.items()}
        self._slots, self._budget = slots, dict(budget_gpus)
        self._quota = quota_left(config, snapshot.pools, state)
        for limit in (self._budget, self._quota):  # which count the stuck replicas too
            _add_gpus(limit, ((pool, stuck.get(pool.key, 0)) for pool in pools))
        self.types = {kind for pool in self._pools for kind in pool.gpus_by_type()}  # GPU types of the claimant
        self._candidates = 0 if slots is None else slots.candidates_of_any(pool.demand for pool in self._pools)

    def may_use(self, nodes: Iterable[str]) -> bool:
        """Whether the claimant's replicas may be on one of these nodes."""
        if self._slots is None:
            return True
        index = self._slots.topology.index
        node_set = sum({1 << index[name] for name in nodes if name in index})  # one bit per node
        return bool(self._candidates & node_set)

    def is_limited(self, kinds: set[str]) -> bool:
        """Whether a budget limits GPUs of one of these types that the claimant uses."""
        return any(kind in self._budget for kind in kinds & self.types)

    def pending(self, departures: Iterable[Departure]) -> float:
        """Standard replicas of the claimant that would lack room once these replicas have left."""
        slots = None if self._slots is None else self._slots.copy()
        budget, quota = dict(self._budget), dict(self._quota)
        for pool, nodes in departures:
            assert pool.demand is not None
            if slots is not None and nodes:
                slots.vacate(pool.demand, nodes)
            _add_gpus(budget, [(pool, 1)])
        placed = place(self._wanted, self._current, self._pools, self._ratio, slots=slots, limits=(budget, quota))
        return sum(placed.pending.values())


def _add_gpus(limit: Limit, gone: Iterable[Gain]) -> None:
    """Add the GPUs of replicas to a limit, for the types that it limits."""
    for pool, count in gone:
        for kind, gpus in pool.gpus_by_type().items():
            if kind in limit:
                limit[kind] += count * gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A unit that a group would give.

    ``counts``: counts of the group's pools once this unit and those before it have left. ``departures``: the unit's
    replicas that have room, by id.
    """

    service: str
    group: str
    counts: Mapping[PoolKey, int]
    departures: Mapping[str, Departure]


def claim(shortage: Shortage, others: Iterable[Snapshot], givers: Givers, claims: Claims) -> bool:
    """Claim units of the givers if the claimant finds room with them; returns whether anything was tried out.

    Preemptible groups give first, then the most expensive ones, none below its lowest counts.

    Args:
        shortage: the claimant's replicas that lack room.
        others: the other services that have leaving replicas; the room of these counts as free.
        givers: the givers, the least important first.
        claims: claims of this cycle, to which new ones are added.
    """
    leaving = [departure for snapshot in others for departure in _leaving(snapshot)]
    if not leaving and not any(_offered(shortage, givers, claims)):
        return False
    pending = shortage.pending(leaving)
    if pending < shortage.pending(()) - EPSILON_REPLICAS:  # room of leaving replicas helps the claimant
        _keep_yielding(givers, claims)
    units = list(islice(_offered(shortage, givers, claims), _MOST_UNITS)) if pending else []
    # If all units together do not help the claimant, fewer units do not help it either.
    fewest_pending = shortage.pending([*leaving, *_departures(units)]) if units else pending
    if fewest_pending >= pending - EPSILON_REPLICAS:
        return True

    def is_enough(some: list[_Unit]) -> bool:
        """Whether these units help the claimant as much as all units."""
        return shortage.pending([*leaving, *_departures(some)]) <= fewest_pending + EPSILON_REPLICAS

    # The shortest beginning of the list that is enough, and then without units that did not help.
    first_units = next(units[:number] for number in range(1, len(units) + 1) if is_enough(units[:number]))
    for unit in _needed(first_units, is_enough):
        claimed = claims.setdefault(unit.service, Claimed())
        claimed.most_replicas.update(unit.counts)
        claimed.replica_ids += unit.departures
    return True


def _keep_yielding(givers: Givers, claims: Claims) -> None:
    """Repeat earlier claims, so that services which made room do not take it back while the claimant waits for it."""
    for name, (_, snapshot) in givers.items():
        most_replicas = claims.setdefault(name, Claimed()).most_replicas
        for key, (_, count) in snapshot.state.yielding.items():
            most_replicas[key] = min(count, most_replicas.get(key, count))


def _offered(shortage: Shortage, givers: Givers, claims: Mapping[str, Claimed]) -> Iterator[_Unit]:
    """The units that may be claimed, in the order in which services and their groups give them.

    A group offers units if the claimant may use its nodes, or if a budget limits the GPUs that both use.
    """
    for service, (config, snapshot) in givers.items():
        state = snapshot.state
        if not any(state.desired.values()) and not any(state.warm.values()):
            continue  # before anything is copied: in a large cluster most services are asked often
        desired, most_replicas = state.desired_and_warm, claims.get(service, Claimed()).most_replicas
        leaving = {*state.victims, *state.withdrawn}
        for pair in _pairs(config, snapshot):
            kinds = {kind for pool in pair for kind in pool.gpus_by_type()}
            if not kinds & shortage.types:
                continue
            counts = {pool.key: most_replicas.get(pool.key, desired.get(pool.key, 0)) for pool in pair}
            names = {pool.key: _in_leaving_order(pool, counts[pool.key], leaving, shortage) for pool in pair}
            nodes = {node for pool in pair for name in names[pool.key] if name for node in pool.on.get(name, ())}
            if shortage.may_use(nodes) or shortage.is_limited(kinds):
                yield from _units_of_group(service, pair, counts, names, state.ratio(config.ratio))


def _needed(units: list[_Unit], is_enough: Callable[[list[_Unit]], bool]) -> list[_Unit]:
    """Leave out units that are not needed. A group gives its units in order, so only its last ones can be left out."""
    for group in dict.fromkeys(unit.group for unit in units):
        while own := [unit for unit in units if unit.group == group]:
            without_last = [unit for unit in units if unit is not own[-1]]
            if not is_enough(without_last):
                break
            units = without_last
    return units


def _departures(units: Iterable[_Unit]) -> list[Departure]:
    return [departure for unit in units for departure in unit.departures.values()]


def has_leaving(snapshot: Snapshot) -> bool:
    """Whether replicas of a service leave already."""
    state = snapshot.state
    return bool(state.victims or state.withdrawn) or any(pool.draining for pool in snapshot.pools)


def _leaving(snapshot: Snapshot) -> list[Departure]:
    """Replicas that leave already, with their nodes if these are known."""
    names = {*snapshot.state.victims, *snapshot.state.withdrawn}
    departures: list[Departure] = []
    for pool in snapshot.pools:
        if pool.demand is None or not (names or pool.draining):
            continue
        present = [*pool.on, *(replica.replica_id for replica in pool.replicas)]
        # A dict names each replica once, in a fixed order.
        leaving = dict.fromkeys([*(name for name in present if name in names), *pool.draining])
        departures += [(pool, pool.on.get(name, ())) for name in leaving]
    return departures


def _pairs(config: AutoscaleConfig, snapshot: Snapshot) -> list[tuple[PoolStats, PoolStats]]:
    """Leader and follower pool of each group, in the order in which groups give."""
    pools = {pool.key: pool for pool in bounded(config, snapshot.pools)}
    pairs = []
    for group in dict.fromkeys(key.group for key in pools):
        prefill, decode = (pools.get(PoolKey(group, role)) for role in Role)
        if prefill is None or decode is None:  # an aggregated group: decode alone
            leader, follower = decode, PoolStats.absent(PoolKey(group, Role.PREFILL))
        elif snapshot.state.ratio(config.ratio).leader is Role.DECODE:
            leader, follower = decode, prefill
        else:
            leader, follower = prefill, decode
        if leader is not None:
            pairs.append((leader, follower))
    pairs.sort(key=lambda pair: (not pair[0].limits.is_preemptible, -_cost(pair[0]), pair[0].key.group))
    return pairs


def _cost(pool: PoolStats) -> float:
    """Cost of a standard replica, by which placement ranks the groups too."""
    return pool.limits.cost / pool.limits.capacity


def _units_of_group(
    service: str,
    pair: tuple[PoolStats, PoolStats],
    counts: dict[PoolKey, int],
    names: Mapping[PoolKey, list[str | None]],
    ratio: PdRatio,
) -> Iterator[_Unit]:
    """One unit after the other: a leader, with the followers that only it needs.

    ``counts``: the present count of each pool. ``names``: replicas of each pool in the order in which they leave; a
    unit takes its replicas out of these lists.
    """
    leader, follower = pair
    share = 0.0 if not follower.limits.highest_replicas else ratio.follower_share
    share *= leader.limits.capacity / follower.limits.capacity
    while counts[leader.key] > leader.limits.lowest_replicas:
        leaders = counts[leader.key] - 1
        followers = max(follower.limits.lowest_replicas, whole(leaders * share))
        after = {leader.key: leaders, follower.key: min(counts[follower.key], followers)}
        departures: dict[str, Departure] = {}
        for pool in pair:
            for _ in range(counts[pool.key] - after[pool.key]):
                name = names[pool.key].pop(0)
                if name is not None and pool.demand is not None:
                    departures[name] = pool, pool.on.get(name, ())
        counts = after
        yield _Unit(service=service, group=leader.key.group, counts=counts, departures=departures)


def _in_leaving_order(pool: PoolStats, count: int, leaving: set[str], shortage: Shortage) -> list[str | None]:
    """``count`` replicas of a pool in the order in which they leave; ``None``: a replica that has no room yet.

    Replicas that do not run yet leave first, as in Serve. Then running replicas on nodes that the claimant may use
    leave, and then the other running ones; each time the youngest leaves first.
    """
    running = [replica.replica_id for replica in reversed(pool.replicas) if replica.replica_id not in leaving]
    running.sort(key=lambda name: not shortage.may_use(pool.on.get(name, ())))
    running_or_leaving = {*leaving, *running, *pool.draining}
    starting = [name for name in pool.on if name not in running_or_leaving]
    with_room = [*starting, *running]
    without_room = max(0, count - len(with_room))
    # If there are more replicas than ``count``, the first ones leave without a claim.
    surplus = max(0, len(with_room) - count)
    return [*[None] * without_room, *with_room[surplus:]]
