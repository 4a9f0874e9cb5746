"""WVA's setting as the paper states it, and laws of its rows."""

from itertools import islice
from statistics import fmean

import pytest

from autoscale.policies.peers.hpa import HpaConfig
from autoscale.policies.wva import WvaConfig
from autoscale.report import Slo
from autoscale.sim.scenario import Scenario, run_schedule
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from tests.lab.papers.wva import RATES, TEST_S, claims, reactions, served, tiering
from tests.lab.papers.wva_setting import (
    ADMISSION,
    HIGHEST,
    HPA,
    KV_TOKENS,
    TOKEN_S,
    WVA,
    physical_variant,
    run,
    settings,
    simulated_variant,
    stairs,
)


def test_the_parameters_are_the_papers() -> None:
    policy = settings(WVA).policy
    assert isinstance(policy, WvaConfig)
    assert (policy.saturated_kv_frac, policy.saturated_waiting_requests, policy.spare_kv_frac) == (0.8, 5.0, 0.3)
    hpa = settings(HPA).policy
    assert isinstance(hpa, HpaConfig)
    assert [(of.metric.value, of.target) for of in hpa.metrics(Role.DECODE)] == [
        ("kv_usage_frac", 0.5),
        ("waiting_requests", 3.0),
    ]
    trace = stairs([(600.0, 10.0)], 0)
    # 6,000 lengths: three standard errors are 80 and 20 tokens.
    assert fmean(request.input_tokens for request in trace) == pytest.approx(4096, abs=80)
    assert fmean(request.output_tokens for request in trace) == pytest.approx(1024, abs=20)
    assert (trace[0].at_s, trace[-1].at_s) == (0.05, 599.95)


def test_an_engine_serves_a_tenth_of_what_ten_serve_in_the_paper() -> None:
    # Three requests at a time, of 4,096 input and 1,024 output tokens, are 5.78 / 10 requests per second.
    alone_s = 4096 * 5e-6 + 1024 * TOKEN_S
    assert 3 / alone_s == pytest.approx(0.578)
    assert physical_variant().profile.kv_tokens // 16 == KV_TOKENS // 16 == 1024


def test_ten_simulated_engines_can_serve_the_highest_step_without_a_queue() -> None:
    variant = simulated_variant("A100", cost=1.0, highest=HIGHEST)
    trace = stairs([(60.0, 10.0)], 0)
    base = run(WVA, trace, [variant]).scenario
    scenario = Scenario(
        trace=trace,
        slos=[Slo(ttft_s=0.5, tpot_s=0.01)] * len(trace),
        profiles=base.profiles,
        pools=base.pools,
        router=base.router,
        warm_up_s=0.0,
    )
    done = run_schedule(scenario, {variant.key: [(0.0, HIGHEST)], PoolKey("a100", Role.PREFILL): [(0.0, 1)]})
    # Alone a prompt takes 0.08 s at most; a few meet a long one in front of them.
    assert done.attainment_frac > 0.98


@pytest.mark.parametrize("policy", [WVA, HPA])
def test_nothing_is_computed_on_prefill_and_only_admission_refuses(policy: dict[str, object]) -> None:
    trace = stairs([(60.0, 6.0)], 0)
    for refuse_at, errors in ((None, {None}), (ADMISSION, {None, "refused"})):
        done = run(policy, trace, [physical_variant()], refuse_at=refuse_at)
        assert all(record.prefilled_s is None for record in done.records)
        assert {record.error for record in done.records} == errors


def test_replicas_follow_both_steps() -> None:
    first, second = reactions(0)
    assert first.before < first.after <= second.before < second.after <= HIGHEST
    assert second.scaled_out_s <= 30.0


def test_the_expensive_variant_grows_only_when_the_cheap_one_is_full() -> None:
    found = tiering(0)
    assert found.is_cheap_first
    assert 0.0 < found.full_s <= found.grew_s < TEST_S


def test_served_and_failed_requests_add_up_to_the_arrivals() -> None:
    stages = served(WVA, 60.0, [0])
    assert [each.goodput_per_s + each.failed_per_s for each in stages] == pytest.approx(list(RATES))
    assert [each.replicas for each in stages] == sorted(each.replicas for each in stages)


def test_rows_fit_the_table_and_come_out_the_same_again() -> None:
    lines: list[str] = []
    rows = list(claims(lines.append, seeds=[1]))
    assert lines == ["Experiment 1", "Experiment 2", "against the HPA"]
    assert rows[:3] == list(islice(claims(seeds=[1]), 3))  # the first two experiments: the third takes twice as long
    for row in rows:
        assert len(row.what) <= 50
        assert max(len(row.claimed), len(row.ours)) <= 60
        assert len(row.assumption) <= 160
