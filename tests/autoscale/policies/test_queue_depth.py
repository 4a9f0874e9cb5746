"""The chapter's law by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.policies.queue_depth import QueueDepth, QueueDepthConfig, replicas_for_queue
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, PoolKey, ReplicaStats, Snapshot, Traffic
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE


@pytest.mark.parametrize(
    ("arrivals", "queue", "law", "expected"),
    [
        # The printed law: Q* = 0, W_slo = 0.5 s, mu = 40. 200/40 + 100/(40 x 0.5) = 10.
        (200.0, 100.0, {"target_queue": 0.0, "burn_down_s": 0.5}, 10),
        (200.0, 0.0, {"target_queue": 0.0, "burn_down_s": 0.5}, 5),
        # Its code: Q* = 40, 3 s. (200 + (100 - 40)/3)/40 = 5.5.
        (200.0, 100.0, {"target_queue": 40.0, "burn_down_s": 3.0}, 6),
        (200.0, 40.0, {"target_queue": 40.0, "burn_down_s": 3.0}, 5),
        # Its headroom controller: 1.4 times, rounded up.
        (200.0, 100.0, {"target_queue": 40.0, "burn_down_s": 3.0, "headroom_frac": 0.4}, 9),
        (0.0, 0.0, {"target_queue": 0.0, "burn_down_s": 1.0}, 0),
    ],
)
def test_the_law_by_hand(arrivals: float, queue: float, law: dict[str, float], expected: int) -> None:
    assert replicas_for_queue(arrivals, queue, served_per_s=40.0, **law) == expected


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e3), st.floats(0.1, 100))
def test_more_arrivals_or_a_longer_queue_never_need_fewer(
    arrivals: float, queue: float, more: float, served: float
) -> None:
    law: dict[str, Any] = {"served_per_s": served, "target_queue": 10.0, "burn_down_s": 2.0}
    base = replicas_for_queue(arrivals, queue, **law)
    assert replicas_for_queue(arrivals + more, queue, **law) >= base
    assert replicas_for_queue(arrivals, queue + more, **law) >= base
    assert base * served >= arrivals - 1e-6 * max(1.0, arrivals)


def decide(snapshot: Snapshot, **config: Any) -> Any:
    policy = QueueDepth(QueueDepthConfig.model_validate(config), ratio=PdRatio(1, 2), slo=SloConfig())
    return policy.decide(snapshot)


def test_each_role_by_its_own_queue(make_snapshot: Callable[..., Snapshot]) -> None:
    stats = {P: {"waiting_requests": 30.0}, D: {"waiting_requests": 0.0}}
    snapshot = make_snapshot(2, 4, stats=stats, traffic=Traffic(requests_per_s=20.0))
    both = decide(snapshot, prefill_requests_per_s=10.0, decode_requests_per_s=5.0, burn_down_s=2.0)
    assert both.wanted == {P: 5.0, D: 4.0}  # (20 + 60/2)/10, 20/5
    assert decide(snapshot, decode_requests_per_s=5.0).wanted == {P: 0.0, D: 4.0}


def test_what_nobody_observed_is_no_decision(make_snapshot: Callable[..., Snapshot]) -> None:
    blind = make_snapshot(1, 2, traffic=Traffic(requests_per_s=1.0))
    assert decide(blind, prefill_requests_per_s=10.0).wanted is None
    assert decide(make_snapshot(1, 2), prefill_requests_per_s=10.0).wanted is None
    seen = make_snapshot(1, 2, stats={P: {"waiting_requests": 1.0}}, traffic=Traffic(requests_per_s=1.0))
    prefill = replace(seen.pools[0], replicas=(*seen.pools[0].replicas, ReplicaStats(replica_id="new", observed_s=0.0)))
    assert decide(replace(seen, pools=(prefill, seen.pools[1])), prefill_requests_per_s=10.0).wanted is None


@pytest.mark.parametrize("config", [{}, {"prefill_requests_per_s": 0}, {"decode_requests_per_s": 1, "burn_down_s": 0}])
def test_a_rate_is_needed(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"give prefill_requests_per_s|greater than 0"):
        QueueDepthConfig.model_validate(config)


@pytest.mark.parametrize(("arrivals", "decode"), [(10.0, 4.0), (30.0, 6.0)])
def test_arrivals_that_are_not_all_take_nobody_away_and_still_add(
    make_snapshot: Callable[..., Snapshot], arrivals: float, decode: float
) -> None:
    stats = {role: {"waiting_requests": 0.0} for role in Role}
    desired = {PoolKey("g0", P): 2, PoolKey("g0", D): 4}
    traffic = Traffic(requests_per_s=arrivals, is_whole=False)
    snapshot = make_snapshot(2, 4, stats=stats, traffic=traffic, state=ControllerState(desired=desired))
    assert decide(snapshot, decode_requests_per_s=5.0).wanted[D] == decode
