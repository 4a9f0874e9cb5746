"""Laws of the counts that a pressure test tries."""

from autoscale.pressure.counts import counts_at, gpus_of, neighbours
from autoscale.ratio import PdRatio
from tests.autoscale.pressure.factories import counts, room


def test_the_neighbours_of_a_ratio_differ_by_one_replica_and_are_supported() -> None:
    assert list(map(str, neighbours(PdRatio(1, 3)))) == ["1:3", "1:2", "1:4", "2:3"]
    assert list(map(str, neighbours(PdRatio(1, 5)))) == ["1:5", "1:4", "2:5"]
    assert list(map(str, neighbours(PdRatio(1, 1)))) == ["1:1", "1:2", "2:1"]
    assert neighbours(PdRatio(0, 1)) == [PdRatio(0, 1)]


def test_the_counts_at_a_ratio_are_the_fewest_inside_bounds_budget_and_gpus() -> None:
    assert counts_at(PdRatio(1, 2), room(), 9.0) == counts(1, 2)
    assert counts_at(PdRatio(1, 2), room(decode=(3, 9)), 9.0) == counts(2, 4)
    assert counts_at(PdRatio(1, 2), room(gpus=2.0), 5.0) is None
    assert counts_at(PdRatio(1, 2), room(gpus=2.0, budget=5), 9.0) is None
    assert counts_at(PdRatio(9, 1), room(prefill=(1, 8)), 99.0) is None
    assert gpus_of(counts(1, 2), room(gpus=2.0)) == 6.0
    assert gpus_of(counts(1, 2), room()) == 3.0
