"""DOPD's Algorithm 2 by hand, tick by tick."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.engines.profile import EngineProfile
from autoscale.policies.dopd import Dopd, DopdConfig
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, DecodeStep, PoolKey, Snapshot, Traffic
from kvtransfer.topology import Role
from tests.autoscale.load_forecasts import forecast_of

P, D = Role.PREFILL, Role.DECODE
MakePolicy = Callable[..., Dopd]
MakeSnapshot = Callable[..., Snapshot]
PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
# 90 tokens take 0.1 s of prefill; eight requests of 90 + 20/2 tokens run in steps of 28 ms (conftest's profile).
CHAT = Traffic(requests_per_s=10.0, input_tokens_mean=90.0, output_tokens_mean=20.0)
# Prefill at 1 ms a token, and beyond 100 tokens at 5 ms.
BENT = {"tokens": [0, 100, 1000], "seconds": [0.0, 0.1, 4.6]}
# The KV of a prompt takes no time that counts: the batch limits decode.
FAST_LINK = {"base_s": 0.01, "kv_bytes_per_token": 1000, "bytes_per_s": 1e9}


@pytest.fixture(scope="session")
def make_policy(make_profile: Callable[..., EngineProfile]) -> MakePolicy:
    """A policy that adjusts every 10 s."""

    def make(**changes: Any) -> Dopd:
        document = {
            "prefill": make_profile(),
            "decode": make_profile(handoff=FAST_LINK),
            "interval_s": 10.0,
            **changes,
        }
        return Dopd(DopdConfig.model_validate(document), ratio=PdRatio(1, 1), slo=SloConfig())

    return make


class Ticks:
    """A policy that decides tick after tick, each time with its memory."""

    def __init__(self, policy: Dopd, make_snapshot: MakeSnapshot, *, counts: tuple[int, int] = (1, 1)) -> None:
        self._policy, self._make, self._counts = policy, make_snapshot, counts
        self.state = ControllerState(desired=dict(zip(map(self._key, Role), counts, strict=True)))

    @staticmethod
    def _key(role: Role) -> PoolKey:
        return PoolKey("g0", role)

    def at(self, now_s: float, traffic: Traffic = CHAT, **fields: Any) -> Decision:
        """The decision of a tick, whose memory goes into the next one; the tick's traffic is also the forecast."""
        load = traffic.requests_per_s, traffic.input_tokens_mean, traffic.output_tokens_mean
        if None not in load:
            fields.setdefault("forecast", forecast_of(*load))
        snapshot = self._make(*self._counts, now_s=now_s, traffic=traffic, state=self.state, **fields)
        decision = self._policy.decide(snapshot)
        assert decision == self._policy.decide(snapshot)  # the policy has no state of its own
        if decision.memory is not None:
            self.state = replace(self.state, memory=decision.memory)
        return decision

    def running(self, prefill: int, decode: int) -> None:
        """Set the numbers of replicas that run from now on."""
        self._counts = (prefill, decode)

    def granted(self, **desired: int) -> None:
        """Set the counts that the guard has made of the decision."""
        self.state = replace(self.state, desired={self._key(Role(name)): count for name, count in desired.items()})


def test_algorithm_2_by_hand(make_policy: MakePolicy, make_snapshot: MakeSnapshot) -> None:
    ticks = Ticks(make_policy(), make_snapshot, counts=(2, 3))
    first = ticks.at(1000.0)
    assert first.wanted is None
    assert first.reason == "the next adjustment is in 10 s"
    assert ticks.at(1009.9).wanted is None
    decision = ticks.at(1010.0)
    assert decision.wanted is not None
    # In flight (Little): 10/s x 20 x 0.028 s = 5.6 of at most 8, planned at nine tenths.
    assert decision.wanted[D] == pytest.approx(5.6 / (0.9 * 8))
    # R_opt = 8 x 0.1 s / (0.028 s x 20) = 1.43 (Eq. 14), so prefill is busy for nine tenths too.
    assert decision.wanted[P] == pytest.approx(10 * 0.1 / 0.9)
    assert decision.ratio == PdRatio.of(decision.wanted)
    assert not decision.is_urgent
    assert "optimal P/D ratio 1.43" in decision.reason
    # The plan holds through the next interval, whatever the load.
    assert ticks.at(1015.0, replace(CHAT, requests_per_s=50.0)).wanted == decision.wanted
    later = ticks.at(1020.0)
    assert later.wanted == decision.wanted
    more = ticks.at(1030.0, forecast=forecast_of(30.0, 90.0, 20.0))  # the forecast counts, not the present load
    assert more.wanted is not None
    assert more.wanted[D] == pytest.approx(3 * decision.wanted[D])


