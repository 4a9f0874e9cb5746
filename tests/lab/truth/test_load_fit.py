"""Laws of the time that load adds to requests of an idle application."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoscale.engines.profile import EngineProfile
from autoscale.traces.trace import TraceRequest
from router.config import RouterConfig
from tests.lab.truth.load_fit import Fit, at_the_edge, fitted
from tests.lab.truth.sim_vs_real import figures, foretold, trace_slice

BASE = EngineProfile.load(Path(__file__).parents[3] / "configs" / "profiles" / "cpu_tiny.json")
ROUTER = RouterConfig()
ALONE = Fit(
    prefill_contention_frac=0.0,
    decode_contention_frac=0.0,
    wake_s=0.0,
    step_frac=1.0,
    stream_s=0.0,
    front_s=0.0,
    swing_frac=0.0,
)


def test_the_time_that_load_adds_is_found_again_and_predicts_other_requests() -> None:
    truth = Fit(prefill_contention_frac=1.0, wake_s=0.012, step_frac=1.3, stream_s=0.0008, front_s=0.004)
    seen, other = trace_slice(0.0, 60.0), trace_slice(300.0, 30.0)
    fit = fitted(BASE, [(seen, [truth.simulated(BASE, seen, ROUTER, seed) for seed in (5, 6, 7)])], ROUTER, tries=40)
    found, expected = (foretold(each, BASE, other, ROUTER, seeds=range(5)) for each in (fit, truth))
    # The fit is to a minute of requests on a machine whose speed varies by a fifth.
    assert found == pytest.approx(expected, rel=0.1)
    assert fit.swing_frac == pytest.approx(truth.swing_frac, abs=0.08)
    assert figures(ALONE.simulated(BASE, other, ROUTER)) != pytest.approx(expected, rel=0.3)


def test_every_load_and_every_replay_of_it_counts() -> None:
    """The fit is to the median of three replays of one load, and to both of two loads."""
    trace, tries = trace_slice(0.0, 10.0), 30
    slow, quick = (Fit(wake_s=wake_s).simulated(BASE, trace, ROUTER) for wake_s in (0.03, 0.003))
    only = [fitted(BASE, [(trace, [each])], ROUTER, tries=tries) for each in (quick, slow)]
    assert fitted(BASE, [(trace, [slow, quick, quick])], ROUTER, tries=tries) == only[0]
    assert fitted(BASE, [(trace, [quick]), (trace, [slow])], ROUTER, tries=tries) not in only


def test_values_at_the_edge_of_their_range_are_named_but_zero_is_no_edge() -> None:
    assert at_the_edge(Fit(wake_s=0.03)) == ["wake_s"]
    assert at_the_edge(Fit(handoff_s=-0.03)) == ["handoff_s"]
    assert at_the_edge(replace(ALONE, step_frac=1.2)) == []


def test_engines_on_the_same_cores_slow_each_other_only_while_both_compute() -> None:
    beside = replace(ALONE, prefill_contention_frac=1.0, decode_contention_frac=1.0)
    alone, many = trace_slice(0.0, 1.0)[:1], trace_slice(300.0, 20.0)
    one, two = (figures(fit.simulated(BASE, alone, ROUTER)) for fit in (ALONE, beside))
    assert two == pytest.approx(one)
    one, two = (figures(fit.simulated(BASE, many, ROUTER)) for fit in (ALONE, beside))
    assert all(two[name] > one[name] for name in one)


def test_time_outside_engines_delays_no_other_request() -> None:
    """Time moves from a prompt's step to the way to the engine: a lone request waits as long, the next one less."""
    outside = replace(ALONE, front_s=0.012)
    alone = TraceRequest(at_s=0.0, input_tokens=300, output_tokens=20)
    (one,), (two,) = ([r.ttft_s for r in fit.simulated(BASE, [alone], ROUTER)] for fit in (ALONE, outside))
    assert two == pytest.approx(one, rel=0.02)  # the shortest prompts have no 12 ms to give
    pair = [alone, replace(alone, at_s=0.001)]
    (_, one), (_, two) = ([r.ttft_s for r in fit.simulated(BASE, pair, ROUTER)] for fit in (ALONE, outside))
    assert one is not None
    assert two is not None
    assert two < one - 0.005  # a step's 12 ms are shared by the prompts in it


def test_a_machine_of_varying_speed_is_as_fast_on_average() -> None:
    trace = trace_slice(300.0, 60.0)
    steady, swinging = (replace(ALONE, swing_frac=frac) for frac in (0.0, 0.2))
    alike = [figures(steady.simulated(BASE, trace, ROUTER, seed))["tpot_p50_s"] for seed in range(3)]
    assert len(set(alike)) == 1
    each = [figures(swinging.simulated(BASE, trace, ROUTER, seed))["tpot_p50_s"] for seed in range(9)]
    assert len(set(each)) == 9
    # In a minute the speed varies about thirty times by a fifth.
    assert sorted(each)[4] == pytest.approx(alike[0], rel=0.1)
