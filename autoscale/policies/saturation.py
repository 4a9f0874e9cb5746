"""WVA's model of saturation: which replicas are full, how many a load needs, and which can leave (pure).

A replica is *saturated* if one of its metrics is at its limit or above. The *spare* is the distance below this limit
that the replicas should keep in the mean. Each replica weighs as the standard replicas that it is worth.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

# Tolerance for rounding errors of a spare, in the metric's unit.
_EPSILON = 1e-9


class Load(NamedTuple):
    """The load of one replica."""

    metrics: tuple[float, float]  # KV usage (0..1), and waiting requests for each standard replica that it is worth
    weight: float = 1.0  # standard replicas that it is worth
    group: str = ""
    cost: float = 0.0  # cost of a standard replica of the group


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limits of one metric, in its unit."""

    saturated: float  # a replica is saturated from this value on (tau)
    spare: float  # distance from ``saturated`` that replicas should have in the mean (gamma)


def replicas_for_load(load: float, limit: Limit) -> float:
    """Standard replicas for the load of a whole role: ``n = (Load_current + delta_safety) / tau``, not rounded.

    delta_safety is the spare of all n replicas, n gamma. So n = Load_current / (tau - gamma), and with n replicas the
    mean spare is at least gamma at once.

    Source: WVA Eq. 4.
    """
    return load / (limit.saturated - limit.spare)


def leaving_replicas(
    unsaturated: Sequence[Load], limits: Sequence[Limit], fewest: int, removable: Mapping[str, int] | None = None
) -> list[Load]:
    """The replicas that can leave if the other unsaturated ones share their load in proportion to their weights.

    No replica may become saturated by that, and the mean spare must remain. With fewer than ``fewest`` (at least 2)
    unsaturated replicas, none leaves. A replica of the group with the highest cost leaves first, and in a group the
    least loaded one. ``removable``: most replicas of each group that may leave; ``None``: any number.

    Source: WVA section III-C2.
    """

    def saturation(load: Load) -> float:
        return max(value / limit.saturated for value, limit in zip(load.metrics, limits, strict=True))

    # Of each group, the next replica that leaves is the last one; the next group is the last one, too.
    staying, leaving = defaultdict[str, list[Load]](list), list[Load]()
    for load in sorted(unsaturated, key=lambda load: (-load.cost, saturation(load)), reverse=True):
        staying[load.group].append(load)
    totals, staying_weight = totals_of(unsaturated), weight_of(unsaturated)
    taken_over = [0.0] * len(totals)  # by each staying replica from those that leave, in each metric
    while sum(map(len, staying.values())) >= fewest:
        left_by_group = Counter(load.group for load in leaving)
        # If the next replica of an expensive group cannot leave, that of a cheaper group may.
        for group in reversed(staying):
            if not staying[group] or (removable is not None and left_by_group[group] >= removable[group]):
                continue
            load = staying[group].pop()
            others_weight = staying_weight - load.weight
            # The leaving replica has its own load and what it took over before.
            after = [
                before + (own + before) * load.weight / others_weight
                for own, before in zip(load.metrics, taken_over, strict=True)
            ]
            others = [each.metrics for each in chain(*staying.values())]
            highest = [max(values) + more for values, more in zip(zip(*others, strict=True), after, strict=True)]
            means = [total / others_weight for total in totals]
            if all(value < limit.saturated for value, limit in zip(highest, limits, strict=True)) and _is_spare_enough(
                means, limits
            ):
                leaving.append(load)
                staying_weight, taken_over = others_weight, after
                break
            staying[group].append(load)
        else:
            break
    return leaving


def weight_of(loads: Sequence[Load]) -> float:
    """Standard replicas that the replicas with these loads are worth."""
    return math.fsum(load.weight for load in loads)


def totals_of(loads: Sequence[Load]) -> list[float]:
    """The sum of each metric over replicas, in which each weighs as the standard replicas that it is worth."""
    by_metric = zip(*(load.metrics for load in loads), strict=True)
    weights = [load.weight for load in loads]
    return [math.fsum(v * w for v, w in zip(values, weights, strict=True)) for values in by_metric]


def is_saturated(load: Load, limits: Sequence[Limit]) -> bool:
    """Whether a replica is saturated in any metric (Eq. 2)."""
    return any(value >= limit.saturated for value, limit in zip(load.metrics, limits, strict=True))


def has_headroom(loads: Sequence[Load], limits: Sequence[Limit]) -> bool:
    """Whether the mean spare is at least gamma in every metric. If not, the role scales out (Eq. 3)."""
    return _is_spare_enough([total / weight_of(loads) for total in totals_of(loads)], limits)


def _is_spare_enough(means: Sequence[float], limits: Sequence[Limit]) -> bool:
    """Whether the mean of each metric keeps its spare below saturation."""
    return all(limit.saturated - mean >= limit.spare - _EPSILON for mean, limit in zip(means, limits, strict=True))