def test_the_forecast_means_scale_the_observed_distribution(
    make_policy: MakePolicy, make_profile: Callable[..., EngineProfile], make_snapshot: MakeSnapshot
) -> None:
    bent = make_policy(prefill=make_profile(prefill=BENT))
    ticks = Ticks(bent, make_snapshot)
    mixed = replace(CHAT, input_lengths=((30.0, 0.75), (270.0, 0.25)), output_lengths=((10.0, 0.5), (30.0, 0.5)))
    for at_s in (1000.0, 1010.0):
        decision = ticks.at(at_s, mixed)
    # The mean prompt takes 90 ms. Three in four take 30 ms, one takes 100 ms + 170 x 5 ms.
    assert decision.wanted is not None
    assert decision.wanted[P] == pytest.approx(10 * (0.75 * 0.03 + 0.25 * 0.95) / 0.9)
    # Context 90 + (100 + 900)/2 / (2 x 20) = 102.5: eight still run, in steps of 28 ms.
    assert decision.wanted[D] == pytest.approx(5.6 / (0.9 * 8))
    # At half the mean, all lengths are halved: no prompt is beyond the bend by more than 35 tokens.
    for at_s in (1020.0, 1030.0):
        decision = ticks.at(at_s, mixed, forecast=forecast_of(10.0, 45.0, 20.0))
    assert decision.wanted is not None
    assert decision.wanted[P] == pytest.approx(10 * (0.75 * 0.015 + 0.25 * 0.275) / 0.9)


def test_observed_steps_and_cached_prompts_change_the_plan(
    make_policy: MakePolicy, make_snapshot: MakeSnapshot
) -> None:
    def planned(traffic: Traffic, state: ControllerState) -> Decision:
        ticks = Ticks(make_policy(), make_snapshot)
        ticks.state = replace(ticks.state, steps=state.steps)
        ticks.at(1000.0, traffic)
        return ticks.at(1010.0, traffic)

    plain = planned(CHAT, ControllerState()).wanted
    cached = planned(replace(CHAT, cached_frac=0.5), ControllerState()).wanted
    slow = DecodeStep(batch=8.0, context_tokens=100.0, seconds=1.5 * 0.028)
    drifted = planned(CHAT, ControllerState(steps=((999.0, slow),)))
    assert plain is not None and cached is not None and drifted.wanted is not None
    assert cached[P] < plain[P] and cached[D] == plain[D]
    assert drifted.wanted[D] == pytest.approx(1.5 * plain[D]) and drifted.wanted[P] == pytest.approx(plain[P])
    assert "decode steps take 1.50 times as long" in drifted.reason


def test_a_slow_link_needs_more_decode_replicas(
    make_policy: MakePolicy, make_profile: Callable[..., EngineProfile], make_snapshot: MakeSnapshot
) -> None:
    slow = make_profile(handoff={**FAST_LINK, "bytes_per_s": 0.45e6})  # 90 kB of KV take 0.2 s: 5 requests/s
    ticks = Ticks(make_policy(decode=slow), make_snapshot)
    for at_s in (1000.0, 1010.0):
        decision = ticks.at(at_s)
    assert decision.wanted == pytest.approx({P: 10 * 0.1 / 0.9, D: 10 / 5 / 0.9})
    assert "decode is limited by the hand-over link" in decision.reason


def test_the_reason_names_the_forecast_its_model_and_why_it_is_the_last_value(
    make_policy: MakePolicy, make_snapshot: MakeSnapshot
) -> None:
    ticks = Ticks(make_policy(), make_snapshot)
    ticks.at(1000.0)
    by_model = ticks.at(1010.0).reason
    assert by_model.startswith("10 requests/s of 90 + 20 tokens in 60 s (ARIMA(0, 1, 1)), 5.6 in flight")
    constant = forecast_of(10.0, 90.0, 20.0, fallback="the series is constant")
    by_last_value = ticks.at(1020.0, forecast=constant).reason
    assert "in 60 s (last value)" in by_last_value
    assert by_last_value.endswith("; requests_per_s: the series is constant")


