"""The switches above nodes, how far apart nodes are, and how scarce their switches are."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from pydantic import ValidationError

from kvtransfer.labels import DEFAULT_LABELS, TopologyLabels
from kvtransfer.topology import LinkTier, Node, NodeSet, SubgroupPriority, Topology, path

S0, S1, S2, CLUSTER = "tandem.io/s0", "tandem.io/s1", "tandem.io/s2", "tandem.io/cluster"


def node(name: str, under: str = "", gpu_type: str | None = "H100", gpus: float = 8.0) -> Node:
    """A node; ``under``: its data centre, cluster, S2, S1 and S0, with slashes; the last ones may be missing."""
    names = under.split("/") if under else []
    labels = dict(zip([DEFAULT_LABELS.of(tier) for tier in reversed(LinkTier) if tier is not LinkTier.NONE], names))  # noqa: B905
    return Node(
        name=name,
        labels=labels,
        under=DEFAULT_LABELS.under(labels),
        gpu_type=gpu_type,
        gpus=gpus,
        free_gpus=gpus,
        cpus=64.0,
        free_cpus=64.0,
    )


def names(topology: Topology, nodes: NodeSet) -> list[str]:
    return [one.name for one in topology.listed(nodes)]


@pytest.mark.parametrize(
    ("prefill", "decode", "tier"),
    [
        ({S1: "a", S0: "x"}, {S1: "a", S0: "x"}, LinkTier.S0),
        ({S0: "x"}, {S0: "x"}, LinkTier.S0),
        ({S1: "a", S0: "x"}, {S1: "a", S0: "y"}, LinkTier.S1),
        ({S1: "a"}, {S1: "a", S0: "y"}, LinkTier.S1),
        ({S1: "a", S0: "x"}, {S1: "b", S0: "x"}, LinkTier.S2),  # racks of two minipods may have the same name
        ({S2: "a", S1: "x"}, {S2: "b", S1: "x"}, LinkTier.CLUSTER),
        ({CLUSTER: "a"}, {CLUSTER: "b"}, LinkTier.DATA_CENTRE),
        ({S1: "in(a,b)"}, {S1: "in(a,b)"}, LinkTier.S2),
        ({S1: "!a"}, {S1: "!a"}, LinkTier.S2),
        ({}, {S1: "a"}, LinkTier.S2),
        ({}, {}, LinkTier.S2),
    ],
)
def test_the_link_tier_is_the_lowest_switch_that_both_roles_demand(
    prefill: dict[str, str], decode: dict[str, str], tier: LinkTier
) -> None:
    assert DEFAULT_LABELS.link_tier(prefill, decode) is tier
    assert DEFAULT_LABELS.link_tier(decode, prefill) is tier


def test_other_names_of_labels_can_be_configured() -> None:
    labels = TopologyLabels(s1="rack.example/minipod")
    assert labels.under({"rack.example/minipod": "m1", S2: "b1"}) == ("", "", "b1", "m1", "")
    assert labels.link_tier({"rack.example/minipod": "m1"}, {"rack.example/minipod": "m1"}) is LinkTier.S1
    with pytest.raises(ValidationError, match="stands for two levels: each level needs its own"):
        TopologyLabels(s1="tandem.io/s2")


def test_a_path_ends_at_its_level_and_is_none_if_it_is_unknown() -> None:
    known = node("n", "dc/c/b/m/r")
    assert path(known, LinkTier.S2) == ("dc", "c", "b")
    assert path(known, LinkTier.S0) == ("dc", "c", "b", "m", "r")
    assert path(node("n", "dc/c/b"), LinkTier.S1) is None


@pytest.mark.parametrize(
    ("under", "tier"),
    [
        (["d/c/b/m/r", "d/c/b/m/r"], LinkTier.S0),
        (["d/c/b/m/r", "d/c/b/m/q"], LinkTier.S1),
        (["d/c/b/m", "d/c/b/m"], LinkTier.S1),
        (["d/c/b/m/r", "d/c/b/n/r"], LinkTier.S2),  # racks with the same name under two switches are different
        (["d/c/b/m", "d/c/a/m"], LinkTier.CLUSTER),
        (["d/c/b/m", "d/e/b/m"], LinkTier.DATA_CENTRE),
        (["d/c/b/m", "f/c/b/m"], LinkTier.NONE),
        (["d/c/b/m", "d/c/b"], LinkTier.S2),  # the second may be under any S1
        (["", ""], LinkTier.NONE),
    ],
)
def test_nodes_are_as_far_apart_as_their_lowest_common_switch(under: list[str], tier: LinkTier) -> None:
    topology = Topology(node(str(number), one) for number, one in enumerate(under))
    assert topology.tier(topology.everywhere) is tier


# Two S2: b1 has one GPU type; b2 has two S1 with one type each, and an S1 with both types.
MIXED: Mapping[str, Node] = {
    name: node(name, f"d/c/{name[:2]}/{name[2:4]}", kind)
    for name, kind in {
        "b1m1-0": "H100",
        "b1m2-0": "H100",
        "b2m1-0": "H20",
        "b2m2-0": "H100",
        "b2m3-0": "H100",
        "b2m3-1": "H20",
    }.items()
}


def test_rdma_subgroups_have_the_papers_three_priorities() -> None:
    """HeteroScale section 3.4."""
    topology = Topology(MIXED.values())
    assert {priority: names(topology, nodes) for priority, nodes in topology.subgroups.items()} == {
        SubgroupPriority.S2_HOMOGENEOUS: ["b1m1-0", "b1m2-0"],
        SubgroupPriority.S2_HETEROGENEOUS: ["b2m1-0", "b2m2-0"],
        SubgroupPriority.S1_HETEROGENEOUS: ["b2m3-0", "b2m3-1"],
    }
    assert list(topology.subgroups) == sorted(topology.subgroups)


def test_a_node_without_gpus_makes_no_switch_scarce_and_unknown_switches_are_common() -> None:
    topology = Topology([node("a", "d/c/b/m"), node("b", "d/c/b/m", None), node("c"), node("d", "", "H20")])
    assert topology.priority(topology.everywhere) is SubgroupPriority.S2_HOMOGENEOUS
    topology = Topology([*MIXED.values(), node("b2m3-2", "d/c/b2/m3", None)])
    assert "b2m3-2" in names(topology, topology.subgroups[SubgroupPriority.S2_HOMOGENEOUS])


def test_every_node_is_in_one_subgroup() -> None:
    topology = Topology([*MIXED.values(), node("x"), node("y", "", None)])
    together = 0
    for nodes in topology.subgroups.values():
        assert together & nodes == 0
        together |= nodes
    assert together == topology.everywhere


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ({}, 6),
        ({S2: "b1"}, 2),
        ({S2: "!b1"}, 4),
        ({S2: "in(b1,b2)", S1: "m1"}, 2),
        ({S2: "b2", S1: "!in(m1,m2)"}, 2),
        ({S2: "b3"}, 0),
        ({"other": "!x"}, 6),
        ({"other": "x"}, 0),
    ],
)
def test_selectors_find_nodes(selector: dict[str, str], found: int) -> None:
    assert Topology(MIXED.values()).selected(selector).bit_count() == found


def test_cordoned_nodes_are_not_usable() -> None:
    cordoned = replace(MIXED["b1m1-0"], is_cordoned=True)
    topology = Topology([cordoned, MIXED["b1m2-0"]])
    assert names(topology, topology.usable) == ["b1m2-0"]
