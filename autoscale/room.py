"""The room of both roles' counts, and rounding that keeps the P/D ratio by moving both roles in one step (pure).

Counts are in standard replicas (``autoscale.headcount``). Leaders are the replicas of the ratio's larger role (decode
if both are equal), followers those of the other role.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from autoscale.ratio import PdRatio
from autoscale.types import PoolLimits
from kvtransfer.topology import Role

# Tolerance for rounding errors of a count times a ratio or a capacity, replicas: 3.0000000001 is 3.
_EPSILON = 1e-9
# Highest count of each role without bounds: more than any cluster has.
_BOUNDLESS_REPLICAS = 1_048_576.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRoom:
    """What one pool contributes to the room of its role; ``present``: its replicas that should serve now."""

    role: Role
    limits: PoolLimits
    present: int = 0


def _each(value: float) -> Mapping[Role, float]:
    return dict.fromkeys(Role, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Limits of both roles' counts: bounds of each, and a GPU budget for both together.

    Attributes:
        lowest: lowest count of each role.
        highest: highest count of each role.
        most_gpus_per_replica: most GPUs that one standard replica may take, in whichever pool it starts.
        budget_gpus: most GPUs of both roles; ``None``: no budget.
        step: smallest change of a count: the capacity of the smallest replica of the role.
        fewer: smallest removal: the capacity of the smallest replica that is present and may leave.
        largest: capacity of the largest replica of the role.
        present: counts now, from which counts change by whole steps.
        present_gpus: GPUs of the present counts.
        least_gpus_per_replica: least GPUs that one standard replica may take.
        counts_least_gpus: whether the budget is checked with these, so that it holds if any choice of pools fits.
    """

    lowest: Mapping[Role, float]
    highest: Mapping[Role, float]
    most_gpus_per_replica: Mapping[Role, float]
    budget_gpus: int | None = None
    step: Mapping[Role, float] = field(default_factory=lambda: _each(1.0))
    fewer: Mapping[Role, float] = field(default_factory=lambda: _each(1.0))
    largest: Mapping[Role, float] = field(default_factory=lambda: _each(1.0))
    present: Mapping[Role, float] = field(default_factory=lambda: _each(0.0))
    present_gpus: Mapping[Role, float] = field(default_factory=lambda: _each(0.0))
    least_gpus_per_replica: Mapping[Role, float] = field(default_factory=lambda: _each(0.0))
    counts_least_gpus: bool = False

    @classmethod
    def of(cls, pools: Iterable[PoolRoom], budget_gpus: int | None) -> Self:
        """The room of several pools."""
        lowest, highest, present, present_gpus = (dict.fromkeys(Role, 0.0) for _ in range(4))
        capacities: dict[Role, list[float]] = {role: [] for role in Role}
        removable: dict[Role, list[float]] = {role: [] for role in Role}
        gpus: dict[Role, list[float]] = {role: [] for role in Role}
        for pool in pools:
            own, limits, count = pool.role, pool.limits, pool.present
            for role, capacity in ((own, limits.capacity), (Role.PREFILL, limits.prompt_capacity)):
                lowest[role] += limits.lowest_replicas * capacity
                highest[role] += limits.highest_replicas * capacity
                present[role] += count * capacity
                if capacity and count > limits.lowest_replicas:
                    removable[role].append(capacity)
            present_gpus[own] += count * limits.gpus_per_replica
            gpus[own].append(limits.gpus_per_replica / limits.capacity)
            if limits.highest_replicas or count:
                capacities[own].append(limits.capacity)
        step = {role: min(capacities[role], default=1.0) for role in Role}
        return cls(
            lowest=lowest,
            highest=highest,
            # Pools may differ. With these numbers the budget holds in whichever pool a replica starts or stops.
            most_gpus_per_replica={role: max(gpus[role], default=0.0) for role in Role},
            least_gpus_per_replica={role: min(gpus[role], default=0.0) for role in Role},
            budget_gpus=budget_gpus,
            step=step,
            fewer={role: min(removable[role], default=step[role]) for role in Role},
            largest={role: max(capacities[role], default=1.0) for role in Role},
            present=present,
            present_gpus=present_gpus,
        )

    def boundless(self) -> Self:
        """The same steps without bounds and budget."""
        return replace(self, lowest=_each(0.0), highest=_each(_BOUNDLESS_REPLICAS), budget_gpus=None)

    def is_even(self, role: Role) -> bool:
        """Whether all replicas of a role are worth the same."""
        return self.largest[role] == self.step[role]

    def whole(self, role: Role, replicas: float) -> float:
        """The count rounded up to whole replicas, without rounding errors.

        Replicas of unequal capacity add up to almost any number. Which of them start and stop is the choice of
        placement, which rounds up. So such a count stays as it is, or is the present one if no replica fewer is enough.
        """
        present, step = self.present[role], self.step[role]
        if self.is_even(role):
            return present + math.ceil((replicas - present) / step - _EPSILON) * step
        is_enough = present - self.fewer[role] + _EPSILON < replicas <= present + _EPSILON
        return present if is_enough else replicas

    def floor(self, role: Role, replicas: float) -> float:
        """The count rounded down to whole replicas, without rounding errors; see ``whole``."""
        present, step = self.present[role], self.step[role]
        if self.is_even(role):
            return present + math.floor((replicas - present) / step + _EPSILON) * step
        return replicas

    def holds(self, counts: Mapping[Role, float]) -> bool:
        """Whether counts are inside the bounds and the budget."""
        inside = all(self.lowest[role] - _EPSILON <= counts[role] <= self.highest[role] + _EPSILON for role in Role)
        return inside and not self.is_over_budget(counts)

    def clamp(self, counts: Mapping[Role, float]) -> dict[Role, float]:
        """The counts rounded up, and moved inside the bounds; the budget is not checked."""
        return {role: min(max(self.whole(role, counts[role]), self.lowest[role]), self.highest[role]) for role in Role}

    def is_over_budget(self, counts: Mapping[Role, float], ending: Mapping[Role, float] | None = None) -> bool:
        """Whether the counts, and ending replicas that still hold their GPUs, take more GPUs than the budget."""
        if self.budget_gpus is None:
            return False
        holding = counts if ending is None else {role: counts[role] + ending[role] for role in Role}
        return sum(self._gpus(role, holding[role]) for role in Role) > self.budget_gpus + _EPSILON

    def _gpus(self, role: Role, replicas: float) -> float:
        """GPUs that a count of a role takes: the present ones, and the most that others may take."""
        more = replicas - self.present[role]
        is_least = more <= 0.0 or self.counts_least_gpus
        each = self.least_gpus_per_replica if is_least else self.most_gpus_per_replica
        return self.present_gpus[role] + more * each[role]