def test_an_overload_of_either_role_does_not_wait(make_policy: MakePolicy, make_snapshot: MakeSnapshot) -> None:
    ticks = Ticks(make_policy(), make_snapshot, counts=(2, 4))
    calm = {P: {"waiting_requests": 5.0}, D: {"kv_usage_frac": 0.9}}
    assert not ticks.at(1000.0, stats=calm).is_urgent
    # 2 x 11 requests wait, 5 may wait at each: ceil(22/5). Three could hold 4 x 0.5 of KV, but no replica leaves.
    queue = ticks.at(1001.0, stats={P: {"waiting_requests": 11.0}, D: {"kv_usage_frac": 0.5}})
    assert queue.wanted == {P: 5.0, D: 4.0}
    assert queue.is_urgent
    assert queue.is_step
    assert queue.ratio == PdRatio(5, 4)
    assert queue.reason == "overload: prefill_queue_requests 22 for 10, decode_kv_replicas 2 for 3.6"
    # 4 x 0.95 / 0.9 = 4.2, rounded up.
    full = ticks.at(1002.0, stats={P: {"waiting_requests": 0.0}, D: {"kv_usage_frac": 0.95}})
    assert full.wanted == {P: 2.0, D: 5.0}
    assert full.is_urgent


def test_after_an_overload_all_replicas_stay_until_the_interval_ends(
    make_policy: MakePolicy, make_snapshot: MakeSnapshot
) -> None:
    ticks = Ticks(make_policy(), make_snapshot)
    for at_s in (1000.0, 1010.0):
        ticks.at(at_s)
    assert ticks.at(1012.0, stats={P: {"waiting_requests": 20.0}}).wanted == {P: 4.0, D: 1.0}
    ticks.granted(prefill=4, decode=1)
    # The wanted replicas start: the same queue is no overload any more.
    waiting = ticks.at(1013.0, stats={P: {"waiting_requests": 20.0}})
    assert waiting.wanted is None
    assert waiting.ratio == PdRatio(4, 1)
    assert ticks.at(1020.0).wanted == pytest.approx({P: 10 * 0.1 / 0.9, D: 5.6 / 7.2})


def test_an_overload_asks_for_no_more_replicas_while_those_it_asked_for_start(
    make_policy: MakePolicy, make_snapshot: MakeSnapshot
) -> None:
    ticks = Ticks(make_policy(), make_snapshot)
    ticks.at(1000.0, stats={P: {"waiting_requests": 20.0}})
    ticks.granted(prefill=3, decode=1)  # the guard's step grants three of the four
    growing = {P: {"waiting_requests": 60.0}}
    assert not ticks.at(1005.0, stats=growing).is_urgent
    # The other role does not wait for that, and does not make the first grow with it.
    full = ticks.at(1006.0, stats=growing | {D: {"kv_usage_frac": 0.95}})
    assert full.wanted == {P: 3.0, D: 2.0}
    assert full.is_urgent
    ticks.running(3, 1)
    ready = ticks.at(1007.0, stats={P: {"waiting_requests": 20.0}})
    assert ready.wanted == {P: 12.0, D: 1.0}
    assert ready.is_urgent


def test_an_overload_does_not_shrink_the_other_role_if_there_is_no_room(
    make_policy: MakePolicy, make_snapshot: MakeSnapshot
) -> None:
    ticks = Ticks(make_policy(), make_snapshot, counts=(4, 2))
    decision = ticks.at(1000.0, stats={P: {"waiting_requests": 50.0}}, bounds=(1, 4))
    assert decision.wanted == {P: 40.0, D: 2.0}  # not clamped


def test_an_interval_that_ends_in_an_overload_is_remembered_too(
    make_policy: MakePolicy, make_snapshot: MakeSnapshot
) -> None:
    ticks = Ticks(make_policy(), make_snapshot)
    ticks.at(1000.0)
    decision = ticks.at(1010.0, stats={P: {"waiting_requests": 6.0}})
    assert decision.is_urgent
    assert decision.memory is not None
    assert decision.memory["dopd_began_s"] == (1010.0,)


def test_without_observations_there_is_no_decision_and_the_memory_stays(
    make_policy: MakePolicy, make_snapshot: MakeSnapshot
) -> None:
    ticks = Ticks(make_policy(), make_snapshot)
    for at_s in (1000.0, 1010.0):
        ticks.at(at_s)
    before = ticks.state.memory
    blind = ticks.at(1020.0, Traffic())
    assert (blind.wanted, blind.reason) == (None, "no arrivals were observed")
    assert ticks.state.memory == before
    assert ticks.at(1021.0).wanted is not None
    silent = Ticks(make_policy(), make_snapshot)
    for at_s in (1000.0, 1010.0):
        decision = silent.at(at_s, forecast=None)
    assert decision.wanted is None
    assert decision.reason == "there is no forecast: no step with arrivals and their lengths has ended lately"


