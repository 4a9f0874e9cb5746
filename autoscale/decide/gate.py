"""The gate: decides which ready replicas serve, which leave first, and which withdrawn ones come back (pure).

A withdrawn replica gets no more requests. It is observed for a time: it comes back if it is needed again, and becomes a
victim if not. A victim must stop. A ready replica that the gate does not admit is held: it waits for the other role.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoscale.decide.draft import Draft
from autoscale.decide.limits import is_off_ratio_by_hand
from autoscale.decide.slots import Slots
from autoscale.headcount import count_among
from autoscale.ratio import PdRatio
from autoscale.types import PoolKey, PoolStats, ReplicaStats
from kvtransfer.topology import Role

# Which nodes are freed first, the lowest rank first: those that will be taken away; the scarcest ones; then those that
# Ray's autoscaler removes when they are empty, the expensive ones first; and of these the ones with the fewest used
# GPUs, which are empty soonest.
NodeRank = tuple[bool, int, float, float]
# The rank of nodes that are not known.
_NO_RANK: NodeRank = (True, 0, 1.0, 0.0)
# Tolerance for rounding errors of a count times a ratio, replicas.
_EPSILON = 1e-9


def leave(draft: Draft) -> None:
    """A stage: withdraw surplus replicas of each pool, and stop them after the time of observation."""
    state = draft.state
    withdrawn, victims = dict(state.withdrawn), set(state.victims)
    may_leave = (draft.may_leave or draft.is_exchange) and not draft.config.is_observing
    for pool in draft.snapshot.pools:
        away = count_among(pool, state.withdrawn) + count_among(pool, state.victims)
        wanted = state.desired[pool.key] + state.warm.get(pool.key, 0)
        surplus = len(pool.replicas) - away - wanted
        if surplus < 0:
            _come_back(pool, -surplus, withdrawn)
        elif surplus > 0 and may_leave:
            _send_away(draft, pool, surplus, withdrawn, victims)
    # After the loop, since a replica that has come back must not stop.
    has_ended = _end_observation(draft, withdrawn, victims)
    draft.state = replace(
        state,
        withdrawn=withdrawn,
        victims=tuple(sorted(victims)),
        desired_before=state.desired_before if withdrawn else {},
        # All replicas of the scale-in were observed to the end and not missed: it was not harmful.
        missed=None if has_ended and not withdrawn else state.missed,
    )


def _come_back(pool: PoolStats, count: int, withdrawn: dict[str, float]) -> None:
    """Return ``count`` withdrawn replicas to service; those that were withdrawn last come first."""
    away = [replica.replica_id for replica in pool.replicas if replica.replica_id in withdrawn]
    away.sort(key=withdrawn.__getitem__)
    for name in away[max(0, len(away) - count) :]:
        del withdrawn[name]


def _send_away(draft: Draft, pool: PoolStats, count: int, withdrawn: dict[str, float], victims: set[str]) -> None:
    """Take ``count`` replicas out of service: withdraw those that serve, and stop the others at once.

    Users cannot miss a replica that does not serve, so it needs no observation. All stop at once in an exchange (one
    role gives its GPUs to the other), and when the service falls asleep.
    """
    admitted, leave_at_once = frozenset(draft.state.admitted), draft.is_exchange or draft.falls_asleep
    serving = [r for r in pool.replicas if r.replica_id not in withdrawn and r.replica_id not in victims]
    for name in choose_victims(serving, admitted, count, rank_of_nodes(pool, draft.slots), draft.snapshot.claimed):
        if name in admitted and not leave_at_once:
            withdrawn[name] = draft.now_s
        else:
            victims.add(name)


def _end_observation(draft: Draft, withdrawn: dict[str, float], victims: set[str]) -> bool:
    """Stop withdrawn replicas after the time of observation, if replicas may leave. Returns whether any stops."""
    if draft.hold is not None or not draft.may_leave:
        return False
    latest_s = draft.now_s - draft.config.gate.observation_s
    ended = [name for name in draft.state.withdrawn if withdrawn.get(name, math.inf) <= latest_s]
    for name in ended:
        del withdrawn[name]
        victims.add(name)
    return bool(ended)


def admit(draft: Draft) -> None:
    """A stage: admit replicas in each group, hold the others and the warm ones, and set the counts for Serve."""
    config, state = draft.config, draft.state
    before, away = frozenset(state.admitted), {*state.withdrawn, *state.victims}
    ready: dict[str, dict[Role, list[str]]] = {}
    capacities: dict[str, dict[Role, float]] = {}
    draft.counts, draft.admitted, draft.held = {}, [], []
    for pool in draft.snapshot.pools:
        ready_in_group = ready.setdefault(pool.key.group, {Role.PREFILL: [], Role.DECODE: []})
        capacities.setdefault(pool.key.group, {})[pool.key.role] = pool.limits.capacity
        names = [replica.replica_id for replica in pool.replicas if replica.replica_id not in away]
        desired, warm = state.desired[pool.key], state.warm.get(pool.key, 0)
        # Surplus replicas that may not leave yet still run.
        running = max(desired + warm, len(names)) + count_among(pool, state.withdrawn)
        draft.counts[pool.key] = desired if config.is_observing else running
        if warm:  # the replicas that would leave first are the warm ones
            staying = [replica for replica in pool.replicas if replica.replica_id not in away]
            idle = choose_victims(staying, before, len(staying) - desired, rank_of_nodes(pool, draft.slots))
            draft.held += idle
            names = [name for name in names if name not in idle]
        ready_in_group[pool.key.role] = names
    is_open = not config.gate.is_enabled or config.is_observing or is_off_ratio_by_hand(config, draft.ratio)
    is_mixed = any(pool.limits.prompt_capacity for pool in draft.snapshot.pools)
    for group, by_role in ready.items():
        names, capacity = [*by_role[Role.PREFILL], *by_role[Role.DECODE]], capacities[group]
        if is_open or len(capacity) < len(Role):  # the replicas of an aggregated group need no others
            enter = names
        else:
            ratio = draft.ratio
            if is_mixed or config.is_paused:
                # Beside aggregated groups each other group has the ratio that placement gave it. Paused counts keep
                # the ratio of the time before, also when another period has begun.
                by_capacity = {role: state.desired[PoolKey(group, role)] * capacity[role] for role in Role}
                ratio = PdRatio.of(by_capacity, capacity)
            share = ratio.follower_share * capacity[ratio.leader] / capacity[ratio.follower]
            enter = admissible(by_role, before, ratio, share, config.gate.band_replicas)
        draft.admitted += enter
        if len(enter) < len(names):
            draft.held += [name for name in names if name not in enter]


def admissible(
    ready: Mapping[Role, Sequence[str]],
    before: frozenset[str],
    ratio: PdRatio,
    followers_per_leader: float,
    band_replicas: float,
) -> list[str]:
    """The replicas of one group that may serve.

    Replicas that were admitted ``before`` stay. Others enter, the oldest first, while the group is at most
    ``band_replicas`` followers (replicas of the ratio's smaller role) off the ratio; one of each role enters even
    beyond that. Source: HeteroScale section 3.4: service discovery of the larger role is suspended until the other has
    caught up.

    Args:
        ready: ready replicas of the group by role, the oldest first.
        before: replicas that were admitted at the last tick.
        ratio: P/D ratio, which says which role leads.
        followers_per_leader: followers of this group that one of its leaders requires: those of the ratio, if the
            group's replicas of both roles have the same capacity.
        band_replicas: largest distance from the ratio, followers.
    """
    everything = [*ready[Role.PREFILL], *ready[Role.DECODE]]
    if before.issuperset(everything):
        return everything
    new = {role: [name for name in ready[role] if name not in before] for role in Role}
    old = {role: [name for name in ready[role] if name in before] for role in Role}
    counts = _largest_counts(
        {role: max(len(old[role]), min(1, len(ready[role]))) for role in Role},
        {role: len(ready[role]) for role in Role},
        ratio,
        followers_per_leader,
        band_replicas,
    )
    return [name for role in Role for name in [*old[role], *new[role][: counts[role] - len(old[role])]]]


def _largest_counts(
    least: Mapping[Role, int], most: Mapping[Role, int], ratio: PdRatio, share: float, band_replicas: float
) -> dict[Role, int]:
    """The largest counts from ``least`` to ``most`` that are at most ``band_replicas`` off the ratio.

    If all counts are further off, the counts that are nearest to the ratio. ``share``: followers per leader.
    """
    leader, follower = ratio.leader, ratio.follower
    for leaders in range(most[leader], least[leader] - 1, -1):
        followers = min(most[follower], int(leaders * share + band_replicas + _EPSILON))
        if followers >= least[follower] and leaders * share - followers <= band_replicas + _EPSILON:
            return {leader: leaders, follower: followers}
    if most[follower] < least[leader] * share:  # too few followers: all of them, and as few leaders as possible
        return {leader: least[leader], follower: most[follower]}
    return {leader: most[leader], follower: least[follower]}  # too many followers


def choose_victims(
    replicas: Sequence[ReplicaStats],
    admitted: frozenset[str],
    number: int,
    ranks: Mapping[str, NodeRank] = MappingProxyType({}),
    claimed: Collection[str] = (),
) -> list[str]:
    """The ``number`` replicas of a pool that leave first.

    Claimed ones leave first; then those that are not admitted, those on nodes of the lowest rank, those with the least
    work, and the youngest.

    Args:
        replicas: replicas of one pool, the oldest first.
        admitted: replicas that get requests.
        number: number of replicas that leave.
        ranks: of the nodes of each replica, by replica id.
        claimed: replicas whose room a more important service needs.
    """
    if number <= 0:
        return []

    def worth(entry: tuple[int, ReplicaStats]) -> tuple[bool, bool, NodeRank, float, float, int]:
        """The parts are compared from left to right; the lowest leaves first."""
        index, replica = entry
        return (
            replica.replica_id not in claimed,
            replica.replica_id in admitted,
            ranks.get(replica.replica_id, _NO_RANK),
            (replica.running_requests or 0.0) + (replica.waiting_requests or 0.0) + (replica.deferred_requests or 0.0),
            replica.queued_prefill_tokens or 0.0,
            -index,
        )

    return [replica.replica_id for _, replica in sorted(enumerate(replicas), key=worth)[:number]]


def rank_of_nodes(pool: PoolStats, slots: Slots | None) -> dict[str, NodeRank]:
    """The rank of the nodes of each replica, by replica id; empty without ``slots``."""
    if slots is None:
        return {}
    topology = slots.topology
    ranks = {}
    for replica, names in pool.on.items():
        nodes = sum(1 << topology.index[name] for name in names if name in topology.index)  # one bit per node
        own = list(topology.listed(nodes))
        saved = max((node.saves_per_gpu_hour for node in own if node.saves_per_gpu_hour is not None), default=None)
        used_gpus = 0.0 if saved is None else slots.used_gpus(nodes)
        stays = not any(node.is_leaving for node in own)
        ranks[replica] = (stays, -int(topology.priority(nodes)), 1.0 if saved is None else -saved, used_gpus)
    return ranks
