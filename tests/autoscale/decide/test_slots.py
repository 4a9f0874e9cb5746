"""Virtual allocation of the GPUs and CPUs of nodes inside one cycle."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.decide.slots import Slots, Taken
from autoscale.types import Demand
from kvtransfer.topology import LinkTier, Node, Topology


def node(
    name: str, free: float = 8.0, gpu_type: str | None = "H100", s1: str = "m", s2: str = "b", **fields: Any
) -> Node:
    cpus = fields.pop("cpus", 64.0)
    return Node(
        name=name,
        labels={"tandem.io/s1": s1},
        under=("d", "c", s2, s1, ""),
        gpu_type=gpu_type,
        gpus=8.0,
        free_gpus=free,
        cpus=64.0,
        free_cpus=cpus,
        **fields,
    )


def slots(*nodes: Node) -> Slots:
    return Slots(Topology(nodes))


def demand(workers: int = 1, each: float = 1.0, **fields: Any) -> Demand:
    return Demand(**{"gpu_type": "H100", "workers": workers, "gpus_per_worker": each, **fields})


def where(found: Slots, taken: Taken | None) -> list[tuple[str, float]] | None:
    return None if taken is None else [(found.topology.nodes[index].name, gpus) for index, gpus, _ in taken]


def test_the_node_with_the_fewest_gpus_left_over_is_taken() -> None:
    found = slots(node("a", 8), node("b", 3), node("c", 4))
    assert where(found, found.take(demand(2))) == [("b", 2.0)]
    assert where(found, found.take(demand(2))) == [("c", 2.0)]
    assert where(found, found.take(demand(8))) == [("a", 8.0)]
    assert found.take(demand(3)) is None  # 3 are left: 1 on b, 2 on c


def test_taken_gpus_are_gone_and_given_back_ones_are_free_again() -> None:
    found = slots(node("a", 2))
    taken = found.take(demand(2))
    assert taken is not None
    assert found.take(demand(1)) is None
    found.give_back(taken)
    assert where(found, found.take(demand(2))) == [("a", 2.0)]


def test_free_gpus_count_as_fragmented_if_no_unit_fits_there() -> None:
    found = slots(node("a", 3, s1="m1"), node("b", 1, s1="m2"), node("c", 1, s1="m2"), node("d", 4, "A100", s1="m3"))
    two = [[demand(2, selector={"tandem.io/s1": switch})] * 2 for switch in ("m1", "m2")]
    one = [demand(1, selector={"tandem.io/s1": "m2"})]
    assert found.fragmented_frac(two) == 1.0  # m1 has three free GPUs, and a unit needs two times two
    assert found.fragmented_frac([*two, one]) == pytest.approx(1 - 2 / 9)  # one group can use the two GPUs of m2
    assert found.fragmented_frac([]) == 1.0
    assert slots(node("a", 0)).fragmented_frac(two) is None
    assert where(found, found.take(demand(3))) == [("a", 3.0)]  # fragmented_frac takes no GPU


def test_scarce_switches_come_last() -> None:
    mixed = [node("x", 1, s1="m2", s2="b2"), node("y", 1, "H20", s1="m2", s2="b2")]
    found = slots(node("a", 8), *mixed)
    assert where(found, found.take(demand(1))) == [("a", 1.0)]  # though "x" would then be full
    assert where(found, found.take(demand(8))) is None
    assert [where(found, found.take(demand(1))) for _ in range(8)][-1] == [("x", 1.0)]


@pytest.mark.parametrize("fields", [{"gpu_type": "H20"}, {"selector": {"tandem.io/s1": "other"}}])
def test_only_nodes_with_the_demanded_type_and_labels_are_taken(fields: dict[str, Any]) -> None:
    assert slots(node("a")).take(demand(1, **fields)) is None


def test_cordoned_nodes_take_no_replica() -> None:
    assert slots(node("a", is_cordoned=True)).take(demand(1)) is None


def test_cpus_count_too() -> None:
    found = slots(node("a", 4, cpus=3.0), node("b", 8, cpus=9.0))
    asked = demand(2, cpus_per_worker=1.0, cpus_per_replica=2.0)
    assert where(found, found.take(asked)) == [("b", 2.0)]
    assert where(found, found.take(asked)) == [("b", 2.0)]
    assert found.take(asked) is None


def test_an_engine_may_need_only_cpus() -> None:
    found = slots(node("a", 0, None, cpus=3.0))
    asked = Demand(cpus_per_worker=2.0, cpus_per_replica=1.0)
    assert where(found, found.take(asked)) == [("a", 0.0)]
    assert found.take(asked) is None


def test_engines_that_need_a_fraction_of_a_gpu_share_one() -> None:
    found = slots(node("a", 1), node("b", 8))
    assert [where(found, found.take(demand(1, 0.3))) for _ in range(4)] == [[("a", 0.3)]] * 3 + [[("b", 0.3)]]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("STRICT_PACK", None),
        ("PACK", [("a", 6.0), ("b", 4.0)]),
        ("SPREAD", [("a", 4.0), ("b", 4.0), ("c", 2.0)]),
        ("STRICT_SPREAD", None),
    ],
)
def test_an_engine_spreads_over_nodes_as_its_strategy_says(
    strategy: Any, expected: list[tuple[str, float]] | None
) -> None:
    found = slots(node("a", 6), node("b", 5), node("c", 2))
    assert where(found, found.take(demand(10, strategy=strategy))) == expected


def test_strict_spread_puts_each_worker_on_a_node_of_its_own() -> None:
    found = slots(node("a", 6), node("b", 5), node("c", 2))
    assert where(found, found.take(demand(3, strategy="STRICT_SPREAD"))) == [("a", 1.0), ("b", 1.0), ("c", 1.0)]


def moe(attention: int, ffn: int) -> Demand:
    parts = [demand(1, 2.0)] * attention + [demand(1, 1.0, gpu_type="H20")] * ffn
    return Demand(parts=tuple(parts), within=LinkTier.S1)


def test_law_8_attention_and_ffn_are_under_one_s1() -> None:
    """HeteroScale section 3.4, disaggregated MoE: the inner ratio inside one S1."""
    apart = slots(node("a", 8, s1="m1"), node("b", 8, "H20", s1="m2"))
    assert apart.take(moe(1, 2)) is None
    found = slots(
        node("a", 8, s1="m1"), node("b", 2, s1="m2"), node("c", 4, "H20", s1="m2"), node("d", 1, "H20", s1="m1")
    )
    assert where(found, found.take(moe(1, 2))) == [("b", 2.0), ("c", 1.0), ("c", 1.0)]
    assert found.take(moe(1, 2)) is None
    assert where(found, found.take(demand(8))) == [("a", 8.0)]  # GPUs that were tried on a were given back
    assert moe(1, 2).gpus_by_type() == {"H100": 2.0, "H20": 2.0}


@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["H100", "H20"]), st.integers(0, 2)), max_size=8),
    st.lists(
        st.builds(
            demand,
            st.integers(1, 9),
            st.sampled_from([0.5, 1.0]),
            gpu_type=st.sampled_from(["H100", "H20"]),
            strategy=st.sampled_from(["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]),
        ),
        max_size=12,
    ),
)
def test_no_gpu_is_taken_twice(nodes: list[tuple[int, str, int]], asked: list[Demand]) -> None:
    found = slots(*(node(str(i), free, kind, s1=f"m{s1}") for i, (free, kind, s1) in enumerate(nodes)))
    held = dict.fromkeys(range(len(nodes)), 0.0)
    for one in asked:
        taken = found.take(one)
        if taken is None:
            continue
        assert sum(gpus for _, gpus, _ in taken) == pytest.approx(one.gpus)
        if one.strategy == "STRICT_PACK":
            assert len(taken) == 1
        if one.strategy == "STRICT_SPREAD":
            assert len({index for index, _, _ in taken}) == one.workers
        for index, gpus, _ in taken:
            assert found.topology.nodes[index].gpu_type == one.gpu_type
            held[index] += gpus
    for index, gpus in held.items():
        assert gpus <= found.topology.nodes[index].free_gpus + 1e-6
