"""Laws of the oracle and of the bounds beside it."""

import itertools
import random

import numpy as np
import pytest

from autoscale.sim import bounds
from autoscale.sim.bounds import causal_bound, smallest_static
from autoscale.sim.oracle import Oracle
from autoscale.sim.scenario import Scenario, run_schedule
from autoscale.sim.schedule import demands, filled, run_counts
from kvtransfer.topology import Role
from tests.autoscale.sim.conftest import KEYS, make_scenario

_LEAST = 0.97


def wave(seed: int, requests_per_s: tuple[float, ...], part_s: float = 4.0) -> Scenario:
    """A scenario of parts with different loads, one after another."""
    rng = random.Random(seed)
    arrivals = []
    for index, rate in enumerate(requests_per_s):
        count = round(rate * part_s)
        times = sorted(rng.uniform(index * part_s, (index + 1) * part_s) for _ in range(count))
        arrivals += [(at, rng.randint(200, 3000), rng.randint(20, 200)) for at in times]
    return make_scenario(arrivals, start_s=2.0, highest=3)


def exhaustive_gpu_hours(scenario: Scenario, bin_s: float) -> float:
    """The cheapest of all schedules of one to three replicas of each role.

    It simulates a schedule only if its replicas, without their time to start and to end, cost less than the cheapest
    so far.
    """
    bins = int(scenario.end_s // bin_s) + 1
    bin_hours = np.minimum(bin_s, scenario.end_s - bin_s * np.arange(bins)) / 3600
    schedules: dict[tuple[int, ...], float] = {}
    for levels in itertools.product((1, 2, 3), repeat=2 * bins):
        each = np.array(levels).reshape(2, bins)
        counts = np.array([filled(row, 2.0 / bin_s, scenario.warm_up_s / bin_s) for row in each])
        schedules[tuple(counts.ravel())] = 2 * float((counts * bin_hours).sum())
    best = np.inf
    for levels, least_gpu_hours in sorted(schedules.items(), key=lambda schedule: schedule[1]):
        if least_gpu_hours >= best:
            break
        counts = np.array(levels).reshape(2, bins)
        run = run_counts(scenario, counts, bin_s)
        assert run.gpu_hours >= least_gpu_hours * (1 - 1e-9)
        if run.attainment_frac >= _LEAST:
            best = min(best, run.gpu_hours)
    return best


@pytest.mark.parametrize(
    ("seed", "rates"), [(0, (5.0, 13.0, 3.0)), (1, (12.0, 4.0, 8.0)), (2, (3.0, 3.0, 14.0)), (3, (9.0, 9.0, 9.0))]
)
def test_the_oracle_equals_exhaustive_search_on_small_traces(seed: int, rates: tuple[float, ...]) -> None:
    scenario = wave(seed, rates)
    oracle = Oracle(scenario, _LEAST, bin_s=4.0, tpot_s=0.05)
    static = smallest_static(scenario, _LEAST, tpot_s=0.05)
    plan, run = oracle.plan(static.sizes if static.is_attained else None)
    assert run.attainment_frac >= _LEAST
    assert run.gpu_hours == pytest.approx(exhaustive_gpu_hours(scenario, 4.0))
    assert plan.shape == (2, int(scenario.end_s // 4.0) + 1)


def test_without_counts_that_attain_enough_the_nearest_plan_is_the_result() -> None:
    scenario = wave(0, (30.0, 30.0))
    oracle = Oracle(scenario, 0.999, bin_s=4.0, tpot_s=0.05, most_runs=30)
    _, run = oracle.plan(dict.fromkeys(Role, 3))
    most = run_schedule(scenario, {key: [(0.0, 3)] for key in scenario.pools})
    assert most.attainment_frac <= run.attainment_frac < 0.999


def test_a_lull_that_is_longer_than_a_start_but_shorter_than_half_of_the_rest_is_spared() -> None:
    scenario = wave(4, (*[12.0] * 6, 1.0, *[12.0] * 8))
    (counts, _), _ = Oracle(scenario, _LEAST, bin_s=4.0, tpot_s=0.05).plan()
    assert counts[6] < min(counts[2:5])


def test_gaps_shorter_than_a_start_are_filled_and_longer_ones_are_not() -> None:
    counts = np.array([2, 2, 3, 1, 3, 1, 1, 1, 1, 3])
    assert list(filled(counts, 2.0, 0.0)) == [2, 2, 3, 3, 3, 1, 1, 1, 1, 3]


def test_the_first_counts_stay_while_policies_are_held_and_for_a_start_more() -> None:
    assert list(filled(np.array([1, 1, 2, 4, 1, 1, 1]), 1.0, 2.0)) == [2, 2, 2, 4, 1, 1, 1]


def test_demands_count_all_of_a_traces_prefill_work() -> None:
    scenario = wave(3, (8.0, 12.0))
    work = demands(scenario, 4.0, 0.05)
    curve = scenario.profiles[KEYS[Role.PREFILL]].prefill
    whole = sum(curve.chunk_s(0.0, request.input_tokens) for request in scenario.trace)
    assert work[0].sum() * 4.0 == pytest.approx(whole)


@pytest.mark.parametrize("seed", range(4))
def test_fixed_counts_are_those_of_an_exhaustive_search(seed: int) -> None:
    scenario = wave(seed, (10.0, 13.0, 7.0))
    attained = [
        sum(pair)
        for pair in itertools.product((1, 2, 3), repeat=2)
        if run_schedule(
            scenario, {KEYS[role]: [(0.0, count)] for role, count in zip(Role, pair, strict=True)}
        ).attainment_frac
        >= _LEAST
    ]
    bound = smallest_static(scenario, _LEAST, tpot_s=0.05)
    assert bound.is_attained == bool(attained)
    assert not attained or sum(bound.sizes.values()) == min(attained)


def test_fixed_counts_attain_enough_and_one_fewer_of_either_role_does_not() -> None:
    scenario = wave(1, (12.0, 11.0, 12.0))
    bound = smallest_static(scenario, _LEAST, tpot_s=0.05)
    assert bound.is_attained
    for role in Role:
        fewer = {KEYS[each]: [(0.0, int(bound.sizes[each]) - (each is role))] for each in Role}
        if min(count for ((_, count),) in fewer.values()) >= 1:
            assert run_schedule(scenario, fewer).attainment_frac < _LEAST


def test_the_causal_planner_never_uses_what_arrives_within_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two traces that are equal up to a time have equal counts until one start later."""
    calm, burst = wave(5, (10.0, 10.0, 10.0, 10.0)), wave(5, (10.0, 10.0, 10.0, 14.0))
    monkeypatch.setattr(bounds, "_MOST_RUNS", 3)
    plans = []
    for scenario in (calm, burst):  # a start takes 2 s
        timeline = causal_bound(scenario, 0.5, tpot_s=0.05).result.timeline
        plans.append([point for point in timeline if point[0] < 14.0])
    assert plans[0] == plans[1]


def test_the_causal_planner_has_replicas_one_start_after_the_work_that_needs_them() -> None:
    """The planner knows at 55 s of work that rises at 50 s, and a start takes 20 s."""
    scenario = make_scenario([(0.0, 1000, 20)], start_s=20.0)
    work = np.array([1.0] * 10 + [5.0] * 10)
    windows = bounds.Windows(look_back_s=bounds._GRID_S, keep_s=bounds._GRID_S)
    steps = bounds._causal_counts(scenario, KEYS[Role.DECODE], work, windows)
    assert steps == [(0.0, 1), (75.0, 5)]
