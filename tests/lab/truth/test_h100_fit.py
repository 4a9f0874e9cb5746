"""The shipped H100 profiles against operating points that were measured on GPUs."""

import numpy as np
import pytest

from autoscale.engines.profile import EngineProfile
from tests.lab.truth.h100_fit import fitted, path_of, points_of, tpot_errors

# Results of ``make fit-profiles``: the shipped profiles are made with them.
_FACTORS = (0.944, 1.076)


def test_tpot_at_tp4_which_was_left_out_of_the_fit_is_near_what_was_measured() -> None:
    errors = np.abs(tpot_errors(EngineProfile.load(path_of(4)), points_of(4)))
    assert errors.mean() < 0.07
    assert errors.max() < 0.12


def test_tpot_at_tp2_is_fitted() -> None:
    assert np.abs(tpot_errors(EngineProfile.load(path_of(2)), points_of(2))).mean() < 0.03


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_shipped_profile_is_that_of_the_fit(tp: int) -> None:
    assert EngineProfile.load(path_of(tp)) == fitted(tp, *_FACTORS)


def test_kv_grows_with_the_gpus() -> None:
    kv_tokens = [EngineProfile.load(path_of(tp)).kv_tokens for tp in (2, 4, 8)]
    # Weights are there once, so twice the GPUs have more than twice the KV.
    assert kv_tokens[1] > 2 * kv_tokens[0] and kv_tokens[2] > 2 * kv_tokens[1]
