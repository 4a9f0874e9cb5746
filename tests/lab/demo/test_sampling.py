"""Samples beside a load."""

import time

import pytest

from tests.lab.demo.sampling import sampling


def test_samples_are_taken_until_the_block_ends() -> None:
    with sampling(lambda at_s: at_s, 0.01) as samples:
        assert samples[0] == 0.0
        until_s = time.monotonic() + 10.0
        while len(samples) < 4:
            assert time.monotonic() < until_s
            time.sleep(0.001)
    assert samples == sorted(samples)
    number = len(samples)
    time.sleep(0.05)
    assert len(samples) == number


def test_a_sample_that_fails_is_not_hidden() -> None:
    def sample(at_s: float) -> float:
        return 1.0 / (0.0 if at_s else 1.0)

    with pytest.raises(ZeroDivisionError), sampling(sample, 0.01):
        time.sleep(0.1)
