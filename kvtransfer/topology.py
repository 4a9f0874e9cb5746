"""What a replica is for and where it may sit: roles, and how far apart two pools of a deployment group are (pure)."""

from collections.abc import Mapping
from enum import IntEnum, StrEnum


class Role(StrEnum):
    """What a replica does for a request (HeteroScale section 2.1)."""

    PREFILL = "prefill"
    DECODE = "decode"


class LinkTier(IntEnum):
    """The lowest switch that two nodes are both under: rack, minipod or bigpod (HeteroScale section 2.3)."""

    S0 = 0
    S1 = 1
    S2 = 2


# The node labels that name a node's switches.
_SWITCH_LABELS = {LinkTier.S0: "tandem.io/s0", LinkTier.S1: "tandem.io/s1"}


def link_tier(prefill: Mapping[str, str], decode: Mapping[str, str]) -> LinkTier:
    """How far KV travels between two pools, from the node labels that they demand; ``S2`` where these do not say.

    A switch counts where both demand the same one, and no different ones above it.
    """
    tier = LinkTier.S2
    for level in (LinkTier.S1, LinkTier.S0):
        one, other = (_switch(labels.get(_SWITCH_LABELS[level], "")) for labels in (prefill, decode))
        if one and other and one != other:
            break
        if one and one == other:
            tier = level
    return tier


def _switch(selector: str) -> str:
    """The switch that a label selector names; nothing where it is an expression such as ``!a`` or ``in(a,b)``."""
    return "" if selector.startswith(("!", "in(")) else selector
