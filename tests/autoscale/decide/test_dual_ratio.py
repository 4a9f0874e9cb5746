"""Law 8: the ratio of attention to FFN holds inside prefill and one S1; that of prefill to decode, inside one S2."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.decide.dual_ratio import DualRatio
from autoscale.decide.group import Group
from autoscale.decide.placement import place
from autoscale.decide.slots import Slots
from autoscale.ratio import PdRatio
from autoscale.types import Demand, PoolKey, PoolLimits, PoolStats
from kvtransfer.topology import LinkTier, Node, Role, SubgroupPriority, Topology

P, D = Role.PREFILL, Role.DECODE
ATTENTION = Demand(gpu_type="H100", workers=2, gpus_per_worker=1.0)
FFN = Demand(gpu_type="H20", workers=1, gpus_per_worker=1.0)
DECODE = Demand(gpu_type="H20", workers=1, gpus_per_worker=1.0)


def test_a_prefill_replica_has_both_kinds_of_instances_and_their_gpus() -> None:
    dual = DualRatio(attention=1, ffn=3, pd_ratio=PdRatio(1, 2))
    assert dual.demand(ATTENTION, FFN).gpus_by_type() == {"H100": 2.0, "H20": 3.0}
    assert dual.instances(4) == (4, 12)


@pytest.mark.parametrize(
    ("attention", "ffn", "decode", "expected"),
    [
        (2.0, 5.0, 1.0, {P: 2.0, D: 4.0}),  # five FFN instances are two replicas of three
        (3.5, 1.0, 1.0, {P: 4.0, D: 8.0}),
        (1.0, 1.0, 9.0, {P: 4.5, D: 9.0}),  # decode decides, and the guard rounds both in one step
    ],
)
def test_the_kind_of_instance_that_is_needed_most_decides_both_counts(
    attention: float, ffn: float, decode: float, expected: dict[Role, float]
) -> None:
    assert DualRatio(attention=1, ffn=3, pd_ratio=PdRatio(1, 2)).wanted_replicas(attention, ffn, decode) == expected


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["1:3", "1:1", "2:1", "3:2"]),
    st.tuples(*[st.floats(0.1, 50.0)] * 3),
)
def test_there_are_enough_instances_of_every_kind_at_both_ratios(
    attention: int, ffn: int, ratio: str, needed: tuple[float, float, float]
) -> None:
    dual = DualRatio(attention=attention, ffn=ffn, pd_ratio=PdRatio.parse(ratio))
    wanted = dual.wanted_replicas(*needed)
    has = dual.instances(math.ceil(wanted[P] - 1e-9))
    assert has[0] >= needed[0] - 1e-6 and has[1] >= needed[1] - 1e-6 and wanted[D] >= needed[2] - 1e-6
    assert has[0] * ffn == has[1] * attention
    assert wanted[P] / wanted[D] == pytest.approx(dual.pd_ratio.per_decode())


def test_a_ratio_without_attention_instances_is_refused() -> None:
    with pytest.raises(ValueError, match="0:1"):
        DualRatio(attention=0, ffn=1, pd_ratio=PdRatio(1, 1))


def moe_pools(prefill: Demand, decode: Demand, affinity: LinkTier) -> list[PoolStats]:
    """The empty pools of one group; the demands are those of a replica."""
    demands = {P: prefill, D: decode}
    return [
        PoolStats(
            key=PoolKey("moe", role),
            replicas=(),
            target_replicas=0,
            held_replicas=0,
            limits=PoolLimits(lowest_replicas=0, highest_replicas=9, demand=demands[role], affinity=affinity),
        )
        for role in Role
    ]


def node(name: str, kind: str, s1: str, gpus: float, s2: str = "b") -> Node:
    return Node(
        name=name, gpu_type=kind, under=("d", "c", s2, s1, ""), gpus=gpus, free_gpus=gpus, cpus=64.0, free_cpus=64.0
    )


def test_law_8_prefill_lies_under_one_s1_and_the_pair_under_one_s2() -> None:
    dual = DualRatio(attention=1, ffn=3, pd_ratio=PdRatio(1, 2))
    # m1 has H100s and one H20 too few; m2 has enough of both; m3 has H20s for decode only.
    nodes = [
        node("a", "H100", "m1", 4.0),
        node("b", "H20", "m1", 2.0),
        node("c", "H100", "m2", 4.0),
        node("d", "H20", "m2", 4.0),
        node("e", "H20", "m3", 8.0),
    ]
    pools = moe_pools(dual.demand(ATTENTION, FFN), DECODE, LinkTier.S2)
    slots = Slots(Topology(nodes))
    placed = place({P: 2, D: 4}, dict.fromkeys((pool.key for pool in pools), 0), pools, dual.pd_ratio, slots=slots)
    # No S1 has room for the second prefill replica, so it is pending, and so are its two decode replicas.
    assert placed.counts == {PoolKey("moe", P): 1, PoolKey("moe", D): 2}
    assert placed.pending == {P: 1, D: 2}
    gpus, _ = slots.free()
    taken = Counter({one.name: one.gpus - left for one, left in zip(slots.topology.nodes, gpus, strict=True)})
    assert taken["c"] == 2.0 and taken["d"] + taken["b"] + taken["e"] == 5.0
    assert taken["a"] == 0.0  # free: a replica with this node would need two S1s


def test_two_instances_on_one_node_count_that_node_once() -> None:
    dual = DualRatio(attention=1, ffn=1, pd_ratio=PdRatio(1, 1))
    ffn = Demand(gpu_type="H100", workers=1, gpus_per_worker=1.0)
    # Only "a" has room, and its S2 has one GPU type; the S2 of the other nodes has two.
    nodes = [
        node("a", "H100", "m1", 8.0, s2="x"),
        node("b", "H100", "m2", 0.0, s2="y"),
        node("c", "H20", "m2", 0.0, s2="y"),
    ]
    pools = {pool.key.role: pool for pool in moe_pools(dual.demand(ffn, ffn), ffn, LinkTier.CLUSTER)}
    group = Group("moe", pools, {}, dual.pd_ratio, Slots(Topology(nodes)))
    assert group.rank_to_grow()[0] is SubgroupPriority.S2_HOMOGENEOUS
