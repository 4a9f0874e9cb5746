"""Floors in a tick and over a virtual morning: the least counts under any policy, whatever it wants."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.decision_log import config_line, decision_line, replay
from autoscale.decide.draft import Draft
from autoscale.decide.floor import lead_s, note_floors, raise_to_floors
from autoscale.decide.guard import guard
from autoscale.engines.profile import EngineProfile
from autoscale.headcount import desired_replicas
from autoscale.ratio import PdRatio
from autoscale.room import Room, joint_counts
from autoscale.types import ControllerState, Decision, Demand, Latency, NoteKind, Plan, PoolKey, Snapshot, Traffic
from kvtransfer.topology import Role
from tests.autoscale.virtual_serve import VirtualServe

MakeDraft = Callable[..., Draft]
MakeConfig = Callable[..., AutoscaleConfig]
P, D = Role.PREFILL, Role.DECODE
PREFILL, DECODE = PoolKey("g0", P), PoolKey("g0", D)
# Virtual time starts at 1000 s, which is 0:16:40 on 1 January 1970. This floor is in force from 1800 to 3000 s.
TIMES = {"begins": "30 0 * * *", "ends": "50 0 * * *"}
BEGINS_S, ENDS_S = 1800.0, 3000.0


def floors(*, prewarm_s: float = 60.0, **counts: int) -> dict[str, Any]:
    return {"prewarm_s": prewarm_s, "periods": [{**TIMES, **counts}]}


class Wishes:
    """A policy that wants what it was told last."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision

    def decide(self, snapshot: Snapshot, ratio: PdRatio) -> Decision:
        return self.decision


def wanting(prefill: float, decode: float, **fields: Any) -> Decision:
    return Decision(wanted={P: prefill, D: decode}, reason="a wish", **fields)


def serve(config: AutoscaleConfig, decision: Decision | None = None, **fields: Any) -> VirtualServe:
    """One replica of each role; with a decision, the policy always wants it."""
    controller = Controller(config)
    if decision is not None:
        controller._policy = Wishes(decision)  # type: ignore[assignment]
    return VirtualServe(controller, {P: 8.0, D: 20.0}, **{"interval_s": 5.0, **fields})


def run(virtual: VirtualServe, until_s: float, **fields: Any) -> list[tuple[int, int]]:
    """The desired counts of each tick until an instant."""
    desired = []
    while virtual.now_s + virtual.interval_s <= until_s:
        plan = virtual.tick(0.0, **fields)
        counts = desired_replicas(plan.state.desired)
        desired.append((counts[P], counts[D]))
    return desired


def notes(plan: Plan) -> list[tuple[NoteKind, str]]:
    return [(note.kind, note.text) for note in plan.held_back]


# One tick


def test_a_wish_below_the_floor_is_raised_and_the_other_role_follows_at_the_ratio(make_draft: MakeDraft) -> None:
    config = {"pd_ratio": "1:2", "floors": floors(decode=8)}
    draft = make_draft(raise_to_floors, wish=(1.0, 2.0), counts=(1, 2), now_s=2000.0, config=config)
    raise_to_floors(draft)
    assert draft.decision.wanted == {P: 1.0, D: 8.0}
    assert (draft.decision.is_step, draft.decision.is_urgent) == (True, True)
    assert draft.floor_counts == {P: 4, D: 8}
    assert draft.decision.reason == (
        "floor of 8 decode replicas since Thu 01 Jan 00:30, until Thu 01 Jan 00:50 (UTC); without it: a wish"
    )


def test_a_floor_that_the_present_counts_meet_is_not_urgent(make_draft: MakeDraft) -> None:
    config = {"pd_ratio": "1:2", "floors": floors(decode=8)}
    draft = make_draft(raise_to_floors, wish=(1.0, 2.0), counts=(4, 8), now_s=2000.0, config=config)
    raise_to_floors(draft)
    assert draft.decision.wanted == {P: 1.0, D: 8.0}
    assert not draft.decision.is_urgent
    assert draft.floor_counts == {P: 0, D: 0}


