"""Laws of a proposal for a running application."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.tuning import Pools, tuned
from autoscale.engines.profile import EngineProfile
from autoscale.sim.compare import run_named
from autoscale.sim.config import SimConfig
from autoscale.sim.curate import Candidate
from autoscale.sim.logged_day import LoggedDay, Point, trace_of
from autoscale.sim.outcome import Result
from autoscale.sim.proposal import NOW, Proposal, day_config, day_notes, propose
from autoscale.sim.scenario import scenario_of
from autoscale.types import PoolKey, PoolLimits, Traffic
from kvtransfer.topology import Role

P, D = PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE)
MakeConfig = Callable[..., AutoscaleConfig]


@pytest.fixture(name="base")
def _base(make_profile: Callable[..., EngineProfile]) -> SimConfig:
    engine = {"profile": make_profile()}
    return SimConfig.model_validate({"groups": [{"prefill": engine, "decode": engine}], "warm_up_s": 10.0})


def day(config: AutoscaleConfig, **limits: Any) -> LoggedDay:
    traffic = Traffic(requests_per_s=1.0, input_tokens_mean=100.0, output_tokens_mean=10.0)
    bounds = PoolLimits(lowest_replicas=1, highest_replicas=6, **limits)
    points = tuple(Point(at_s=at_s, requests_per_s=1.0, traffic=traffic) for at_s in (0.0, 60.0, 120.0))
    return LoggedDay(service="m", config=config, pools=Pools({P: bounds, D: bounds}), points=points, skipped={})


@pytest.fixture(name="result")
def _result(base: SimConfig, make_autoscale: MakeConfig) -> Result:
    """The run of the present settings."""
    logged = day(make_autoscale())
    config = day_config(base, logged)
    scenario = scenario_of(config, trace_of(logged, np.random.default_rng(0)), seed=0)
    return run_named(config, NOW, scenario, {P: 1, D: 1})


def candidate(result: Result, attained: float, gpu_hours: float, **changes: Any) -> Candidate:
    outcome = replace(result.outcome, slo_attainment_frac=attained, gpu_hours=gpu_hours)
    kind = changes.get("policy", {}).get("kind", "heteroscale")
    return Candidate(kind=kind, changes={"policy": {"kind": kind}, **changes}, result=replace(result, outcome=outcome))


def test_the_application_is_simulated_with_its_own_settings_limits_and_objectives(
    base: SimConfig, make_autoscale: MakeConfig
) -> None:
    live = make_autoscale(pd_ratio="1:3", guard={"cooldown_in_s": 33.0}, override={"prefill": 1, "decode": 3})
    config = day_config(base, day(live))
    now = config.autoscale_config(NOW)
    assert (str(now.pd_ratio), now.guard.cooldown_in_s, now.policy) == ("1:3", 33.0, live.policy)
    assert now.override is None
    assert config.groups[0].prefill.highest_replicas == 6
    slo = config.slo
    assert (slo.ttft_least_s, slo.ttft_unloaded_factor, slo.tpot_s) == (live.slo.ttft_s, 1.0, live.slo.tpot_s)
    assert slo.attainment_frac == live.slo.quantile_frac
    assert any(note.startswith("override of the application is left out") for note in day_notes(base, day(live)))


def test_groups_are_simulated_as_one_and_other_gpus_are_noted(base: SimConfig, make_autoscale: MakeConfig) -> None:
    logged = day(make_autoscale(), gpus_per_replica=8.0)
    limits = logged.pools.root[P]
    more = {PoolKey("g1", role): limits for role in Role}
    logged = replace(logged, pools=Pools({**logged.pools.root, **more}))
    assert day_config(base, logged).groups[0].decode.highest_replicas == 12
    notes = " ".join(day_notes(base, logged))
    assert "groups are simulated as one group" in notes and "a replica of prefill:g0 has 8 GPUs" in notes


def test_settings_that_keep_the_objectives_with_fewer_gpu_hours_are_proposed_as_their_difference(
    base: SimConfig, make_autoscale: MakeConfig, result: Result
) -> None:
    logged = day(make_autoscale())
    now = candidate(result, 1.0, 10.0)
    same = logged.config.guard.cooldown_out_s
    better = candidate(
        result, 0.96, 8.0, policy={"kind": "heteroscale", "target": 77.0}, guard={"cooldown_out_s": same}, window_s=60.0
    )
    proposal = propose(logged, day_config(base, logged), now, [candidate(result, 0.9, 1.0), better], 0.95)
    assert proposal == Proposal(
        now=now, best=better, changes={"policy": {"target": 77.0}, "window_s": 60.0}, redeploy=None
    )
    assert tuned(logged.config, proposal.changes, logged.pools).window_s == 60.0


@pytest.mark.parametrize(
    ("now", "other", "is_proposed"),
    [
        ((1.0, 10.0), (1.0, 9.9), False),  # within what another seed changes
        ((1.0, 10.0), (1.0, 9.7), True),
        ((1.0, 10.0), (0.94, 5.0), False),  # it misses the objectives
        ((0.9, 10.0), (0.96, 20.0), True),  # the present settings miss them
        ((0.9, 10.0), (0.94, 9.0), False),
    ],
)
def test_only_what_is_worth_a_change_is_proposed(
    base: SimConfig,
    make_autoscale: MakeConfig,
    result: Result,
    now: tuple[float, float],
    other: tuple[float, float],
    is_proposed: bool,
) -> None:
    logged = day(make_autoscale())
    proposal = propose(
        logged, day_config(base, logged), candidate(result, *now), [candidate(result, *other, window_s=60.0)], 0.95
    )
    assert (proposal.best is not None) == is_proposed == bool(proposal.changes)


def test_another_kind_of_policy_is_proposed_whole_with_its_profiles(
    base: SimConfig, make_autoscale: MakeConfig, result: Result
) -> None:
    logged = day(make_autoscale())
    other = candidate(result, 1.0, 5.0, policy={"kind": "default", "memory_s": 30.0})
    proposal = propose(logged, day_config(base, logged), candidate(result, 1.0, 10.0), [other], 0.95)
    policy = proposal.changes["policy"]
    assert (policy["kind"], policy["memory_s"]) == ("default", 30.0)
    assert policy["prefill"]["name"] == base.groups[0].prefill.profile.name
    assert tuned(logged.config, proposal.changes, logged.pools).policy.kind == "default"


def test_what_the_pools_cannot_follow_needs_a_new_deployment(
    base: SimConfig, make_autoscale: MakeConfig, result: Result
) -> None:
    logged = day(make_autoscale())
    wide = candidate(result, 1.0, 5.0, bounds={"decode": {"highest_replicas": 9}})
    proposal = propose(logged, day_config(base, logged), candidate(result, 1.0, 10.0), [wide], 0.95)
    assert proposal.redeploy is not None and "reach beyond what decode:g0 was deployed with" in proposal.redeploy
