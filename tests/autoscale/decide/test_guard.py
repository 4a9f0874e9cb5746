"""Hysteresis, cooldown, damping, largest change per tick, bounds, budget and ratio, one at a time and all together."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.draft import Draft
from autoscale.decide.guard import Guard, Verdict
from autoscale.headcount import Census
from autoscale.policies.static import Static, StaticConfig
from autoscale.ratio import PdRatio
from autoscale.room import Room
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, Snapshot
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
FREE = {
    "cooldown_out_s": 0.0,
    "cooldown_in_s": 0.0,
    "hysteresis_out_frac": 0.0,
    "hysteresis_in_frac": 0.0,
    "damping_in_frac": 1.0,
    "step_out_replicas": 64,
    "step_in_replicas": 64,
}


def make_guard(
    current: tuple[int, int],
    *,
    ratio: PdRatio,
    highest: tuple[int, int] = (64, 64),
    budget_gpus: int | None = None,
    since_change_s: float | None = None,
    is_loss_fresh: bool = False,
    missed: tuple[float, int] | None = None,
    withdrawn: tuple[int, int] = (0, 0),
    ending: tuple[int, int] = (0, 0),
    may_leave: bool = True,
    floor_counts: tuple[int, int] = (0, 0),
    **config: Any,
) -> Guard:
    ones = {P: 1, D: 1}
    document = {
        "pd_ratio": str(ratio),
        "policy": {"kind": "static", "prefill": 1, "decode": 1},
        "gate": {"band_replicas": 16.0},
    }
    draft = Draft(
        config=AutoscaleConfig.model_validate({**document, "guard": {**FREE, **config}}),
        policy=Static(StaticConfig(kind="static", prefill=1, decode=1), ratio=ratio, slo=SloConfig()),
        snapshot=Snapshot(now_s=1000.0, pools=()),
        slots=None,
    )
    draft.decision = Decision(wanted=None, reason="test", ratio=ratio)
    draft.may_leave = may_leave
    draft.state = ControllerState(
        scaled_out_s=None if since_change_s is None else 1000.0 - since_change_s,
        lost_s=999.0 if is_loss_fresh else None,
        missed=missed,
    )
    draft.room = Room(
        lowest=ones, highest=dict(zip(Role, highest, strict=True)), most_gpus_per_replica=ones, budget_gpus=budget_gpus
    )
    draft.current = dict(zip(Role, current, strict=True))
    draft.floor_counts = dict(zip(Role, floor_counts, strict=True))
    draft.census = Census(
        desired={},
        running={},
        withdrawn=dict(zip(Role, withdrawn, strict=True)),
        ending=dict(zip(Role, ending, strict=True)),
    )
    return Guard(draft)


def judge(
    decode: float | None,
    current: tuple[int, int] = (2, 6),
    *,
    ratio: str = "1:3",
    highest: int = 64,
    is_step: bool = False,
    is_urgent: bool = False,
    **fields: Any,
) -> Verdict:
    """The guard's verdict on a wish for decode replicas."""
    wanted = None if decode is None else {P: 0.0, D: decode}
    guard = make_guard(current, ratio=PdRatio.parse(ratio), highest=(highest, highest), **fields)
    return guard.judge(Decision(wanted=wanted, reason="test", is_step=is_step, is_urgent=is_urgent))


def texts(verdict: Verdict) -> tuple[str, ...]:
    return tuple(note.text for note in verdict.notes)


def counts(verdict: Verdict) -> tuple[int, int]:
    return verdict.counts[P], verdict.counts[D]


def test_a_decision_without_counts_changes_nothing() -> None:
    assert judge(None) == Verdict(counts={P: 2, D: 6}, notes=())


def test_both_roles_move_in_one_verdict() -> None:
    assert counts(judge(9.0)) == (3, 9)
    assert counts(judge(3.0)) == (1, 3)


@pytest.mark.parametrize(("decode", "expected"), [(6.6, (2, 6)), (6.7, (3, 7)), (5.4, (2, 6)), (5.0, (2, 5))])
def test_hysteresis_is_a_dead_band_around_the_present_count(decode: float, expected: tuple[int, int]) -> None:
    assert counts(judge(decode, hysteresis_out_frac=0.1, hysteresis_in_frac=0.1)) == expected