@pytest.mark.parametrize(
    "fields",
    [
        {"now_s": 1500.0},  # before its prewarm
        {"now_s": ENDS_S},
        {"now_s": 2000.0, "wish": (4.0, 9.0), "counts": (5, 9)},  # the policy wants more
        {"now_s": 2000.0, "config": {"floors": floors(decode=8), "is_paused": True}},
        {"now_s": 2000.0, "config": {"floors": floors(decode=8), "override": {"prefill": 1, "decode": 2}}},
        {"now_s": 2000.0, "config": {}},
    ],
)
def test_otherwise_the_decision_stays_the_same_object(make_draft: MakeDraft, fields: dict[str, Any]) -> None:
    base = {"wish": (1.0, 2.0), "counts": (1, 2), "config": {"pd_ratio": "1:2", "floors": floors(decode=8)}}
    draft = make_draft(raise_to_floors, **{**base, **fields})
    before = draft.decision
    raise_to_floors(draft)
    assert draft.decision is before
    assert draft.floor_counts == {P: 0, D: 0}


def test_a_policy_with_a_ratio_of_its_own_gets_the_ratio_of_both_floors(make_draft: MakeDraft) -> None:
    config = {"floors": floors(prefill=2, decode=8)}
    draft = make_draft(raise_to_floors, wish=(1.0, 1.0), counts=(1, 1), now_s=2000.0, config=config)
    draft.decision = replace(draft.decision, ratio=PdRatio(1, 1))
    raise_to_floors(draft)
    assert draft.decision.ratio == PdRatio(1, 4)
    assert draft.floor_counts == {P: 2, D: 8}
    alone = make_draft(
        raise_to_floors, wish=(1.0, 1.0), counts=(1, 1), now_s=2000.0, config={"floors": floors(decode=8)}
    )
    alone.decision = replace(alone.decision, ratio=PdRatio(1, 2))
    raise_to_floors(alone)
    assert alone.decision.ratio == PdRatio(1, 2)
    assert alone.floor_counts == {P: 4, D: 8}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"is_paused": True}, "the counts are paused by hand"),
        ({"override": {"prefill": 1, "decode": 2}}, "the counts are set by hand"),
        ({"is_observing": True}, "the configuration only observes"),
        ({"bounds": {"decode": {"highest_replicas": 2}}}, "bounds, budget, quota or room"),
    ],
)
def test_a_note_says_why_a_floor_is_not_met(make_draft: MakeDraft, config: dict[str, Any], why: str) -> None:
    config = {"pd_ratio": "1:2", "floors": floors(decode=8), **config}
    draft = make_draft(note_floors, wish=(1.0, 2.0), counts=(1, 2), now_s=2000.0, config=config)
    note_floors(draft)
    (note,) = [note for note in draft.notes if note.kind is NoteKind.FLOOR]
    assert note.text.startswith("floor of 8 decode replicas since")
    assert f"not met with 1P2D: {why}" in note.text


def test_a_met_floor_needs_no_note(make_draft: MakeDraft) -> None:
    draft = make_draft(
        note_floors,
        wish=(1.0, 1.0),
        counts=(4, 8),
        now_s=2000.0,
        config={"pd_ratio": "1:2", "floors": floors(decode=8)},
    )
    note_floors(draft)
    assert draft.notes == []


def test_the_lead_is_configured_or_the_longest_start(
    make_autoscale: MakeConfig, make_profile: Callable[..., Any]
) -> None:
    profile: EngineProfile = make_profile(start_s=45.0)
    profiled = {"kind": "default", "prefill": profile, "decode": profile, "prefill_start_s": 90.0}
    assert lead_s(make_autoscale(floors=floors(prewarm_s=30.0, decode=8)), ControllerState()) == 30.0
    assert lead_s(make_autoscale(floors=floors(prewarm_s=0.0, decode=8), policy=profiled), ControllerState()) == 0.0
    assert lead_s(make_autoscale(policy=profiled), ControllerState()) == 90.0
    own = {**profiled, "kind": "tests.autoscale.own:Profiled"}
    assert lead_s(make_autoscale(floors=floors(prewarm_s=None, decode=8), policy=own), ControllerState()) == 90.0
    assert lead_s(make_autoscale(no_room_s=600.0), ControllerState()) == 600.0
    observed = ControllerState(starts_s={PoolKey("g0", Role.DECODE): (42.0,)})
    assert lead_s(make_autoscale(policy=profiled), observed) == 42.0


