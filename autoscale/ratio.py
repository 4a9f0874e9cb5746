"""The P/D ratio: prefill replicas to decode replicas, and texts of counts (pure).

Leaders are the replicas of the ratio's larger role (decode if both are equal), followers those of the other role.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import GetCoreSchemaHandler, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from kvtransfer.topology import Role

# Bounds of configured ratios: the range that production needs, HeteroScale section 4.1.
_LOWEST = Fraction(1, 5)
_HIGHEST = Fraction(9, 1)
# A decimal ratio becomes the nearest fraction with at most this denominator.
_MAX_DENOMINATOR = 60
# A unit of replicas at a ratio of fractions has at most this number of decode replicas.
_MAX_UNIT = 5
# Tolerance for rounding errors of a count times a ratio, replicas: 3.0000000001 is 3.
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class PdRatio:
    """Prefill replicas to decode replicas, written ``P:D``.

    A configured ratio is of whole numbers in lowest terms. The ratio of two counts of standard replicas may be of
    fractions. ``0:1`` is the ratio of aggregated groups: they have only decode replicas, which compute prompts too.
    """

    prefill: float
    decode: float

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
    def stored(cls, value: Any) -> Any:
        """Read a ratio that ``exact`` has written, also one that no configuration may have; other values stay.

        Policies with a ratio of their own may want 12:1, and their decisions are logged and sent.
        """
        parts = value.split(":") if isinstance(value, str) else []
        try:
            prefill, decode = (float(part) if "." in part or "e" in part else int(part) for part in parts)
        except ValueError:
            return value
        is_ratio = 0 <= prefill < math.inf and 0 < decode < math.inf
        return cls(prefill, decode) if is_ratio else value

    @classmethod
    def of(cls, wanted: Mapping[Role, float], least: Mapping[Role, float] | None = None) -> Self:
        """The ratio of two counts, in lowest terms if that is a ratio of small whole numbers.

        ``least``: standard replicas that the smallest replica of each role is worth, by default 1. A lower count counts
        as this, because a role has at least one replica.
        """
        prefill, decode = (max(1.0 if least is None else least[role], wanted[role]) for role in Role)
        near = Fraction(prefill / decode).limit_denominator(_MAX_DENOMINATOR)
        if abs(near * decode - prefill) <= _EPSILON:
            return cls(near.numerator, near.denominator)
        # A rounded ratio would ask for a little more of one role, and so for a whole replica.
        return cls(prefill, decode)

    @property
    def is_supported(self) -> bool:
        """Whether a configuration may have this ratio."""
        return self.is_aggregated or _LOWEST <= Fraction(self.prefill) / Fraction(self.decode) <= _HIGHEST

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

    def unit(self) -> dict[Role, int]:
        """The fewest whole replicas of each role at the ratio; near it, if it is of fractions."""
        near = Fraction(self.prefill) / Fraction(self.decode)
        if not (isinstance(self.prefill, int) and isinstance(self.decode, int)):
            near = near.limit_denominator(_MAX_UNIT) or Fraction(1, _MAX_UNIT)
        return {Role.PREFILL: near.numerator, Role.DECODE: near.denominator}

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
        return f"{round(self.prefill, 2):.12g}:{round(self.decode, 2):.12g}"

    def exact(self) -> str:
        """The ratio as text without rounding, which ``stored`` reads."""
        return f"{self.prefill}:{self.decode}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In configurations a ratio is text or a number."""
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(
                cls.exact, return_schema=core_schema.str_schema()
            ),
            json_schema_input_schema=core_schema.union_schema(
                [core_schema.str_schema(pattern=r"^\d+:\d+$"), core_schema.float_schema()]
            ),
        )


def _setting(value: Any) -> Any:
    return value if value == "auto" else PdRatio.parse(value)


# A configured ratio, or "auto": it follows the traffic.
RatioSetting = Annotated[
    PdRatio | Literal["auto"],
    PlainValidator(_setting),
    PlainSerializer(lambda value: value if isinstance(value, str) else value.exact(), return_type=str),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": r"^(\d+:\d+|auto)$"}, {"type": "number"}]},
    ),
]


def pd_text(counts: Mapping[Role, float]) -> str:
    """Counts as text: ``2P6D``, or ``1.5P6D`` if replicas of unequal capacity add up to a fraction."""
    return f"{round(counts[Role.PREFILL], 2):g}P{round(counts[Role.DECODE], 2):g}D"


def whole(replicas: float) -> int:
    """The count rounded up to a whole number, without rounding errors: 3.0000000001 becomes 3."""
    return math.ceil(replicas - _EPSILON)
