"""Observed decode steps: remembered by window, and held against a profile."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autoscale.decide.steps import Steps, with_steps
from autoscale.engines.engine_model import EngineModel
from autoscale.engines.engine_step import ModelRequest
from autoscale.engines.profile import EngineProfile
from autoscale.observe.report_window import ReportWindow
from autoscale.policies.default import Default, DefaultConfig
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, DecodeStep, Snapshot, Traffic
from kvtransfer.topology import Role

MakeSnapshot = Callable[..., Snapshot]
PROFILE = EngineProfile.load(Path(__file__).parents[3] / "configs" / "profiles" / "h100_llama70b_fp8_tp2.json")
D = Role.DECODE
WINDOW_S = 20.0
SEEN = DecodeStep(batch=8.0, context_tokens=1000.0, seconds=0.02)


def seen(make_snapshot: MakeSnapshot, now_s: float, step: DecodeStep | None) -> Snapshot:
    return make_snapshot(1, 2, now_s=now_s, stats={D: {} if step is None else {"decode_step": step}})


def factor_of(state: ControllerState) -> float | None:
    return DefaultConfig(prefill=PROFILE, decode=PROFILE).step_factor(state)


def observed(factor: float, batch: float = 8.0, context_tokens: float = 1000.0) -> DecodeStep:
    """A step that takes ``factor`` times as long as the profile says."""
    seconds = factor * PROFILE.decode.seconds_for(round(batch), context_tokens)
    return DecodeStep(batch=batch, context_tokens=context_tokens, seconds=seconds)


def test_one_window_after_the_other_is_remembered(make_snapshot: MakeSnapshot) -> None:
    steps: Steps = ()
    for at_s, step in ((0.0, SEEN), (5.0, replace(SEEN, seconds=9.0)), (20.0, None), (25.0, SEEN)):
        steps = with_steps(steps, seen(make_snapshot, at_s, step), WINDOW_S)
    assert steps == ((0.0, SEEN), (25.0, SEEN))
    for number in range(20):
        steps = with_steps(steps, seen(make_snapshot, 100.0 + 20.0 * number, SEEN), WINDOW_S)
    assert len(steps) == 9
    assert with_steps(steps, seen(make_snapshot, 50.0, None), WINDOW_S) == ()  # the clock was set back


def test_the_mean_over_replicas_counts(make_snapshot: MakeSnapshot) -> None:
    snapshot = seen(make_snapshot, 0.0, SEEN)
    other = DecodeStep(batch=16.0, context_tokens=3000.0, seconds=0.04)
    pools = []
    for pool in snapshot.pools:
        first, *others = pool.replicas
        pools.append(
            replace(pool, replicas=(first, *(replace(each, decode_step=other) for each in others)))
            if pool.key.role is D
            else pool
        )
    ((_, mean),) = with_steps((), replace(snapshot, pools=tuple(pools)), WINDOW_S)
    assert mean == DecodeStep(batch=12.0, context_tokens=2000.0, seconds=pytest.approx(0.03))


def test_replicas_of_another_capacity_do_not_count(make_snapshot: MakeSnapshot) -> None:
    snapshot = seen(make_snapshot, 0.0, SEEN)
    fast = tuple(replace(pool, limits=replace(pool.limits, capacity=2.0)) for pool in snapshot.pools)
    assert with_steps((), replace(snapshot, pools=fast), WINDOW_S) == ()


def test_the_median_window_counts_and_points_outside_the_profile_do_not() -> None:
    assert factor_of(ControllerState()) is None
    one_is_odd = (observed(1.2), observed(9.0), observed(1.2))
    assert factor_of(ControllerState(steps=tuple(enumerate(map(replace, one_is_odd))))) == pytest.approx(1.2)
    outside = DecodeStep(batch=8.0, context_tokens=10.0, seconds=9.0)
    assert factor_of(ControllerState(steps=((0.0, outside),))) is None


@pytest.mark.parametrize(
    ("factor", "is_replaced", "is_named"), [(1.05, False, False), (1.2, True, False), (1.4, True, True)]
)
def test_the_profile_follows_its_engines_and_a_drift_is_named(
    make_snapshot: MakeSnapshot, factor: float, is_replaced: bool, is_named: bool
) -> None:
    config = DefaultConfig(prefill=PROFILE, decode=PROFILE)
    state = ControllerState(steps=((1.0, observed(factor)),))
    learned = config.with_observed(state).decode
    assert learned.decode.seconds_for(8, 1000.0) == pytest.approx(
        PROFILE.decode.seconds_for(8, 1000.0) * (factor if is_replaced else 1.0)
    )
    assert learned.prefill == PROFILE.prefill
    traffic = Traffic(requests_per_s=1.0, input_tokens_mean=900.0, output_tokens_mean=200.0)
    snapshot = replace(make_snapshot(1, 1), state=state, traffic=traffic)
    decision = Default(config, ratio=PdRatio.parse("1:1"), slo=SloConfig()).decide(snapshot)
    assert ("measure it again" in decision.reason) is is_named
    assert {"decode_step_factor": pytest.approx(factor)}.items() <= {
        each.name: each.value for each in decision.shown
    }.items()


def test_the_engine_model_reports_its_steps_without_prompts() -> None:
    engine = EngineModel(PROFILE)
    for number in range(4):
        engine.add(ModelRequest(request_id=str(number), input_tokens=1000, output_tokens=101))
    while (step := engine.plan(0.0, 64)) is not None:
        engine.apply(step)
    counters = engine.counters
    assert counters.decode_steps == 100
    assert counters.decode_steps_requests == 400
    assert counters.decode_steps_kv_tokens == sum(4 * (1000 + number) for number in range(100))
    mean_s = counters.decode_steps_s / counters.decode_steps
    assert mean_s == pytest.approx(PROFILE.decode.seconds_for(4, 1049.5))


def test_a_window_has_the_mean_of_its_steps() -> None:
    window = ReportWindow(0.0)
    for at_s, count in ((0.0, 0), (10.0, 50)):
        values = {
            "decode_steps": count,
            "decode_steps_s": 0.02 * count,
            "decode_steps_requests": 8 * count,
            "decode_steps_kv_tokens": 8000 * count,
        }
        window.add(at_s, values, now_s=at_s, window_s=20.0, interval_s=5.0)
    assert window.stats("r").decode_step == DecodeStep(batch=8.0, context_tokens=1000.0, seconds=pytest.approx(0.02))
    idle = ReportWindow(0.0)
    assert idle.stats("r").decode_step is None