# A virtual morning


def test_all_replicas_of_a_floor_start_at_its_prewarm_and_leave_slowly_after_its_end(
    make_autoscale: MakeConfig,
) -> None:
    guard = {"cooldown_out_s": 600.0, "cooldown_in_s": 60.0, "step_out_replicas": 1, "step_in_replicas": 2}
    config = make_autoscale(pd_ratio="1:2", floors=floors(decode=12), guard=guard, gate={"observation_s": 10.0})
    virtual = serve(config, wanting(1.0, 2.0))
    assert set(run(virtual, BEGINS_S - 65.0)) == {(1, 2)}
    assert run(virtual, BEGINS_S - 60.0) == [(6, 12)]  # one tick, whatever cooldown and step are
    assert virtual.plan is not None
    assert virtual.plan.decision.reason.startswith("prewarm for the floor of 12 decode replicas from Thu 01 Jan 00:30")
    run(virtual, BEGINS_S)
    assert len(virtual.serving(D)) == 12
    assert set(run(virtual, ENDS_S - 5.0)) == {(6, 12)}
    after = run(virtual, ENDS_S + 600.0)
    assert after == sorted(after, reverse=True)
    assert after[-1] == (1, 2)
    steps = [before[1] - now[1] for before, now in pairwise(after)]
    assert max(steps) == 2
    assert after.count((6, 12)) <= 1  # the cooldown had ended long before


