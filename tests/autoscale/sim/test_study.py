"""A whole comparison: what it reports for one group, and what for several."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autoscale.engines.profile import EngineProfile
from autoscale.sim import bounds, schedule
from autoscale.sim.checks import check_lengths, least_frac, notes
from autoscale.sim.compare import find_causal, find_oracle, with_cheaper_run
from autoscale.sim.config import SimConfig, SimFailureConfig
from autoscale.sim.outcome import outcome
from autoscale.sim.pressure import pressure_test
from autoscale.sim.scenario import Run, run_schedule, scenario_of
from autoscale.sim.simulations import run_study
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role
from serve_app.cli.sim_report import html_page, summary_table

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
FAST, SLOW = (str(PROFILES / f"h100_llama70b_fp8_{name}.json") for name in ("tp4", "tp2"))


def group(name: str, profile: str | EngineProfile, cost: float, highest: int) -> dict[str, Any]:
    pool = {"profile": profile, "start_s": 5, "cost_per_gpu_hour": cost, "highest_replicas": highest}
    return {"name": name, "prefill": pool, "decode": pool}


def config(*groups: dict[str, Any], **changes: Any) -> SimConfig:
    return SimConfig.model_validate({"groups": groups, "warm_up_s": 10, **changes})


def arrivals(requests_per_s: float, end_s: float) -> list[TraceRequest]:
    rng, trace, at_s = random.Random(0), list[TraceRequest](), 0.0
    while (at_s := at_s + rng.expovariate(requests_per_s)) < end_s:
        trace.append(TraceRequest(at_s=at_s, input_tokens=2000, output_tokens=100))
    return trace


CHEAP, DEAR = group("cheap", SLOW, 1.0, 2), group("dear", FAST, 2.5, 4)
TRACE = arrivals(8.0, 50.0)


def test_several_groups_are_compared_without_bounds_and_the_cheap_one_is_full_first() -> None:
    static = {"static": {"policy": {"prefill": 3, "decode": 3}}}
    settings = config(DEAR, CHEAP, policies=static)
    with ThreadPoolExecutor(1) as pool:
        study = run_study(settings, TRACE, ["static"], rate_scale=1.0, seeds=[0, 1], pool=pool)
    assert [seed.bounds for seed in study.seeds] == [None, None]
    assert study.bound_rows() == {}
    assert study.beat_the_oracle == []
    assert study.flags[0].startswith("the oracle and the bounds plan one group")
    (row, _) = study.rows("static")
    assert row["gpu_hours_over_oracle"] is None
    # Work of 3 dear replicas of each role: two cheap ones, all that their group can have, are worth 1.3 and 1.4 dear
    # ones, so two dear ones are needed beside them.
    end_s = TRACE[-1].at_s
    assert row["gpu_hours"] == pytest.approx((2 * 2 * 2 + 2 * 2 * 4) * (end_s - 10.0) / 3600)
    assert row["cost"] == pytest.approx((2 * 2 * 2 + 2.5 * 2 * 2 * 4) * (end_s - 10.0) / 3600)
    assert row["failed_requests"] == 0


def test_fixed_counts_lose_replicas_like_every_policy() -> None:
    failing = config(CHEAP | {"prefill": {**CHEAP["prefill"], "highest_replicas": 9}}, oracle_simulated_requests=1)
    dying = failing.model_copy(update={"failures": (SimFailureConfig(at_s=30.0, role=Role.DECODE, replicas=2),)})
    fared = []
    for settings in (failing, dying):
        with ThreadPoolExecutor(1) as pool:
            study = run_study(settings, TRACE, ["static"], rate_scale=1.0, seeds=[0], pool=pool)
        fared.append(study.rows("static")[0])
        assert study.bound_rows()["smallest_static"][0]["failed_requests"] == 0
    assert fared[0]["failed_requests"] == 0
    assert fared[1]["failed_requests"] > 0 or fared[1]["slo_attainment_frac"] < fared[0]["slo_attainment_frac"]


def test_a_policy_may_have_the_name_by_which_a_bound_is_shown() -> None:
    """Names of policies never hide a bound: neither in its results nor in its row of a page."""
    fixed = {"policy": {"kind": "static", "prefill": 1, "decode": 1}}
    settings = config(
        group("g0", SLOW, 1.0, 1), oracle_simulated_requests=1, policies={"causal bound": fixed, "1P1D": fixed}
    )
    names = ["causal bound", "1P1D"]
    with ThreadPoolExecutor(1) as pool:
        study = run_study(settings, arrivals(2.0, 20.0), names, rate_scale=1.0, seeds=[0], pool=pool)
    assert study.rows("causal bound") == study.rows("1P1D")
    assert set(study.bound_rows()) == {"oracle", "causal_bound", "smallest_static", "aggregated"}
    file = {"file": "", "sha256": ""}
    report = {"trace": file, "config": file, "seeds": [0], "policies": {name: {"parameters": {}} for name in names}}
    assert html_page(study, report).count("<td>causal bound</td>") == 2


def test_the_required_share_counts_only_measured_requests_that_can_meet_the_objectives() -> None:
    settings = config(group("g0", SLOW, 1.0, 8), slo={"tpot_s": 0.0182}, oracle_simulated_requests=1)
    hopeless = [replace(request, input_tokens=100_000) for request in TRACE[::20]]
    late = sum(request.at_s >= 10.0 for request in hopeless)
    mixed = sorted([*TRACE, *hopeless], key=lambda request: request.at_s)
    measured = sum(request.at_s >= 10.0 for request in mixed)
    scenario = scenario_of(settings, mixed)
    assert least_frac(settings, scenario) == pytest.approx(0.994 * (1 - late / measured))
    assert notes(settings, mixed)[-1].startswith(f"{len(hopeless)} of {len(mixed)} requests cannot meet their TPOT")


def test_a_study_notes_what_limits_its_figures() -> None:
    settings = config(CHEAP, oracle_simulated_requests=1)
    settings = settings.model_copy(
        update={
            "failures": (SimFailureConfig(at_s=30.0, role=Role.DECODE), SimFailureConfig(at_s=9e4, role=Role.DECODE))
        }
    )
    with ThreadPoolExecutor(1) as pool:
        study = run_study(settings, TRACE, ["static"], rate_scale=1.0, seeds=[0, 1], pool=pool)
    failed = sum(seed.policies["static"].outcome.failed_requests for seed in study.seeds)
    assert failed
    assert study.flags[-3:] == [
        f"a failure at 90000 s comes after the last request, at {TRACE[-1].at_s:g} s: it changes nothing",
        f"static: {failed} requests failed or had not ended 605 s after the last one came; "
        "latencies are those of the other requests",
        "at a rate scale of 1 a seed changes only how routers choose between equal replicas: arrivals are the "
        "same, so the intervals are too narrow",
    ]
    late = [replace(request, at_s=request.at_s + 20_000.0) for request in TRACE]
    (line,) = notes(config(CHEAP), late)
    assert line.startswith("the first request comes 19,990 s after the warm-up: GPU-hours of that time count too")
    assert notes(config(CHEAP), late, is_replayed=False) == []


def test_nothing_is_a_multiple_of_a_bound_that_attains_nothing() -> None:
    few = config(group("g0", SLOW, 1.0, 1), oracle_simulated_requests=1)
    with ThreadPoolExecutor(1) as pool:
        study = run_study(few, arrivals(40.0, 20.0), ["static"], rate_scale=1.0, seeds=[0], pool=pool)
    (row,) = study.rows("static")
    assert row["gpu_hours"] > 0.0
    assert row["gpu_hours_over_oracle"] is None and row["gpu_hours_over_causal_bound"] is None
    console = Console(record=True, width=100)
    console.print(summary_table(study))
    assert " - " in console.export_text()


def test_the_objective_of_a_prompt_counts_the_link_that_its_kv_takes() -> None:
    """The objective is three times the unloaded TTFT. At 1 GB/s, 2,000 tokens of 327,680 bytes take 0.66 s."""
    slow = config({**CHEAP, "uplink_bytes_per_s": 1e9})
    alone, behind = (scenario_of(each, TRACE[:1]).slos[0].ttft_s for each in (config(CHEAP), slow))
    assert behind > 3 * 2000 * 327_680 / 1e9 > alone


def test_batches_beyond_the_profile_are_noted() -> None:
    large = group("g0", EngineProfile.load(Path(SLOW)).model_copy(update={"max_running": 400}), 1.0, 2)
    assert notes(config(CHEAP), TRACE) == []
    (line,) = notes(config(large), TRACE)
    assert "engines run up to 400 requests at once, but only batches of 369 were profiled" in line


def test_requests_with_derived_times_in_any_group_count_in_figures_as_in_notes() -> None:
    measured = EngineProfile.load(Path(SLOW))
    derived = measured.model_copy(
        update={"prefill": measured.prefill.model_copy(update={"derived_above_tokens": 1000})}
    )
    settings = config(group("measured", measured, 1.0, 2), group("derived", derived, 1.0, 2))
    scenario = scenario_of(settings, TRACE)
    figures = outcome(run_schedule(scenario, {key: [(0.0, 1)] for key in scenario.pools}))
    assert figures.derived_requests == figures.requests
    (line,) = notes(settings, scenario.measured_trace)
    assert line.startswith(f"{figures.requests} of {figures.requests} requests have prompts whose times were derived")


def test_the_oracle_is_never_dearer_than_the_causal_bound() -> None:
    settings = config(group("g0", SLOW, 1.0, 8), oracle_simulated_requests=1)
    oracle = find_oracle(settings, TRACE, rate_scale=1.0)
    dear = replace(oracle.result.outcome, gpu_hours=oracle.result.outcome.gpu_hours * 2)
    causal = find_causal(settings, oracle)
    better = with_cheaper_run(replace(oracle, result=replace(oracle.result, outcome=dear)), causal)
    assert better.result is causal.result
    assert better.is_beaten_by(oracle.result) == (oracle.result.outcome.gpu_hours < causal.result.outcome.gpu_hours)
    assert with_cheaper_run(oracle, replace(causal, is_attained=False)) is oracle


def test_the_oracle_and_what_needs_it_refuse_several_groups() -> None:
    settings = config(DEAR, CHEAP)
    with pytest.raises(ValueError, match="the oracle: needs a configuration with one group, got 2: leave one of them"):
        find_oracle(settings, TRACE, rate_scale=1.0)
    with pytest.raises(ValueError, match="the pressure test: needs"):
        pressure_test(settings, TRACE, gpus=8)
    with ThreadPoolExecutor(1) as pool:
        for names, scale, says in ((["wva"], None, "--rate-scale auto"), (["static"], 1.0, "smallest static")):
            with pytest.raises(ValueError, match=says):
                run_study(settings, TRACE, names, rate_scale=scale, seeds=[0], pool=pool)


def test_objectives_come_from_the_slowest_group_whatever_the_order() -> None:
    slow, both, turned = (
        scenario_of(config(*groups, slo={"ttft_least_s": 0.01}), TRACE[:5]).slos[0].ttft_s
        for groups in ((CHEAP,), (CHEAP, DEAR), (DEAR, CHEAP))
    )
    assert slow == both == turned > scenario_of(config(DEAR, slo={"ttft_least_s": 0.01}), TRACE[:5]).slos[0].ttft_s


def test_a_request_must_fit_the_engines_of_every_group(tmp_path: Path) -> None:
    small = group("small", EngineProfile.load(Path(SLOW)).model_copy(update={"kv_tokens": 8000}), 1.0, 2)
    long = [TraceRequest(at_s=0.0, input_tokens=8000, output_tokens=1)]
    check_lengths(config(DEAR, CHEAP), long, tmp_path)
    with pytest.raises(ValueError, match="do not fit the KV of an engine, 8000 tokens"):
        check_lengths(config(DEAR, small), long, tmp_path)


def test_bounds_of_another_seed_are_found_near_the_first_ones_with_less_work(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(group("g0", SLOW, 1.0, 40), oracle_simulated_requests=1)
    trace = TRACE[:240]
    first = find_oracle(settings, trace, rate_scale=2.0)
    runs = list[Run]()

    def counted(*arguments: Any) -> Run:
        runs.append(run_schedule(*arguments))
        return runs[-1]

    for module in (bounds, schedule):
        monkeypatch.setattr(module, "run_schedule", counted)
    anew = find_oracle(settings, trace, rate_scale=2.0, seed=1)
    alone = len(runs)
    found = find_oracle(settings, trace, rate_scale=2.0, seed=1, other_seed=first)
    assert len(runs) - alone < alone
    for each in (anew, found):
        assert each.static.is_attained
        assert each.result.outcome.slo_attainment_frac >= settings.slo.attainment_frac
    assert found.result.outcome.gpu_hours <= 1.1 * anew.result.outcome.gpu_hours
    assert found.static.result.outcome.gpu_hours <= 1.1 * anew.static.result.outcome.gpu_hours
    causal = find_causal(settings, first)
    again = find_causal(settings, found, causal)
    assert again.is_attained
    assert again.result.outcome.gpu_hours <= found.static.result.outcome.gpu_hours