def test_partly_observed_arrivals_remove_no_replica(make_policy: MakePolicy, make_snapshot: MakeSnapshot) -> None:
    ticks = Ticks(make_policy(), make_snapshot, counts=(3, 3))
    ticks.at(1000.0)
    part = replace(CHAT, requests_per_s=1.0, is_whole=False)
    assert ticks.at(1010.0, part, forecast=forecast_of(10.0, 90.0, 20.0)).wanted == {P: 3.0, D: 3.0}
    assert ticks.at(1011.0).wanted == pytest.approx({P: 10 * 0.1 / 0.9, D: 5.6 / 7.2})


def test_a_clock_that_was_set_back_forgets_the_future(make_policy: MakePolicy, make_snapshot: MakeSnapshot) -> None:
    ticks = Ticks(make_policy(), make_snapshot)
    for at_s in (1000.0, 1010.0, 1020.0):
        ticks.at(at_s)
    ticks.at(1015.0)
    assert ticks.state.memory["dopd_began_s"] == (1015.0,)
    assert ticks.at(1025.0).wanted is not None


def test_memory_of_another_policy_is_not_read(make_policy: MakePolicy, make_snapshot: MakeSnapshot) -> None:
    ticks = Ticks(make_policy(), make_snapshot)
    ticks.state = replace(ticks.state, memory={"at_s": (1.0, 2.0), "prefill": (3.0, 4.0)})
    ticks.at(1000.0)
    assert all(name.startswith("dopd_") for name in ticks.state.memory)


TRAFFIC = st.builds(
    Traffic,
    requests_per_s=st.none() | st.floats(0, 1e4),
    input_tokens_mean=st.none() | st.floats(1, 1e5),
    output_tokens_mean=st.none() | st.floats(1, 1e4),
    is_whole=st.booleans(),
)


@settings(max_examples=50)
@given(
    observations=st.lists(
        st.tuples(st.floats(0.1, 30.0), TRAFFIC, st.none() | st.floats(0, 1e3), st.none() | st.floats(0, 1)),
        min_size=1,
        max_size=12,
    )
)
def test_decisions_are_deterministic_and_counts_are_finite(
    make_policy: MakePolicy,
    make_snapshot: MakeSnapshot,
    observations: list[tuple[float, Traffic, float | None, float | None]],
) -> None:
    ticks, now_s = Ticks(make_policy(), make_snapshot, counts=(2, 3)), 1000.0
    for passed_s, traffic, waiting, usage in observations:
        now_s += passed_s
        decision = ticks.at(now_s, traffic, stats={P: {"waiting_requests": waiting}, D: {"kv_usage_frac": usage}})
        if decision.wanted is not None:
            assert all(0.0 <= count < math.inf for count in decision.wanted.values())
        if decision.is_urgent:
            assert decision.wanted is not None
            assert decision.wanted[P] >= 2
            assert decision.wanted[D] >= 3
        assert decision.memory is not None
        assert sum(map(len, decision.memory.values())) <= 1 + 2
        assert all(math.isfinite(number) for series in decision.memory.values() for number in series)


@given(rate=st.floats(1e-3, 1e3), more=st.floats(0, 1e3), inputs=st.floats(1, 900), longer=st.floats(0, 1000))
def test_more_requests_or_longer_prompts_never_need_fewer(
    make_policy: MakePolicy, make_snapshot: MakeSnapshot, rate: float, more: float, inputs: float, longer: float
) -> None:
    def wanted(rate: float, inputs: float) -> dict[Role, float]:
        ticks = Ticks(make_policy(), make_snapshot)
        traffic = Traffic(requests_per_s=rate, input_tokens_mean=inputs, output_tokens_mean=20.0)
        ticks.at(1000.0, traffic)
        return dict(ticks.at(1010.0, traffic).wanted or {})

    base = wanted(rate, inputs)
    for other in (wanted(rate + more, inputs), wanted(rate, inputs + longer)):
        assert all(other[role] >= base[role] - 1e-9 * base[role] for role in Role)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interval_s": 0}, "greater than 0"),
        ({"concurrency_frac": 1.1}, "less than or equal to 1"),
        ({"forecast": {"kind": "last_value"}}, "Extra inputs"),
        ({"queue_requests": 0}, "greater than 0"),
        ({"wheels": 4}, "Extra inputs"),
    ],
)
def test_an_invalid_configuration_is_refused(make_policy: MakePolicy, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_policy(**change)


def test_an_objective_that_no_step_keeps_is_refused_at_once(make_policy: MakePolicy) -> None:
    slow = {"gpu_bytes": 80e9, "other_bytes": 8e9, "model_bytes": 70e9, "bytes_per_s": 1e12, "read_frac": 0.5}
    with pytest.raises(ValueError, match="reading the weights alone takes"):
        make_policy(decode_memory=slow)
