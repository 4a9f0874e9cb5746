"""``pd_ratio: auto``: limits and rate of the changes by hand, the configuration's faults, and replay."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.decide.auto_ratio import AutoRatioConfig
from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.decision_log import config_line, decision_line, is_news, replay
from autoscale.decide.follow_ratio import possible
from autoscale.decide.tuning import Pools, tuned
from autoscale.engines.profile import EngineProfile
from autoscale.ratio import PdRatio
from autoscale.room import Room, joint_counts
from autoscale.types import ControllerState, DecodeStep, Plan, PoolKey, PoolLimits, Snapshot, Traffic
from kvtransfer.topology import Role

MakeAutoscale = Callable[..., AutoscaleConfig]
MakeSnapshot = Callable[..., Snapshot]
FAST_LINK = {"base_s": 0.0, "kv_bytes_per_token": 1000, "bytes_per_s": 1e9}
# 90 + 20 tokens: eight run in steps of 28 ms, and each prompt takes 0.1 s.
CHAT = Traffic(requests_per_s=10.0, input_tokens_mean=90.0, output_tokens_mean=20.0)
CHAT_RATIO = 8 * 0.1 / (0.028 * 20)
# 290 + 20 tokens: three fit in 1000, in steps of 23 ms, and each prompt takes 0.3 s.
LONG = replace(CHAT, input_tokens_mean=290.0)
LONG_RATIO = 3 * 0.3 / (0.023 * 20)


@pytest.fixture(scope="session")
def auto_ratio(make_profile: Callable[..., EngineProfile]) -> Callable[..., dict[str, Any]]:
    """Settings of a ratio that starts at that of CHAT and may change every 10 s."""

    def make(**changes: Any) -> dict[str, Any]:
        return {
            "prefill": make_profile(),
            "decode": make_profile(handoff=FAST_LINK),
            "start_input_tokens": 90,
            "start_output_tokens": 20,
            "interval_s": 10.0,
            "least_requests": 10,
            **changes,
        }

    return make


@pytest.fixture
def make_auto(make_autoscale: MakeAutoscale, auto_ratio: Callable[..., dict[str, Any]]) -> MakeAutoscale:
    def make(**changes: Any) -> AutoscaleConfig:
        return make_autoscale(pd_ratio="auto", auto_ratio=auto_ratio(**changes))

    return make


class Ticks:
    """A controller that ticks every 5 s, each time with its own state; and its log."""

    def __init__(self, config: AutoscaleConfig, make_snapshot: MakeSnapshot, **fields: Any) -> None:
        self._controller, self._make, self._fields = Controller(config), make_snapshot, fields
        self.now_s, self.state = 1000.0, ControllerState()
        self.log, self._last = [config_line("m", config, self.now_s, "start")], None

    def tick(self, traffic: Traffic = CHAT, **fields: Any) -> Plan:
        stats = {role: {"decode_tokens_per_s": 100.0} for role in Role}
        values = {"stats": stats, **self._fields, **fields}
        snapshot = self._make(3, 2, now_s=self.now_s, traffic=traffic, state=self.state, **values)
        plan = self._controller.tick(snapshot)
        if is_news(plan, self._last):
            self.log.append(decision_line("m", snapshot, plan))
        self._last, self.state = plan, plan.state
        self.now_s += 5.0
        return plan


def ratio_of(plan: Plan) -> float:
    assert plan.state.followed is not None
    return plan.state.followed.ratio.per_decode()


def test_the_ratio_follows_the_lengths_by_at_most_a_quarter_an_interval(
    make_auto: MakeAutoscale, make_snapshot: MakeSnapshot
) -> None:
    ticks = Ticks(make_auto(), make_snapshot)
    assert [ratio_of(ticks.tick()) for _ in range(4)] == pytest.approx([CHAT_RATIO] * 4)
    plans = [ticks.tick(LONG) for _ in range(5)]
    # Intervals end every second tick. The first that ends has one tick with short prompts, 190 tokens in the mean: four
    # run, in steps of 24 ms, and a prompt takes 0.2 s. The next one has long prompts alone.
    mixed = 4 * 0.2 / (0.024 * 20)
    assert mixed < 1.25 * CHAT_RATIO and 1.25 * mixed > LONG_RATIO
    assert [ratio_of(plan) for plan in plans] == pytest.approx([mixed, mixed, LONG_RATIO, LONG_RATIO, LONG_RATIO])
    assert plans[0].decision.reason.startswith(
        "pd_ratio 1.43 -> 1.67: 1.67 is optimal for 100 requests in 10 s, 190 + 20 tokens, 0.2 s of prefill each; "
        "decode is limited by the decode KV memory; decode_tps"
    )
    assert not any("pd_ratio" in plan.decision.reason for plan in (plans[1], plans[3], plans[4]))
    assert (plans[-1].decision.shown[-1].name, plans[-1].decision.shown[-1].target) == ("pd_ratio", LONG_RATIO)
    # The policy got the ratio, and so did the guard: its wish keeps it.
    wanted = plans[-1].decision.wanted
    assert wanted is not None
    assert wanted[Role.PREFILL] / wanted[Role.DECODE] == pytest.approx(LONG_RATIO)
    assert plans[-1].ratio(PdRatio(1, 1)).per_decode() == pytest.approx(LONG_RATIO)


def test_every_change_has_a_line_of_the_log_that_replays(make_auto: MakeAutoscale, make_snapshot: MakeSnapshot) -> None:
    ticks = Ticks(make_auto(), make_snapshot)
    for traffic in (CHAT, CHAT, CHAT, *[LONG] * 12, *[CHAT] * 12):
        ticks.tick(traffic)
    changes = [line for line in ticks.log if "-> " in line]
    assert len(changes) >= 2
    assert all('"followed"' in line and '"optimal"' in line for line in changes)
    results = list(replay(ticks.log))
    assert len(results) > len(changes)
    assert results == [None] * len(results)


def test_too_few_requests_make_the_interval_longer(make_auto: MakeAutoscale, make_snapshot: MakeSnapshot) -> None:
    ticks = Ticks(make_auto(least_requests=30), make_snapshot)
    few = replace(LONG, requests_per_s=1.0)  # 5 in each tick
    ratios = [ratio_of(ticks.tick(few)) for _ in range(7)]
    assert ratios[:5] == pytest.approx([CHAT_RATIO] * 5)
    assert ratios[5:] == pytest.approx([1.25 * CHAT_RATIO] * 2)


def test_without_observed_requests_the_ratio_stays(make_auto: MakeAutoscale, make_snapshot: MakeSnapshot) -> None:
    ticks = Ticks(make_auto(), make_snapshot)
    silent = [Traffic(), replace(LONG, is_whole=False), replace(LONG, requests_per_s=0.0)]
    assert [ratio_of(ticks.tick(each)) for each in silent * 3] == pytest.approx([CHAT_RATIO] * 9)


def test_a_clock_that_is_set_back_begins_a_new_interval(make_auto: MakeAutoscale, make_snapshot: MakeSnapshot) -> None:
    ticks = Ticks(make_auto(), make_snapshot)
    for _ in range(3):
        ticks.tick(LONG)
    before = ratio_of(ticks.tick(LONG))
    ticks.now_s = 500.0
    plan = ticks.tick(LONG)
    assert ratio_of(plan) == before
    assert plan.state.followed is not None
    assert plan.state.followed.since_s == 500.0


def test_the_ratio_stays_where_the_pools_have_counts(make_auto: MakeAutoscale, make_snapshot: MakeSnapshot) -> None:
    # One request of 900 tokens fits, and its five tokens take 0.105 s: 8.7 prefill replicas for 0.91 s.
    ticks = Ticks(make_auto(start_input_tokens=900, start_output_tokens=5), make_snapshot, bounds=(1, 3))
    plan = ticks.tick()
    assert ratio_of(plan) == 3.0  # 3P1D is the highest ratio within the bounds; the profiles say more
    assert "no counts" not in str(plan.held_back)


def test_the_ratio_stays_where_the_budget_has_counts(make_auto: MakeAutoscale, make_snapshot: MakeSnapshot) -> None:
    auto = make_auto(start_input_tokens=900, start_output_tokens=5)
    guard = auto.guard.model_copy(update={"budget_gpus": 7})
    ticks = Ticks(auto.model_copy(update={"guard": guard}), make_snapshot, bounds=(2, 9))
    plan = ticks.tick()
    assert ratio_of(plan) == 2.5  # 5P2D takes the budget; 8.7 prefill replicas for 0.91 s have no room
    assert "no counts" not in str(plan.held_back)


@given(
    bounds=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=2, max_size=2),
    gpus=st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=2),
    spare_gpus=st.none() | st.integers(0, 12),
    per_decode=st.floats(0.2, 9.0),
)
def test_there_are_counts_at_every_ratio_that_is_taken(
    bounds: list[tuple[int, int]], gpus: list[int], spare_gpus: int | None, per_decode: float
) -> None:
    lowest = {role: float(least) for role, (least, _) in zip(Role, bounds, strict=True)}
    highest = {role: float(least + more) for role, (least, more) in zip(Role, bounds, strict=True)}
    each = dict(zip(Role, gpus, strict=True))
    # A replica of each role has room, since a service without one of them serves nothing.
    needed = sum(each[role] * max(1, int(lowest[role])) for role in Role)
    budget = None if spare_gpus is None else needed + spare_gpus
    room = Room(
        lowest=lowest,
        highest=highest,
        most_gpus_per_replica=each,
        least_gpus_per_replica=each,
        budget_gpus=budget,
    )
    ratio = possible(PdRatio(per_decode, 1), room)
    assert joint_counts(dict.fromkeys(Role, 20.0), ratio, room, band_replicas=0.5) is not None


def test_a_ratio_that_no_longer_follows_is_the_configured_one(
    make_auto: MakeAutoscale, make_snapshot: MakeSnapshot
) -> None:
    auto = make_auto()
    ticks = Ticks(auto, make_snapshot)
    ticks.tick()
    pools = Pools({PoolKey("g0", role): PoolLimits(lowest_replicas=1, highest_replicas=9) for role in Role})
    fixed = tuned(auto, {"pd_ratio": "1:2"}, pools)
    again = Ticks(fixed, make_snapshot)
    again.state, again.now_s = ticks.state, ticks.now_s
    plan = again.tick()
    assert plan.state.followed is None
    assert plan.ratio(fixed.ratio) == PdRatio(1, 2)
    # And back: the settings are still there, and survive being written and read.
    assert tuned(fixed, {"pd_ratio": "auto"}, pools).ratio.per_decode() == pytest.approx(CHAT_RATIO)


def test_the_first_ratio_is_that_of_the_start_lengths_inside_the_limits(make_auto: MakeAutoscale) -> None:
    assert make_auto().ratio.per_decode() == pytest.approx(CHAT_RATIO)
    assert make_auto(highest="1:1").ratio.per_decode() == 1.0
    assert make_auto(lowest="2:1").ratio.per_decode() == 2.0


@given(now=st.floats(0.2, 9.0), optimal=st.floats(0.0, 100.0))
def test_a_change_is_inside_the_limits_no_larger_than_allowed_and_towards_the_optimum(
    auto_ratio: Callable[..., dict[str, Any]], now: float, optimal: float
) -> None:
    auto = AutoRatioConfig.model_validate(auto_ratio(lowest="1:4", highest="4:1"))
    now = min(4.0, max(0.25, now))
    later = auto.next_ratio(now, optimal).per_decode()
    assert 0.25 <= later <= 4.0
    assert now / 1.25 - 1e-9 <= later <= now * 1.25 + 1e-9
    inside = min(4.0, max(0.25, optimal))
    assert abs(later - inside) <= abs(now - inside) + 1e-9
    if abs(inside - now) <= 0.1 * now:
        assert later == now


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_ratio": None}, "pd_ratio is auto, and auto_ratio is missing: give the profiles of both engines"),
        ({"policy": {"kind": "static", "prefill": 1, "decode": 1}}, "policy 'static' sizes each role by itself"),
        ({"pd_ratio": "Auto"}, "'Auto' is no P/D ratio"),
    ],
)
def test_faults_of_the_configuration_are_named(
    make_autoscale: MakeAutoscale, auto_ratio: Callable[..., dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        make_autoscale(**{"pd_ratio": "auto", "auto_ratio": auto_ratio(), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lowest": "2:1", "highest": "1:2"}, r"lowest \(2:1\) must be between 1:5 and highest \(1:2\)"),
        ({"lowest": "0:1"}, "lowest"),
        ({"prefill": "none.json"}, "none.json"),
        ({"interval_s": 0.0}, "greater than or equal to 1"),
    ],
)
def test_faults_of_the_limits_are_named(
    make_autoscale: MakeAutoscale, auto_ratio: Callable[..., dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        make_autoscale(pd_ratio="auto", auto_ratio=auto_ratio(**changes))


def test_a_bound_that_moves_the_ratio_is_named_and_one_that_holds_it_says_nothing(
    make_auto: MakeAutoscale, make_snapshot: MakeSnapshot
) -> None:
    ticks = Ticks(make_auto(start_input_tokens=900, start_output_tokens=5), make_snapshot)
    traffic = replace(CHAT, input_tokens_mean=900.0, output_tokens_mean=5.0)
    for _ in range(4):
        ticks.tick(traffic, bounds=(1, 9))
    before = ratio_of(ticks.tick(traffic, bounds=(1, 9)))
    reasons = [ticks.tick(traffic, bounds=(1, 2)).decision.reason for _ in range(6)]
    assert before > 2.0
    assert reasons[0].startswith(f"pd_ratio {before:.3g} -> 2: the bounds and the budget of the pools do not allow")
    assert not any("pd_ratio" in reason for reason in reasons[1:])


def test_observed_steps_are_shown_beside_the_ratio_and_their_drift_is_named(
    make_auto: MakeAutoscale, make_snapshot: MakeSnapshot
) -> None:
    ticks = Ticks(make_auto(), make_snapshot)
    ticks.state = replace(ticks.state, steps=((999.0, DecodeStep(batch=8.0, context_tokens=100.0, seconds=0.084)),))
    decision = ticks.tick().decision
    assert {each.name: each.value for each in decision.shown}["decode_step_factor"] == pytest.approx(3.0)
    assert "decode steps take 3.00 times as long as the profile" in decision.reason
