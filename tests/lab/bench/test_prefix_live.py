"""The figures of the bench of prefix routing on real engines."""

import pytest

from tests.lab.bench.prefix_live import STACKS, Answer, figures, table


def test_hits_are_cached_tokens_of_all_prompt_tokens() -> None:
    found = figures([Answer(0.1, 90, 100), Answer(0.3, 0, 200)], elapsed_s=4.0)
    assert found == {
        "hit_frac": pytest.approx(0.3),
        "ttft_p50_s": pytest.approx(0.2),
        "ttft_p90_s": pytest.approx(0.28),
        "requests_per_s": 0.5,
    }


def test_the_table_has_the_median_of_the_rounds() -> None:
    rounds = [{"ray_prefix": {"hit_frac": value}} for value in (0.1, 0.9, 0.5)]
    assert table(rounds, ["ray_prefix"]).splitlines()[-1] == f"| {STACKS['ray_prefix']} | 0.5 |"
