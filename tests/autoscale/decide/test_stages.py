"""What each stage of a tick adds to a draft, one at a time."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autoscale.decide.draft import Draft, emit
from autoscale.decide.gate import admit, leave
from autoscale.decide.guard import exchange, guard
from autoscale.decide.placing import place
from autoscale.decide.reconcile import reconcile
from autoscale.decide.wish import bring_back, decide, hold, sleep
from autoscale.ratio import PdRatio
from autoscale.types import Latency, NoteKind, PoolKey, Traffic
from kvtransfer.topology import Role

MakeDraft = Callable[..., Draft]
P, D = Role.PREFILL, Role.DECODE
PREFILL, DECODE = PoolKey("g0", P), PoolKey("g0", D)
LATE = Latency(ttft_s=5.0, tpot_s=0.01)
IDLE = {"idle_to_zero_s": 60.0}


def kinds(draft: Draft) -> list[NoteKind]:
    return [note.kind for note in draft.notes]


def test_reconcile_counts_once(make_draft: MakeDraft) -> None:
    state = {"desired": {PREFILL: 1, DECODE: 1}, "withdrawn": {"d1": 990.0}, "victims": ("p1",)}
    draft = make_draft(reconcile, state=state, bounds=(1, 8))
    reconcile(draft)
    assert draft.census.desired == {P: 1, D: 1}
    assert draft.census.running == {P: 1, D: 2}
    assert (draft.census.withdrawn, draft.census.ending) == ({P: 0, D: 1}, {P: 1, D: 0})
    assert draft.room.highest == {P: 8, D: 8}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"config": {"is_paused": True}}, "paused by hand"),
        (
            {"state": {"ticked_s": 0.0}},
            "the last tick was 1000.0 s ago: the clock jumped, or the controller stood still",
        ),
        ({"counts": (2, 0), "targets": (2, 2)}, "no decode replica of group g0 is running"),
        ({"stats": {D: {"observed_s": 900.0}}}, "replica d0 of decode:g0 has been silent for 100.0 s"),
        ({"traffic": Traffic(quietest=("i0", 900.0))}, "replica i0 of the endpoint has been silent for 100.0 s"),
        ({}, None),
    ],
)
def test_hold_says_why(make_draft: MakeDraft, fields: dict[str, object], reason: str | None) -> None:
    draft = make_draft(hold, **fields)
    hold(draft)
    assert draft.hold == reason
    assert draft.may_leave
    assert not draft.is_missed


def test_withdrawn_replicas_are_missed_while_latency_misses_its_objective(make_draft: MakeDraft) -> None:
    state = {"desired": {PREFILL: 2, DECODE: 1}, "withdrawn": {"d1": 990.0}}
    draft = make_draft(hold, latency=LATE, state=state)
    hold(draft)
    assert draft.is_missed
    assert not draft.may_leave
    by_hand = make_draft(hold, latency=LATE, state=state, config={"override": {"prefill": 2, "decode": 1}})
    hold(by_hand)
    assert by_hand.may_leave


def test_decide_ignores_the_policy_if_the_tick_holds_or_counts_are_not_finite(make_draft: MakeDraft) -> None:
    held = make_draft(decide, wish=(3.0, 3.0), config={"is_paused": True})
    decide(held)
    assert (held.decision.wanted, held.decision.reason) == (None, "paused by hand")
    wrong = make_draft(decide, wish=(float("inf"), 3.0))
    decide(wrong)
    assert wrong.decision.wanted is None
    by_hand = make_draft(decide, wish=(3.0, 3.0), config={"override": {"prefill": 1, "decode": 4}})
    decide(by_hand)
    assert by_hand.decision.wanted == {P: 1.0, D: 4.0}


def test_a_service_falls_asleep_only_after_an_idle_time(make_draft: MakeDraft) -> None:
    draft = make_draft(sleep, bounds=(0, 8), config=IDLE)
    draft.state = replace(draft.state, idle_since_s=900.0)
    sleep(draft)
    assert draft.falls_asleep
    assert draft.decision.wanted == {P: 0.0, D: 0.0}
    busy = make_draft(sleep, bounds=(0, 8), config=IDLE)
    sleep(busy)
    assert not busy.falls_asleep
    held = make_draft(sleep, bounds=(0, 8), config=IDLE)
    held.state, held.hold = replace(held.state, idle_since_s=900.0), "a replica has been silent"
    sleep(held)
    assert not held.falls_asleep


def test_a_sleeping_service_wakes_when_requests_wait(make_draft: MakeDraft) -> None:
    draft = make_draft(sleep, counts=(0, 0), bounds=(0, 8), config=IDLE, is_awaited=True)
    sleep(draft)
    assert draft.decision.is_urgent
    assert draft.decision.reason == "requests wait for it"


def test_bring_back_undoes_a_scale_in_and_remembers_it(make_draft: MakeDraft) -> None:
    state = {
        "desired": {PREFILL: 1, DECODE: 1},
        "desired_before": {PREFILL: 2, DECODE: 2},
        "withdrawn": {"p1": 990.0, "d1": 990.0},
        "tried": 1.0,
    }
    draft = make_draft(bring_back, latency=LATE, state=state)
    bring_back(draft)
    assert draft.state.desired == {PREFILL: 2, DECODE: 2}
    assert (draft.census.desired, draft.census.withdrawn) == ({P: 2, D: 2}, {P: 0, D: 0})
    assert draft.state.missed == (1.0, 1)
    well = make_draft(bring_back, state=state)
    before = well.state
    bring_back(well)
    assert well.state is before


def test_guard_takes_counts_set_by_hand_as_they_are_and_changes_none_while_observing(make_draft: MakeDraft) -> None:
    by_hand = make_draft(guard, config={"override": {"prefill": 1, "decode": 4}})
    guard(by_hand)
    assert by_hand.wanted == {P: 1, D: 4}
    only = make_draft(guard, wish=(3.0, 3.0), config={"is_observing": True})
    guard(only)
    assert only.wanted == {P: 2, D: 2}
    assert kinds(only) == [NoteKind.OBSERVING]


def test_while_latency_misses_its_objective_no_replica_leaves(make_draft: MakeDraft) -> None:
    draft = make_draft(exchange, wish=(1.0, 1.0), latency=LATE)
    assert draft.wanted == {P: 1, D: 1}
    exchange(draft)
    assert draft.wanted == {P: 2, D: 2}
    assert kinds(draft) == [NoteKind.LATENCY_MISSED]


def test_while_latency_misses_its_objective_replicas_that_start_are_not_given_up(make_draft: MakeDraft) -> None:
    state = {"desired": {PREFILL: 4, DECODE: 2}}
    draft = make_draft(exchange, wish=(1.0, 1.0), latency=LATE, state=state)  # two prefill replicas run
    exchange(draft)
    assert draft.wanted == {P: 4, D: 2}
    without_room = make_draft(exchange, wish=(1.0, 1.0), latency=LATE, state=state, bounds=(1, 3))
    exchange(without_room)
    assert without_room.wanted == {P: 3, D: 2}  # a limit takes one that starts
    well = make_draft(exchange, wish=(1.0, 1.0), state=state)
    exchange(well)
    assert well.wanted[P] < 4


def test_replicas_that_start_stay_though_late_requests_are_from_before_the_last_entry(make_draft: MakeDraft) -> None:
    state = {"desired": {PREFILL: 4, DECODE: 2}, "settled_s": 998.0}  # a replica entered at 988 or before
    draft = make_draft(exchange, wish=(1.0, 1.0), latency=Latency(ttft_s=600.0), state=state)
    assert draft.may_leave
    exchange(draft)
    assert draft.wanted[P] == 4  # two of them start
    assert draft.wanted[D] == 1


def test_while_latency_misses_its_objective_hysteresis_holds_no_growth_back(make_draft: MakeDraft) -> None:
    config = {"guard": {"hysteresis_out_frac": 0.9}}
    for latency, wanted in ((LATE, 3), (Latency(), 2)):
        draft = make_draft(guard, wish=(3.0, 3.0), latency=latency, config=config)
        draft.decision = replace(draft.decision, is_step=False)
        guard(draft)
        assert draft.wanted == {P: wanted, D: wanted}


def test_a_bound_of_one_role_does_not_cut_the_other_if_the_policy_has_its_own_ratio(make_draft: MakeDraft) -> None:
    draft = make_draft(guard, wish=(40.0, 2.0), bounds=(1, 4))
    draft.decision = replace(draft.decision, ratio=PdRatio(20, 1))
    guard(draft)
    assert draft.wanted == {P: 4, D: 2}  # four prefill replicas at 20:1 would leave one decode replica
    assert draft.ratio == PdRatio(2, 1)


def test_one_role_gives_its_gpus_to_the_other_if_the_budget_is_full(make_draft: MakeDraft) -> None:
    config = {"pd_ratio": "1:2", "guard": {"budget_gpus": 4, "band_replicas": 1.0}}
    draft = make_draft(exchange, wish=(1.0, 3.0), latency=LATE, config=config, counts=(2, 2))
    exchange(draft)
    assert draft.is_exchange
    assert draft.wanted[P] < 2


def test_place_moves_counts_and_remembers_when(make_draft: MakeDraft) -> None:
    draft = make_draft(place, wish=(3.0, 3.0))
    place(draft)
    assert draft.state.desired == {PREFILL: 3, DECODE: 3}
    assert (draft.state.scaled_out_s, draft.state.scaled_in_s) == (1000.0, None)
    same = make_draft(place, wish=(2.0, 2.0))
    before = same.state
    place(same)
    assert same.state is before


def test_leave_withdraws_replicas_that_serve_and_stops_others_at_once(make_draft: MakeDraft) -> None:
    draft = make_draft(leave, wish=(1.0, 1.0), state={"admitted": ("p0", "p1", "d0")})
    leave(draft)
    assert set(draft.state.withdrawn) == {"p1"}
    assert draft.state.victims == ("d1",)  # it has never served


def test_leave_ends_an_observation_that_showed_nothing(make_draft: MakeDraft) -> None:
    state = {"desired": {PREFILL: 1, DECODE: 1}, "withdrawn": {"p1": 960.0, "d1": 980.0}, "missed": (1.0, 2)}
    draft = make_draft(leave, state=state, config={"gate": {"observation_s": 30.0}})
    leave(draft)
    assert draft.state.victims == ("p1",)
    assert set(draft.state.withdrawn) == {"d1"}
    assert draft.state.missed == (1.0, 2)  # kept until no replica is withdrawn


def test_no_observation_ends_in_a_tick_that_holds(make_draft: MakeDraft) -> None:
    state = {"desired": {PREFILL: 1, DECODE: 1}, "withdrawn": {"p1": 960.0, "d1": 960.0}}
    silent = {D: {"observed_s": 900.0}}
    draft = make_draft(leave, state=state, config={"gate": {"observation_s": 30.0}}, stats=silent)
    leave(draft)
    assert draft.hold is not None
    assert draft.state.victims == ()


def test_admit_holds_replicas_off_the_ratio_and_counts_withdrawn_ones(make_draft: MakeDraft) -> None:
    state = {"admitted": ("p0", "d0"), "desired": {PREFILL: 1, DECODE: 4}}
    draft = make_draft(admit, counts=(1, 4), state=state)
    admit(draft)
    assert draft.admitted == ["p0", "d0", "d1"]  # 1P2D is one replica off 1:1, inside the band
    assert draft.held == ["d2", "d3"]
    away = make_draft(admit, state={"desired": {PREFILL: 2, DECODE: 1}, "withdrawn": {"d1": 990.0}})
    admit(away)
    assert away.counts == {PREFILL: 2, DECODE: 2}


def test_emit_settles_when_the_last_replica_has_entered(make_draft: MakeDraft) -> None:
    draft = make_draft(admit, state={"admitted": ("p0", "d0")})
    admit(draft)
    plan = emit(draft)
    assert plan.admitted == ("p0", "p1", "d0", "d1")
    assert plan.state.settled_s == 1000.0 + draft.config.window_s
    assert plan.state.ticked_s == 1000.0


def test_while_traffic_is_observed_in_part_replicas_that_start_are_not_given_up(make_draft: MakeDraft) -> None:
    """The replica of the endpoint that has ended may have refused requests, and latencies alone look well then."""
    state = {"desired": {PREFILL: 4, DECODE: 2}}  # two prefill replicas start
    for is_whole, prefill in ((False, 4), (True, 1)):
        draft = make_draft(exchange, wish=(1.0, 1.0), state=state, traffic=Traffic(is_whole=is_whole))
        assert draft.may_leave
        assert draft.may_give_up == is_whole
        exchange(draft)
        assert draft.wanted == {P: prefill, D: 1}


def test_no_replica_is_added_on_gpus_that_leaving_replicas_still_hold(make_draft: MakeDraft) -> None:
    config = {"pd_ratio": "1:4", "guard": {"budget_gpus": 5}}
    late_before = {"latency": Latency(ttft_s=600.0), "state": {"settled_s": 998.0}}  # an entry was at 988 or before
    draft = make_draft(exchange, wish=(1.0, 4.0), counts=(3, 2), config=config, **late_before)
    assert draft.may_leave
    assert not draft.may_give_up
    assert draft.final_counts == {P: 1, D: 4}
    exchange(draft)
    assert draft.wanted == {P: 1, D: 2}
