"""How far apart the pools of a group are."""

import pytest

from kvtransfer.topology import LinkTier, link_tier

S0, S1 = "tandem.io/s0", "tandem.io/s1"


@pytest.mark.parametrize(
    ("prefill", "decode", "tier"),
    [
        ({S1: "a", S0: "x"}, {S1: "a", S0: "x"}, LinkTier.S0),
        ({S0: "x"}, {S0: "x"}, LinkTier.S0),
        ({S1: "a", S0: "x"}, {S1: "a", S0: "y"}, LinkTier.S1),
        ({S1: "a"}, {S1: "a", S0: "y"}, LinkTier.S1),
        ({S1: "a", S0: "x"}, {S1: "b", S0: "x"}, LinkTier.S2),  # racks of two minipods may have one name
        ({S1: "in(a,b)"}, {S1: "in(a,b)"}, LinkTier.S2),
        ({S1: "!a"}, {S1: "!a"}, LinkTier.S2),
        ({}, {S1: "a"}, LinkTier.S2),
        ({}, {}, LinkTier.S2),
    ],
)
def test_the_lowest_switch_that_both_demand(prefill: dict[str, str], decode: dict[str, str], tier: LinkTier) -> None:
    assert link_tier(prefill, decode) is tier
    assert link_tier(decode, prefill) is tier
