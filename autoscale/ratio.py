"""The P/D ratio, and rounding that keeps it by moving both roles in one step (pure).

Leaders are the replicas of the ratio's larger role (decode if both are equal), followers those of the other role.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from kvtransfer.topology import Role

# Bounds of configured ratios: the range that production needs, HeteroScale section 4.1.
_LOWEST = Fraction(1, 5)
_HIGHEST = Fraction(9, 1)
# A decimal ratio becomes the nearest fraction with at most this denominator.
_MAX_DENOMINATOR = 60
# Tolerance for rounding errors of a count times a ratio, replicas: 3.0000000001 is 3.
_EPSILON = 1e-9
# Highest count of each role in ``BOUNDLESS``: more than any cluster has.
_BOUNDLESS_REPLICAS = 1_048_576


@dataclass(frozen=True, slots=True)
class PdRatio:
    """Prefill replicas to decode replicas, in lowest terms; written ``P:D``.

    ``0:1`` is the ratio of aggregated groups: they have only decode replicas, which compute prompts too.
    """

    prefill: int
    decode: int

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read ``"1:3"``, or prefill replicas per decode replica; a ValueError unless 0:1 or between 1:5 and 9:1."""
        if isinstance(value, cls):
            return value
        try:
            if isinstance(value, str) and ":" in value:
                prefill, decode = value.split(":")
                ratio = Fraction(int(prefill), int(decode))
            elif isinstance(value, bool):  # Fraction would take it for 0 or 1
                raise TypeError
            else:
                ratio = Fraction(value)
                if ratio >= _LOWEST:  # a tiny ratio must not become 0
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
        """The ratio of two counts, as the nearest fraction of small whole numbers; a count below 1 counts as 1."""
        exact = Fraction(max(1.0, wanted[Role.PREFILL]) / max(1.0, wanted[Role.DECODE]))
        near = exact.limit_denominator(_MAX_DENOMINATOR) or Fraction(1, _MAX_DENOMINATOR)  # 0 would mean aggregated
        return cls(near.numerator, near.denominator)

    @property
    def is_supported(self) -> bool:
        """Whether a configuration may have this ratio."""
        return self.is_aggregated or _LOWEST <= Fraction(self.prefill, self.decode) <= _HIGHEST

    @property
    def is_aggregated(self) -> bool:
        """Whether the ratio is 0:1."""
        return self.prefill == 0

    @property
    def leader(self) -> Role:
        """The role with more replicas; decode if both are equal."""
        return Role.PREFILL if self.prefill > self.decode else Role.DECODE

    @property
    def follower(self) -> Role:
        """The role that is not the leader."""
        return Role.DECODE if self.leader is Role.PREFILL else Role.PREFILL

    @property
    def follower_share(self) -> float:
        """Followers per leader, at most 1."""
        return min(self.prefill, self.decode) / max(self.prefill, self.decode)

    def leaders(self, wanted: Mapping[Role, float]) -> float:
        """The fewest leaders with which, at the ratio, both roles have their wanted replicas; perhaps a fraction."""
        if not self.follower_share:  # aggregated: there are no followers
            return wanted[self.leader]
        return max(wanted[self.leader], wanted[self.follower] / self.follower_share)

    def per_decode(self) -> float:
        """Prefill replicas per decode replica."""
        return self.prefill / self.decode

    def deviation(self, prefill: float, decode: float) -> float:
        """Number of followers that are too many or too few for the ratio r.

        With P prefill and D decode replicas it is ``|P - r D|`` for r <= 1, and ``|P / r - D|`` for r > 1.
        """
        if self.leader is Role.DECODE:
            return abs(prefill - decode * self.follower_share)
        return abs(prefill * self.follower_share - decode)

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In configurations a ratio is text or a number."""
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.to_string_ser_schema(),
            json_schema_input_schema=core_schema.union_schema(
                [core_schema.str_schema(pattern=r"^\d+:\d+$"), core_schema.float_schema()]
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Limits of both roles' counts: bounds of each, and a GPU budget for both together."""

    lowest: Mapping[Role, int]
    highest: Mapping[Role, int]
    gpus_per_replica: Mapping[Role, float]
    budget_gpus: int | None = None

    @classmethod
    def of(cls, pools: Iterable[tuple[Role, int, int, float]], budget_gpus: int | None) -> Self:
        """The room of several pools; each has its role, lowest and highest count, and GPUs per replica."""
        lowest, highest, gpus = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0), dict.fromkeys(Role, 0.0)
        for role, pool_lowest, pool_highest, pool_gpus in pools:
            lowest[role] += pool_lowest
            highest[role] += pool_highest
            # Pools of a role may differ. With the largest number the budget holds in whichever pool a replica starts.
            gpus[role] = max(gpus[role], pool_gpus)
        return cls(lowest=lowest, highest=highest, gpus_per_replica=gpus, budget_gpus=budget_gpus)

    def holds(self, counts: Mapping[Role, int]) -> bool:
        """Whether counts are inside the bounds and the budget."""
        inside = all(self.lowest[role] <= counts[role] <= self.highest[role] for role in Role)
        return inside and not self.is_over_budget(counts)

    def clamp(self, counts: Mapping[Role, float]) -> dict[Role, int]:
        """The counts rounded up, and moved inside the bounds; the budget is not checked."""
        return {role: min(max(whole(counts[role]), self.lowest[role]), self.highest[role]) for role in Role}

    def is_over_budget(self, counts: Mapping[Role, int], ending: Mapping[Role, int] | None = None) -> bool:
        """Whether the counts, and ending replicas that still hold their GPUs, take more GPUs than the budget."""
        if self.budget_gpus is None:
            return False
        holding = counts if ending is None else {role: counts[role] + ending[role] for role in Role}
        return sum(holding[role] * self.gpus_per_replica[role] for role in Role) > self.budget_gpus


