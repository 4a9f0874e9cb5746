"""Fixed counts stay as they are."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.policies.static import Static, StaticConfig
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Snapshot, Traffic
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE


def static(prefill: int, decode: int) -> Static:
    return Static(StaticConfig(prefill=prefill, decode=decode), ratio=PdRatio(1, 3), slo=SloConfig())


def test_counts_and_their_ratio_are_the_configured_ones(make_snapshot: Callable[..., Snapshot]) -> None:
    decision = static(2, 5).decide(make_snapshot(1, 3))
    assert decision.wanted == {P: 2.0, D: 5.0}
    assert decision.ratio == PdRatio(2, 5)
    assert decision.is_step
    assert decision.memory is None


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0, 1e4))
def test_no_observation_changes_the_counts(
    make_snapshot: Callable[..., Snapshot], prefill: int, decode: int, arrivals: float
) -> None:
    policy = static(prefill, decode)
    blind, busy = make_snapshot(3, 4), make_snapshot(3, 4, traffic=Traffic(requests_per_s=arrivals))
    assert policy.decide(blind) == policy.decide(busy) == static(prefill, decode).decide(blind)


@pytest.mark.parametrize("counts", [{}, {"prefill": 1}, {"prefill": -1, "decode": 1}, {"prefill": 1, "decode": 0}])
def test_decode_needs_a_replica_and_prefill_a_count(counts: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"Field required|greater than or equal to [01]"):
        StaticConfig.model_validate(counts)
