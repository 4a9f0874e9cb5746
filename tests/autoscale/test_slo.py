"""The TTFT objective of a prompt."""

import pytest

from autoscale.slo import SloConfig


@pytest.mark.parametrize(("tokens", "objective_s"), [(1, 0.5), (500, 0.5), (501, 0.501), (2000, 2.0)])
def test_a_long_prompt_has_its_own_objective_by_hand(tokens: int, objective_s: float) -> None:
    assert SloConfig(ttft_s=0.5, ttft_s_per_input_token=0.001).objective_s(tokens) == pytest.approx(objective_s)


def test_the_objective_and_the_share_are_inverse() -> None:
    slo = SloConfig(ttft_s=0.5, ttft_s_per_input_token=0.001)
    for tokens in (1, 499, 501, 30_000):
        assert slo.objective_s(tokens) * slo.ttft_share(tokens) == pytest.approx(slo.ttft_s)
