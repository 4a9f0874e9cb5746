"""Our copy of Ray's autoscaling counts as Ray's own functions do, and keeps its delays in the policy's memory."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import (
    _apply_delay_logic,
    _apply_scaling_factors,
    _core_replica_queue_length_policy,
)
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from autoscale.policies.peers.serve_baseline import (
    RayBaseline,
    RayBaselineConfig,
    apply_delay_logic,
    apply_scaling_factors,
    replicas_for_ongoing,
)
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, PoolKey, Snapshot
from kvtransfer.topology import Role

pytestmark = pytest.mark.ray

P, D = Role.PREFILL, Role.DECODE
MakeSnapshot = Callable[..., Snapshot]
# Some are exact in binary and some are not: both must round as Ray's do.
FACTORS = st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.9, 1.0, 1.5, 2.0])


def context(running: int, target_replicas: int, ongoing: float, config: AutoscalingConfig) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=DeploymentID(name="d"),
        deployment_name="d",
        app_name=None,
        current_num_replicas=running,
        target_num_replicas=target_replicas,
        running_replicas=[],
        total_num_requests=ongoing,
        total_queued_requests=None,
        aggregated_metrics=None,
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=1000,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=config,
    )


def test_the_defaults_are_rays() -> None:
    ours, theirs = RayBaselineConfig(), AutoscalingConfig()
    assert ours.prefill_ongoing_requests == ours.decode_ongoing_requests == theirs.get_target_ongoing_requests()
    assert (ours.upscaling_factor, ours.downscaling_factor) == (
        theirs.get_upscaling_factor(),
        theirs.get_downscaling_factor(),
    )
    assert (ours.upscale_delay_s, ours.downscale_delay_s) == (theirs.upscale_delay_s, theirs.downscale_delay_s)
    assert ours.look_back_s == theirs.look_back_period_s


@given(st.integers(1, 300), st.floats(0, 1e5), st.floats(0.1, 500), FACTORS, FACTORS)
def test_the_count_is_the_one_that_ray_computes(
    running: int, ongoing: float, target: float, up: float, down: float
) -> None:
    config = AutoscalingConfig(
        max_replicas=1000, target_ongoing_requests=target, upscaling_factor=up, downscaling_factor=down
    )
    theirs, _ = _core_replica_queue_length_policy(context(running, running, ongoing, config))
    ours = replicas_for_ongoing(ongoing, running, target)
    assert ours == theirs
    factors = RayBaselineConfig(upscaling_factor=up, downscaling_factor=down)
    assert apply_scaling_factors(ours, running, factors) == _apply_scaling_factors(theirs, running, config)
    assert apply_scaling_factors(ours, 0, factors) == _apply_scaling_factors(theirs, 0, config)


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from([0.1, 5.0, 10.0, 30.0]), st.integers(0, 6)), max_size=40))
def test_the_delay_is_the_one_that_ray_counts(start: int, ticks: list[tuple[float, int]]) -> None:
    config = AutoscalingConfig(max_replicas=1000, upscale_delay_s=30.0, downscale_delay_s=60.0)
    delays = RayBaselineConfig(upscale_delay_s=30.0, downscale_delay_s=60.0)
    ours = theirs = start
    since: tuple[float, ...] = ()
    state: dict[str, Any] = {}
    now_s = 1000.0
    for passed_s, desired in ticks:
        now_s += passed_s
        theirs, state = _apply_delay_logic(desired, theirs, config, state, _now=now_s)
        ours, since = apply_delay_logic(desired, ours, since, now_s, delays)
        assert ours == theirs


def snapshot(
    make_snapshot: MakeSnapshot, ongoing: tuple[float | None, float | None], *, now_s: float, memory: Any, **fields: Any
) -> Snapshot:
    """Two prefill and four decode replicas, each with this number of ongoing requests: half running, half waiting."""
    stats = {
        role: {} if each is None else {"running_requests": each / 2, "waiting_requests": each / 2}
        for role, each in zip(Role, ongoing, strict=True)
    }
    desired = {PoolKey("g0", P): 2, PoolKey("g0", D): 4}
    return make_snapshot(
        2, 4, now_s=now_s, stats=stats, state=ControllerState(desired=desired, memory=memory, **fields)
    )


def run(make_snapshot: MakeSnapshot, ticks: list[tuple[float | None, float | None]], **config: Any) -> list[Decision]:
    policy = RayBaseline(RayBaselineConfig.model_validate(config), ratio=PdRatio(1, 2), slo=SloConfig())
    memory: Any = {}
    decisions = []
    for index, ongoing in enumerate(ticks):
        decisions.append(policy.decide(snapshot(make_snapshot, ongoing, now_s=1000.0 + 5.0 * index, memory=memory)))
        memory = decisions[-1].memory
    return decisions


def test_more_replicas_are_wanted_after_the_delay_and_not_before(make_snapshot: MakeSnapshot) -> None:
    # 2 x 6 = 12 ongoing requests at 4 a replica are 3 prefill replicas, from the first tick on; decode needs no change.
    config = {"prefill_ongoing_requests": 4.0, "decode_ongoing_requests": 4.0}
    decisions = run(make_snapshot, [(6.0, 4.0)] * 7, **config)
    assert [d.wanted for d in decisions[:6]] == [{P: 2.0, D: 4.0}] * 6
    assert decisions[6].wanted == {P: 3, D: 4}  # 30 s
    assert decisions[6].is_step and decisions[6].ratio == PdRatio(3, 4)


def test_a_tick_that_wants_no_more_begins_the_delay_anew(make_snapshot: MakeSnapshot) -> None:
    config = {"prefill_ongoing_requests": 4.0, "decode_ongoing_requests": 4.0, "look_back_s": 1.0}
    ticks = [(6.0, 4.0)] * 3 + [(4.0, 4.0)] + [(6.0, 4.0)] * 7
    assert [d.wanted[P] for d in run(make_snapshot, ticks, **config) if d.wanted] == [2.0] * 10 + [3.0]


def test_deferred_requests_are_ongoing_and_those_of_a_leaving_replica_are_not(make_snapshot: MakeSnapshot) -> None:
    stats = {D: {"running_requests": 1.0, "waiting_requests": 1.0, "deferred_requests": 2.0}}
    state = ControllerState(desired={PoolKey("g0", P): 1, PoolKey("g0", D): 3}, withdrawn={"d3": 990.0})
    policy = RayBaseline(RayBaselineConfig(), ratio=PdRatio(1, 1), slo=SloConfig())
    shown = policy.decide(make_snapshot(1, 4, stats=stats, state=state)).shown
    assert [(entry.name, entry.value) for entry in shown] == [("decode_ongoing_requests", 4.0)]


def test_without_observations_there_is_no_decision_and_memory_stays(make_snapshot: MakeSnapshot) -> None:
    first, blind = run(make_snapshot, [(6.0, 4.0), (None, None)], look_back_s=1.0)
    assert blind.wanted is None and "no replica reports" in blind.reason
    assert first.memory and blind.memory and blind.memory["prefill_since"] == first.memory["prefill_since"]
    one = run(make_snapshot, [(None, 40.0)], upscale_delay_s=0.0)[0]
    assert one.wanted == {P: 2.0, D: 80}  # prefill as it is; 160 ongoing requests at 2 a decode replica


@given(st.floats(0, 1e4), st.floats(0, 1e3))
def test_more_ongoing_requests_never_need_fewer_replicas(
    make_snapshot: MakeSnapshot, ongoing: float, more: float
) -> None:
    calm = {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0}
    (base,), (busier,) = (run(make_snapshot, [(each, each)], **calm) for each in (ongoing, ongoing + more))
    assert base.wanted and busier.wanted
    assert all(0 <= base.wanted[role] <= busier.wanted[role] for role in Role)
    assert run(make_snapshot, [(ongoing, ongoing)], **calm) == [base]


def test_memory_is_bounded_by_the_look_back(make_snapshot: MakeSnapshot) -> None:
    memory = run(make_snapshot, [(6.0, 4.0)] * 100)[-1].memory
    assert memory is not None
    assert max(len(series) for series in memory.values()) == 7  # 30 s at 5 s, both ends


@pytest.mark.parametrize(
    "config", [{"upscaling_factor": 0}, {"look_back_s": 0}, {"prefill_ongoing_requests": 0}, {"x": 1}]
)
def test_what_ray_refuses_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"greater than 0|not permitted"):
        RayBaselineConfig.model_validate(config)