def test_a_step_of_a_feedback_loop_needs_no_hysteresis() -> None:
    assert counts(judge(6.3, hysteresis_out_frac=0.1, is_step=True)) == (3, 7)


def test_cooldowns_differ_by_direction_and_an_urgent_decision_skips_them() -> None:
    cooldowns = {"cooldown_out_s": 10.0, "cooldown_in_s": 60.0}
    assert counts(judge(9.0, since_change_s=9.0, **cooldowns)) == (2, 6)
    assert texts(judge(9.0, since_change_s=9.0, **cooldowns)) == ("cooldown: 1.0 s left",)
    assert counts(judge(9.0, since_change_s=10.0, **cooldowns)) == (3, 9)
    assert counts(judge(3.0, since_change_s=59.0, **cooldowns)) == (2, 6)
    assert counts(judge(3.0, since_change_s=60.0, **cooldowns)) == (1, 3)
    assert counts(judge(9.0, since_change_s=0.0, is_urgent=True, **cooldowns)) == (3, 9)


def test_damping_takes_a_share_of_the_way_but_always_a_whole_replica() -> None:
    assert counts(judge(2.0, (4, 12), damping_in_frac=0.5)) == (3, 7)  # half of the way from 12 to 2
    assert counts(judge(2.0, (1, 3), damping_in_frac=0.1)) == (1, 2)  # 2.9 would stay 3 for ever
    assert counts(judge(12.0, damping_out_frac=0.5)) == (3, 9)
    assert counts(judge(12.0, damping_out_frac=0.5, is_urgent=True)) == (4, 12)


def test_a_step_limits_the_larger_role_and_the_other_follows() -> None:
    verdict = judge(12.0, step_out_replicas=2)
    assert counts(verdict) == (3, 8)
    assert texts(verdict) == ("step: 4P12D became 3P8D",)
    assert counts(judge(1.0, (4, 12), step_in_replicas=3)) == (3, 9)


def test_budget_and_bounds_limit_counts_and_a_note_says_so() -> None:
    verdict = judge(12.0, budget_gpus=12)
    assert counts(verdict) == (3, 9)
    assert texts(verdict) == ("bounds, budget or room: 4P12D became 3P9D",)
    assert counts(judge(30.0, highest=8)) == (3, 8)


def test_an_urgent_decision_keeps_bounds_and_budget() -> None:
    assert counts(judge(30.0, budget_gpus=8, is_urgent=True)) == (2, 6)
    assert counts(judge(30.0, highest=6, is_urgent=True)) == (2, 6)


def test_if_there_is_no_room_for_both_roles_neither_moves() -> None:
    verdict = judge(6.0, (1, 1), ratio="1:5", budget_gpus=1)
    assert counts(verdict) == (1, 1)
    assert "both roles stay" in verdict.notes[0].text


def test_a_drifted_ratio_is_repaired_step_by_step_without_new_load() -> None:
    path = [(1, 9)]
    while len(path) < 10 and (step := counts(judge(9.0, path[-1], step_out_replicas=1))) != path[-1]:
        path.append(step)
    assert path == [(1, 9), (2, 9), (3, 9)]


def test_a_drift_that_one_role_cannot_repair_inside_its_bounds_is_repaired_by_the_other() -> None:
    # Prefill cannot grow beyond two, so decode shrinks until it is one prefill replica off the ratio.
    path = [(2, 12)]
    for _ in range(5):
        guard = make_guard(path[-1], ratio=PdRatio(1, 3), highest=(2, 64), step_in_replicas=1)
        verdict = guard.judge(Decision(wanted={P: 0.0, D: 12.0}, reason="test"))
        path.append(counts(verdict))
    assert path == [(2, 12), (2, 11), (2, 10), (2, 9), (2, 9), (2, 9)]


def test_a_replica_that_ends_counts_against_the_budget_until_it_has_gone() -> None:
    # On the way to 3:1, 1P5D and two decode replicas that still end hold all 8 GPUs.
    verdict = judge(2.0, (1, 5), ratio="3:1", budget_gpus=8, ending=(0, 2))
    assert counts(verdict) == (1, 2)
    assert any("must be gone" in text for text in texts(verdict))
    assert counts(judge(2.0, (1, 2), ratio="3:1", budget_gpus=8)) == (6, 2)
    assert counts(judge(2.0, (1, 2), ratio="3:1", budget_gpus=8, ending=(0, 1))) == (1, 2)


