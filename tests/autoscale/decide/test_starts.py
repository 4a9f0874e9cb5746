"""Start times are learned from the plans that ask for replicas."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.starts import with_ended_starts
from autoscale.engines.profile import EngineProfile
from autoscale.policies.token_velocity import TokenVelocity, TokenVelocityConfig
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, PoolKey, Snapshot, Traffic
from kvtransfer.topology import Role
from tests.autoscale.virtual_serve import VirtualServe

P, D = PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE)
MakeConfig = Callable[..., AutoscaleConfig]
MakeSnapshot = Callable[..., Snapshot]


def set_by_hand(config: AutoscaleConfig, prefill: int, decode: int) -> Controller:
    document = config.model_dump(mode="json") | {"override": {"prefill": prefill, "decode": decode}}
    return Controller(AutoscaleConfig.model_validate(document))


def test_after_some_starts_the_learned_times_are_those_of_the_cluster(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(gate={"observation_s": 2.0})
    serve = VirtualServe(Controller(config), {Role.PREFILL: 31.0, Role.DECODE: 47.0})
    for count in (2, 5, 1, 3):
        serve.controller = set_by_hand(config, count, count)
        for _ in range(30):
            serve.tick(None)
    assert serve.state.start_s(Role.PREFILL) == pytest.approx(31.0, abs=serve.interval_s)
    assert serve.state.start_s(Role.DECODE) == pytest.approx(47.0, abs=serve.interval_s)
    assert not serve.state.asked_s


def test_a_replica_that_is_given_up_before_it_runs_teaches_nothing(make_autoscale: MakeConfig) -> None:
    config = make_autoscale()
    serve = VirtualServe(set_by_hand(config, 3, 3), dict.fromkeys(Role, 60.0))
    serve.tick(None)
    assert [len(serve.state.asked_s[key]) for key in (P, D)] == [2, 2]
    serve.controller = set_by_hand(config, 1, 1)
    for _ in range(40):
        serve.tick(None)
    assert (serve.state.asked_s, serve.state.starts_s) == ({}, {})


def test_a_start_is_not_learned_over_a_clock_that_was_set_back(make_snapshot: MakeSnapshot) -> None:
    state = ControllerState(admitted=("p0", "d0"), asked_s={P: (5000.0,), D: (900.0,)})
    after = with_ended_starts(state, make_snapshot(2, 2, now_s=1000.0))
    assert (after.asked_s, after.starts_s) == ({}, {D: (100.0,)})


@pytest.mark.parametrize("jump_s", [60.0, 600.0, 1e6])
def test_a_start_is_not_learned_over_a_clock_that_was_set(make_autoscale: MakeConfig, jump_s: float) -> None:
    serve = VirtualServe(set_by_hand(make_autoscale(), 3, 3), dict.fromkeys(Role, 31.0))
    serve.tick(None)
    serve.now_s += jump_s
    for _ in range(20):
        serve.tick(None)
    assert (serve.state.asked_s, serve.state.starts_s) == ({}, {})


def test_the_median_of_the_last_nine_starts_of_all_pools_of_a_role_counts(make_snapshot: MakeSnapshot) -> None:
    old = ControllerState(admitted=("p0", "d0"), asked_s={D: (990.0,)}, starts_s={D: (100.0,) * 9})
    after = with_ended_starts(old, make_snapshot(1, 2, now_s=1000.0))
    assert after.starts_s[D] == (*(100.0,) * 8, 10.0)
    other = PoolKey("g1", Role.DECODE)
    assert replace(after, starts_s={D: (10.0, 20.0), other: (90.0,)}).start_s(Role.DECODE) == 20.0
    assert replace(after, starts_s={D: (20.0,), P: (30.0,)}).longest_start_s == 30.0
    assert ControllerState().longest_start_s is None
    assert after.start_s(Role.PREFILL) is None


def test_a_policy_with_profiles_takes_observed_starts_and_names_a_drift(
    make_profile: Callable[..., EngineProfile], make_snapshot: MakeSnapshot
) -> None:
    config = TokenVelocityConfig(prefill=make_profile(), decode=make_profile(), prefill_start_s=30.0)
    policy = TokenVelocity(config, ratio=PdRatio(1, 1), slo=SloConfig())
    traffic = Traffic(requests_per_s=1.0, input_tokens_mean=90.0, output_tokens_mean=20.0)
    before = policy.decide(make_snapshot(traffic=traffic))
    assert "start" not in before.reason
    state = ControllerState(starts_s={P: (40.0, 41.0, 300.0), D: (1.0,)})
    assert config.with_observed(state).start_s(Role.PREFILL) == 41.0
    decision = policy.decide(make_snapshot(traffic=traffic, state=state))
    assert decision.reason.endswith("prefill replicas start in 41 s, configured are 30 s")
    assert {(each.name, each.value, each.target) for each in decision.shown[-2:]} == {
        ("prefill_start_s", 41.0, 30.0),
        ("decode_start_s", 1.0, 1.0),
    }
