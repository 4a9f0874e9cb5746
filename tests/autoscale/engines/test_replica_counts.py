"""Whole replicas of both roles, by hand and against all counts tried."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.candidates import Candidate, Need, NoEngineError
from autoscale.engines.lengths import Lengths
from autoscale.engines.profile import EngineProfile
from autoscale.engines.replica_counts import fleet_of_means, fleets_for_load, fleets_in_gpus

MakeEngine = Callable[..., EngineProfile]
FAST_LINK = {"base_s": 0.0, "kv_bytes_per_token": 1000, "bytes_per_s": 1e9}
# 90 tokens take 0.1 s of prefill. Eight requests run in steps of 28 ms: 8 / (0.028 x 20) = 14.29 requests/s.
NEED = Need(lengths=Lengths.fixed(90.0, 20.0), longest_input_tokens=90.0, ttft_s=1.0, tpot_s=0.05)


@pytest.fixture(scope="session")
def make_engine(make_profile: Callable[..., EngineProfile]) -> MakeEngine:
    """The engine by hand with a fast link and a number of GPUs."""

    def make(gpus: int = 1, gpu: str | None = "H100", **changes: object) -> EngineProfile:
        return make_profile(**{"gpus": gpus, "gpu": gpu, "handoff": FAST_LINK, **changes})

    return make


def fit(*profiles: EngineProfile) -> list[Candidate]:
    return [Candidate(profile=profile, longest_s=0.0) for profile in profiles]


def test_the_fewest_whole_replicas_that_carry_a_load_by_hand(make_engine: MakeEngine) -> None:
    (fleet,) = fleets_for_load(fit(make_engine()), fit(make_engine(2)), NEED, 30.0, {})
    # 30 / (0.9 x 10) = 3.33 and 30 / (0.9 x 14.29) = 2.33, rounded up.
    assert (fleet.prefill_needed, fleet.decode_needed) == pytest.approx((30 / 9, 30 / (0.9 * 8 / 0.56)))
    assert (fleet.prefill_replicas, fleet.decode_replicas) == (4, 3)
    assert fleet.gpus_by_type == {"H100": 4 + 6}
    assert fleet.cost_per_hour == 10.0
    assert fleet.carried_per_s == pytest.approx(36.0)  # prefill: 4 x 0.9 x 10


def test_a_larger_engine_is_taken_only_if_the_whole_is_cheaper(make_engine: MakeEngine) -> None:
    # The larger one serves 32 requests in 28 ms a step: four times as many with twice the GPUs.
    small = make_engine(2, name="small")
    steps = {"batch": [1, 32], "context_tokens": [100], "step_s": [[0.021], [0.028]]}
    large = make_engine(4, name="large", max_running=32, kv_tokens=10_000, decode=steps)
    decodes = fit(small, large)
    names = [
        [fleet.decode.name for fleet in fleets_for_load(fit(make_engine()), decodes, NEED, rate, {})]
        for rate in (10.0, 50.0)
    ]
    assert names == [["small", "large"], ["large", "small"]]  # 2 against 4 GPUs, and 8 against 4


def test_prices_may_turn_the_choice(make_engine: MakeEngine) -> None:
    cheap, dear = make_engine(gpu="A100", name="cheap"), make_engine(gpu="H100", name="dear")
    slow = make_engine(
        gpu="A100", name="cheap", prefill={"tokens": [0, 1000], "seconds": [0.02, 2.02]}
    )  # half of the speed
    best = fleets_for_load(fit(slow, dear), fit(cheap), NEED, 30.0, {"A100": 1.0, "H100": 2.5})[0]
    assert (best.prefill.name, best.gpus_by_type, best.cost_per_hour) == ("cheap", {"A100": 7 + 3}, 10.0)
    best = fleets_for_load(fit(slow, dear), fit(cheap), NEED, 30.0, {"A100": 1.0, "H100": 1.2})[0]
    assert best.prefill.name == "dear"
    assert best.gpus_by_type == {"H100": 4, "A100": 3}


def test_in_a_budget_the_pair_is_searched_together(make_engine: MakeEngine) -> None:
    # 7 GPUs. 3P2D carries min(27, 25.7), 5P1D and 1P3D less. By the ratio of 1.43 alone: 2.9P2.04D.
    fleet = fleets_in_gpus(fit(make_engine()), fit(make_engine(2)), NEED, {"H100": 7}, {})[0]
    assert (fleet.prefill_replicas, fleet.decode_replicas) == (3, 2)
    assert fleet.carried_per_s == pytest.approx(0.9 * 2 * 8 / 0.56)
    # One GPU more carries no more: the fewest GPUs are taken.
    assert fleets_in_gpus(fit(make_engine()), fit(make_engine(2)), NEED, {"H100": 8}, {})[0].cost_per_hour == 7.0


def test_the_gpus_of_a_large_cluster_are_searched_in_seconds(make_engine: MakeEngine) -> None:
    # 10,000 / (1 + 2 / 1.43) = 4,166.7. For each number of prefill replicas, one number of decode replicas is tried.
    fleet = fleets_in_gpus(fit(make_engine()), fit(make_engine(2)), NEED, {"H100": 10_000}, {})[0]
    assert (fleet.prefill_replicas, fleet.decode_replicas) == (4166, 2917)


def test_each_type_has_its_own_budget(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine(gpu="A100"), make_engine(2, gpu="H100")
    fleet = fleets_in_gpus(fit(prefill), fit(decode), NEED, {"A100": 2, "H100": 8}, {})[0]
    assert fleet.gpus_by_type == {"A100": 2, "H100": 4}  # two prompts' engines fill two decode engines
    with pytest.raises(NoEngineError, match="no prefill and decode replica fit 8 H100"):
        fleets_in_gpus(fit(prefill), fit(decode), NEED, {"H100": 8}, {})


def test_engines_without_a_gpu_count_as_one(make_engine: MakeEngine) -> None:
    fleet = fleets_in_gpus(fit(make_engine(0, None)), fit(make_engine(0, None)), NEED, {"CPU": 3}, {})[0]
    assert (fleet.prefill_replicas, fleet.decode_replicas, fleet.gpus_by_type) == (2, 1, {"CPU": 3})


@given(
    budget=st.integers(3, 40),
    input_tokens=st.floats(1.0, 900.0),
    output_tokens=st.floats(1.0, 90.0),
    sizes=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])),
)
def test_no_other_counts_in_the_budget_carry_more_or_the_same_for_less(
    make_engine: MakeEngine, budget: int, input_tokens: float, output_tokens: float, sizes: tuple[int, int]
) -> None:
    need = Need(lengths=Lengths.fixed(input_tokens, output_tokens), longest_input_tokens=900.0, ttft_s=9.0, tpot_s=0.05)
    engines = make_engine(sizes[0]), make_engine(sizes[1])
    if sum(sizes) > budget:
        return
    fleet = fleets_in_gpus(fit(engines[0]), fit(engines[1]), need, {"H100": budget}, {})[0]
    for prefills in range(1, budget + 1):
        for decodes in range(1, budget + 1):
            gpus = prefills * sizes[0] + decodes * sizes[1]
            if gpus > budget:
                continue
            ratio = fleet.ratio
            carried = 0.9 * min(prefills * ratio.prefill_requests_per_s, decodes * ratio.decode_requests_per_s)
            assert carried <= fleet.carried_per_s + 1e-6
            assert gpus >= fleet.cost_per_hour or carried < fleet.carried_per_s - 1e-9


@given(rate=st.floats(0.0, 1000.0))
def test_the_load_is_carried_and_one_replica_less_of_either_role_carries_less(
    make_engine: MakeEngine, rate: float
) -> None:
    fleet = fleets_for_load(fit(make_engine()), fit(make_engine(2)), NEED, rate, {})[0]
    assert fleet.carried_per_s >= rate * (1 - 1e-9)
    for count, per_s in (
        (fleet.prefill_replicas, fleet.ratio.prefill_requests_per_s),
        (fleet.decode_replicas, fleet.ratio.decode_requests_per_s),
    ):
        assert count == 1 or 0.9 * (count - 1) * per_s < rate


def test_what_the_mean_alone_asks_for_carries_less(make_engine: MakeEngine) -> None:
    bent = make_engine(prefill={"tokens": [0, 100, 1000], "seconds": [0.0, 0.1, 4.6]})
    lengths = Lengths.independent(((30.0, 0.75), (270.0, 0.25)), ((20.0, 1.0),))
    need = Need(lengths=lengths, longest_input_tokens=270.0, ttft_s=9.0, tpot_s=0.05)
    fleet = fleets_for_load(fit(bent), fit(make_engine()), need, 20.0, {})[0]
    means = fleet_of_means(fleet, need, 20.0, {})
    # The prompts take 0.75 x 0.03 + 0.25 x 0.95 = 0.26 s in the mean, and a prompt of the mean length 0.09 s.
    assert fleet.prefill_replicas == math.ceil(20 * 0.26 / 0.9) == 6
    assert means.prefill_replicas == 2
    assert means.ratio.prefill_per_decode == pytest.approx(8 / 0.56 * 0.09)
    assert means.carried_per_s == pytest.approx(0.9 * 2 / 0.26)
