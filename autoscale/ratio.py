"""The P/D ratio, and the rounding that moves both roles in one step and keeps it (pure)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from kvtransfer.topology import Role

# HeteroScale section 4.1: what production needs lies between one prefill for five decode and nine for one.
_LOWEST, _HIGHEST = Fraction(1, 5), Fraction(9, 1)
# A ratio given as a decimal stands for the nearest one of small whole numbers.
_MAX_DENOMINATOR = 60
# What floating point adds to a product of a need and a ratio is no replica.
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class PdRatio:
    """Prefill replicas to decode replicas, in lowest terms; written ``P:D``.

    ``0:1`` is that of groups of one aggregated pool, whose decode replicas prefill for themselves.
    """

    prefill: int
    decode: int

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read ``"1:3"``, or a number of prefill replicas per decode replica.

        Raises:
            ValueError: not a ratio, or one that is neither 0:1 nor between 1:5 and 9:1.
        """
        if isinstance(value, cls):
            return value
        try:
            if isinstance(value, str) and ":" in value:
                prefill, decode = value.split(":")
                ratio = Fraction(int(prefill), int(decode))
            elif isinstance(value, bool):
                raise TypeError
            else:
                ratio = Fraction(value)
                if ratio >= _LOWEST:  # next to nothing must not become nothing
                    ratio = ratio.limit_denominator(_MAX_DENOMINATOR)
        except (TypeError, ValueError, OverflowError, ZeroDivisionError):
            raise ValueError(
                f"{value!r} is no P/D ratio: give prefill and decode replicas as '1:3', or prefill per decode as 0.5"
            ) from None
        if not cls(ratio.numerator, ratio.denominator).is_supported:
            raise ValueError(
                f"a P/D ratio of {value} is impossible: between 1:5 and 9:1 are supported, and 0:1 where "
                "groups have no prefill; give prefill replicas first"
                + (", and in quotes: YAML reads 1:3 as 63" if isinstance(value, int) else "")
            )
        return cls(ratio.numerator, ratio.denominator)

    @classmethod
    def of(cls, wanted: Mapping[Role, float]) -> Self:
        """The ratio of counts that a policy wants, as near as small whole numbers come; of each at least one."""
        ratio = Fraction(max(1.0, wanted[Role.PREFILL]) / max(1.0, wanted[Role.DECODE]))
        near = ratio.limit_denominator(_MAX_DENOMINATOR) or Fraction(1, _MAX_DENOMINATOR)
        return cls(near.numerator, near.denominator)

    @property
    def is_supported(self) -> bool:
        """Whether a configuration may have it."""
        return self.is_aggregated or _LOWEST <= Fraction(self.prefill, self.decode) <= _HIGHEST

    @property
    def is_aggregated(self) -> bool:
        """Whether there is no prefill replica."""
        return self.prefill == 0

    @property
    def leader(self) -> Role:
        """The role with more replicas; decode where both have as many."""
        return Role.PREFILL if self.prefill > self.decode else Role.DECODE

    @property
    def follower(self) -> Role:
        """The other role."""
        return Role.DECODE if self.leader is Role.PREFILL else Role.PREFILL

    @property
    def follower_share(self) -> float:
        """Followers per leader, at most 1."""
        return min(self.prefill, self.decode) / max(self.prefill, self.decode)

    def leaders(self, wanted: Mapping[Role, float]) -> float:
        """Replicas of the larger role with which both have what is wanted."""
        if not self.follower_share:
            return wanted[self.leader]
        return max(wanted[self.leader], wanted[self.follower] / self.follower_share)

    def per_decode(self) -> float:
        """Prefill replicas per decode replica."""
        return self.prefill / self.decode

    def deviation(self, prefill: float, decode: float) -> float:
        """How many followers the counts are from the ratio: ``|P - r D|`` for r < 1, ``|P / r - D|`` for r >= 1."""
        if self.leader is Role.DECODE:
            return abs(prefill - decode * self.follower_share)
        return abs(prefill * self.follower_share - decode)

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Configs carry it as text."""
        return core_schema.no_info_plain_validator_function(cls.parse, serialization=core_schema.to_string_ser_schema())


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the counts of both roles must stay inside: replicas, and GPUs for both together."""

    lowest: Mapping[Role, int]
    highest: Mapping[Role, int]
    gpus_per_replica: Mapping[Role, float]
    budget_gpus: int | None = None

    @classmethod
    def of(cls, pools: Iterable[tuple[Role, int, int, float]], budget_gpus: int | None) -> Self:
        """The room of several pools, each by its role, lowest and highest count, and GPUs per replica."""
        lowest, highest, gpus = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0), dict.fromkeys(Role, 0.0)
        for role, low, high, each in pools:
            lowest[role] += low
            highest[role] += high
            gpus[role] = max(gpus[role], each)
        return cls(lowest=lowest, highest=highest, gpus_per_replica=gpus, budget_gpus=budget_gpus)

    def holds(self, counts: Mapping[Role, int]) -> bool:
        """Whether counts are inside the bounds and the budget."""
        inside = all(self.lowest[role] <= counts[role] <= self.highest[role] for role in Role)
        return inside and not self.is_over_budget(counts)

    def clamp(self, counts: Mapping[Role, float]) -> dict[Role, int]:
        """The nearest whole counts inside the bounds."""
        return {role: min(max(_whole(counts[role]), self.lowest[role]), self.highest[role]) for role in Role}

    def is_over_budget(self, counts: Mapping[Role, int]) -> bool:
        """Whether counts take more GPUs than there may be."""
        if self.budget_gpus is None:
            return False
        return sum(counts[role] * self.gpus_per_replica[role] for role in Role) > self.budget_gpus


