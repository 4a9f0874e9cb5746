"""The prefill queue of a virtual cluster: late binding by hand, and replicas that go while prompts wait."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from autoscale.engines.profile import EngineProfile
from autoscale.report import RequestRecord
from autoscale.sim.clock import Clock
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.journey import Journey
from autoscale.sim.prefill_queue import VirtualPrefillQueue
from autoscale.slo import SloConfig
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import PrefillQueueConfig, RouterConfig

MakeProfile = Callable[..., EngineProfile]
P, D = PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE)
STRATEGIES = ["fcfs", "edf", "dopd"]


def cluster(profile: EngineProfile, strategy: str, prefill: int = 2, decode: int = 1, **changes: Any) -> VirtualCluster:
    config = RouterConfig.model_validate(
        {
            "length": {"local_max_tokens": 0, "local_cap_tokens": 0},
            "prefill_queue": {"strategy": strategy, "window_tokens": 100},
        }
    )
    made = VirtualCluster(dict.fromkeys((P, D), profile), config, random.Random(0), **changes)
    for key, count in ((P, prefill), (D, decode)):
        names = [f"{key.role}-{number}" for number in range(count)]
        for name in names:
            made.add(key, name)
        made.route(key, names)
    return made


def requests(*lengths: int) -> list[TraceRequest]:
    """Requests of these lengths, 1 ms apart."""
    return [TraceRequest(at_s=n / 1000, input_tokens=tokens, output_tokens=1) for n, tokens in enumerate(lengths)]


def ran(made: VirtualCluster, trace: list[TraceRequest]) -> list[RequestRecord]:
    made.submit(trace)
    made.run()
    assert made.is_done
    return made.records()


def test_a_prompt_goes_to_the_replica_that_has_room_first(make_profile: MakeProfile) -> None:
    # Two prompts for each replica: 200 and 200 tokens, 600 and 600 tokens. A chunk of 100 tokens takes 0.11 s.
    records = ran(cluster(make_profile(), "fcfs"), requests(200, 600, 200, 600, 100))
    # The last prompt waits for the end of the first one, after 0.22 s, and goes behind the third one: 0.44 s, 0.55 s.
    assert records[2].prefilled_s == pytest.approx(0.44, abs=0.01)
    assert records[4].prefilled_s == pytest.approx(0.55, abs=0.01)


def test_with_edf_a_short_prompt_overtakes_long_ones_that_came_before(make_profile: MakeProfile) -> None:
    slo = SloConfig(ttft_s=0.5, ttft_s_per_input_token=0.01)
    lengths = (*[600] * 8, 100)
    place = {}
    for strategy in ("fcfs", "edf"):
        prefilled_s = [one.prefilled_s for one in ran(cluster(make_profile(), strategy, slo=slo), requests(*lengths))]
        ends_s = [end_s for end_s in prefilled_s if end_s is not None]
        place[strategy] = sum(end_s < ends_s[-1] for end_s in ends_s)
    assert place["edf"] <= 4 < 7 <= place["fcfs"]  # with EDF, after those of the first four that are not done yet


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_prompt_goes_where_its_beginning_is_cached(strategy: str) -> None:
    clock, bound = Clock(lambda request: None), list[tuple[str, str]]()
    config = PrefillQueueConfig.model_validate({"strategy": strategy})
    queue = VirtualPrefillQueue(
        config, SloConfig(), clock, on_bind=lambda journey, name: bound.append((journey.name, name)), on_leave=id
    )
    queue.route(["a", "b"])
    for number, holder in enumerate("bab"):
        journey = Journey(number=number, request=requests(1000)[0], block_hashes=())
        queue.add(journey, {holder: 900})
        assert bound[-1] == (str(number), holder)
        assert journey.expected_tokens[Role.PREFILL] == 900


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_prompts_are_answered_if_a_prefill_replica_dies_while_they_wait(
    make_profile: MakeProfile, strategy: str
) -> None:
    made = cluster(make_profile(), strategy)
    victim = next(one for one in made._groups["g0"].replicas.values() if one.replica_id == "prefill-0")

    def die() -> None:
        made.kill(victim)
        made.route(P, ["prefill-1"])

    made.at(0.3, die)
    records = ran(made, requests(*[300] * 12))
    assert [one.error for one in records] == [None] * 12
    assert 0 < sum(one.prefilled_s is None for one in records) < 6  # decode computed those that the victim had


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_decode_computes_the_waiting_prompts_if_no_prefill_replica_is_left(
    make_profile: MakeProfile, strategy: str
) -> None:
    made = cluster(make_profile(), strategy)
    made.at(0.1, lambda: made.route(P, []))
    records = ran(made, requests(*[300] * 12))
    assert [one.error for one in records] == [None] * 12
    assert sum(one.prefilled_s is not None for one in records) == 4  # those that were bound


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requests_of_a_decode_replica_that_dies_wait_no_longer(make_profile: MakeProfile, strategy: str) -> None:
    made = cluster(make_profile(), strategy, decode=2)
    victim = next(one for one in made._groups["g0"].replicas.values() if one.replica_id == "decode-0")

    def die() -> None:
        made.kill(victim)
        made.route(D, ["decode-1"])

    made.at(0.1, die)
    records = ran(made, requests(*[300] * 12))
    lost = [one for one in records if one.error is not None]
    assert {one.error for one in lost} == {"its decode replica died"} and len(lost) == 6
    # Two of the lost ones were bound by then. Prefill does not compute the four that waited.
    engines = [one.engine for one in made._groups["g0"].replicas.values() if one.key == P]
    assert sum(engine.counters.prefill_tokens for engine in engines) == 8 * 300


def test_requests_that_wait_at_the_end_of_a_simulation_are_given_up(make_profile: MakeProfile) -> None:
    made = cluster(make_profile(), "dopd")
    made.submit(requests(*[600] * 8))
    made.run(0.05)
    made.give_up()
    assert [one.error for one in made.records()] == ["not ended"] * 8
