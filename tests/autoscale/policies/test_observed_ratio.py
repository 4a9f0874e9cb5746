"""The optimal ratio of observed requests by hand: sums over windows, prefix caches, and observed steps and links."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.engines.lengths import Lengths
from autoscale.engines.optimal_ratio import optimal_ratio
from autoscale.engines.profile import EngineProfile
from autoscale.policies.observed_ratio import ratio_of_lengths, ratio_of_sums, with_requests
from autoscale.policies.policy import EnginesConfig, observed_lengths
from autoscale.types import ControllerState, DecodeStep, RequestSums, Traffic

MakeProfile = Callable[..., EngineProfile]
FAST_LINK = {"base_s": 0.0, "kv_bytes_per_token": 1000, "bytes_per_s": 1e9}
CHAT = Traffic(requests_per_s=10.0, input_tokens_mean=90.0, output_tokens_mean=20.0)


@pytest.fixture(scope="session")
def engines(make_profile: MakeProfile) -> EnginesConfig:
    return EnginesConfig(prefill=make_profile(), decode=make_profile(handoff=FAST_LINK))


def test_the_sums_of_two_windows_by_hand(engines: EnginesConfig) -> None:
    sums = with_requests(RequestSums(), CHAT, engines, 5.0)  # 50 requests of 90 + 20 tokens, each 0.1 s of prefill
    longer = Traffic(requests_per_s=2.0, input_tokens_mean=190.0, output_tokens_mean=50.0)
    sums = with_requests(sums, longer, engines, 5.0)  # 10 of 190 + 50 tokens, each 0.2 s
    assert sums.requests == pytest.approx(60.0)
    assert sums.prefill_s == pytest.approx(50 * 0.1 + 10 * 0.2)
    assert sums.input_tokens == pytest.approx(50 * 90 + 10 * 190)
    assert sums.output_tokens == pytest.approx(50 * 20 + 10 * 50)
    assert sums.context_tokens == pytest.approx(1000 * 100 + 500 * 215)
    best = ratio_of_sums(sums, engines, ControllerState(), 0.05)
    # Context 138.3: six and a half fit 1000 tokens. Six run, in steps of 26 ms.
    assert best.decode_concurrency == 6
    assert best.prefill_per_decode == pytest.approx(6 * (7 / 60) / (0.026 * 25))


@given(inputs=st.floats(1.0, 900.0), outputs=st.floats(1.0, 90.0))
def test_one_window_gives_the_ratio_of_its_lengths(engines: EnginesConfig, inputs: float, outputs: float) -> None:
    traffic = Traffic(requests_per_s=3.0, input_tokens_mean=inputs, output_tokens_mean=outputs)
    sums = with_requests(RequestSums(), traffic, engines, 7.0)
    found = ratio_of_sums(sums, engines, ControllerState(), 0.05)
    expected = optimal_ratio(engines.prefill, engines.decode, Lengths.fixed(inputs, outputs), tpot_s=0.05)
    # A batch is a whole number, which rounding errors of the sums may lower by one.
    assert found.decode_concurrency == pytest.approx(expected.decode_concurrency, abs=1)
    if found.decode_concurrency == expected.decode_concurrency:
        assert found.prefill_per_decode == pytest.approx(expected.prefill_per_decode)
    assert ratio_of_lengths(engines, inputs, outputs, 0.05) == expected


def test_cached_tokens_take_no_prefill(engines: EnginesConfig) -> None:
    cached = Traffic(requests_per_s=10.0, input_tokens_mean=90.0, output_tokens_mean=20.0, cached_frac=0.5)
    assert with_requests(RequestSums(), cached, engines, 1.0).prefill_s == pytest.approx(10 * (0.1 - 0.045))


@pytest.mark.parametrize(
    "traffic",
    [
        Traffic(),
        Traffic(requests_per_s=0.0, input_tokens_mean=90.0, output_tokens_mean=20.0),
        Traffic(requests_per_s=5.0, input_tokens_mean=90.0),  # no answer has ended
        Traffic(requests_per_s=5.0, input_tokens_mean=90.0, output_tokens_mean=20.0, is_whole=False),
    ],
)
def test_what_was_not_observed_adds_nothing(engines: EnginesConfig, traffic: Traffic) -> None:
    assert with_requests(RequestSums(), traffic, engines, 5.0) == RequestSums()


def test_observed_steps_and_links_replace_those_of_the_profile(engines: EnginesConfig) -> None:
    sums = with_requests(RequestSums(), CHAT, engines, 5.0)
    plain = ratio_of_sums(sums, engines, ControllerState(), 0.05)
    slow = DecodeStep(batch=8.0, context_tokens=100.0, seconds=2 * 0.028)
    slower = ratio_of_sums(sums, engines, ControllerState(steps=((1.0, slow),)), 0.1)
    assert slower.prefill_per_decode == pytest.approx(plain.prefill_per_decode / 2)
    narrow = ControllerState(links={"g0": ((1.0, 0.45e6),)})  # 90 kB take 0.2 s
    assert ratio_of_sums(sums, engines, narrow, 0.05).prefill_per_decode == pytest.approx(5 * 0.1)


def test_profiles_of_two_models_or_kinds_of_kv_are_refused(make_profile: MakeProfile) -> None:
    with pytest.raises(ValidationError, match="give profiles of one model"):
        EnginesConfig(prefill=make_profile(), decode=make_profile(model="another"))
    wide = {**FAST_LINK, "kv_bytes_per_token": 2000}
    with pytest.raises(ValidationError, match="KV of another type cannot be handed over"):
        EnginesConfig(prefill=make_profile(handoff=FAST_LINK), decode=make_profile(handoff=wide))


def test_observed_lengths_have_the_means_of_the_offered_requests() -> None:
    lengths = observed_lengths(
        Traffic(
            input_tokens_mean=200.0,
            output_tokens_mean=20.0,
            input_lengths=((50.0, 0.5), (150.0, 0.5)),  # long prompts were refused
            output_lengths=((10.0, 0.5), (30.0, 0.5)),
        )
    )
    assert lengths is not None
    assert lengths.inputs == ((100.0, 0.5), (300.0, 0.5))
    assert lengths.outputs == ((10.0, 0.5), (30.0, 0.5))
    assert observed_lengths(Traffic(input_tokens_mean=200.0)) is None