def test_a_floor_needs_no_signal(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(pd_ratio="1:2", floors=floors(decode=8))
    virtual = serve(config)
    run(virtual, 1500.0)
    while virtual.now_s < 2000.0:
        virtual.now_s += 5.0
        snapshot = virtual.snapshot({})
        silent = tuple(
            replace(pool, replicas=tuple(replace(each, observed_s=1500.0) for each in pool.replicas))
            for pool in snapshot.pools
        )
        plan = virtual.controller.tick(replace(snapshot, pools=silent))
        virtual.state = plan.state
    assert desired_replicas(plan.state.desired) == {P: 4, D: 8}
    assert "has been silent" in plan.decision.reason


def test_a_floor_wakes_a_service_and_idle_time_counts_from_its_end(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(pd_ratio="1:2", floors=floors(decode=8), idle_to_zero_s=100.0)
    virtual = serve(config, bounds=(0, 32), is_idle=True)
    idle = {"traffic": Traffic(requests_per_s=0.0)}
    before = run(virtual, BEGINS_S - 65.0, **idle)
    assert before[-1] == (0, 0)
    assert run(virtual, BEGINS_S - 60.0, **idle) == [(4, 8)]
    assert set(run(virtual, ENDS_S - 5.0, **idle)) == {(4, 8)}
    after = run(virtual, ENDS_S + 300.0, **idle)
    slept_s = ENDS_S + 5.0 * after.index((0, 0))
    assert slept_s == ENDS_S + 100.0


def test_a_paused_service_keeps_its_counts_and_says_that_the_floor_is_not_met(make_autoscale: MakeConfig) -> None:
    virtual = serve(make_autoscale(pd_ratio="1:1", floors=floors(decode=8), is_paused=True))
    assert set(run(virtual, 2000.0)) == {(1, 1)}
    assert virtual.plan is not None
    ((kind, text),) = notes(virtual.plan)
    assert kind is NoteKind.FLOOR
    assert text.endswith("not met with 1P1D: the counts are paused by hand (`tandem scale --resume`)")


def test_counts_set_by_hand_precede_a_floor(make_autoscale: MakeConfig) -> None:
    override = {"prefill": 2, "decode": 3}
    virtual = serve(make_autoscale(pd_ratio="1:1", floors=floors(decode=8), override=override))
    assert run(virtual, 2000.0)[-1] == (2, 3)
    assert virtual.plan is not None
    assert [kind for kind, _ in notes(virtual.plan)] == [NoteKind.FLOOR]
    assert virtual.plan.decision.reason == "set by hand"


def test_a_service_that_only_observes_logs_the_floor_and_changes_nothing(make_autoscale: MakeConfig) -> None:
    virtual = serve(make_autoscale(pd_ratio="1:1", floors=floors(decode=8), is_observing=True))
    assert set(run(virtual, 2000.0)) == {(1, 1)}
    assert virtual.plan is not None
    assert [kind for kind, _ in notes(virtual.plan)] == [NoteKind.OBSERVING, NoteKind.FLOOR]
    assert notes(virtual.plan)[0][1] == "only observing: would be 8P8D"


def test_the_budget_precedes_a_floor_and_a_note_says_so(make_autoscale: MakeConfig) -> None:
    guard = {"budget_gpus": 9}
    virtual = serve(make_autoscale(pd_ratio="1:2", floors=floors(decode=8), guard=guard), wanting(1.0, 2.0))
    assert run(virtual, 2000.0)[-1] == (3, 6)
    assert virtual.plan is not None
    assert {kind for kind, _ in notes(virtual.plan)} == {NoteKind.BOUNDS, NoteKind.FLOOR}
    assert "not met with 3P6D: bounds, budget, quota or room" in dict(notes(virtual.plan))[NoteKind.FLOOR]


def test_a_quota_precedes_a_floor_and_a_note_counts_the_replicas_that_found_a_place(
    make_autoscale: MakeConfig, make_snapshot: Callable[..., Snapshot]
) -> None:
    snapshot = make_snapshot(1, 2, now_s=2000.0)
    demand = Demand(gpu_type="H100", gpus_per_worker=1.0)
    pools = tuple(replace(pool, limits=replace(pool.limits, demand=demand)) for pool in snapshot.pools)
    config = make_autoscale(pd_ratio="1:2", floors=floors(decode=8), quota_gpus={"H100": 6.0})
    plan = Controller(config).tick(replace(snapshot, pools=pools))
    assert desired_replicas(plan.state.desired) == {P: 2, D: 4}
    assert any(plan.pending.values())
    assert "not met with 2P4D: bounds, budget, quota or room" in dict(notes(plan))[NoteKind.FLOOR]


@pytest.mark.parametrize("wish", [6.0, 10.0])
def test_a_floor_takes_budget_from_the_other_role_at_once(make_autoscale: MakeConfig, wish: float) -> None:
    config = make_autoscale(pd_ratio="1:1", floors=floors(prefill=3, decode=9), guard={"budget_gpus": 12})
    virtual = serve(config, wanting(wish, wish, ratio=PdRatio(1, 1)))
    assert run(virtual, BEGINS_S - 65.0)[-1] == (6, 6)
    assert run(virtual, BEGINS_S + 60.0)[-1] == (3, 9)


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ((2.0, 2.0), (3, 9)),  # whole floors, nothing beyond
        ((2.0, 20.0), (3, 10)),  # the one replica that is left
        ((7.0, 13.0), (3, 9)),  # half of it for each role is none
    ],
)
def test_replicas_beyond_the_floors_give_way_if_the_budget_is_tight(
    make_draft: MakeDraft, wish: tuple[float, float], expected: tuple[int, int]
) -> None:
    config = {"floors": floors(prefill=3, decode=9), "guard": {"budget_gpus": 13}}
    draft = make_draft(raise_to_floors, wish=wish, counts=(3, 8), now_s=2000.0, config=config)
    draft.decision = replace(draft.decision, ratio=PdRatio(1, 1))
    raise_to_floors(draft)
    assert draft.decision.wanted == dict(zip(Role, map(float, expected), strict=True))
    assert draft.decision.ratio == PdRatio.of(draft.decision.wanted)


def test_a_floor_that_the_room_cuts_is_not_urgent_once_it_is_met_as_far_as_possible(make_draft: MakeDraft) -> None:
    config = {"pd_ratio": "1:2", "floors": floors(decode=8), "guard": {"budget_gpus": 9}}

    def is_urgent(prefill: int, decode: int) -> bool:
        draft = make_draft(raise_to_floors, wish=(1.0, 2.0), counts=(prefill, decode), now_s=2000.0, config=config)
        raise_to_floors(draft)
        return draft.decision.is_urgent

    assert is_urgent(3, 5)
    assert not is_urgent(3, 6)