BOUNDLESS = Room(
    lowest=dict.fromkeys(Role, 0), highest=dict.fromkeys(Role, 1 << 20), gpus_per_replica=dict.fromkeys(Role, 0)
)


def joint_counts(
    wanted: Mapping[Role, float], ratio: PdRatio, room: Room, *, band_replicas: float, shortfall_replicas: float = 0.0
) -> dict[Role, int] | None:
    """Whole replicas of both roles, within ``band_replicas`` followers of the ratio.

    The fewest leaders, and for them the fewest followers, that give each role at least what is wanted; where the room
    is too small for that, the most that it holds. The two always come from one step: neither role can move and leave
    the other behind.

    Args:
        wanted: replicas of each role; need not be whole, nor at the ratio.
        ratio: the ratio to keep.
        room: bounds and budget.
        band_replicas: how far from the ratio the followers may be, replicas of the follower.
        shortfall_replicas: how far below the ratio rounding may leave them; 0 rounds up, 0.5 to the nearest.

    Returns:
        Counts of both roles, or ``None`` where the room holds no pair inside the band.
    """
    leader, follower = ratio.leader, ratio.follower
    share = ratio.follower_share
    need = {leader: _whole(ratio.leaders(wanted))}
    need[follower] = max(_whole(wanted[follower]), _whole(wanted[leader] * share - shortfall_replicas))
    lowest, highest = room.lowest[leader], room.highest[leader]
    first = min(max(need[leader], lowest), highest)
    # Upward only where fewer are out of band, as a high minimum of the follower can force.
    for leaders in chain(range(first, lowest - 1, -1), range(first + 1, highest + 1)):
        fewest = max(room.lowest[follower], _whole(leaders * share - band_replicas))
        most = min(room.highest[follower], math.floor(leaders * share + band_replicas + _EPSILON))
        followers = max(fewest, min(most, need[follower], _whole(leaders * share - shortfall_replicas)))
        while followers >= fewest and not room.holds({leader: leaders, follower: followers}):
            followers -= 1
        if fewest <= followers <= most:
            return {leader: leaders, follower: followers}
    return None


def pd_text(counts: Mapping[Role, int]) -> str:
    """Counts as people write them: ``2P6D``."""
    return f"{counts[Role.PREFILL]}P{counts[Role.DECODE]}D"


def _whole(replicas: float) -> int:
    return math.ceil(replicas - _EPSILON)
