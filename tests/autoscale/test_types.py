"""Pool names, and start times."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.ratio import PdRatio
from autoscale.types import ControllerState, Decision, FollowedRatio, Plan, PoolKey
from kvtransfer.topology import Role


def test_the_name_of_a_pool_says_role_and_group() -> None:
    assert str(PoolKey("g0", Role.PREFILL)) == "prefill:g0"
    assert str(PoolKey("rack-7", Role.DECODE)) == "decode:rack-7"


def test_a_plan_keeps_the_policys_ratio_or_the_followed_one_or_the_configured_one() -> None:
    configured, followed, own = PdRatio(1, 3), PdRatio(0.7, 1), PdRatio(2, 1)
    plain, following = ControllerState(), ControllerState(followed=FollowedRatio(ratio=followed, since_s=0.0))

    def ratio_of(state: ControllerState, ratio: PdRatio | None = None) -> PdRatio:
        decision = Decision(wanted=None, reason="", ratio=ratio)
        return Plan(counts={}, admitted=(), withdrawn=(), victims=(), decision=decision, state=state).ratio(configured)

    assert [ratio_of(plain), ratio_of(following), ratio_of(following, own)] == [configured, followed, own]


@given(st.text(min_size=1), st.sampled_from(Role))
def test_parse_undoes_the_name(group: str, role: Role) -> None:
    key = PoolKey(group, role)
    assert PoolKey.parse(str(key)) == key
    assert type(PoolKey.parse(str(key)).role) is Role


@pytest.mark.parametrize(
    "name",
    ["", "ingress", "prefill", "prefill:", "decode:", ":g0", "Prefill:g0", "router:g0", " decode:g0", "decode g0"],
)
def test_the_name_of_another_deployment_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected 'prefill:GROUP' or 'decode:GROUP'") as caught:
        PoolKey.parse(name)
    assert repr(name) in str(caught.value)


@given(st.text())
def test_parse_returns_the_pool_of_a_name_or_refuses_it(name: str) -> None:
    try:
        key = PoolKey.parse(name)
    except ValueError:
        return
    assert str(key) == name


def test_key_is_a_value() -> None:
    key = PoolKey("g0", Role.DECODE)
    assert {key: 1}[PoolKey("g0", Role.DECODE)] == 1
    assert pickle.loads(pickle.dumps(key)) == key


def test_the_longest_start_is_that_of_the_slowest_pool_though_a_faster_one_starts_more_often() -> None:
    fast, slow = PoolKey("fast", Role.DECODE), PoolKey("slow", Role.DECODE)
    state = ControllerState(starts_s={fast: (10.0,) * 9, slow: (300.0,) * 5, PoolKey("new", Role.PREFILL): ()})
    assert state.start_s(Role.DECODE) == 10.0  # the median of all 14
    assert state.longest_start_s == 300.0
    assert ControllerState().longest_start_s is None
