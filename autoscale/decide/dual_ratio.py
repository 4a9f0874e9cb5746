"""Prefill replicas of attention and feed-forward (FFN) instances: a ratio inside the P/D ratio (pure).

Source: HeteroScale section 3.4, "Extending to Disaggregated MoE". A prefill replica has attention and FFN instances in
a strict ratio, below one S1 switch (of a minipod). Prefill and decode replicas keep the P/D ratio below one S2 switch
(of a bigpod). The inner ratio holds inside each prefill replica, so any number of whole replicas keeps it.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from autoscale.types import Demand
from kvtransfer.topology import LinkTier

# Most instances of a kind in one replica: the highest tensor parallel size that a role may have.
_MOST_INSTANCES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFfn:
    """Instances of each kind in one prefill replica, written ``A:F``."""

    attention: int
    ffn: int

    def __post_init__(self) -> None:
        if not (1 <= self.attention <= _MOST_INSTANCES and 1 <= self.ffn <= _MOST_INSTANCES):
            raise ValueError(
                f"attention:ffn is {self}: a prefill replica needs at least one of each, and at most {_MOST_INSTANCES}"
            )

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read ``"1:3"``. Raises ValueError: it is not two whole numbers, each at least 1."""
        if isinstance(value, cls):
            return value
        if not (isinstance(value, str) and (found := re.fullmatch(r"(\d+):(\d+)", value.strip()))):
            quotes = ", and in quotes: YAML reads 1:3 as 63" if isinstance(value, int) else ""
            raise ValueError(f"{value!r} is no ratio of attention to FFN instances: give them as '1:3'{quotes}")
        return cls(attention=int(found[1]), ffn=int(found[2]))

    @property
    def instances(self) -> int:
        """Instances of both kinds in one replica."""
        return self.attention + self.ffn

    def demand(self, attention: Demand, ffn: Demand) -> Demand:
        """Demand of one prefill replica below one S1 switch; arguments: demand of one instance of each kind.

        The CPUs of the replica itself stand beside its first instance.
        """
        others = replace(attention, cpus_per_replica=0.0), replace(ffn, cpus_per_replica=0.0)
        parts = (attention, *[others[0]] * (self.attention - 1), *[others[1]] * self.ffn)
        return Demand(parts=parts, within=LinkTier.S1)

    def __str__(self) -> str:
        return f"{self.attention}:{self.ffn}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In configurations it is text."""
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.to_string_ser_schema(),
            json_schema_input_schema=core_schema.str_schema(pattern=r"^\d+:\d+$"),
        )