BOUNDLESS = Room(
    lowest=dict.fromkeys(Role, 0),
    highest=dict.fromkeys(Role, _BOUNDLESS_REPLICAS),
    gpus_per_replica=dict.fromkeys(Role, 0),
)


def joint_counts(
    wanted: Mapping[Role, float], ratio: PdRatio, room: Room, band_replicas: float, shortfall_replicas: float = 0.0
) -> dict[Role, int] | None:
    """Whole counts of both roles within the band; ``None``: no such counts are inside the room.

    The band: followers are at most ``band_replicas`` more or fewer than the ratio asks for. The counts are the fewest
    leaders, and then the fewest followers, that give each role its wanted replicas. If the room is too small for these
    counts, the result is the largest counts that the room holds. Rounding may leave followers ``shortfall_replicas``
    below the ratio: 0 rounds up, 0.5 rounds to the nearest.
    """
    leader, follower, share = ratio.leader, ratio.follower, ratio.follower_share
    wanted_followers = max(whole(wanted[follower]), whole(wanted[leader] * share - shortfall_replicas))
    lowest, highest = room.lowest[leader], room.highest[leader]
    wanted_leaders = min(max(whole(ratio.leaders(wanted)), lowest), highest)
    # First the wanted leaders, then fewer, then more. More leaders help if the lowest count of followers is above what
    # the band allows with fewer leaders.
    for leaders in chain(range(wanted_leaders, lowest - 1, -1), range(wanted_leaders + 1, highest + 1)):
        at_ratio = leaders * share
        fewest = max(room.lowest[follower], whole(at_ratio - band_replicas))
        # One follower is in every band: leaders cannot serve without it.
        most = min(room.highest[follower], max(1, math.floor(at_ratio + band_replicas + _EPSILON)))
        followers = max(fewest, min(most, wanted_followers, whole(at_ratio - shortfall_replicas)))
        while followers >= fewest and not room.holds({leader: leaders, follower: followers}):
            followers -= 1
        if fewest <= followers <= most:
            return {leader: leaders, follower: followers}
    return None


def pd_text(counts: Mapping[Role, int]) -> str:
    """Counts as text: ``2P6D``."""
    return f"{counts[Role.PREFILL]}P{counts[Role.DECODE]}D"


def whole(replicas: float) -> int:
    """The count rounded up to a whole number, without rounding errors: 3.0000000001 becomes 3."""
    return math.ceil(replicas - _EPSILON)