def test_withdrawn_replicas_come_back_inside_a_budget_that_is_full() -> None:
    # 3P3D serve, and one withdrawn replica of each role is observed: 8 GPUs. Their return needs no new GPU.
    assert counts(judge(4.0, (3, 3), ratio="1:1", budget_gpus=8, withdrawn=(1, 1))) == (4, 4)
    assert counts(judge(5.0, (3, 3), ratio="1:1", budget_gpus=8, withdrawn=(1, 1))) == (4, 4)
    # 3P1D hold all 4 GPUs: decode grows only once a prefill replica has gone.
    assert counts(judge(2.0, (3, 1), ratio="1:1", budget_gpus=4, withdrawn=(0, 0))) == (2, 1)


@given(
    wanted=st.floats(0, 1e6),
    leaders=st.integers(1, 60),
    ratio=st.sampled_from(["1:5", "1:3", "1:1", "2:1", "9:1"]),
    budget=st.none() | st.integers(2, 120),
    step=st.integers(1, 64),
    since=st.none() | st.floats(0, 100),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_a_verdict_keeps_bounds_budget_ratio_and_step_whatever_is_wanted(
    wanted: float,
    leaders: int,
    ratio: str,
    budget: int | None,
    step: int,
    since: float | None,
    flags: tuple[bool, bool],
) -> None:
    ratio_ = PdRatio.parse(ratio)
    followers = max(1, round(leaders * ratio_.follower_share))
    current = (leaders, followers) if ratio_.leader is P else (followers, leaders)
    before = sum(current)
    is_over = budget is not None and before > budget
    given: dict[str, Any] = {
        "ratio": ratio,
        "since_change_s": since,
        "budget_gpus": budget,
        "is_step": flags[0],
        "is_urgent": flags[1],
        "step_out_replicas": step,
        "step_in_replicas": step,
    }
    verdict = judge(wanted, current, **given)
    prefill, decode = counts(verdict)
    assert 1 <= prefill <= 64
    assert 1 <= decode <= 64
    assert ratio_.deviation(prefill, decode) <= 1 + 1e-9 or is_over
    assert budget is None or prefill + decode <= max(budget, before)
    if not is_over:
        assert abs(counts(verdict)[0 if ratio_.leader is P else 1] - leaders) <= step
    assert verdict == judge(wanted, current, **given)


def test_a_fresh_loss_holds_back_a_scale_in_and_no_scale_out() -> None:
    assert counts(judge(3.0, is_loss_fresh=True)) == (2, 6)
    assert counts(judge(9.0, is_loss_fresh=True)) == (3, 9)
    assert counts(judge(3.0, is_loss_fresh=True, is_step=True)) == (1, 3)  # a step needs no sum over replicas
    assert "was lost" in judge(3.0, is_loss_fresh=True).notes[0].text


def test_the_band_says_how_near_to_the_ratio_counts_must_be() -> None:
    # 2P4D is 0.67 prefill replicas off 1:3: inside a band of one replica, outside a band of half a replica.
    assert counts(judge(4.0, (2, 4))) == (2, 4)
    assert counts(judge(4.0, (2, 4), band_replicas=0.5)) != (2, 4)


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ({"since_change_s": 20.0, "cooldown_in_s": 60.0}, (8, 8)),
        ({"is_loss_fresh": True}, (4, 8)),
        ({"hysteresis_in_frac": 0.9}, (4, 8)),
    ],
)
def test_reasons_against_a_scale_in_count_off_the_ratio_too(why: dict[str, Any], expected: tuple[int, int]) -> None:
    # 8P8D comes to 1:2 and keeps its decode replicas; 4P8D is at the ratio and does not move.
    assert counts(judge(2.0, current=(8, 8), ratio="1:2", **why)) == expected
    assert counts(judge(2.0, current=(4, 8), ratio="1:2", **why)) == (4, 8)
    assert counts(judge(2.0, current=(8, 8), ratio="1:2")) == (1, 2)


