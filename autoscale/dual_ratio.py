"""Prefill that consists of attention and feed-forward instances: two ratios, one inside the other (pure).

Source: HeteroScale section 3.4, "Extending to Disaggregated MoE": attention to FFN strictly inside a prefill replica,
which lies under one S1 switch; prefill to decode in proportion, the pair under one S2. A prefill replica is as many
instances of both as the inner ratio says in whole numbers, so counting replicas keeps it.
"""

import math
from dataclasses import dataclass

from autoscale.ratio import PdRatio
from autoscale.slots import Demand
from kvtransfer.topology import LinkTier, Role

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class DualRatio:
    """``attention`` instances to ``ffn`` instances of one prefill replica, and prefill to decode replicas."""

    attention: int
    ffn: int
    pd_ratio: PdRatio

    def __post_init__(self) -> None:
        if self.attention < 1 or self.ffn < 1:
            raise ValueError(
                f"attention:ffn is {self.attention}:{self.ffn}: a prefill replica has at least one of both"
            )

    def demand(self, attention: Demand, ffn: Demand) -> Demand:
        """What a prefill replica takes, from what an instance of each takes: all of it under one S1."""
        parts = (*[attention] * self.attention, *[ffn] * self.ffn)
        return Demand(parts=parts, within=LinkTier.S1)

    def instances(self, prefill_replicas: int) -> tuple[int, int]:
        """Attention and FFN instances of so many prefill replicas."""
        return prefill_replicas * self.attention, prefill_replicas * self.ffn

    def wanted(self, attention: float, ffn: float, decode: float) -> dict[Role, float]:
        """Replicas of both roles that have at least so many instances, and keep the outer ratio.

        Args:
            attention: instances that are needed; need not be whole.
            ffn: likewise.
            decode: replicas that are needed.
        """
        prefill = max(math.ceil(attention / self.attention - _EPSILON), math.ceil(ffn / self.ffn - _EPSILON))
        leaders = self.pd_ratio.leaders({Role.PREFILL: prefill, Role.DECODE: decode})
        return {self.pd_ratio.leader: leaders, self.pd_ratio.follower: leaders * self.pd_ratio.follower_share}
