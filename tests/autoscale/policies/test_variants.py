"""Policies over two groups, the second of which is half as fast: by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.engines.profile import EngineProfile
from autoscale.policies.heteroscale import Signal, observed_signals
from autoscale.ratio import PdRatio
from autoscale.types import (
    ControllerState,
    Decision,
    Latency,
    PoolKey,
    PoolLimits,
    PoolStats,
    ReplicaStats,
    Snapshot,
    Traffic,
)
from kvtransfer.topology import Role
from tests.autoscale.conftest import MakeProfile

P, D = Role.PREFILL, Role.DECODE
NOW_S = 1000.0
# Two replicas of each role in each group: three standard replicas of each role.
PRESENT = 3.0


def snapshot(stats: Mapping[tuple[str, Role], Mapping[str, float]], **fields: Any) -> Snapshot:
    """Two replicas in each pool; ``stats``: reports of the replicas of a pool."""
    pools = []
    for group, capacity in (("fast", 1.0), ("slow", 0.5)):
        for role in Role:
            shown = {"queued_prefill_tokens": 0.0, **stats.get((group, role), {})}
            replicas = tuple(ReplicaStats(replica_id=f"{role}-{group}-{n}", observed_s=NOW_S, **shown) for n in (0, 1))
            limits = PoolLimits(lowest_replicas=1, highest_replicas=9, capacity=capacity)
            pools.append(PoolStats(key=PoolKey(group, role), replicas=replicas, target_replicas=2, limits=limits))
    state = ControllerState(desired={pool.key: 2 for pool in pools})
    return Snapshot(now_s=NOW_S, pools=tuple(pools), **{"state": state, "latency": Latency(), **fields})


def decide(of: Snapshot, kind: str, ratio: str = "1:1", **config: Any) -> Decision:
    settings = AutoscaleConfig.model_validate({"pd_ratio": ratio, "policy": {"kind": kind, **config}})
    policy, own = settings.policy_settings()
    return policy(own, ratio=settings.pd_ratio, slo=settings.slo).decide(of)


def reports(fast: tuple[float, float], slow: tuple[float, float]) -> dict[tuple[str, Role], dict[str, float]]:
    """KV usage and queue of the decode replicas of each group; prefill replicas are calm."""
    calm = (0.45, 0.0)
    loads = {("fast", P): calm, ("slow", P): calm, ("fast", D): fast, ("slow", D): slow}
    return {key: {"kv_usage_frac": kv, "waiting_requests": queue} for key, (kv, queue) in loads.items()}


def test_tokens_are_summed_and_shares_are_weighed() -> None:
    # 2 x 80 + 2 x 40 tokens/s on three standard replicas; utilisation (2 x 0.9 x 1 + 2 x 0.6 x 0.5) / 3.
    stats = {
        ("fast", D): {"decode_tokens_per_s": 80.0, "gpu_utilization_frac": 0.9},
        ("slow", D): {"decode_tokens_per_s": 40.0, "gpu_utilization_frac": 0.6},
    }
    of = snapshot(stats)
    assert observed_signals(of) == {
        Signal.DECODE_TPS: pytest.approx(80.0),
        Signal.DECODE_GPU_UTILIZATION: pytest.approx(0.8),
    }
    by_tokens = decide(of, "heteroscale", target=40.0)
    assert by_tokens.wanted == {P: pytest.approx(6.0), D: pytest.approx(6.0)}
    by_share = decide(of, "heteroscale", signal="decode_gpu_utilization", target=0.6)
    assert by_share.wanted == {P: pytest.approx(4.0), D: pytest.approx(4.0)}


def test_a_slow_replica_is_saturated_by_a_shorter_queue() -> None:
    # Five requests saturate a fast replica, two and a half a slow one: two of four decode replicas are saturated.
    decision = decide(snapshot(reports((0.45, 2.5), (0.45, 2.5))), "wva")
    assert decision.reason == "0 of 4 prefill and 2 of 4 decode replicas are saturated"
    assert decision.wanted is not None
    assert decision.wanted[P] == PRESENT
    # Ten requests wait in all; the unsaturated (fast) ones are 2.5 below saturation, less than the spare of 3.
    assert decision.wanted[D] == 5.0  # 10 / (5 - 3)


def test_a_ratio_of_slow_replicas_is_that_of_their_capacities() -> None:
    # One prefill and two decode replicas that are worth a half each.
    one = snapshot({("slow", role): {"kv_usage_frac": 0.45, "waiting_requests": 0.0} for role in Role})
    slow = [replace(pool, replicas=pool.replicas[: 1 if pool.key.role is P else 2]) for pool in one.pools[2:]]
    empty = [replace(pool, replicas=(), target_replicas=0) for pool in one.pools[:2]]
    desired = {pool.key: len(pool.replicas) for pool in [*empty, *slow]}
    decision = decide(replace(one, pools=(*empty, *slow), state=replace(one.state, desired=desired)), "wva")
    assert decision.wanted == {P: 0.5, D: 1.0}
    assert decision.ratio == PdRatio(1, 2)


def test_one_replica_more_is_one_of_the_slowest_group() -> None:
    # The queue of every decode replica is full, but 15 waiting requests need no more than three: 15 / (5 - 0).
    crowded = decide(snapshot(reports((0.1, 5.0), (0.1, 2.5))), "wva", spare_waiting_requests=0.0)
    assert (crowded.wanted or {})[D] == PRESENT + 0.5


def test_kv_weighs_as_the_replica_that_holds_it() -> None:
    # (2 x 0.7 + 2 x 0.4 x 0.5) / (0.8 - 0.3) = 3.6. Placement rounds it: the group that grows decides.
    assert (decide(snapshot(reports((0.7, 0.0), (0.4, 0.0))), "wva").wanted or {})[D] == pytest.approx(3.6)


def test_a_queue_waits_for_standard_replicas() -> None:
    stats = {(group, role): {"waiting_requests": 3.0} for group in ("fast", "slow") for role in Role}
    of = snapshot(stats, traffic=Traffic(requests_per_s=30.0))
    decision = decide(of, "queue_depth", prefill_requests_per_s=10.0, decode_requests_per_s=10.0, burn_down_s=2.0)
    shown = {each.name: each.value for each in decision.shown}
    assert shown["decode_implied_wait_s"] == pytest.approx(12.0 / (PRESENT * 10.0))
    assert decision.wanted == {P: 4.0, D: 4.0}  # (30 + 12 / 2) / 10, rounded up


@pytest.mark.parametrize("kind", ["default", "token_velocity"])
def test_arrivals_want_the_same_whatever_the_replicas_are(kind: str, make_profile: MakeProfile) -> None:
    profile: EngineProfile = make_profile()
    traffic = Traffic(requests_per_s=100.0, input_tokens_mean=90.0, output_tokens_mean=20.0, served_per_s=100.0)
    uneven = snapshot({}, traffic=traffic)
    even = replace(
        uneven,
        pools=tuple(replace(pool, limits=replace(pool.limits, capacity=1.0)) for pool in uneven.pools),
        state=replace(uneven.state, desired={pool.key: 1 for pool in uneven.pools}),
    )
    wanted = [decide(of, kind, prefill=profile, decode=profile).wanted for of in (uneven, even)]
    assert wanted[0] is not None and wanted[0] == wanted[1]


def test_dopd_counts_the_kv_of_slow_replicas_for_less(make_profile: MakeProfile) -> None:
    full = {(group, D): {"kv_usage_frac": 1.0} for group in ("fast", "slow")}
    decision = decide(
        snapshot(full, traffic=Traffic(requests_per_s=1.0)), "dopd", prefill=make_profile(), decode=make_profile()
    )
    # 2 + 2 x 0.5 full standard replicas need 3 / 0.9, rounded up.
    assert decision.wanted == {P: PRESENT, D: 4.0}
    assert decision.is_urgent


def test_what_aggregated_groups_compute_of_the_prompts_stays() -> None:
    limits = PoolLimits(lowest_replicas=1, highest_replicas=9, capacity=0.5, prompt_capacity=0.5)
    calm = {"observed_s": NOW_S, "kv_usage_frac": 0.45, "waiting_requests": 0.0}
    replicas = tuple(ReplicaStats(replica_id=f"both-{n}", **calm) for n in (0, 1))
    both = PoolStats(key=PoolKey("both", D), replicas=replicas, target_replicas=2, limits=limits)
    full = {(group, P): {"kv_usage_frac": 0.79, "waiting_requests": 0.0} for group in ("fast", "slow")}
    of = snapshot(reports((0.45, 0.0), (0.45, 0.0)) | full)
    state = replace(of.state, desired={**of.state.desired, both.key: 2})
    decision = decide(replace(of, pools=(*of.pools, both), state=state), "wva")
    # The prefill replicas hold 3 x 0.79, with room for 0.5 each; the other group computes the prompts of one more.
    assert decision.wanted == {P: pytest.approx(2.37 / 0.5 + 1.0), D: PRESENT + 1.0}