def joint_counts(
    wanted: Mapping[Role, float], ratio: PdRatio, room: Room, band_replicas: float, shortfall_replicas: float = 0.0
) -> dict[Role, float] | None:
    """Counts of both roles within the band, in whole replicas; ``None``: no such counts are inside the room.

    The band: followers are at most ``band_replicas``, each as large as the largest follower, more or fewer than the
    ratio asks for. The counts are the fewest leaders, and then the fewest followers, that give each role its wanted
    replicas. If the room is too small for these counts, the result is the largest counts that the room holds. Rounding
    may leave followers ``shortfall_replicas`` of the smallest ones below the ratio: 0 rounds up, 0.5 rounds to the
    nearest.
    """
    leader, follower, share = ratio.leader, ratio.follower, ratio.follower_share
    one_follower, band = room.step[follower], band_replicas * room.largest[follower]
    shortfall = shortfall_replicas * one_follower
    # Leaders that only the lowest count requires need their followers too.
    least_leaders = max(wanted[leader], room.lowest[leader])
    at_least = room.whole(follower, max(wanted[follower], least_leaders * share - shortfall))
    exact = ratio.leaders(wanted)
    for leaders in _leaders(room.whole(leader, exact), ratio, room, band):
        # What a large replica is worth beyond the wanted leaders needs no followers.
        needing = leaders if room.is_even(leader) else min(leaders, max(exact, room.lowest[leader]))
        at_ratio = needing * share
        fewest = max(room.lowest[follower], room.whole(follower, at_ratio - band))
        # One follower is in every band: leaders cannot serve without it.
        most = min(room.highest[follower], max(one_follower, room.floor(follower, at_ratio + band)))
        followers = max(fewest, min(most, at_least, room.whole(follower, at_ratio - shortfall)))
        while followers >= fewest - _EPSILON and not room.holds({leader: leaders, follower: followers}):
            followers -= one_follower
        if fewest - _EPSILON <= followers <= most + _EPSILON:
            return {leader: leaders, follower: followers}
    return None


def _leaders(wanted: float, ratio: PdRatio, room: Room, band: float) -> Iterator[float]:
    """Counts of leaders to try: the wanted ones inside the bounds, then fewer, then more.

    More leaders help if the lowest count of followers is above what the band allows with fewer leaders. ``band``: in
    standard replicas.
    """
    leader, follower, share = ratio.leader, ratio.follower, ratio.follower_share
    lowest, highest, step = room.lowest[leader], room.highest[leader], room.step[leader]
    leaders = first = min(max(wanted, lowest), highest)
    if share:  # with more leaders the highest count of followers would be below the band
        most = room.floor(leader, (room.highest[follower] + band) / share)
        leaders = first = max(lowest, min(first, most))
    while leaders >= lowest - _EPSILON:
        yield leaders
        # From the present count by whole steps, so that the result does not depend on a fraction that is wanted.
        number = math.ceil((leaders - room.present[leader]) / step - _EPSILON) - 1
        leaders = room.present[leader] + number * step
    if lowest < leaders + step - _EPSILON:
        yield lowest
    if share:
        more = room.whole(leader, (room.lowest[follower] - band) / share)
        if first < more <= highest + _EPSILON:
            yield more
