"""Laws of the clairvoyant planner and of what stands beside it."""

import itertools
import random

import numpy as np
import pytest

from autoscale.sim.bounds import causal_bound, smallest_static
from autoscale.sim.oracle import Oracle, demands, filled, steps
from autoscale.sim.scenario import Scenario, run_schedule
from kvtransfer.topology import Role
from tests.autoscale.sim.conftest import KEYS, make_scenario

_LEAST = 0.97


def wave(seed: int, requests_per_s: tuple[float, ...], part_s: float = 4.0) -> Scenario:
    """Parts of different load, one after another."""
    rng = random.Random(seed)
    arrivals = []
    for index, rate in enumerate(requests_per_s):
        count = round(rate * part_s)
        times = sorted(rng.uniform(index * part_s, (index + 1) * part_s) for _ in range(count))
        arrivals += [(at, rng.randint(200, 3000), rng.randint(20, 200)) for at in times]
    return make_scenario(arrivals, start_s=2.0, highest=3)


def exhaustive_gpu_hours(scenario: Scenario, bin_s: float) -> float:
    """The cheapest of all schedules of one to three replicas of each role."""
    bins = int(scenario.end_s // bin_s) + 1
    seen, best = set(), np.inf
    for levels in itertools.product((1, 2, 3), repeat=2 * bins):
        counts = {
            role: filled(np.array(levels[at * bins : (at + 1) * bins]), 2.0 / bin_s, scenario.warm_up_s / bin_s)
            for at, role in enumerate(Role)
        }
        name = tuple(tuple(each) for each in counts.values())
        if name in seen:
            continue
        seen.add(name)
        run = run_schedule(scenario, steps(counts, KEYS, bin_s))
        if run.attainment_frac >= _LEAST:
            best = min(best, run.gpu_hours)
    return best


@pytest.mark.parametrize(
    ("seed", "rates"), [(0, (5.0, 13.0, 3.0)), (1, (12.0, 4.0, 8.0)), (2, (3.0, 3.0, 14.0)), (3, (9.0, 9.0, 9.0))]
)
def test_the_oracle_equals_exhaustive_search_on_small_traces(seed: int, rates: tuple[float, ...]) -> None:
    scenario = wave(seed, rates)
    oracle = Oracle(scenario, attainment_frac=_LEAST, bin_s=4.0)
    static = smallest_static(scenario, _LEAST, tpot_s=0.05)
    fixed = {role: int(size) for role, size in static.sizes.items()} if static.is_attained else None
    plan, run = oracle.plan(fixed)
    assert run.attainment_frac >= _LEAST
    assert run.gpu_hours == pytest.approx(exhaustive_gpu_hours(scenario, 4.0))
    assert all(len(counts) == int(scenario.end_s // 4.0) + 1 for counts in plan.counts.values())


def test_where_no_counts_attain_enough_the_nearest_plan_is_told() -> None:
    scenario = wave(0, (30.0, 30.0))
    oracle = Oracle(scenario, attainment_frac=0.999, bin_s=4.0, simulated_requests=1)
    _, run = oracle.plan(dict.fromkeys(Role, 3))
    most = run_schedule(scenario, {key: [(0.0, 3)] for key in scenario.pools})
    assert most.attainment_frac <= run.attainment_frac < 0.999


def test_a_lull_that_is_longer_than_a_start_but_shorter_than_half_of_the_rest_is_spared() -> None:
    scenario = wave(4, (*[12.0] * 6, 1.0, *[12.0] * 8))
    plan, _ = Oracle(scenario, attainment_frac=_LEAST, bin_s=4.0).plan()
    counts = plan.counts[Role.PREFILL]
    assert counts[6] < min(counts[2:5])


def test_gaps_shorter_than_a_start_are_filled_and_longer_ones_are_not() -> None:
    counts = np.array([2, 2, 3, 1, 3, 1, 1, 1, 1, 3])
    assert list(filled(counts, 2.0, 0.0)) == [2, 2, 3, 3, 3, 1, 1, 1, 1, 3]


def test_the_first_counts_stay_while_policies_are_held_and_for_a_start_more() -> None:
    assert list(filled(np.array([1, 1, 2, 4, 1, 1, 1]), 1.0, 2.0)) == [2, 2, 2, 4, 1, 1, 1]


def test_demands_count_all_of_a_traces_prefill_work() -> None:
    scenario = wave(3, (8.0, 12.0))
    work = demands(scenario, KEYS, 4.0, 0.05)
    curve = scenario.profiles[KEYS[Role.PREFILL]].prefill
    whole = sum(curve.chunk_s(0.0, request.input_tokens) for request in scenario.trace)
    assert work[Role.PREFILL].sum() * 4.0 == pytest.approx(whole)


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


def test_fixed_counts_attain_and_one_fewer_of_either_does_not() -> None:
    scenario = wave(1, (12.0, 11.0, 12.0))
    bound = smallest_static(scenario, _LEAST, tpot_s=0.05)
    assert bound.is_attained
    for role in Role:
        fewer = {KEYS[each]: [(0.0, int(bound.sizes[each]) - (each is role))] for each in Role}
        if min(count for ((_, count),) in fewer.values()) >= 1:
            assert run_schedule(scenario, fewer).attainment_frac < _LEAST


def test_the_causal_planner_never_uses_what_arrives_within_a_start() -> None:
    """Two traces that are equal up to a time have equal counts until one start later."""
    calm, burst = wave(5, (10.0, 10.0, 10.0, 10.0)), wave(5, (10.0, 10.0, 10.0, 14.0))
    plans = []
    for scenario in (calm, burst):
        bound = causal_bound(scenario, 0.5, tpot_s=0.05, most_runs=3)
        lives = [(life.asked_s, life.stopped_s) for life in bound.run.fleet.lives]
        plans.append([[at for at in life if at is not None and at < 12.0] for life in lives if life[0] < 12.0])
    assert plans[0] == plans[1]
