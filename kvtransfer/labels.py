"""Node labels that name the switches above a node, and how far two pools are apart by such labels (pure).

A pool *demands* labels: its replicas run only on nodes that satisfy them (``kvtransfer.selectors``).
"""

from collections import Counter
from collections.abc import Mapping

from pydantic import Field, model_validator

from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import TIERS, LinkTier, Path


class TopologyLabels(StrictConfig):
    """Keys of the node labels that name the switches above a node."""

    s0: str = Field("tandem.io/s0", min_length=1, description="Node label that names the rack switch.")
    s1: str = Field("tandem.io/s1", min_length=1, description="Node label that names the minipod switch.")
    s2: str = Field("tandem.io/s2", min_length=1, description="Node label that names the bigpod switch.")
    cluster: str = Field("tandem.io/cluster", min_length=1, description="Node label that names the network cluster.")
    data_centre: str = Field("tandem.io/dc", min_length=1, description="Node label that names the data centre.")

    @model_validator(mode="after")
    def _check_differ(self) -> "TopologyLabels":
        twice = [key for key, count in Counter(self.of(tier) for tier in TIERS).items() if count > 1]
        if twice:
            raise ValueError(f"the label {twice[0]!r} stands for two levels: each level needs its own")
        return self

    def of(self, tier: LinkTier) -> str:
        """Key of a level's label."""
        return str(getattr(self, tier.name.lower()))

    def under(self, labels: Mapping[str, str]) -> Path:
        """Names of the switches above a node with these labels; empty where a label is missing."""
        return tuple(labels.get(self.of(tier), "") for tier in TIERS)

    def link_tier(self, prefill: Mapping[str, str], decode: Mapping[str, str]) -> LinkTier:
        """The lowest level that two pools share by the labels that they demand.

        Pools without a common switch at S2 or below count as sharing ``S2``. If their labels name different switches at
        a level, the result is above that level.
        """
        same, apart = self._shared(prefill, decode)
        shared = min(same, LinkTier.S2)
        if apart is None:
            return shared
        # Pools under different switches share at best the level above these.
        return max(shared, LinkTier(apart + 1))

    def named_tier(self, prefill: Mapping[str, str], decode: Mapping[str, str]) -> LinkTier:
        """The lowest level at which the demanded node labels name one switch for both pools; ``NONE``: at no level."""
        return self._shared(prefill, decode)[0]

    def _shared(self, prefill: Mapping[str, str], decode: Mapping[str, str]) -> tuple[LinkTier, LinkTier | None]:
        """The lowest level at which both pools demand the same switch, and the highest at which their switches differ.

        Levels below a difference do not count. ``NONE`` and ``None``: there is no such level.
        """
        same = LinkTier.NONE
        for level in TIERS:
            selectors = (labels.get(self.of(level), "") for labels in (prefill, decode))
            # An expression such as !a or in(a,b) names no switch.
            switches = ["" if selector.startswith(("!", "in(")) else selector for selector in selectors]
            if not all(switches):
                continue
            if switches[0] != switches[1]:
                return same, level
            same = level
        return same, None


DEFAULT_LABELS = TopologyLabels()