def test_hysteresis_does_not_hold_back_a_floor(make_draft: MakeDraft) -> None:
    config = {"pd_ratio": "1:1", "floors": floors(decode=41), "guard": {"hysteresis_out_frac": 0.05}}
    draft = make_draft(raise_to_floors, counts=(40, 40), now_s=2000.0, bounds=(1, 64), config=config)
    draft.decision = wanting(40.0, 40.0)  # no step
    raise_to_floors(draft)
    guard(draft)
    assert draft.wanted == {P: 41, D: 41}


def test_while_a_floor_adds_replicas_of_one_role_the_other_leaves_only_after_its_cooldown(
    make_draft: MakeDraft,
) -> None:
    # 2P10D at 1:3: the floor needs a prefill replica; the policy would do with one decode replica less.
    config: dict[str, Any] = {"pd_ratio": "1:3", "floors": floors(prefill=3), "guard": {"cooldown_in_s": 120.0}}

    def counts(changed_s: float) -> Mapping[Role, int]:
        draft = make_draft(
            guard, wish=(1.0, 4.0), counts=(2, 10), now_s=2000.0, config=config, state={"scaled_out_s": changed_s}
        )
        guard(draft)
        return draft.wanted

    assert counts(1990.0) == {P: 3, D: 10}
    assert counts(1800.0) == {P: 3, D: 9}
    config["guard"]["budget_gpus"] = 12  # no room for 3P10D
    assert counts(1990.0) == {P: 2, D: 9}


def test_a_log_with_floors_replays_and_an_older_configuration_without_them_still_loads(
    make_autoscale: MakeConfig,
) -> None:
    config = make_autoscale(pd_ratio="1:2", floors=floors(decode=8), guard={"budget_gpus": 9})
    virtual = serve(config)
    lines = [config_line("m", config, 1000.0, "start")]
    while virtual.now_s < 2000.0:
        snapshot = virtual.snapshot({D: {"decode_tokens_per_s": 0.0}})
        plan = virtual.tick(0.0)
        lines.append(
            decision_line(
                "m",
                replace(snapshot, now_s=virtual.now_s),
                virtual.controller.tick(replace(snapshot, now_s=virtual.now_s)),
            )
        )
    assert any('"kind": "floor"' in line for line in lines)
    assert plan.decision.reason.startswith("floor of 8")
    assert list(replay(lines)) == [None] * (len(lines) - 1)
    old = config.model_dump(mode="json")
    del old["floors"]
    assert AutoscaleConfig.model_validate(old).floors.periods == ()


# Any policy

COUNT = st.floats(0.0, 20.0)
RATIOS = st.one_of(st.none(), st.tuples(st.integers(1, 5), st.integers(1, 5)).map(lambda pair: PdRatio(*pair)))
DECISIONS = st.builds(
    Decision,
    wanted=st.one_of(st.none(), st.fixed_dictionaries({P: COUNT, D: COUNT})),
    reason=st.just("a wish"),
    ratio=RATIOS,
    is_step=st.booleans(),
    is_urgent=st.booleans(),
)
FLOOR = st.fixed_dictionaries({}, optional={"prefill": st.integers(1, 12), "decode": st.integers(1, 12)}).filter(bool)
LATENCIES = st.sampled_from([Latency(), Latency(ttft_s=0.1, tpot_s=0.01), Latency(ttft_s=9.0, tpot_s=0.9)])


