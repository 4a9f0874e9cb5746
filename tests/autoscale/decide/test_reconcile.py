"""The controller's state before a tick decides, by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.reconcile import is_after_a_gap, reconciled
from autoscale.types import ControllerState, PoolKey, Snapshot, Traffic
from kvtransfer.topology import Role

MakeSnapshot = Callable[..., Snapshot]
MakeAutoscale = Callable[..., AutoscaleConfig]

P, D = PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE)


@pytest.mark.parametrize(("ticked_s", "is_gap"), [(None, False), (995.0, False), (1001.0, True), (949.0, True)])
def test_a_tick_long_after_the_last_or_before_it_comes_after_a_gap(
    make_snapshot: MakeSnapshot, make_autoscale: MakeAutoscale, ticked_s: float | None, is_gap: bool
) -> None:
    snapshot = make_snapshot(state=ControllerState(ticked_s=ticked_s))
    assert is_after_a_gap(snapshot, make_autoscale(interval_s=5.0)) is is_gap


def test_replicas_that_no_longer_run_are_forgotten_and_a_loss_is_remembered(
    make_snapshot: MakeSnapshot, make_autoscale: MakeAutoscale
) -> None:
    before = ControllerState(
        ticked_s=995.0, admitted=("p0", "d0", "d9"), withdrawn={"d1": 990.0, "d8": 990.0}, victims=("d7",)
    )
    state = reconciled(make_snapshot(1, 2, state=before), make_autoscale())
    assert state.admitted == ("p0", "d0")
    assert state.withdrawn == {"d1": 990.0}
    assert state.victims == ()
    assert state.lost_s == 1000.0
    assert state.desired == {P: 1, D: 2}


def test_missing_replicas_are_timed_from_when_the_last_one_became_ready(
    make_snapshot: MakeSnapshot, make_autoscale: MakeAutoscale
) -> None:
    waiting = ControllerState(ticked_s=995.0, missing_since_s={D: (900.0, 2)})
    assert reconciled(make_snapshot(1, 2, targets=(1, 4), state=waiting), make_autoscale()).missing_since_s[D] == (
        900.0,
        2,
    )
    assert reconciled(make_snapshot(1, 3, targets=(1, 4), state=waiting), make_autoscale()).missing_since_s[D] == (
        1000.0,
        3,
    )
    assert D not in reconciled(make_snapshot(1, 4, targets=(1, 4), state=waiting), make_autoscale()).missing_since_s


def test_replicas_without_a_node_are_timed_from_when_the_last_one_found_a_node(
    make_snapshot: MakeSnapshot, make_autoscale: MakeAutoscale
) -> None:
    waiting = ControllerState(ticked_s=995.0, unplaced_since_s={D: (900.0, 2)})

    def since(held: int | None) -> tuple[float, int] | None:
        seen = make_snapshot(1, 2, targets=(1, 4), state=waiting)
        seen = replace(seen, pools=tuple(replace(pool, held_replicas=held) for pool in seen.pools))
        return reconciled(seen, make_autoscale()).unplaced_since_s.get(D)

    assert since(2) == (900.0, 2)
    assert since(3) == (1000.0, 3)  # one more has found a node
    assert since(4) is None  # all have a node: their start is not timed here
    assert since(None) is None


def test_a_pool_without_room_for_too_long_is_capped_at_its_running_count(
    make_snapshot: MakeSnapshot, make_autoscale: MakeAutoscale
) -> None:
    waiting = ControllerState(ticked_s=995.0, missing_since_s={D: (600.0, 2)})
    patient = make_autoscale(no_room_s=300.0, no_room_retry_s=120.0)
    assert reconciled(make_snapshot(1, 2, targets=(1, 4), state=waiting), patient).capped == {D: (1120.0, 2)}
    over = ControllerState(ticked_s=995.0, capped={D: (999.0, 2)})
    assert reconciled(make_snapshot(1, 2, state=over), patient).capped == {}


def test_after_a_gap_all_times_start_anew(make_snapshot: MakeSnapshot, make_autoscale: MakeAutoscale) -> None:
    before = ControllerState(ticked_s=500.0, withdrawn={"d1": 490.0}, missing_since_s={D: (400.0, 2)}, settled_s=510.0)
    state = reconciled(make_snapshot(1, 2, targets=(1, 3), state=before), make_autoscale())
    assert state.withdrawn == {"d1": 1000.0}
    assert state.missing_since_s == {D: (1000.0, 2)}
    assert state.settled_s is None


QUIET = {role: {"running_requests": 0.0, "waiting_requests": 0.0} for role in Role}


def idle_since_s(make_snapshot: MakeSnapshot, config: AutoscaleConfig, *, now_s: float, **state: float) -> float | None:
    """``idle_since_s`` after a tick without requests; ``state``: fields that the tick before it left."""
    traffic, before = Traffic(requests_per_s=0.0), ControllerState(**state)  # type: ignore[arg-type]
    return reconciled(make_snapshot(now_s=now_s, stats=QUIET, traffic=traffic, state=before), config).idle_since_s


def test_an_idle_period_begins_anew_after_a_gap(make_snapshot: MakeSnapshot, make_autoscale: MakeAutoscale) -> None:
    config = make_autoscale(interval_s=5.0)  # a gap is more than 50 s
    assert idle_since_s(make_snapshot, config, now_s=1000.0, ticked_s=950.0, idle_since_s=900.0) == 900.0
    assert idle_since_s(make_snapshot, config, now_s=1000.0, ticked_s=949.0, idle_since_s=900.0) == 1000.0


def test_an_idle_period_may_begin_at_0_s(make_snapshot: MakeSnapshot, make_autoscale: MakeAutoscale) -> None:
    assert idle_since_s(make_snapshot, make_autoscale(), now_s=5.0, ticked_s=0.0, idle_since_s=0.0) == 0.0


def test_the_backlog_keeps_64_points_including_the_present_one(
    make_snapshot: MakeSnapshot, make_autoscale: MakeAutoscale
) -> None:
    earlier = tuple((900.0 + second, 1.0) for second in range(100))
    snapshot = make_snapshot(
        stats={Role.PREFILL: {"queued_prefill_tokens": 7.0}}, state=ControllerState(ticked_s=999.0, backlog=earlier)
    )
    backlog = reconciled(snapshot, make_autoscale(window_s=600.0)).backlog
    assert backlog == (*earlier[-63:], (1000.0, 7.0))
