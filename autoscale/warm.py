"""Warm replicas: they run and are not routed to, for whoever needs one at once (pure).

They are placed together with what serves, and what serves is then taken out of that: so a service finds its warm
replicas where it grows, and they enter in the tick that decides so instead of after a start.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from autoscale.placement import Limit, Placed, place
from autoscale.ratio import PdRatio, Room
from autoscale.slots import Slots
from autoscale.types import ControllerState, PoolKey, PoolStats
from kvtransfer.topology import Role

_EPSILON = 1e-9


def asked(state: ControllerState) -> dict[PoolKey, int]:
    """Replicas of each pool that should run: those that should serve, and the warm ones."""
    return {key: count + state.warm.get(key, 0) for key, count in state.desired.items()}


def with_warm(
    counts: Mapping[Role, int], warm: int, ratio: PdRatio, room: Room, ending: Mapping[Role, int]
) -> dict[Role, int]:
    """Counts of both roles with so many leaders more and the followers that are due with them, or as many as fit.

    Args:
        counts: what should serve.
        warm: how many replicas of the ratio's larger role are to be warm.
        ratio: of prefill to decode.
        room: bounds and budget.
        ending: replicas of each role that were told to stop and still hold their GPUs.
    """
    for more in range(warm, 0, -1):
        leaders = counts[ratio.leader] + more
        followers = math.ceil(leaders * ratio.follower_share - _EPSILON)
        both = {ratio.leader: leaders, ratio.follower: max(counts[ratio.follower], followers)}
        is_inside = all(both[role] <= max(room.highest[role], counts[role]) for role in Role)
        if is_inside and not room.is_over_budget({role: both[role] + ending[role] for role in Role}):
            return both
    return dict(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """Where what serves and what is warm goes; ``placed.counts`` are what serves."""

    placed: Placed
    warm: Mapping[PoolKey, int] = field(default_factory=dict)


def place_both(
    counts: Mapping[Role, int],
    both: Mapping[Role, int],
    state: ControllerState,
    pools: Sequence[PoolStats],
    ratio: PdRatio,
    *,
    slots: Slots | None,
    limits: Sequence[Limit],
    overdue: frozenset[PoolKey],
    spare_followers: int,
) -> Both:
    """Place what serves, ``counts``, inside what runs, ``both``; the rest as in ``place``."""
    placed = place(
        both,
        asked(state),
        pools,
        ratio,
        slots=slots,
        limits=limits,
        overdue=overdue,
        spare_followers=spare_followers,
    )
    if both == counts and not state.warm:
        return Both(placed=placed)
    most = placed.counts
    inside = [
        replace(p, lowest_replicas=min(p.lowest_replicas, most[p.key]), highest_replicas=most[p.key]) for p in pools
    ]
    serving = place(counts, state.desired, inside, ratio, spare_followers=spare_followers).counts
    total = {role: sum(count for key, count in serving.items() if key.role is role) for role in Role}
    warm = {key: count - serving[key] for key, count in placed.counts.items() if count > serving[key]}
    pending = {role: max(0, counts[role] - total[role]) for role in Role}
    return Both(
        placed=Placed(counts=serving, pending=pending, passed_over=placed.passed_over, nodes=placed.nodes), warm=warm
    )


def shared(warm_replicas: int, order: Sequence[str]) -> dict[str, int]:
    """How many of an application's warm replicas each service has: one each in turn.

    Args:
        warm_replicas: of all services together.
        order: services, the one that is to have one first.
    """
    given = dict.fromkeys(order, 0)
    for name in islice(cycle(order), warm_replicas):
        given[name] += 1
    return given