@given(
    decisions=st.lists(DECISIONS, min_size=1, max_size=8),
    floor=FLOOR,
    ratio=st.sampled_from(["1:1", "1:3", "3:2"]),
    latency=LATENCIES,
    is_gate_on=st.booleans(),
)
def test_under_any_policy_no_floor_in_force_is_undercut(
    make_autoscale: MakeConfig,
    decisions: list[Decision],
    floor: dict[str, int],
    ratio: str,
    latency: Latency,
    is_gate_on: bool,
) -> None:
    config = make_autoscale(pd_ratio=ratio, floors=floors(**floor), gate={"is_enabled": is_gate_on})
    virtual = serve(config, now_s=BEGINS_S - 90.0, bounds=(1, 128))
    policy = Wishes(decisions[0])
    virtual.controller._policy = policy  # type: ignore[assignment]
    for tick in range(40):
        policy.decision = decisions[tick % len(decisions)]
        plan = virtual.tick(0.0, latency=latency)
        counts = desired_replicas(plan.state.desired)
        if virtual.now_s >= BEGINS_S - 60.0:
            assert all(counts[role] >= floor.get(role, 0) for role in Role)
            assert NoteKind.FLOOR not in {note.kind for note in plan.held_back}


@given(
    decisions=st.lists(DECISIONS, min_size=1, max_size=4),
    floor=FLOOR,
    highest=st.integers(2, 14),
    budget_gpus=st.one_of(st.none(), st.integers(4, 20)),
)
def test_a_floor_is_met_as_far_as_the_room_allows_and_a_note_says_what_is_lacking(
    make_autoscale: MakeConfig,
    decisions: list[Decision],
    floor: dict[str, int],
    highest: int,
    budget_gpus: int | None,
) -> None:
    config = make_autoscale(pd_ratio="1:2", floors=floors(**floor), guard={"budget_gpus": budget_gpus})
    virtual = serve(config, now_s=BEGINS_S - 90.0, bounds=(1, highest))
    policy = Wishes(decisions[0])
    virtual.controller._policy = policy  # type: ignore[assignment]
    least = {role: floor.get(role, 0) for role in Role}
    for tick in range(60):
        policy.decision = decisions[min(tick // 5, len(decisions) - 1)]  # then the last wish stays
        plan = virtual.tick(0.0)
        counts = desired_replicas(plan.state.desired)
        assert virtual.gpus <= (budget_gpus or 1_000)
        if virtual.now_s >= BEGINS_S - 60.0:
            is_noted = NoteKind.FLOOR in {note.kind for note in plan.held_back}
            assert is_noted == any(counts[role] < least[role] for role in Role)
    room = Room(
        lowest=dict.fromkeys(Role, 1),
        highest=dict.fromkeys(Role, highest),
        most_gpus_per_replica=dict.fromkeys(Role, 1),
        budget_gpus=budget_gpus,
    )
    wanted = {role: float(count) for role, count in least.items()}
    at_ratio = joint_counts(wanted, plan.decision.ratio or config.pd_ratio, room, 1.0)
    is_inside = at_ratio is not None and all(at_ratio[role] >= least[role] for role in Role)
    assert not is_inside or all(counts[role] >= least[role] for role in Role)


@given(decision=DECISIONS, low=st.integers(1, 12), more=st.integers(0, 8), present=st.integers(1, 8))
def test_a_higher_floor_never_gives_fewer_replicas(
    make_autoscale: MakeConfig, decision: Decision, low: int, more: int, present: int
) -> None:
    def counts(decode: int) -> dict[Role, int]:
        virtual = serve(make_autoscale(pd_ratio="1:2", floors=floors(decode=decode)), decision, now_s=2000.0)
        virtual.running = {P: [f"p{n}" for n in range(present)], D: [f"d{n}" for n in range(2 * present)]}
        virtual.targets = {P: present, D: 2 * present}
        return desired_replicas(virtual.tick(0.0).state.desired)

    lower, higher = counts(low), counts(low + more)
    assert all(lower[role] <= higher[role] for role in Role)


@given(wish=st.floats(0.0, 12.0), floor=st.integers(1, 12), prewarm_s=st.floats(0.0, 300.0))
def test_a_steady_wish_changes_the_counts_in_one_direction_at_the_begin_and_at_the_end(
    make_autoscale: MakeConfig, wish: float, floor: int, prewarm_s: float
) -> None:
    config = make_autoscale(pd_ratio="1:2", floors=floors(decode=floor, prewarm_s=prewarm_s))
    virtual = serve(config, wanting(0.0, wish), interval_s=20.0)
    run(virtual, BEGINS_S - 305.0)
    rise, fall = run(virtual, ENDS_S - 1.0), run(virtual, ENDS_S + 1000.0)
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
