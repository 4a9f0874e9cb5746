"""Laws of a whole run: warm-up, failures, shared links, prefixes, GPU-hours."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.engines.profile import EngineProfile
from autoscale.sim.config import SimFailureConfig
from autoscale.sim.outcome import outcome
from autoscale.sim.scenario import Run, run_policy, run_schedule, unloaded_ttft_s
from kvtransfer.topology import Role
from router.config import RouterConfig
from tests.autoscale.sim.conftest import KEYS, PROFILE, make_scenario

STEADY = [(0.1 * n, 800, 60) for n in range(600)]


def controlled(**changes: Any) -> AutoscaleConfig:
    return AutoscaleConfig.model_validate(
        {"policy": {"kind": "static", "prefill": 2, "decode": 2}, "interval_s": 2.0, "gate": {"observation_s": 2.0}}
        | changes
    )


def fixed(scenario: Any, prefill: int, decode: int) -> Run:
    return run_schedule(scenario, {KEYS[Role.PREFILL]: [(0.0, prefill)], KEYS[Role.DECODE]: [(0.0, decode)]})


def test_fixed_counts_cost_their_gpus_for_the_time_after_the_warm_up() -> None:
    scenario = make_scenario(STEADY, warm_up_s=20.0)
    run = fixed(scenario, 2, 1)
    assert run.gpu_hours == pytest.approx(3 * 2 * (scenario.end_s - 20.0) / 3600)
    assert len(run.measured) == 400
    assert all(record.sent_s >= 20.0 for record in run.measured)


def test_a_replica_that_a_schedule_adds_costs_from_one_start_before() -> None:
    scenario = make_scenario(STEADY, start_s=5.0)
    steps = {KEYS[Role.PREFILL]: [(0.0, 1), (30.0, 2), (40.0, 1)], KEYS[Role.DECODE]: [(0.0, 1)]}
    base = fixed(scenario, 1, 1).gpu_hours
    extra_s = (run_schedule(scenario, steps).gpu_hours - base) * 3600 / 2
    assert 14.99 <= extra_s < 16.0  # 5 s to start, 10 s of service, then the rest of its requests


def test_policies_keep_the_first_counts_while_the_trace_warms_up() -> None:
    scenario = make_scenario(STEADY, warm_up_s=20.0)
    run = run_policy(scenario, controlled(), dict.fromkeys(KEYS.values(), 1))
    requests_s = [life.requested_s for life in run.fleet.lives if life.requested_s > 0.0]
    assert len(requests_s) == 2
    assert min(requests_s) >= 20.0


def test_all_of_the_first_counts_serve_while_the_trace_warms_up_whatever_the_ratio() -> None:
    scenario = make_scenario(STEADY, warm_up_s=20.0)
    run = run_policy(scenario, controlled(pd_ratio="1:1"), {KEYS[Role.PREFILL]: 1, KEYS[Role.DECODE]: 4})
    assert {len(plan.admitted) for at_s, plan in run.plans if at_s < 20.0} == {5}


def test_runs_of_one_seed_are_the_same() -> None:
    scenario = make_scenario(STEADY)
    first, again = (run_policy(scenario, controlled(), dict.fromkeys(KEYS.values(), 1)) for _ in range(2))
    assert first.records == again.records
    assert first.gpu_hours == again.gpu_hours


def test_streams_of_a_decode_replica_that_dies_fail_and_another_takes_its_place() -> None:
    scenario = make_scenario(STEADY, failures=[SimFailureConfig(at_s=30.0, role=Role.DECODE)])
    run = run_policy(scenario, controlled(), dict.fromkeys(KEYS.values(), 2))
    failed = [record for record in run.records if record.error is not None]
    assert failed
    assert {record.error for record in failed} == {"its decode replica died"}
    assert all(record.sent_s <= 30.0 for record in failed)
    assert len(run.records) == len(STEADY)
    assert [life.requested_s for life in run.fleet.lives if life.requested_s > 0.0] == [30.0]
    assert outcome(run).failed_requests == len(failed)


def test_no_request_is_lost_when_all_prefill_replicas_die() -> None:
    scenario = make_scenario(STEADY, failures=[SimFailureConfig(at_s=30.0, role=Role.PREFILL, replicas=2)])
    run = run_policy(scenario, controlled(), dict.fromkeys(KEYS.values(), 2))
    assert all(record.error is None for record in run.records)
    local = [record for record in run.records if record.prefilled_s is None and record.input_tokens > 512]
    assert local  # prompts were computed where they decode
    assert all(25.0 <= record.sent_s <= 40.0 for record in local)


def test_requests_wait_while_no_decode_replica_is_up() -> None:
    scenario = make_scenario(STEADY, start_s=4.0, failures=[SimFailureConfig(at_s=30.0, role=Role.DECODE, replicas=2)])
    run = run_policy(scenario, controlled(), dict.fromkeys(KEYS.values(), 2))
    assert len(run.records) == len(STEADY)
    assert [record.sent_s for record in run.records] == [at for at, _, _ in STEADY]
    waited = [record for record in run.records if 30.5 <= record.sent_s <= 33.0]
    assert all(record.error is None and record.first_token_s > 34.0 for record in waited)


def test_a_shared_uplink_delays_first_tokens_and_a_fifth_less_bandwidth_only_a_little() -> None:
    arrivals = [(0.05 * n, 3000, 20) for n in range(200)]

    def ttft(**changes: Any) -> float:
        return outcome(fixed(make_scenario(arrivals, **changes), 8, 4)).ttft_p50_s or 0.0

    own, crossing, shared = ttft(), ttft(link_frac=0.8), ttft(uplink_bytes_per_s=2.2e10)
    assert own < crossing < own + 0.02
    assert shared > crossing


def test_prefixes_that_come_again_are_not_computed_again() -> None:
    def run_with_ids(ids: tuple[int, ...] | None) -> Run:
        scenario = make_scenario([(2.0 * n, 4096, 20) for n in range(20)], prefix_block_tokens=512)
        trace = [replace(r, hash_ids=() if ids is None else (*ids, 100 + n)) for n, r in enumerate(scenario.trace)]
        return fixed(replace(scenario, trace=trace), 1, 1)

    def computed(run: Run) -> int:
        return sum(
            life.replica.engine.counters.prefill_tokens
            for life in run.fleet.lives
            if life.replica is not None and life.key.role is Role.PREFILL
        )

    cold, warm = run_with_ids(None), run_with_ids(tuple(range(7)))
    assert computed(cold) == 20 * 4096
    # After the first prompt, seven of its eight blocks are cached.
    assert computed(warm) == 4096 + 19 * 512
    assert (outcome(warm).ttft_p50_s or 0.0) < (outcome(cold).ttft_p50_s or 0.0) / 2
    assert outcome(cold).cached_prompt_frac == 0.0
    assert outcome(warm).cached_prompt_frac == pytest.approx(19 * 7 / (20 * 8), abs=0.01)


def test_our_policy_sizes_prefill_by_the_tokens_that_are_not_cached() -> None:
    def prefill_hours(is_shared: bool) -> float:
        scenario = make_scenario([(0.05 * n, 8192, 20) for n in range(2800)], highest=40, prefix_block_tokens=512)
        ids = [(*(range(15) if is_shared else range(100 + 20 * n, 115 + 20 * n)), 90_000 + n) for n in range(2800)]
        trace = [replace(r, hash_ids=each) for r, each in zip(scenario.trace, ids, strict=True)]
        config = AutoscaleConfig.model_validate(
            {
                "policy": {"kind": "default", "prefill": PROFILE, "decode": PROFILE, "stay_starts": 1.0},
                "pd_ratio": "1:1",
                "window_s": 10,
                "guard": {"cooldown_in_s": 0, "step_in_replicas": 20, "step_out_replicas": 40},
            }
        )
        run = run_policy(replace(scenario, trace=trace), config, dict.fromkeys(KEYS.values(), 15))
        assert run.attainment_frac > 0.99
        return run.fleet.gpu_hours(100.0, scenario.end_s)[KEYS[Role.PREFILL]]

    assert prefill_hours(True) < 0.4 * prefill_hours(False)


def test_aggregated_groups_prefill_where_they_decode() -> None:
    scenario = make_scenario(STEADY)
    key = KEYS[Role.DECODE]
    alone = replace(scenario, profiles={key: scenario.profiles[key]}, pools={key: scenario.pools[key]})
    run = run_schedule(alone, {key: [(0.0, 4)]})
    assert all(record.error is None and record.prefilled_s is None for record in run.records)
    assert outcome(run).prefill_utilization_frac is None


def test_the_figures_of_an_outcome_fit_each_other() -> None:
    scenario = make_scenario(STEADY, warm_up_s=10.0)
    found = outcome(run_policy(scenario, controlled(), dict.fromkeys(KEYS.values(), 1)))
    assert found.requests == 500
    assert found.gpu_hours_by_type == {"H100": pytest.approx(found.gpu_hours)}
    assert found.cost == pytest.approx(2.0 * found.gpu_hours)
    assert found.goodput_requests_per_s == pytest.approx(
        found.slo_attainment_frac * found.requests / (scenario.end_s - 10.0)
    )
    assert found.peak_replicas == 4
    assert found.scale_events == 2
    assert found.flaps == 0
    idle_kwh, full_kwh = (share * 0.7 * found.gpu_hours for share in (0.18, 1.0))
    assert found.energy_kwh is not None
    assert idle_kwh < found.energy_kwh < full_kwh


def test_a_trace_that_ends_in_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="no request arrives after the warm-up of 100 s"):
        outcome(fixed(make_scenario(STEADY, warm_up_s=100.0), 1, 1))


def test_a_request_that_never_ends_counts_as_failed() -> None:
    scenario = make_scenario([(0.0, 800, 60)])
    run = run_schedule(scenario, {KEYS[Role.PREFILL]: [(0.0, 1)], KEYS[Role.DECODE]: [(0.0, 0)]})
    assert [record.error for record in run.records] == ["not ended"]
    assert run.attainment_frac == 0.0


def test_unloaded_times_grow_with_length() -> None:
    profile = EngineProfile.load(Path(__file__).parents[3] / "configs" / "profiles" / "h100_llama70b_fp8_tp1.json")
    times = [unloaded_ttft_s(n, dict.fromkeys(Role, profile), RouterConfig()) for n in (50, 500, 2000, 7000)]
    assert times == sorted(times)
    # 0.125 s of prefill at 700 tokens (DOPD, Table I), then its KV over the link and one token again.
    unloaded_s = unloaded_ttft_s(700, dict.fromkeys(Role, profile), RouterConfig())
    assert unloaded_s == pytest.approx(0.125 + 0.024 + 0.02, abs=0.02)
