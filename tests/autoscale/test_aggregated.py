"""Groups of one pool, whose decode replicas prefill for themselves: the ratio is 0:1."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.cycle import tick_all
from autoscale.decide.gate import admissible
from autoscale.decide.placement import place
from autoscale.decide.slots import Slots
from autoscale.ratio import PdRatio
from autoscale.room import Room, joint_counts
from autoscale.sim.config import SimAutoscaleConfig
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, PoolKey, PoolStats, Snapshot, Traffic
from kvtransfer.topology import Role, Topology
from tests.autoscale.decide.test_cycle import NOW_S, controller, node, pools, room, snapshot
from tests.autoscale.load_forecasts import forecast_of

P, D = Role.PREFILL, Role.DECODE
ALONE = PdRatio(0, 1)


def pool(name: str, count: int, *, lowest: int = 0, highest: int = 8, **limits: Any) -> PoolStats:
    (_, decode) = pools(name, (count, count), lowest=lowest)
    return replace(decode, limits=replace(decode.limits, highest_replicas=highest, **limits))


def sized(policy: dict[str, Any], **fields: Any) -> Controller:
    guard = {"cooldown_out_s": 0.0, "cooldown_in_s": 0.0, "damping_in_frac": 1.0}
    config = SimAutoscaleConfig.model_validate({"pd_ratio": "0:1", "policy": policy, "guard": guard, **fields})
    return Controller(config)


def test_any_number_of_decode_replicas_is_at_the_ratio() -> None:
    assert str(PdRatio.parse("0:1")) == str(PdRatio.parse(0)) == "0:1"
    assert ALONE.deviation(0, 7) == 0.0
    small = Room(lowest={P: 0, D: 1}, highest={P: 0, D: 2}, most_gpus_per_replica={P: 0, D: 4}, budget_gpus=None)
    assert joint_counts({P: 3.0, D: 2.5}, ALONE, small.boundless(), band_replicas=1.0) == {P: 0, D: 3}
    assert joint_counts({P: 0.0, D: 9.0}, ALONE, small, band_replicas=1.0) == {P: 0, D: 2}


@pytest.mark.parametrize("tiny", [1e-6, "0.001"])
def test_a_ratio_just_above_zero_is_refused(tiny: object) -> None:
    with pytest.raises(ValueError, match="impossible"):
        PdRatio.parse(tiny)


def test_a_unit_is_one_replica_and_goes_to_the_cheapest_group() -> None:
    dear, cheap = pool("dear", 0, cost=2.0), pool("cheap", 0, cost=1.0)
    slots = Slots(Topology([node("a", 5)]))
    placed = place(
        {P: 0, D: 6},
        {dear.key: 0, cheap.key: 0},
        [dear, replace(cheap, limits=replace(cheap.limits, highest_replicas=3))],
        ALONE,
        slots=slots,
    )
    assert placed.counts == {dear.key: 2, cheap.key: 3}
    assert placed.pending == {P: 0, D: 1}
    fewer = place({P: 0, D: 2}, placed.counts, [dear, cheap], ALONE)
    assert fewer.counts == {dear.key: 0, cheap.key: 2}


def test_the_gate_admits_every_replica() -> None:
    assert admissible({P: [], D: ["a", "b", "c"]}, frozenset({"a"}), ALONE, 0.0, 1.0) == ["a", "b", "c"]


def profiled(kind: str) -> dict[str, Any]:
    """A policy by the profile of an H100 engine."""
    path = str(Path(__file__).parents[2] / "configs" / "profiles" / "h100_llama70b_fp8_tp1.json")
    return {"kind": kind, "prefill": path, "decode": path}


@pytest.mark.parametrize(
    ("policy", "shown", "wanted"),
    [
        ({"kind": "static", "prefill": 0, "decode": 3}, {}, 3),
        ({"kind": "wva"}, {"kv_usage_frac": 0.9, "waiting_requests": 1.0}, 4),
        ({"kind": "heteroscale", "target": 50.0}, {"decode_tokens_per_s": 100.0}, 4),
        (
            {"kind": "heteroscale", "signal": "prefill_tps", "target": 500.0},
            {"prefill_tokens_per_s": 750.0, "queued_prefill_tokens": 0.0},
            3,
        ),
        ({"kind": "hpa", "decode": {"metric": "kv_usage_frac", "target": 0.5}}, {"kv_usage_frac": 0.95}, 4),
    ],
)
def test_policies_that_look_at_one_role_size_an_aggregated_pool(
    policy: dict[str, Any], shown: dict[str, float], wanted: int
) -> None:
    of = pool("g", 2, lowest=1)
    of = replace(of, replicas=tuple(replace(replica, **shown) for replica in of.replicas))
    plan = sized(policy).tick(snapshot((of,)))
    assert plan.state.desired == {of.key: wanted}
    assert plan.counts == {of.key: wanted}
    assert len(plan.admitted) == 2


@pytest.mark.parametrize("kind", ["default", "dopd"])
def test_policies_by_profile_want_engines_for_prompts_and_answers(kind: str) -> None:
    """Engines that share their time need more than decode engines alone, and fewer than prefill and decode together."""
    traffic = Traffic(requests_per_s=20.0, served_per_s=20.0, input_tokens_mean=1000.0, output_tokens_mean=200.0)
    wanted = {}
    for ratio in ("0:1", "1:1"):
        of = pools("g", (1, 1), lowest=1)
        ahead = forecast_of(20.0, 1000.0, 200.0)
        seen = replace(snapshot(of if ratio == "1:1" else of[1:]), traffic=traffic, forecast=ahead)
        settings = {**profiled(kind), **({"interval_s": 10.0} if kind == "dopd" else {})}
        policy, config = AutoscaleConfig.model_validate({"pd_ratio": ratio, "policy": settings}).policy_settings()
        decision = None
        for at_s in (0.0, 5.0, 10.0):
            memory = {} if decision is None else decision.memory or {}
            now = replace(seen, now_s=NOW_S + at_s, state=replace(seen.state, memory=memory))
            decision = policy(config, ratio=PdRatio.parse(ratio), slo=SloConfig()).decide(now)
        assert decision is not None and decision.wanted is not None
        wanted[ratio] = decision.wanted
    pair = wanted["1:1"]
    assert pair[D] < wanted["0:1"][D]
    assert pair[D] + pair[P] <= 1.5 * wanted["0:1"][D]


def test_the_prompts_of_an_aggregated_pool_are_computed_by_the_profile_of_decode() -> None:
    """It has no prefill engine: however fast the profile of one is, it changes nothing."""
    traffic = Traffic(requests_per_s=20.0, served_per_s=20.0, input_tokens_mean=1000.0, output_tokens_mean=200.0)
    seen = replace(snapshot(pools("g", (1, 1), lowest=1)[1:]), traffic=traffic)
    own = profiled("default")
    wanted = []
    for prefill in (own["decode"], own["decode"].replace("tp1", "tp8")):
        settings = AutoscaleConfig.model_validate({"pd_ratio": "0:1", "policy": {**own, "prefill": prefill}})
        policy, config = settings.policy_settings()
        wanted.append(policy(config, ratio=ALONE, slo=SloConfig()).decide(seen).wanted)
    assert wanted[0] is not None and wanted[0][D] > 1.0
    assert wanted[0] == wanted[1]


def test_a_queue_of_an_aggregated_pool_is_an_overload_of_decode() -> None:
    of = pool("g", 2, lowest=1)
    of = replace(of, replicas=tuple(replace(r, waiting_requests=20.0, kv_usage_frac=0.5) for r in of.replicas))
    seen = snapshot((of,))
    plan = sized(profiled("dopd")).tick(replace(seen, traffic=replace(seen.traffic, requests_per_s=5.0)))
    assert plan.state.desired == {of.key: 8}  # 40 / 5


def test_an_aggregated_pool_sleeps_and_wakes_with_one_replica() -> None:
    of = pool("g", 1)
    idle = tuple(replace(r, running_requests=0.0, waiting_requests=0.0) for r in of.replicas)
    of = replace(of, replicas=idle)
    one = sized({"kind": "wva"}, idle_to_zero_s=60.0)
    seen = snapshot((of,))
    seen = replace(seen, traffic=replace(seen.traffic, requests_per_s=0.0))
    state = replace(seen.state, idle_since_s=NOW_S - 61.0)
    asleep = one.tick(replace(seen, state=state))
    assert asleep.state.desired == {of.key: 0}
    away = replace(of, replicas=(), target_replicas=0, held_replicas=0)
    sleeping = replace(seen, pools=(away,), state=ControllerState(ticked_s=NOW_S - 5.0, desired={of.key: 0}))
    assert one.tick(sleeping).state.desired == {of.key: 0}
    assert one.tick(replace(sleeping, is_awaited=True)).state.desired == {of.key: 1}


def test_an_aggregated_pool_makes_room_for_a_more_important_service() -> None:
    services = {"high": controller(3, priority=5), "low": sized({"kind": "static", "prefill": 0, "decode": 6})}
    seen = {"high": snapshot(pools("high", (1, 1))), "low": snapshot((pool("low", 6, lowest=1),))}
    decided = tick_all(services, seen, slots=room([node("a", 0)]))
    assert decided["high"][1].pending == {P: 2, D: 2}
    assert decided["low"][1].state.desired == {PoolKey("low-g", D): 2}


def test_a_lost_replica_without_room_elsewhere_is_pending() -> None:
    of = replace(pool("g", 1, lowest=1), replicas=(), target_replicas=1, held_replicas=0)
    state = ControllerState(ticked_s=NOW_S - 5.0, desired={of.key: 1}, unplaced_since_s={of.key: (NOW_S - 99.0, 0)})
    other = pool("h", 0)
    seen = Snapshot(now_s=NOW_S, pools=(replace(of, limits=replace(of.limits, lowest_replicas=0)), other), state=state)
    config = {"kind": "static", "prefill": 0, "decode": 1}
    (_, plan) = tick_all({"g": sized(config)}, {"g": seen}, slots=room([]))["g"]
    assert plan.pending == {P: 0, D: 1}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"policy": profiled("token_velocity")}, "'token_velocity' sizes prefill and decode together"),
        ({"policy": {"kind": "static", "prefill": 1, "decode": 1}}, "policy has 1 prefill replicas"),
        ({"policy": {"kind": "wva"}, "override": {"prefill": 1, "decode": 1}}, "override has 1 prefill replicas"),
        ({"policy": {"kind": "wva"}, "pd_ratio": "1:2", "override": {"prefill": 0, "decode": 1}}, "override has 0"),
    ],
)
def test_a_policy_or_override_that_does_not_fit_the_ratio_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AutoscaleConfig.model_validate({"pd_ratio": "0:1", **fields})


def test_decisions_go_on_while_an_aggregated_group_serves_and_a_pair_starts() -> None:
    both = pool("both", 2, capacity=0.5, prompt_capacity=0.5)
    pair = tuple(replace(of, target_replicas=1) for of in pools("pair", (0, 0), lowest=0))
    one = sized({"kind": "static", "prefill": 3, "decode": 3}, pd_ratio="1:1")
    plan = one.tick(snapshot((*pair, both)))
    assert plan.decision.wanted == {P: 3.0, D: 3.0}
    asleep = replace(both, replicas=(), target_replicas=0, held_replicas=0)
    silent = one.tick(snapshot((*pair, asleep)))
    assert (silent.decision.wanted, silent.decision.reason) == (None, "no prefill replica of group pair-g is running")
