"""The gap study gives the same cases for a seed."""

from autoscale.operators.contention import UniformContention
from tests.lab.operators.gap import cases, shown


def test_cases_are_the_same_for_a_seed_and_none_beats_the_oracle() -> None:
    first, again = (list(cases(2, 5, UniformContention())) for _ in range(2))
    assert [case.gpus for case in first] == [case.gpus for case in again]
    assert all(gap >= 0.0 for case in first for gap in case.gaps.values())
    assert shown(first).row_count == 5
