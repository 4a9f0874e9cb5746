"""Law 8: the ratio of attention to FFN holds inside prefill and one S1; that of prefill to decode, inside one S2."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.decide.dual_ratio import AttentionFfn
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
    split = AttentionFfn.parse("1:3")
    assert split.demand(ATTENTION, FFN).gpus_by_type() == {"H100": 2.0, "H20": 3.0}
    assert (split.instances, str(split)) == (4, "1:3")


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_whole_replicas_keep_the_ratio(attention: int, ffn: int, replicas: int) -> None:
    parts = AttentionFfn(attention=attention, ffn=ffn).demand(ATTENTION, FFN).parts * replicas
    kinds = Counter(part.gpu_type for part in parts)
    assert kinds["H100"] * ffn == kinds["H20"] * attention


def test_the_replica_has_its_own_cpus_once() -> None:
    instance = Demand(gpu_type="H100", gpus_per_worker=1.0, cpus_per_replica=2.0)
    parts = AttentionFfn(attention=2, ffn=2).demand(instance, instance).parts
    assert [part.cpus_per_replica for part in parts] == [2.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0:1", "attention:ffn is 0:1: a prefill replica needs at least one of each"),
        ("1:65", "at most 64"),
        (63, "in quotes: YAML reads 1:3 as 63"),
        ("1.5:1", "give them as '1:3'"),
        ("3", "give them as '1:3'"),
        (None, "None is no ratio"),
    ],
)
def test_what_is_no_ratio_is_named(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionFfn.parse(value)


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
    split, ratio = AttentionFfn(attention=1, ffn=3), PdRatio(1, 2)
    # m1 has H100s and one H20 too few; m2 has enough of both; m3 has H20s for decode only.
    nodes = [
        node("a", "H100", "m1", 4.0),
        node("b", "H20", "m1", 2.0),
        node("c", "H100", "m2", 4.0),
        node("d", "H20", "m2", 4.0),
        node("e", "H20", "m3", 8.0),
    ]
    pools = moe_pools(split.demand(ATTENTION, FFN), DECODE, LinkTier.S2)
    slots = Slots(Topology(nodes))
    placed = place({P: 2, D: 4}, dict.fromkeys((pool.key for pool in pools), 0), pools, ratio, slots=slots)
    # No S1 has room for the second prefill replica, so it is pending, and so are its two decode replicas.
    assert placed.counts == {PoolKey("moe", P): 1, PoolKey("moe", D): 2}
    assert placed.pending == {P: 1, D: 2}
    gpus, _ = slots.free()
    taken = Counter({one.name: one.gpus - left for one, left in zip(slots.topology.nodes, gpus, strict=True)})
    assert taken["c"] == 2.0 and taken["d"] + taken["b"] + taken["e"] == 5.0
    assert taken["a"] == 0.0  # free: a replica with this node would need two S1s


def test_two_instances_on_one_node_count_that_node_once() -> None:
    split, ratio = AttentionFfn(attention=1, ffn=1), PdRatio(1, 1)
    ffn = Demand(gpu_type="H100", workers=1, gpus_per_worker=1.0)
    # Only "a" has room, and its S2 has one GPU type; the S2 of the other nodes has two.
    nodes = [
        node("a", "H100", "m1", 8.0, s2="x"),
        node("b", "H100", "m2", 0.0, s2="y"),
        node("c", "H20", "m2", 0.0, s2="y"),
    ]
    pools = {pool.key.role: pool for pool in moe_pools(split.demand(ffn, ffn), ffn, LinkTier.CLUSTER)}
    group = Group("moe", pools, {}, ratio, Slots(Topology(nodes)))
    assert group.rank_to_grow()[0] is SubgroupPriority.S2_HOMOGENEOUS


def test_parts_are_placed_below_one_s1_or_not_at_all() -> None:
    part = Demand(gpu_type="H100", workers=2, gpus_per_worker=1.0)
    demand = AttentionFfn.parse("1:3").demand(part, part)
    below_two = Slots(Topology([node("a", "H100", "m1", 6.0), node("b", "H100", "m2", 6.0)]))
    assert below_two.take(demand) is None
    assert below_two.free()[0] == [6.0, 6.0]  # nothing was taken for the parts that had room
    below_one = Slots(Topology([node("a", "H100", "m1", 6.0), node("b", "H100", "m1", 6.0)]))
    assert below_one.take(demand) is not None
    assert sum(below_one.free()[0]) == 4.0