@pytest.mark.parametrize(
    ("since_change_s", "decode", "missed", "expected"),
    [
        (119.0, 3.0, (3.0, 1), (2, 6)),
        (120.0, 3.0, (3.0, 1), (1, 3)),
        (239.0, 3.0, (3.0, 2), (2, 6)),
        (240.0, 3.0, (3.0, 2), (1, 3)),
        (960.0, 3.0, (3.0, 50), (1, 3)),  # the wait has an upper limit
        (60.0, 2.0, (3.0, 50), (1, 2)),  # the load is lower than when users waited
        (60.0, 5.0, (3.0, 50), (2, 5)),  # users did not wait with that many replicas
        (60.0, 3.0, None, (1, 3)),
    ],
)
def test_a_scale_in_that_made_users_wait_is_tried_again_after_twice_as_long(
    since_change_s: float, decode: float, missed: tuple[float, int] | None, expected: tuple[int, int]
) -> None:
    verdict = judge(decode, since_change_s=since_change_s, missed=missed, cooldown_in_s=60.0, hysteresis_in_frac=0.1)
    assert counts(verdict) == expected
    assert expected != (2, 6) or "a latency missed its objective" in verdict.notes[0].text


@pytest.mark.parametrize(
    ("since_change_s", "decode", "current", "ratio", "expected"),
    [
        (119.0, 8.5, (8, 8), "1:2", (8, 9)),  # decode grows, and prefill replicas would leave again
        (120.0, 8.5, (8, 8), "1:2", (5, 9)),
        (15.0, 8.0, (4, 8), "1:1", (8, 8)),  # no replica leaves
        (15.0, 9.0, (4, 8), "1:2", (5, 9)),
    ],
)
def test_a_return_to_the_ratio_waits_only_with_its_removals_and_as_long_as_a_scale_in(
    since_change_s: float, decode: float, current: tuple[int, int], ratio: str, expected: tuple[int, int]
) -> None:
    cooldowns = {"cooldown_out_s": 10.0, "cooldown_in_s": 15.0, "hysteresis_in_frac": 0.1}
    verdict = judge(decode, current, ratio=ratio, since_change_s=since_change_s, missed=(8.0, 3), **cooldowns)
    assert counts(verdict) == expected


def judge_both(
    wanted: tuple[float, float], *, current: tuple[int, int] = (6, 2), is_own: bool = True, **config: Any
) -> Verdict:
    """The guard's verdict on wanted counts of both roles; ``is_own``: the policy gives their ratio, too."""
    counts = {P: wanted[0], D: wanted[1]}
    guard = make_guard(current, ratio=PdRatio.of(counts), since_change_s=10.0, **config)
    return guard.judge(Decision(wanted=counts, ratio=PdRatio.of(counts) if is_own else None, reason="test"))


def test_the_smaller_role_grows_alone_if_the_policy_sizes_it_by_itself() -> None:
    assert judge_both((6.0, 2.4)).counts == {P: 6, D: 3}
    # If the policy gives no ratio of its own, a need of less than a whole replica is rounding.
    assert judge_both((6.0, 2.4), is_own=False).counts == {P: 6, D: 2}
    assert judge_both((6.0, 2.0)).counts == {P: 6, D: 2}


def test_the_smaller_role_grows_though_the_larger_may_not_shrink_yet() -> None:
    assert judge_both((5.8, 2.4), hysteresis_in_frac=0.1).counts == {P: 6, D: 3}
    verdict = judge_both((4.0, 2.4), cooldown_in_s=60.0)
    assert verdict.counts[P] == 6
    assert verdict.counts[D] > 2
    assert "cooldown: 50.0 s left" in texts(verdict)


def test_the_hysteresis_holds_for_the_smaller_role_too() -> None:
    assert judge_both((6.0, 2.4), hysteresis_out_frac=0.5).counts == {P: 6, D: 2}


@pytest.mark.parametrize(
    ("wanted", "current", "expected"),
    [
        ((2.0, 1.0), (9, 1), (9, 1)),  # nine prefill replicas at 2:1 would give five decode replicas
        ((2.0, 2.0), (9, 1), (9, 2)),
        ((0.4, 0.4), (16, 8), (16, 8)),
        ((1.0, 2.0), (1, 9), (1, 9)),
    ],
)
def test_while_the_larger_role_may_not_shrink_the_other_gets_no_more_than_the_policy_wants(
    wanted: tuple[float, float], current: tuple[int, int], expected: tuple[int, int]
) -> None:
    verdict = judge_both(wanted, current=current, cooldown_in_s=60.0)
    assert counts(verdict) == expected
    assert "cooldown: 50.0 s left" in texts(verdict)
