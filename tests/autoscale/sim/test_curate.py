"""Laws of the search of policies and parameters."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from autoscale.policies.heteroscale import Signal
from autoscale.policies.peers import SIM_POLICIES
from autoscale.pressure.rate_search import PressurePoint
from autoscale.sim.compare import find_oracle
from autoscale.sim.curate import SPACES, Candidate, curate, draw
from autoscale.sim.pressure import PressureResult
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role
from tests.autoscale.sim.conftest import LLAMA

POINT = PressurePoint(
    prefill=8, decode=4, requests_per_s=60.0, attainment_frac=0.995, signals={Signal.DECODE_TPS: 3000.0}
)
PRESSURE = PressureResult(points=[POINT], aggregated=replace(POINT, prefill=0, decode=12, requests_per_s=40.0), gpus=24)
FIXED = {"prefill": 10, "decode": 5}


def test_every_policy_can_be_searched_except_the_periodic_one() -> None:
    assert set(SIM_POLICIES) - set(SPACES) == {"periodic"}


@pytest.mark.parametrize("kind", sorted(SPACES))
def test_drawn_configurations_are_valid_and_all_different(kind: str) -> None:
    drawn = draw(LLAMA, kind, 30, PRESSURE, FIXED, random.Random(3))
    assert drawn == draw(LLAMA, kind, 30, PRESSURE, FIXED, random.Random(3))
    assert len({str(each) for each in drawn}) == len(drawn)
    for changes in drawn:
        LLAMA.model_copy(update={"policies": {kind: changes}}).autoscale_config(kind)


def test_every_policy_gets_the_same_number_of_tries_if_its_space_has_them() -> None:
    assert {len(draw(LLAMA, kind, 12, PRESSURE, FIXED, random.Random(0))) for kind in SPACES if kind != "static"} == {
        12
    }


def test_fixed_counts_that_are_tried_stay_inside_the_limits_of_pools() -> None:
    (group,) = LLAMA.groups
    prefill, decode = (group.pool(role) for role in Role)
    changes = {
        "prefill": prefill.model_copy(update={"highest_replicas": 11}),
        "decode": decode.model_copy(update={"lowest_replicas": 5}),
    }
    config = LLAMA.model_copy(update={"groups": (group.model_copy(update=changes),)})
    drawn = draw(config, "static", 5, PRESSURE, FIXED, random.Random(0))
    counts = {(each["policy"]["prefill"], each["policy"]["decode"]) for each in drawn}
    assert counts == {(9, 5), (10, 5), (11, 6)}


def test_targets_are_multiples_of_the_figures_of_the_pressure_test() -> None:
    (changes,) = draw(LLAMA, "heteroscale", 1, PRESSURE, FIXED, random.Random(0))
    assert changes["pd_ratio"] == "2:1"
    assert changes["policy"]["signal"] == "decode_tps"
    assert changes["policy"]["target"] / 3000.0 in SPACES["heteroscale"]["policy.target*"]
    (changes,) = draw(LLAMA, "queue_depth", 1, PRESSURE, FIXED, random.Random(0))
    assert changes["policy"]["decode_requests_per_s"] / 15.0 in SPACES["queue_depth"]["policy.decode_requests_per_s*"]


def test_without_a_split_that_keeps_the_objectives_every_policy_can_be_tried() -> None:
    nothing = replace(PRESSURE, points=[replace(POINT, requests_per_s=0.0, signals=dict.fromkeys(POINT.signals))])
    for kind in SPACES:
        for changes in draw(LLAMA, kind, 3, nothing, FIXED, random.Random(0)):
            LLAMA.model_copy(update={"policies": {kind: changes}}).autoscale_config(kind)


def test_the_best_of_each_policy_comes_first_and_attaining_enough_beats_being_cheap() -> None:
    rng = random.Random(0)
    trace, at_s = [], 0.0
    while at_s < 100.0:
        at_s += rng.expovariate(8.0)
        trace.append(TraceRequest(at_s=at_s, input_tokens=rng.randint(200, 2500), output_tokens=rng.randint(10, 150)))
    config = LLAMA.model_copy(update={"warm_up_s": 10.0, "oracle_simulated_requests": 1})
    oracle = find_oracle(config, trace, rate_scale=1.0)
    done: list[Candidate] = []
    with ThreadPoolExecutor(1) as pool:
        found = curate(config, oracle, PRESSURE, ["default", "static"], tries=4, seed=0, pool=pool, on_done=done.append)
    assert {kind: len(each) for kind, each in found.items()} == {"default": 4, "static": len(found["static"])}
    assert len(done) == sum(len(each) for each in found.values())
    for each in found.values():
        scores = [one.score(0.994) for one in each]
        assert scores == sorted(scores, reverse=True)
    enough, cheap = (found["static"][0], found["static"][-1])
    assert enough.result.outcome.slo_attainment_frac >= 0.994
    assert enough.score(0.994) >= cheap.score(0.994)
