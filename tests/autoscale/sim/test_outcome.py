"""Figures of a run are those of the measured time alone."""

from typing import Any

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.sim.config import SimFailureConfig
from autoscale.sim.outcome import outcome
from autoscale.sim.scenario import run_policy, run_schedule
from kvtransfer.topology import Role
from tests.autoscale.sim.conftest import KEYS, make_scenario

P, D = Role.PREFILL, Role.DECODE


def schedule(*counts: int) -> dict[Any, list[tuple[float, int]]]:
    return {KEYS[role]: [(0.0, count)] for role, count in zip(Role, counts, strict=True)}


def test_only_work_in_the_measured_time_counts_as_utilisation() -> None:
    """The same requests run in the warm-up, or after it. In a third run an answer ends long after the last arrival."""
    early = [(0.1 * n, 1000, 50) for n in range(40)]
    late = [(60.0 + 0.1 * n, 1000, 50) for n in range(40)]
    used = {
        name: outcome(run_schedule(make_scenario(arrivals, warm_up_s=50.0), schedule(1, 1))).decode_utilization_frac
        for name, arrivals in (("early", [*early, (100.0, 1000, 1)]), ("late", [*late, (100.0, 1000, 1)]))
    }
    assert used["early"] == pytest.approx(0.0, abs=0.01)
    assert used["late"] is not None and used["late"] > 0.08
    long = make_scenario([*early, (59.0, 1000, 5000), (60.0, 1000, 1)], warm_up_s=50.0)
    found = outcome(run_schedule(long, schedule(1, 1)))
    # One answer from 59 s on, and 10 s are measured: the rest of the answer does not count.
    assert found.decode_utilization_frac is not None and 0.05 < found.decode_utilization_frac < 0.12


def test_replicas_that_come_and_go_after_the_last_arrival_are_no_scale_events() -> None:
    arrivals = [(n / 10, 2000, 200) for n in range(300)] + [(30.0, 500, 20_000)]
    config = AutoscaleConfig.model_validate(
        {
            "policy": {"kind": "heteroscale", "signal": "decode_tps", "target": 500},
            "pd_ratio": "1:1",
            "interval_s": 5,
            "window_s": 10,
            "guard": {"cooldown_in_s": 0, "cooldown_out_s": 0},
        }
    )
    run = run_policy(make_scenario(arrivals), config, dict.fromkeys(KEYS.values(), 1))
    moves = {(life.requested_s, life.key, 1) for life in run.fleet.lives if life.requested_s}
    moves |= {(life.stopped_s, life.key, -1) for life in run.fleet.lives if life.stopped_s is not None}
    measured = [move for move in moves if move[0] <= run.scenario.end_s]
    assert 0 < len(measured) < len(moves)
    assert outcome(run).scale_events == len(measured)


def test_a_replica_that_dies_and_is_replaced_at_once_is_no_scale_event() -> None:
    arrivals = [(0.5 * n, 1000, 20) for n in range(200)]
    config = AutoscaleConfig.model_validate(
        {"policy": {"kind": "static", "prefill": 2, "decode": 2}, "pd_ratio": "1:1"}
    )
    scenario = make_scenario(arrivals, failures=[SimFailureConfig(at_s=40.0, role=D)])
    run = run_policy(scenario, config, dict.fromkeys(KEYS.values(), 2))
    assert sum(life.stopped_s == 40.0 for life in run.fleet.lives) == 1
    found = outcome(run)
    assert (found.scale_events, found.flaps) == (0, 0)


@pytest.mark.parametrize(("shrinks_s", "flaps"), [(130.0, 1), (140.0, 0)])
def test_a_pool_that_shrinks_within_two_minutes_of_its_growth_has_flapped(shrinks_s: float, flaps: int) -> None:
    """A replica that is ready at 15 s was requested at 10 s."""
    scenario = make_scenario([(2.0 * n, 1000, 20) for n in range(100)], start_s=5.0)
    counts = {KEYS[P]: [(0.0, 1)], KEYS[D]: [(0.0, 1), (15.0, 2), (shrinks_s, 1)]}
    found = outcome(run_schedule(scenario, counts))
    assert (found.scale_events, found.flaps) == (2, flaps)


def test_an_answer_may_take_as_long_as_its_objective_lets_it() -> None:
    """An answer of 60,000 tokens takes more than 15 minutes, and still meets its objectives."""
    run = run_schedule(make_scenario([(0.0, 500, 60_000), (1.0, 500, 10)]), schedule(1, 1))
    assert run.records[0].last_token_s is not None and run.records[0].last_token_s > 900.0
    assert run.attainment_frac == 1.0


def test_a_trace_whose_last_request_comes_as_the_warm_up_ends_is_refused() -> None:
    scenario = make_scenario([(0.0, 500, 10), (30.0, 500, 10)], warm_up_s=30.0)
    with pytest.raises(ValueError, match=r"no request arrives after the warm-up of 30 s"):
        outcome(run_schedule(scenario, schedule(1, 1)))
