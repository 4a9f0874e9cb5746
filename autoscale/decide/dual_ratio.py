"""Prefill replicas of attention and feed-forward (FFN) instances: a ratio inside the P/D ratio (pure).

Source: HeteroScale section 3.4, "Extending to Disaggregated MoE". A prefill replica has attention and FFN instances in
a strict ratio, below one S1 switch (of a minipod). Prefill and decode replicas keep the P/D ratio below one S2 switch
(of a bigpod). The inner ratio holds inside each prefill replica, so any number of whole replicas keeps it.
"""

from dataclasses import dataclass

from autoscale.ratio import PdRatio, whole
from autoscale.types import Demand
from kvtransfer.topology import LinkTier, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class DualRatio:
    """Instances of each kind in one prefill replica, and the prefill-to-decode ratio."""

    attention: int
    ffn: int
    pd_ratio: PdRatio

    def __post_init__(self) -> None:
        if self.attention < 1 or self.ffn < 1:
            raise ValueError(
                f"attention:ffn is {self.attention}:{self.ffn}: a prefill replica needs at least one of each"
            )

    def demand(self, attention: Demand, ffn: Demand) -> Demand:
        """Demand of one prefill replica below one S1 switch; arguments: demand of one instance of each kind."""
        return Demand(parts=(*[attention] * self.attention, *[ffn] * self.ffn), within=LinkTier.S1)

    def instances(self, prefill_replicas: int) -> tuple[int, int]:
        """Number of attention and of FFN instances in these prefill replicas."""
        return prefill_replicas * self.attention, prefill_replicas * self.ffn

    def wanted_replicas(self, attention: float, ffn: float, decode: float) -> dict[Role, float]:
        """Replicas of both roles at the P/D ratio, with at least these instances and decode replicas."""
        prefill = max(whole(attention / self.attention), whole(ffn / self.ffn))
        leaders = self.pd_ratio.leaders({Role.PREFILL: prefill, Role.DECODE: decode})
        return {self.pd_ratio.leader: leaders, self.pd_ratio.follower: leaders * self.pd_ratio.follower_share}
