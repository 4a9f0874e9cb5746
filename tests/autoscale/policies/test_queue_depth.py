"""The law of the queue-depth chapter, by hand."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.observe.signals import Signals
from autoscale.policies.policy import queue_at_endpoint
from autoscale.policies.queue_depth import QueueDepth, QueueDepthConfig, replicas_for_queue
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, PoolKey, ReplicaStats, Snapshot, Traffic
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE


@pytest.mark.parametrize(
    ("arrivals", "queue", "law", "expected"),
    [
        # The printed law: Q* = 0, W_slo = 0.5 s, mu = 40. 200/40 + 100/(40 x 0.5) = 10.
        (200.0, 100.0, {"target_queue": 0.0, "burn_down_s": 0.5}, 10),
        (200.0, 0.0, {"target_queue": 0.0, "burn_down_s": 0.5}, 5),
        # Its code: Q* = 40, 3 s. (200 + (100 - 40)/3)/40 = 5.5.
        (200.0, 100.0, {"target_queue": 40.0, "burn_down_s": 3.0}, 6),
        (200.0, 40.0, {"target_queue": 40.0, "burn_down_s": 3.0}, 5),
        # Its headroom controller: 1.4 times, rounded up.
        (200.0, 100.0, {"target_queue": 40.0, "burn_down_s": 3.0, "headroom_frac": 0.4}, 9),
        (0.0, 0.0, {"target_queue": 0.0, "burn_down_s": 1.0}, 0),
    ],
)
def test_the_law_by_hand(arrivals: float, queue: float, law: dict[str, float], expected: int) -> None:
    config = QueueDepthConfig.model_validate({"decode_requests_per_s": 40.0, **law})
    assert replicas_for_queue(arrivals, queue, 40.0, config) == expected


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e3), st.floats(0.1, 100))
def test_more_arrivals_or_a_longer_queue_never_need_fewer_replicas(
    arrivals: float, queue: float, more: float, served: float
) -> None:
    config = QueueDepthConfig(decode_requests_per_s=served, target_queue=10.0, burn_down_s=2.0)
    base = replicas_for_queue(arrivals, queue, served, config)
    assert replicas_for_queue(arrivals + more, queue, served, config) >= base
    assert replicas_for_queue(arrivals, queue + more, served, config) >= base
    assert base * served >= arrivals - 1e-6 * max(1.0, arrivals)


def decide(snapshot: Snapshot, **config: Any) -> Any:
    policy = QueueDepth(QueueDepthConfig.model_validate(config), ratio=PdRatio(1, 2), slo=SloConfig())
    return policy.decide(snapshot)


def test_each_role_is_sized_by_its_own_queue(make_snapshot: Callable[..., Snapshot]) -> None:
    stats = {P: {"waiting_requests": 30.0}, D: {"waiting_requests": 0.0}}
    snapshot = make_snapshot(2, 4, stats=stats, traffic=Traffic(requests_per_s=20.0))
    both = decide(snapshot, prefill_requests_per_s=10.0, decode_requests_per_s=5.0, burn_down_s=2.0)
    assert both.wanted == {P: 5.0, D: 4.0}  # (20 + 60/2)/10, 20/5
    assert decide(snapshot, decode_requests_per_s=5.0).wanted == {P: 0.0, D: 4.0}


def test_a_queue_adds_no_replica_while_replicas_start_but_arrivals_do(make_snapshot: Callable[..., Snapshot]) -> None:
    """2 replicas run and 2 start. The law alone would want (10 + 40/1)/5 = 10: for a queue that the 2 will serve."""

    def wanted(arrivals: float, present: int) -> float:
        state = ControllerState(desired={PoolKey("g0", D): present})
        traffic = Traffic(requests_per_s=arrivals)
        snapshot = make_snapshot(1, 2, stats={D: {"waiting_requests": 20.0}}, traffic=traffic, state=state)
        return float(decide(snapshot, decode_requests_per_s=5.0, burn_down_s=1.0).wanted[D])

    assert wanted(10.0, present=2) == 10.0
    assert wanted(10.0, present=4) == 4.0
    assert wanted(30.0, present=4) == 6.0  # 30/5


def test_without_observations_there_is_no_decision(make_snapshot: Callable[..., Snapshot]) -> None:
    blind = make_snapshot(1, 2, traffic=Traffic(requests_per_s=1.0))
    assert decide(blind, prefill_requests_per_s=10.0).wanted is None
    assert decide(make_snapshot(1, 2), prefill_requests_per_s=10.0).wanted is None
    snapshot = make_snapshot(1, 2, stats={P: {"waiting_requests": 1.0}}, traffic=Traffic(requests_per_s=1.0))
    prefill = replace(
        snapshot.pools[0], replicas=(*snapshot.pools[0].replicas, ReplicaStats(replica_id="new", observed_s=0.0))
    )
    assert decide(replace(snapshot, pools=(prefill, snapshot.pools[1])), prefill_requests_per_s=10.0).wanted is None


@pytest.mark.parametrize("config", [{}, {"prefill_requests_per_s": 0}, {"decode_requests_per_s": 1, "burn_down_s": 0}])
def test_a_rate_is_needed(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"give prefill_requests_per_s|greater than 0"):
        QueueDepthConfig.model_validate(config)


@pytest.mark.parametrize(("arrivals", "decode"), [(10.0, 4.0), (30.0, 6.0)])
def test_partly_observed_arrivals_remove_no_replica_and_still_add(
    make_snapshot: Callable[..., Snapshot], arrivals: float, decode: float
) -> None:
    stats = {role: {"waiting_requests": 0.0} for role in Role}
    desired = {PoolKey("g0", P): 2, PoolKey("g0", D): 4}
    traffic = Traffic(requests_per_s=arrivals, is_whole=False)
    snapshot = make_snapshot(2, 4, stats=stats, traffic=traffic, state=ControllerState(desired=desired))
    assert decide(snapshot, decode_requests_per_s=5.0).wanted[D] == decode


def arrivals_before(*rates: float, interval_s: float = 10.0) -> dict[str, tuple[float, ...]]:
    """The memory of a policy that saw these arrival rates; it saw the last one an interval before 1000 s."""
    times = (1000.0 - interval_s * n for n in range(len(rates), 0, -1))
    return {"arrivals_at_s": tuple(times), "arrivals_per_s": rates}


def ahead(
    make_snapshot: Callable[..., Snapshot],
    arrivals: float | None,
    memory: Mapping[str, tuple[float, ...]],
    *,
    now_s: float = 1000.0,
    is_whole: bool = True,
    **config: Any,
) -> Any:
    snapshot = make_snapshot(
        now_s=now_s,
        stats={role: {"waiting_requests": 0.0} for role in Role},
        traffic=Traffic(requests_per_s=arrivals, is_whole=is_whole),
        state=ControllerState(memory=memory),
    )
    return decide(snapshot, decode_requests_per_s=40.0, **{"lead_s": 20.0, "trend_s": 60.0, **config})


@pytest.mark.parametrize(
    ("memory", "arrivals", "config", "expected"),
    [
        # 5 requests/s more every 10 s: 274 now are 6.85 replicas, 284 after the 20 s of a start 7.1.
        (arrivals_before(259.0, 264.0, 269.0), 274.0, {"lead_s": 0.0}, 7.0),
        (arrivals_before(259.0, 264.0, 269.0), 274.0, {}, 8.0),
        (arrivals_before(259.0, 264.0, 269.0), 274.0, {"lead_s": 120.0}, 9.0),  # 334 requests/s in 120 s
        (arrivals_before(259.0, 264.0, 269.0), 274.0, {"headroom_frac": 0.4}, 12.0),  # both together: 8 x 1.4
        # (-30, 100), (-20, 300), (-10, 100), (0, 300): the least squares' slope is 4, so 200 + 4 x 35 = 340.
        (arrivals_before(100.0, 300.0, 100.0), 300.0, {}, 9.0),
        (arrivals_before(300.0, 250.0, 200.0), 150.0, {}, 4.0),  # a fall counts only once it has come
        (arrivals_before(200.0, 205.0), 300.0, {}, 8.0),  # 20 s are too short for a trend over 60 s
        (arrivals_before(0.0, 0.0, 0.0, 0.0, 300.0, 300.0, 300.0, 300.0, 300.0, 300.0), 300.0, {}, 8.0),
        ({}, 210.0, {}, 6.0),
    ],
)
def test_arrivals_are_forecast_one_start_ahead(
    make_snapshot: Callable[..., Snapshot],
    memory: dict[str, tuple[float, ...]],
    arrivals: float,
    config: dict[str, float],
    expected: float,
) -> None:
    assert ahead(make_snapshot, arrivals, memory, **config).wanted[D] == expected


def test_only_the_predictive_policy_remembers_arrivals(make_snapshot: Callable[..., Snapshot]) -> None:
    past = arrivals_before(200.0)
    assert "arrivals_at_s" not in (ahead(make_snapshot, 210.0, {}, lead_s=0.0).memory or {})
    assert ahead(make_snapshot, None, past).memory is None
    decision = ahead(make_snapshot, 210.0, past)
    assert decision.memory is not None
    trend = {"arrivals_at_s": (990.0, 1000.0), "arrivals_per_s": (200.0, 210.0)}
    assert trend.items() <= decision.memory.items()
    assert decision.reason == "210 requests/s, 210 in 20 s; decode_queue 0, decode_implied_wait_s 0"
    # Partly observed arrivals would look like a fall, and the next whole ones like a rise.
    partly = ahead(make_snapshot, 100.0, past, is_whole=False).memory
    assert partly is not None
    assert past.items() <= partly.items()


@given(st.lists(st.floats(0, 1e3), max_size=7), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 120))
def test_neither_a_forecast_nor_more_arrivals_want_fewer_replicas(
    make_snapshot: Callable[..., Snapshot], past: list[float], arrivals: float, more: float, lead_s: float
) -> None:
    memory = arrivals_before(*past)
    decision = ahead(make_snapshot, arrivals, memory, lead_s=lead_s)
    assert decision == ahead(make_snapshot, arrivals, memory, lead_s=lead_s)
    assert decision.wanted[D] >= ahead(make_snapshot, arrivals, memory, lead_s=0.0).wanted[D]
    assert decision.wanted[D] <= ahead(make_snapshot, arrivals + more, memory, lead_s=lead_s).wanted[D] + 1e-9
    # A line through rates up to 1000 requests/s over at least 30 s rises by at most 100 requests/s each second.
    assert decision.wanted[D] <= (2000.0 + 100.0 * lead_s) / 40.0 + 1


@given(st.floats(0.05, 20.0))
def test_memory_is_bounded_however_often_it_decides(make_snapshot: Callable[..., Snapshot], interval_s: float) -> None:
    memory: Mapping[str, tuple[float, ...]] = {}
    for tick in range(200):
        now_s = 1000.0 + tick * interval_s
        memory = ahead(make_snapshot, float(tick), memory, now_s=now_s).memory
        assert len(memory["arrivals_at_s"]) == len(memory["arrivals_per_s"]) <= 65
        assert memory["arrivals_at_s"][0] >= now_s - 60.0


@pytest.mark.parametrize(
    ("start_s", "reason"),
    [(50.0, "274 requests/s, 299 in 50 s"), (60.0, "304 in 60 s"), (7200.0, "304 in 60 s")],
)
def test_arrivals_are_forecast_by_an_observed_start_but_no_further_than_the_trend_is_long(
    make_snapshot: Callable[..., Snapshot], start_s: float, reason: str
) -> None:
    snapshot = make_snapshot(
        stats={role: {"waiting_requests": 0.0} for role in Role},
        traffic=Traffic(requests_per_s=274.0),
        # 5 requests/s more every 10 s.
        state=ControllerState(memory=arrivals_before(259.0, 264.0, 269.0), starts_s={PoolKey("g0", D): (start_s,) * 3}),
    )
    assert reason in decide(snapshot, decode_requests_per_s=40.0, lead_s=20.0, trend_s=60.0).reason


@pytest.mark.parametrize(
    ("served", "text"),
    [
        (1500.0, "; a prefill replica serves 3 requests/s, configured are 6"),
        (2250.0, None),  # 4.5 are a quarter below
        (3750.0, None),  # 7.5 are a quarter above
        (4500.0, "; a prefill replica serves 9 requests/s, configured are 6"),
    ],
)
def test_a_learned_rate_that_differs_by_more_than_a_quarter_is_named(
    make_snapshot: Callable[..., Snapshot], served: float, text: str | None
) -> None:
    idle = {"waiting_requests": 0.0, "running_requests": 0.0}
    snapshot = make_snapshot(
        stats={P: idle, D: idle},
        traffic=Traffic(requests_per_s=3.0, served_per_s=3.0),
        state=ControllerState(memory={"prefill_service_rate": (served, 500.0, 1000.0)}),
    )
    reason = decide(snapshot, prefill_requests_per_s=6.0).reason
    assert reason.endswith(text) if text is not None else "configured are" not in reason


@pytest.mark.parametrize("window_s", [10.0, 20.0, 60.0])
def test_refused_requests_of_five_seconds_count_as_waiting_whatever_the_window_is(
    make_snapshot: Callable[..., Snapshot], window_s: float
) -> None:
    signals, now_s = Signals(window_s), 1000.0
    for seconds in range(0, 121, 5):  # three requests wait, and 15 a second are refused
        now_s = 1000.0 + seconds
        figures = {"waiting_requests": 3.0, "offered_requests": 20.0 * seconds}
        refused = {"refused_predicted_ttft_normal": 15.0 * seconds}
        signals.add_endpoint({"i0": (now_s, figures | refused)}, now_s, 5.0)
    snapshot = make_snapshot(now_s=now_s, traffic=signals.traffic())
    assert queue_at_endpoint(snapshot) == pytest.approx(3.0 + 15.0 * 5.0)
    state = ControllerState(settled_s=now_s + 1.0)  # a replica has just entered
    assert queue_at_endpoint(replace(snapshot, state=state)) == 3.0
