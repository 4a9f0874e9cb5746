"""What operators on one GPU take from each other, and shares of the SMs."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.activity import Activity, Kind
from autoscale.operators.contention import (
    LEAST_TAKEN_FRAC,
    MeasuredPairs,
    ScaledContention,
    UniformContention,
    interference,
    load_pairs,
)
from autoscale.operators.costs import Phase
from autoscale.operators.demand import BadCostError
from autoscale.operators.queueing import wait_in_services
from autoscale.operators.sm_shares import SmBandwidthContention, load_shares
from tests.autoscale.operators.conftest import CONTENTION


def _activity(name: str, tokens: int, phase: Phase = Phase.PREFILL, bandwidth_frac: float = 0.3) -> Activity:
    return Activity(name=name, phase=phase, tokens=tokens, bandwidth_frac=bandwidth_frac)


@pytest.fixture(scope="module")
def measured() -> MeasuredPairs:
    return load_pairs(CONTENTION / "h100_80gb_pairs.csv")


def test_interference_by_hand() -> None:
    """Others busy for 0.2 and 0.3 of the time, which take 1 and 0.5 of it: I = 1 / (1 - 0.35)."""
    taken = np.array([[1.0, 1.0, 0.5], [1.0, 1.0, 1.0], [0.5, 1.0, 1.0]])
    assert interference(0, [0.4, 0.2, 0.3], taken) == pytest.approx(1 / 0.65)
    assert interference(0, [0.4, 0.0, 0.0], taken) == 1.0
    assert interference(0, [0.4, 0.9, 0.9], taken) == math.inf


@given(own=st.floats(0.01, 0.5), other=st.floats(0.01, 0.45))
def test_interference_with_turns_is_processor_sharing(own: float, other: float) -> None:
    """A queue with services of T I waits as if the GPU were shared evenly by all jobs: T / (1 - rho) in total."""
    stretch = interference(0, [own, other], np.ones((2, 2)))
    sojourn = stretch * (1 + wait_in_services(1, own * stretch))
    assert sojourn == pytest.approx(1 / (1 - own - other), rel=1e-9)


def test_kinds_come_from_names() -> None:
    kinds = {
        "attention": Kind.PREFILL_ATTENTION,
        "input_norm": Kind.NORM,
        "attention_norm": Kind.NORM,
        "rotary": Kind.POINTWISE,
        "gate_up": Kind.PRODUCT,
        "experts": Kind.PRODUCT,
    }
    assert {name: _activity(name, 64).kind for name in kinds} == kinds
    assert _activity("attention", 64, Phase.DECODE).kind is Kind.DECODE_ATTENTION


def test_shipped_pairs_are_those_measured(measured: MeasuredPairs) -> None:
    """Two attentions of 2,048 tokens: 1.26 and 1.32 for Llama-3-8B and Qwen2-7B, so a joint speed of 1.55."""
    pair = [_activity("attention", 2048), _activity("attention", 2048)]
    assert measured.taken_fracs(pair)[0, 1] == pytest.approx(1 / math.sqrt(2 / 1.2567 * 2 / 1.3189), rel=0.01)
    large = [_activity("gate_up", 2048), _activity("down", 1500)]
    assert 0.9 < measured.taken_fracs(large)[0, 1] < 1.2  # large products take turns


@given(
    names=st.lists(st.sampled_from(["gate_up", "attention", "norm", "activation"]), min_size=1, max_size=6),
    tokens=st.integers(1, 100_000),
    phase=st.sampled_from(list(Phase)),
)
def test_no_busy_neighbour_is_free(names: list[str], tokens: int, phase: Phase) -> None:
    """I = 1 never holds for two busy operators on one GPU, in any model of contention."""
    activities = [_activity(name, tokens, phase) for name in names]
    models = (
        load_pairs(CONTENTION / "h100_80gb_pairs.csv"),
        SmBandwidthContention(shares=load_shares(CONTENTION / "h100_80gb_sm_shares.csv")),
        UniformContention(taken_frac=LEAST_TAKEN_FRAC),
        ScaledContention(base=UniformContention(), factor=0.01),
    )
    for model in models:
        taken = model.taken_fracs(activities)
        assert taken.shape == (len(names), len(names))
        assert (taken >= LEAST_TAKEN_FRAC).all()
        busy = [0.2 / len(names)] * len(names)
        for own in range(len(names)):
            assert (interference(own, busy, taken) > 1.0) == (len(names) > 1)


def test_scaled_contention_is_the_sensitivity_row() -> None:
    activities = [_activity("a", 64), _activity("b", 64)]
    scaled = ScaledContention(base=UniformContention(taken_frac=0.9), factor=1.2)
    assert scaled.taken_fracs(activities)[0, 1] == pytest.approx(1.08)
    with pytest.raises(ValueError, match="taken_frac is nan"):
        UniformContention(taken_frac=math.nan)


def test_share_of_sms_is_the_least_that_keeps_the_time() -> None:
    """Fig. 8: a product of 64 tokens reads weights, and 40 % of the SMs suffice; one of 2,048 needs all of them."""
    shares = load_shares(CONTENTION / "h100_80gb_sm_shares.csv")
    assert shares.least_share_percent(_activity("gate_up", 64, Phase.DECODE)) <= 60
    assert shares.least_share_percent(_activity("gate_up", 2048)) == 100
    assert shares.least_share_percent(_activity("norm", 1, Phase.DECODE)) == 10
    large = _activity("gate_up", 2048)
    assert shares.slowdown(large, 100) == 1.0
    assert shares.slowdown(large, 5) == pytest.approx(2 * shares.slowdown(large, 10))
    assert shares.slowdown(large, 100) < shares.slowdown(large, 75) < shares.slowdown(large, 70)


def test_sms_and_bandwidth_contend_each_for_itself() -> None:
    """Weights of a small product take the bandwidth: two of them take turns, though each has 40 to 60 % of the SMs."""
    model = SmBandwidthContention(shares=load_shares(CONTENTION / "h100_80gb_sm_shares.csv"))
    reads = _activity("gate_up", 64, Phase.DECODE, bandwidth_frac=0.95)
    computes = _activity("gate_up", 2048, bandwidth_frac=0.2)
    taken = model.taken_fracs([reads, computes])
    assert taken[0, 0] == pytest.approx(0.95)
    assert taken[1, 0] < taken[0, 0]  # the large product loses SMs, not bandwidth
    assert taken[1, 1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind,tokens,other_kind,other_tokens,joint_speed\nnorm,64,norm,64,nan\n", "joint_speed"),
        ("kind,tokens,other_kind,other_tokens,joint_speed\nnorm,64,norm,64,1.0\n", "pairs are missing"),
        ("kind,tokens\nnorm,64\n", "cannot be read"),
        ("kind,tokens,other_kind,other_tokens,joint_speed\nfoo,64,norm,64,1.0\n", "cannot be read"),
    ],
)
def test_bad_tables_of_pairs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(text)
    with pytest.raises(BadCostError, match=message):
        load_pairs(path)
    with pytest.raises(BadCostError, match="cannot be read"):
        load_pairs(tmp_path / "none.csv")


def test_bad_tables_of_shares_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "shares.csv"
    path.write_text("kind,tokens,share_percent,slowdown\nnorm,64,50,nan\nnorm,64,100,1\n")
    with pytest.raises(BadCostError, match="above 0"):
        load_shares(path)
    path.write_text("kind,tokens,share_percent,slowdown\nnorm,64,100,1\n")
    with pytest.raises(BadCostError, match="a kind has no curve"):
        load_shares(path)
