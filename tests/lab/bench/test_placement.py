"""The benchmarks of placement, on smaller clusters than they measure."""

import random
from collections import Counter

import pytest

from autoscale.decide.slots import Slots
from autoscale.engines.profile import EngineProfile
from autoscale.traces.trace import load_trace
from autoscale.types import Demand
from kvtransfer.topology import Node, Role, Topology
from tests.autoscale.decide import test_slots as by_hand
from tests.lab.bench import hetero as bench_hetero
from tests.lab.bench import placement as bench_placement
from tests.lab.bench.hetero import cost_per_million, edge

P, D = Role.PREFILL, Role.DECODE


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_NODES", 256), ("_SERVICES", 60), ("_REPLICAS", 240)):
        monkeypatch.setattr(bench_placement, name, value)


def test_a_cycle_places_whole_units_and_no_gpu_twice() -> None:
    rng = random.Random(3)
    nodes = bench_placement.cluster(rng)
    asked = bench_placement.requests(nodes, rng)
    assert sum(sum(one.counts.values()) for one in asked) >= 240
    for kind in (Slots, bench_placement.FirstFit):
        _, slots, placed = bench_placement.cycle(nodes, asked, kind)
        left, _ = slots.free()
        assert min(left) >= 0.0
        taken: Counter[str] = Counter()
        for one, found in zip([one for one in asked if one.pools], placed, strict=True):
            for pool in one.pools:
                assert pool.demand is not None
                taken[pool.demand.gpu_type or ""] += int(found.counts[pool.key] * pool.demand.gpus)
            for group in {pool.key.group for pool in one.pools}:
                counts = {key.role: count for key, count in found.counts.items() if key.group == group}
                assert bool(counts[P]) == bool(counts[D])
        free = Counter[str]()
        for node, rest in zip(sorted(nodes, key=lambda node: node.name), left, strict=True):
            free[node.gpu_type or ""] += int(node.free_gpus - rest)
        assert taken == free


def test_first_fit_takes_the_first_node_and_ours_the_fullest() -> None:
    nodes = [Node(name=name, gpu_type="H100", gpus=8, free_gpus=free) for name, free in (("a", 8), ("b", 2))]
    two = Demand(gpu_type="H100", workers=2, gpus_per_worker=1.0)
    assert Slots(Topology(nodes)).take(two) == [(1, 2.0, 0.0)]
    assert bench_placement.FirstFit(Topology(nodes)).take(two) == [(0, 2.0, 0.0)]


class Search:
    """Counts that meet the objective: from two prefill and six decode replicas on, or from four and five on."""

    def counts(self, prefill: int, decode: int) -> "Search":
        self.attainment_frac = float(prefill >= 2 and decode >= (5 if prefill >= 4 else 6))
        return self


def test_the_edge_has_the_pairs_of_which_neither_count_can_be_reduced() -> None:
    found = edge(Search())  # type: ignore[arg-type]
    assert found == [(2, 6), (4, 5)]
    per_hour = 1_490_000.0
    both = {P: "H100", D: "H100"}
    # Four A100s are 5.96 an hour, and H100s cost twice that: 8 replicas of 11.92 for 1.49 million tokens.
    assert cost_per_million(found, both, 2.0, per_hour) == (pytest.approx(64.0), (2, 6))
    mixed = {P: "H100", D: "A100"}
    assert cost_per_million(found, mixed, 2.0, per_hour) == (pytest.approx(2 * 8.0 + 6 * 4.0), (2, 6))
    assert cost_per_million([], both, 2.0, per_hour) is None


def test_placement_by_topology_keeps_scarce_switches_free() -> None:
    trace = load_trace(bench_hetero._TRACE)
    slowest = EngineProfile.load(bench_hetero._PROFILES["A100"])
    rows = bench_hetero.where(trace, bench_hetero.slos(trace, slowest), 5e9, 0)
    aware, agnostic = rows["aware"], rows["agnostic"]
    assert aware["replicas"] == agnostic["replicas"] == 12
    assert aware["scarce_gpus_free"] > agnostic["scarce_gpus_free"]
    assert aware["mixed_units_left"] > agnostic["mixed_units_left"]


def test_free_gpus_are_unusable_if_the_unit_of_their_group_does_not_fit() -> None:
    room = by_hand.slots(
        by_hand.node("a", 3, s1="m1"),
        by_hand.node("b", 1, s1="m2"),
        by_hand.node("c", 1, s1="m2"),
        by_hand.node("d", 4, "A100", s1="m3"),
    )
    two = [[by_hand.demand(2, selector={"tandem.io/s1": switch})] * 2 for switch in ("m1", "m2")]
    one = [by_hand.demand(1, selector={"tandem.io/s1": "m2"})]
    assert bench_placement.unusable_frac(room, [*two, one]) == pytest.approx((3 + 2) / (3 + 2 + 2))
