"""The rate of a busy replica is learned at any load, and a configured one that is too high is replaced."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.policies.queue_depth import QueueDepth, QueueDepthConfig
from autoscale.policies.service_rate import ServiceRate
from autoscale.ratio import PdRatio
from autoscale.sim.scenario import Run, run_policy
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, PoolKey, PoolLimits, PoolStats, ReplicaStats, Snapshot, Traffic
from kvtransfer.topology import Role
from tests.autoscale.sim.conftest import KEYS, make_scenario

P, D = Role.PREFILL, Role.DECODE
MakeSnapshot = Callable[..., Snapshot]
_MINUTES = 10


def simulated(requests_per_s: float, configured_per_s: float) -> Run:
    """Ten minutes of Poisson arrivals with prompts of 2,000 tokens, of which a replica computes about six a second."""
    rng, at_s, arrivals = random.Random(5), 0.0, []
    while at_s < 60.0 * _MINUTES:
        arrivals.append((at_s, 2000, 100))
        at_s += rng.expovariate(requests_per_s)
    policy = {"kind": "queue_depth", "prefill_requests_per_s": configured_per_s, "decode_requests_per_s": 9.0}
    config = AutoscaleConfig.model_validate({"policy": policy, "pd_ratio": "3:2", "slo": {"ttft_s": 2.0}})
    return run_policy(make_scenario(arrivals, highest=32), config, {KEYS[P]: 4, KEYS[D]: 3})


@pytest.mark.parametrize(("requests_per_s", "configured_per_s"), [(12.0, 3.0), (12.0, 6.0), (24.0, 12.0)])
def test_after_ten_minutes_the_learned_rate_is_within_15_percent(
    requests_per_s: float, configured_per_s: float
) -> None:
    run = simulated(requests_per_s, configured_per_s)
    shown = {each.name: each.value for each in run.plans[-1][1].decision.shown}
    lives = [life for life in run.fleet.lives if life.key == KEYS[P] and life.replica is not None]
    prompts = sum(record.prefilled_s is not None for record in run.records)
    busy_s = sum(life.replica.engine.counters.busy_s for life in lives if life.replica is not None)
    assert shown["prefill_service_rate"] == pytest.approx(prompts / busy_s, rel=0.15)


def decided(make_snapshot: MakeSnapshot, served: float, busy_s: float) -> float:
    config = QueueDepthConfig(prefill_requests_per_s=6.0)
    policy = QueueDepth(config, ratio=PdRatio(1, 1), slo=SloConfig())
    memory = {"prefill_service_rate": (served, busy_s, 1000.0)}
    idle = {"waiting_requests": 0.0, "running_requests": 0.0}
    snapshot = make_snapshot(
        4,
        4,
        stats={P: idle, D: idle},
        traffic=Traffic(requests_per_s=24.0, served_per_s=24.0),
        state=ControllerState(memory=memory),
    )
    wanted = policy.decide(snapshot).wanted
    assert wanted is not None
    return wanted[P]


def test_a_lower_observed_rate_replaces_the_configured_one_and_a_higher_one_does_not(
    make_snapshot: MakeSnapshot,
) -> None:
    assert decided(make_snapshot, served=600.0, busy_s=200.0) == 8.0  # three requests per second
    assert decided(make_snapshot, served=2400.0, busy_s=200.0) == 4.0  # twelve: six may leave room for the objective
    assert decided(make_snapshot, served=60.0, busy_s=20.0) == 4.0  # too little was observed


def test_decode_shows_its_rate_only_while_all_of_its_replicas_have_a_queue(make_snapshot: MakeSnapshot) -> None:
    traffic = Traffic(requests_per_s=9.0, served_per_s=8.0)
    full = make_snapshot(1, 2, now_s=1010.0, stats={D: {"waiting_requests": 3.0}}, traffic=traffic)
    one = ServiceRate(at_s=1000.0).observed(full, D)
    assert (one.served, one.busy_s) == (80.0, 20.0)
    free = make_snapshot(1, 2, now_s=1010.0, stats={D: {"waiting_requests": 0.0}}, traffic=traffic)
    assert ServiceRate(at_s=1000.0).observed(free, D).busy_s == 0.0


def test_an_observation_of_the_future_is_forgotten() -> None:
    rate = ServiceRate(served=9.0, busy_s=3.0, at_s=2000.0)
    assert ServiceRate.of(rate.memory(P), P, 2000.0) == rate
    assert ServiceRate.of(rate.memory(P), P, 1999.0) == ServiceRate()


@pytest.mark.parametrize("jump_s", [0.0, 600.0, 3600.0])
def test_one_observation_counts_for_a_minute_at_most(make_snapshot: MakeSnapshot, jump_s: float) -> None:
    busy = {"waiting_requests": 1.0, "running_requests": 1.0}
    learned = ServiceRate(served=1500.0, busy_s=300.0, at_s=1000.0)  # five a second
    # All four replicas are busy at the instant after the jump, though two are on average.
    snapshot = make_snapshot(
        4, 4, now_s=1005.0 + jump_s, stats={P: busy, D: busy}, traffic=Traffic(requests_per_s=10.0, served_per_s=10.0)
    )
    rate = learned.observed(snapshot, P).requests_per_s
    assert rate is not None
    assert 3.5 < rate <= 5.0


@pytest.mark.parametrize(("aggregated_replicas", "busy_s"), [(1, 0.0), (0, 10.0)])
def test_prefills_rate_is_not_learned_while_aggregated_replicas_serve_a_part_of_the_requests(
    make_snapshot: MakeSnapshot, aggregated_replicas: int, busy_s: float
) -> None:
    busy = {"waiting_requests": 1.0, "running_requests": 1.0}
    pair = make_snapshot(
        1, 1, now_s=1010.0, stats={P: busy, D: busy}, traffic=Traffic(requests_per_s=9.0, served_per_s=9.0)
    )
    both = PoolStats(
        key=PoolKey("both", D),
        replicas=tuple(
            ReplicaStats(replica_id=f"both{number}", observed_s=1010.0, waiting_requests=0.0, running_requests=1.0)
            for number in range(aggregated_replicas)
        ),
        target_replicas=aggregated_replicas,
        limits=PoolLimits(lowest_replicas=0, highest_replicas=8, capacity=0.5, prompt_capacity=0.5),
    )
    rate = ServiceRate(at_s=1000.0).observed(replace(pair, pools=(*pair.pools, both)), P)
    assert (rate.served, rate.busy_s) == (9.0 * busy_s, busy_s)
