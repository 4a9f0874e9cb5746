"""llm-d's guide by hand: seconds of backlog, KV usage, and at most one more replica in three minutes."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.profile import EngineProfile
from autoscale.policies.peers.llmd_token_aware import (
    LlmdTokenAware,
    LlmdTokenAwareConfig,
    peak_prefill_tokens_per_s,
    replicas_for_total,
)
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, PoolKey, Snapshot
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
MakeSnapshot = Callable[..., Snapshot]
MakeProfile = Callable[..., EngineProfile]


def test_the_velocity_is_a_chunk_over_its_ttft(make_profile: MakeProfile) -> None:
    # 100 tokens: 0.11 s of prefill, 0.01 + 0.1 s of transfer and 0.021 s of decode.
    assert peak_prefill_tokens_per_s(make_profile(), make_profile()) == pytest.approx(100 / 0.241)


@pytest.mark.parametrize(
    ("total", "current", "target", "expected"),
    [
        # The guide's table of replica-equivalents at 1.5 s: 0.46 -> 1, 1.52 -> 2; 4.25 seconds are 3.
        (0.46, 2, 1.5, 1),
        (1.52, 3, 1.5, 2),
        (4.25, 1, 1.5, 3),
        (1.6, 1, 1.5, 1),  # within the tolerance of the HPA
        (1.7, 1, 1.5, 2),
        (1.7, 2, 0.8, 2),  # 2.125 pods' worth of full KV is 6 % above two at 0.8
        (0.0, 3, 1.5, 0),
        (0.0, 0, 1.5, 0),
    ],
)
def test_the_counts_by_hand(total: float, current: int, target: float, expected: int) -> None:
    assert replicas_for_total(total, current, target, 0.1) == expected


@given(st.floats(0, 1e4), st.floats(0, 1e3), st.integers(1, 64), st.floats(0.1, 10))
def test_a_longer_backlog_never_needs_fewer_replicas(total: float, more: float, current: int, target: float) -> None:
    base = replicas_for_total(total, current, target, 0.1)
    assert 0 <= base <= max(current, total / target + 1)
    assert replicas_for_total(total + more, current, target, 0.1) >= base


def run(
    make_snapshot: MakeSnapshot,
    profile: EngineProfile,
    ticks: list[tuple[float | None, float | None]],
    **config: Any,
) -> list[Decision]:
    """A tick every 15 s with a backlog and a KV usage of each replica; the wanted number of replicas runs."""
    chosen = {"prefill": profile, "decode": profile, "prefill_tokens_per_s": 1000.0, **config}
    policy = LlmdTokenAware(LlmdTokenAwareConfig.model_validate(chosen), ratio=PdRatio(1, 1), slo=SloConfig())
    counts = {P: 2, D: 2}
    memory: Any = {}
    decisions = []
    for index, (queued, kv) in enumerate(ticks):
        stats = {
            P: {} if queued is None else {"queued_prefill_tokens": queued},
            D: {} if kv is None else {"kv_usage_frac": kv},
        }
        state = ControllerState(desired={PoolKey("g0", role): count for role, count in counts.items()}, memory=memory)
        snapshot = make_snapshot(counts[P], counts[D], now_s=1000.0 + 15.0 * index, stats=stats, state=state)
        decisions.append(policy.decide(snapshot))
        memory = decisions[-1].memory
        if (wanted := decisions[-1].wanted) is not None:
            counts = {role: int(wanted[role]) for role in Role}
    return decisions


def test_each_role_by_itself_adds_one_replica_in_three_minutes(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile
) -> None:
    decisions = run(make_snapshot, make_profile(), [(9000.0, 0.8)] * 25)  # 9 s of backlog each; 1.5 s are allowed
    prefill = [d.wanted[P] for d in decisions if d.wanted]
    assert (prefill[0], prefill[11], prefill[12], prefill[24]) == (3.0, 3.0, 4.0, 5.0)
    assert {d.wanted[D] for d in decisions if d.wanted} == {2.0}
    assert decisions[0].is_step and decisions[0].ratio == PdRatio(3, 2)
    assert [(s.name, s.value, s.target) for s in decisions[0].shown] == [
        ("prefill_backlog_s", 9.0, 1.5),
        ("decode_kv", 0.8, 0.8),
    ]


def test_replicas_leave_after_five_minutes_without_a_need(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile
) -> None:
    decode = [
        d.wanted[D] for d in run(make_snapshot, make_profile(), [(1500.0, 0.8)] + [(1500.0, 0.3)] * 21) if d.wanted
    ]
    assert decode == [2.0] * 20 + [1.0] * 2


def test_without_observations_there_is_no_decision(make_snapshot: MakeSnapshot, make_profile: MakeProfile) -> None:
    first, blind = run(make_snapshot, make_profile(), [(9000.0, 0.8), (None, None)])
    assert blind.wanted is None and blind.memory is not None and first.memory is not None
    assert blind.memory["prefill_recommended"] == first.memory["prefill_recommended"]
    assert run(make_snapshot, make_profile(), [(None, 1.6)])[0].wanted == {P: 2.0, D: 3.0}


def test_counts_stay_between_two_syncs(make_snapshot: MakeSnapshot, make_profile: MakeProfile) -> None:
    decisions = run(make_snapshot, make_profile(), [(9000.0, 0.8), (0.0, 0.0)], sync_s=30.0)
    assert decisions[1].wanted == decisions[0].wanted
    assert "every 30 s" in decisions[1].reason


def test_memory_is_bounded_and_the_policy_has_no_other_state(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile
) -> None:
    ticks: list[tuple[float | None, float | None]] = [(9000.0, 0.1), (0.0, 0.9)] * 100
    decisions = run(make_snapshot, make_profile(), ticks)
    memory = decisions[-1].memory
    assert memory is not None and max(len(series) for series in memory.values()) <= 20
    assert run(make_snapshot, make_profile(), ticks) == decisions


def test_the_profiles_give_the_velocity_if_none_is_calibrated(
    make_snapshot: MakeSnapshot, make_profile: MakeProfile
) -> None:
    decision = run(make_snapshot, make_profile(), [(100.0, 0.8)], prefill_tokens_per_s=None)[0]
    assert decision.shown[0].value == pytest.approx(0.241)
