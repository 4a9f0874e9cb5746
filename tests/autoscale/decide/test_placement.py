"""Spreading a service over its groups."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.decide.gate import choose_victims
from autoscale.decide.placement import Placed, place
from autoscale.decide.slots import Slots
from autoscale.decide.supply import start_nodes
from autoscale.ratio import PdRatio
from autoscale.room import Room, joint_counts
from autoscale.types import Demand, PoolKey, PoolLimits, PoolStats, ReplicaStats
from kvtransfer.topology import LinkTier, Node, Role, Topology

P, D = Role.PREFILL, Role.DECODE


def pools(
    bounds: Sequence[tuple[int, int]],
    tiers: Sequence[LinkTier] = (LinkTier.S1,) * 3,
    costs: Sequence[float] = (0.0,) * 4,
) -> list[PoolStats]:
    return [
        PoolStats(
            key=PoolKey(f"g{i}", role),
            replicas=(),
            target_replicas=1,
            limits=PoolLimits(lowest_replicas=low, highest_replicas=high, link_tier=tiers[i], cost=costs[i]),
        )
        for i, (low, high) in enumerate(bounds)
        for role in Role
    ]


def test_one_group_gets_everything() -> None:
    current = {PoolKey("g0", P): 1, PoolKey("g0", D): 3}
    assert place({P: 2, D: 6}, current, pools([(1, 9)]), PdRatio(1, 3)).counts == {
        PoolKey("g0", P): 2,
        PoolKey("g0", D): 6,
    }


def test_the_emptiest_group_grows_and_its_followers_with_it() -> None:
    current = {PoolKey("g0", P): 2, PoolKey("g0", D): 6, PoolKey("g1", P): 1, PoolKey("g1", D): 3}
    placed = place({P: 4, D: 12}, current, pools([(1, 9), (1, 9)]), PdRatio(1, 3)).counts
    assert placed == {PoolKey("g0", P): 2, PoolKey("g0", D): 6, PoolKey("g1", P): 2, PoolKey("g1", D): 6}


def test_near_groups_grow_first_and_far_ones_shrink_first() -> None:
    groups = pools([(1, 9), (1, 9)], tiers=(LinkTier.S2, LinkTier.S0))
    current = {PoolKey("g0", P): 1, PoolKey("g0", D): 1, PoolKey("g1", P): 2, PoolKey("g1", D): 2}
    grown = place({P: 5, D: 5}, current, groups, PdRatio(1, 1)).counts
    assert grown == {PoolKey("g0", P): 1, PoolKey("g0", D): 1, PoolKey("g1", P): 4, PoolKey("g1", D): 4}
    current = {PoolKey("g0", P): 3, PoolKey("g0", D): 3, PoolKey("g1", P): 4, PoolKey("g1", D): 4}
    shrunk = place({P: 5, D: 5}, current, groups, PdRatio(1, 1)).counts
    assert shrunk == {PoolKey("g0", P): 1, PoolKey("g0", D): 1, PoolKey("g1", P): 4, PoolKey("g1", D): 4}


def decode_counts(total: int, current: Sequence[int]) -> list[int]:
    """Experiment 2 of WVA: decode counts of A100s at cost 1.0 and H100s at 2.5; each group has one prefill replica."""
    groups = pools([(1, 4), (1, 4)], tiers=(LinkTier.S2, LinkTier.S0), costs=(1.0, 2.5))
    before = {PoolKey(f"g{i}", role): current[i] if role is D else 1 for i in range(2) for role in Role}
    placed = place({P: 2, D: total}, before, groups, PdRatio(2, max(2, total))).counts
    return [placed[PoolKey(f"g{i}", D)] for i in range(2)]


@pytest.mark.parametrize(
    ("total", "current", "expected"),
    [
        (2, (1, 1), [1, 1]),
        (4, (1, 1), [3, 1]),  # though KV travels least in the dearer group
        (5, (1, 1), [4, 1]),
        (6, (4, 1), [4, 2]),  # an H100 only if no A100 is left
        (8, (4, 2), [4, 4]),
        (7, (4, 4), [4, 3]),  # the dearest goes first
        (4, (4, 3), [3, 1]),
        (5, (2, 3), [2, 3]),  # nothing moves if the total stays
    ],
)
def test_the_cheapest_variant_grows_first_and_the_dearest_shrinks_first(
    total: int, current: tuple[int, int], expected: list[int]
) -> None:
    assert decode_counts(total, current) == expected


@pytest.mark.parametrize(
    ("decode", "prefill", "grown"),
    [
        # Cost of a decode replica and a third of a prefill replica: 2 + 9/3 against 2 + 3/3.
        ((2.0, 2.0), (9.0, 3.0), "g1"),
        # 2 + 6/3 against 4 + 3/3, though a whole pair costs 8 against 7.
        ((2.0, 4.0), (6.0, 3.0), "g0"),
    ],
)
def test_the_cost_of_a_leader_includes_its_share_of_a_follower(
    decode: tuple[float, float], prefill: tuple[float, float], grown: str
) -> None:
    prices = {P: prefill, D: decode}
    priced = [
        replace(pool, limits=replace(pool.limits, cost=prices[pool.key.role][int(pool.key.group[1])]))
        for pool in pools([(1, 9), (1, 9)])
    ]
    current = {PoolKey(group, role): 1 for group in ("g0", "g1") for role in Role}
    placed = place({P: 3, D: 7}, current, priced, PdRatio(1, 3)).counts
    assert {key for key, count in placed.items() if count > 1} == {PoolKey(grown, P), PoolKey(grown, D)}


def test_a_full_group_is_passed_over_and_replicas_without_room_are_pending() -> None:
    current = {PoolKey("g0", P): 1, PoolKey("g0", D): 1, PoolKey("g1", P): 1, PoolKey("g1", D): 1}
    placed = place({P: 5, D: 5}, current, pools([(1, 2), (1, 9)]), PdRatio(1, 1)).counts
    assert placed == {PoolKey("g0", P): 2, PoolKey("g0", D): 2, PoolKey("g1", P): 3, PoolKey("g1", D): 3}
    full = place({P: 2, D: 9}, current, pools([(1, 2), (1, 2)]), PdRatio(1, 1))
    assert full.counts == {**current, PoolKey("g0", D): 2, PoolKey("g1", D): 2}
    assert full.pending == {P: 0, D: 5}


@given(
    ratio=st.sampled_from(["1:5", "1:3", "1:1", "2:1", "9:1"]).map(PdRatio.parse),
    leaders=st.tuples(st.integers(3, 60), st.integers(3, 60)),
    tiers=st.lists(st.sampled_from(LinkTier), min_size=1, max_size=4),
    costs=st.tuples(*[st.sampled_from([0.0, 1.0, 2.5])] * 4),
)
def test_totals_are_kept_and_groups_are_near_the_ratio(
    ratio: PdRatio, leaders: tuple[int, int], tiers: list[LinkTier], costs: tuple[float, ...]
) -> None:
    groups = len(tiers)
    room = Room(
        lowest=dict.fromkeys(Role, groups),
        highest=dict.fromkeys(Role, 500),
        most_gpus_per_replica=dict.fromkeys(Role, 1),
    )
    bounds = pools([(1, 500)] * groups, tiers, costs)
    placed = {PoolKey(f"g{i}", role): 1 for i in range(groups) for role in Role}
    for count in leaders:
        wanted = joint_counts({ratio.leader: float(count), ratio.follower: 0.0}, ratio, room, band_replicas=1.0)
        assert wanted is not None
        placed = place(wanted, placed, bounds, ratio).counts
        assert {role: sum(n for key, n in placed.items() if key.role is role) for role in Role} == wanted
        for i in range(groups):
            deviation = ratio.deviation(placed[PoolKey(f"g{i}", P)], placed[PoolKey(f"g{i}", D)])
            # Every replica of every group may serve: the gate's band is one replica.
            assert deviation <= 1.0 + 1e-9


def test_a_near_group_gets_no_more_leaders_than_its_followers_can_serve() -> None:
    groups = pools([(1, 12)] * 4, tiers=(LinkTier.S0, LinkTier.S2, LinkTier.S2, LinkTier.S2))
    current = {PoolKey(f"g{i}", role): 1 for i in range(4) for role in Role}
    placed = place({P: 4, D: 12}, current, groups, PdRatio(1, 3)).counts
    # Each group keeps one of the four prefill replicas, which serves six decode replicas at most.
    assert [placed[PoolKey(f"g{i}", P)] for i in range(4)] == [1, 1, 1, 1]
    assert [placed[PoolKey(f"g{i}", D)] for i in range(4)] == [6, 2, 2, 2]


# The tests below place replicas on nodes.


def node(name: str, gpu_type: str = "H100", free: float = 8.0, under: str = "d/c/b1/m1") -> Node:
    names = (*under.split("/"), "", "")[:5]
    return Node(
        name=name,
        labels={"s2": names[2], "s1": names[3]},
        under=names,
        gpu_type=gpu_type,
        gpus=8.0,
        free_gpus=free,
        cpus=64.0,
        free_cpus=64.0,
    )


def group(
    name: str,
    selector: Mapping[str, str] = MappingProxyType({}),
    types: Mapping[Role, str] = MappingProxyType({P: "H100", D: "H100"}),
    gpus: int = 1,
    bounds: tuple[int, int] = (0, 99),
    held_replicas: int | Mapping[Role, int] | None = None,
    **limits: Any,
) -> list[PoolStats]:
    return [
        PoolStats(
            key=PoolKey(name, role),
            replicas=(),
            target_replicas=0,
            held_replicas=held_replicas[role] if isinstance(held_replicas, Mapping) else held_replicas,
            limits=PoolLimits(
                lowest_replicas=bounds[0],
                highest_replicas=bounds[1],
                demand=Demand(selector=selector, gpu_type=types[role], workers=gpus, gpus_per_worker=1.0),
                **limits,
            ),
        )
        for role in Role
    ]


def placed_on(
    nodes: Sequence[Node],
    groups: Sequence[list[PoolStats]],
    prefill: int,
    decode: int,
    ratio: str = "1:1",
    current: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    **fields: Any,
) -> Placed:
    of = [pool for group_ in groups for pool in group_]
    now = {pool.key: current.get(pool.key.group, (0, 0))[pool.key.role is D] for pool in of}
    slots = Slots(Topology(nodes))
    return place({P: prefill, D: decode}, now, of, PdRatio.parse(ratio), slots=slots, **fields)


def counts(placed: Placed) -> dict[str, tuple[int, int]]:
    """Counts (P, D) of each group that has replicas."""
    groups = {key.group: None for key in placed.counts}
    found = {name: (placed.counts[PoolKey(name, P)], placed.counts[PoolKey(name, D)]) for name in groups}
    return {name: pair for name, pair in found.items() if any(pair)}


B1, B2 = {"s2": "b1"}, {"s2": "b2"}
M1, M2, M3 = {"s1": "m1"}, {"s1": "m2"}, {"s1": "m3"}


def test_law_1_a_group_whose_nodes_break_its_affinity_gets_no_replica() -> None:
    nodes = [node("a", under="d/c/b1/m1"), node("b", under="d/c/b1/m2")]
    near = {"affinity": LinkTier.S1}
    apart = placed_on(nodes, [group("wide", **near), group("near", M2, **near)], 1, 1)
    assert counts(apart) == {"near": (1, 1)}
    alone = placed_on(nodes, [group("wide", **near)], 1, 1)
    assert counts(alone) == {}
    assert alone.pending == {P: 1, D: 1}
    assert alone.passed_over == {"wide": "its affinity requires one s1 above all its nodes: a and b do not share one"}
    assert counts(placed_on(nodes, [group("wide", affinity=LinkTier.S2)], 1, 1)) == {"wide": (1, 1)}


@pytest.mark.parametrize(
    ("switches", "fault"),
    [
        ({"a": "m1", "b": "m2", "c": "m1"}, "a and b do not share one"),  # the first and the last node share one
        ({"a": "m1", "b": ""}, "a and b do not share one"),
        ({"a": ""}, "a has no label for it"),
    ],
)
def test_the_reason_names_nodes_that_break_the_affinity(switches: Mapping[str, str], fault: str) -> None:
    nodes = [node(name, under=f"d/c/b1/{switch}") for name, switch in switches.items()]
    apart = placed_on(nodes, [group("wide", affinity=LinkTier.S1)], 1, 1)
    assert apart.passed_over == {"wide": f"its affinity requires one s1 above all its nodes: {fault}"}


# b1 has one GPU type. Under b2 one S1 has two types, so its nodes are scarce.
SCARCE = (
    node("common", under="d/c/b1/m1", free=4),
    node("scarce", under="d/c/b2/m2"),
    node("scarce-too", "H20", under="d/c/b2/m2"),
)


def test_law_3_scarce_switches_are_left_alone_while_others_fit() -> None:
    groups = [group("scarce", B2), group("common", B1)]
    assert counts(placed_on(SCARCE, groups, 2, 2)) == {"common": (2, 2)}
    assert counts(placed_on(SCARCE, groups, 3, 3)) == {"common": (2, 2), "scarce": (1, 1)}
    # One group over both takes the common node first.
    wide = placed_on(SCARCE, [group("wide")], 2, 2)
    assert set(wide.nodes.values()) == {("common",)}
    # Also if the scarce group is cheaper and nearer.
    cheap = [group("scarce", B2, cost=1.0, link_tier=LinkTier.S0), group("common", B1, cost=9.0)]
    assert counts(placed_on(SCARCE, cheap, 1, 1)) == {"common": (1, 1)}


def test_law_3_a_replica_that_starts_again_gets_no_scarcer_node() -> None:
    nodes = [*SCARCE, node("common-too", under="d/c/b1/m1")]
    slots = Slots(Topology(nodes))
    prefill, decode = (replace(pool, on={"r": ("common",)}) for pool in group("wide", held_replicas=1))
    key, common, everywhere = prefill.key, ("common", "common-too"), ()

    def starts(planned: Mapping[PoolKey, tuple[str, ...]], before: tuple[str, ...], wanted: int) -> tuple[str, ...]:
        found, _ = start_nodes({key: before}, planned, {key: wanted}, [prefill], slots, {})
        return found.get(key, everywhere)

    assert starts({}, everywhere, 1) == common  # no scarcer than the nodes of its pool
    assert starts({key: common}, everywhere, 2) == common  # the planned nodes
    assert starts({}, common, 2) == common  # they stay until the replica runs
    assert starts({key: everywhere}, common, 2) == everywhere  # a later plan found room only on scarcer nodes
    assert starts({}, everywhere, 2) == everywhere
    scarce = replace(decode, on={"r": ("common",), "s": ("scarce",)}, held_replicas=2)
    assert start_nodes({}, {}, {scarce.key: 2}, [scarce], slots, {}) == ({}, {})
    # A node that was cordoned while the pool grew takes no further replica.
    slots = Slots(Topology([replace(one, is_cordoned=one.name == "common-too") for one in nodes]))
    assert starts({}, common, 2) == ("common",)
    slots = Slots(Topology([replace(one, is_cordoned=one.name in common) for one in nodes]))
    assert starts({}, common, 2) == everywhere  # the scheduler hook then leaves out cordoned nodes


def test_law_6_in_one_group_the_replica_on_the_scarcest_node_leaves_first() -> None:
    names = [f"r{i}" for i in range(3)]
    replicas = tuple(ReplicaStats(replica_id=name, observed_s=0.0) for name in names)
    scarcer, scarce, common = ((True, -scarcity, 1.0, 0.0) for scarcity in (2, 1, 0))
    ranks = {"r0": scarcer, "r1": common, "r2": scarce}
    assert choose_victims(replicas, frozenset(names), 2, ranks) == ["r0", "r2"]
    ranks = {"r0": common, "r1": scarcer}
    assert choose_victims(replicas, frozenset(names[1:]), 1, ranks) == ["r0"]  # held replicas first
    assert choose_victims(replicas, frozenset(names), 1) == ["r2"]


def test_law_3_a_group_that_needs_two_types_under_one_switch_gets_them() -> None:
    types = {P: "H100", D: "H20"}
    groups = [group("mixed", M2, types, affinity=LinkTier.S1), group("apart", B1, types, affinity=LinkTier.S1)]
    placed = placed_on(SCARCE, groups, 2, 2)
    assert counts(placed) == {"mixed": (2, 2)}
    assert not any(placed.nodes.values())  # Ray may take any node that the group asks for


def test_law_4_a_unit_is_all_or_nothing_and_the_rest_is_pending() -> None:
    nodes = [node("a", free=5)]
    placed = placed_on(nodes, [group("g", bounds=(0, 99))], 2, 6, "1:3")
    # The four replicas of the first unit, and none of the second, though a GPU is free.
    assert counts(placed) == {"g": (1, 3)}
    assert placed.pending == {P: 1, D: 3}
    assert placed.passed_over == {"g": "no node has room for a replica of prefill:g beside the other 1 of its unit"}


def test_law_4_a_request_goes_to_several_groups_in_whole_units() -> None:
    nodes = [node("a", free=5, under="d/c/b1/m1"), node("b", free=4, under="d/c/b1/m2")]
    placed = placed_on(nodes, [group("one", M1), group("two", M2)], 3, 9, "1:3")
    assert counts(placed) == {"one": (1, 3), "two": (1, 3)}
    assert placed.pending == {P: 1, D: 3}


def test_law_6_scale_in_frees_the_scarcest_switches_first() -> None:
    groups = [group("common", B1), group("scarce", B2)]
    now = {"common": (2, 2), "scarce": (2, 2)}
    assert counts(placed_on(SCARCE, groups, 3, 3, current=now)) == {"common": (2, 2), "scarce": (1, 1)}
    assert counts(placed_on(SCARCE, groups, 1, 1, current=now)) == {"common": (1, 1)}


def test_law_5_gpus_that_are_given_up_are_not_free_in_the_same_cycle() -> None:
    nodes = [node("a", free=0)]
    placed = placed_on(nodes, [group("g")], 1, 1, current={"g": (0, 2)})
    assert placed.pending == {P: 1, D: 0}


def test_law_7_the_preferred_gpu_type_fills_first_and_then_the_acceptable_one() -> None:
    nodes = [node("a", "H100", free=2, under="d/c/b1/m1"), node("b", "A100", under="d/c/b2/m2")]
    groups = [
        group("second", types={P: "A100", D: "A100"}, preference=1, cost=1.0),
        group("first", types={P: "H100", D: "H100"}, preference=0, cost=4.0),
    ]
    assert counts(placed_on(nodes, groups, 1, 1)) == {"first": (1, 1)}
    assert counts(placed_on(nodes, groups, 2, 2)) == {"first": (1, 1), "second": (1, 1)}


def test_law_9_budgets_and_quotas_hold() -> None:
    nodes = [node("a"), node("b", "A100", under="d/c/b2/m2")]
    groups = [group("h", gpus=2, cost=1.0), group("a", types={P: "A100", D: "A100"}, gpus=2, cost=2.0)]
    budget, quota = {"H100": 4.0}, {"A100": 6.0}
    placed = placed_on(nodes, groups, 4, 4, limits=(budget, quota))
    assert counts(placed) == {"h": (1, 1), "a": (1, 1)}
    assert placed.pending == {P: 2, D: 2}
    assert placed.passed_over["h"] == "a budget leaves 0 GPUs of type H100, and 4 are needed"
    assert placed.passed_over["a"] == "a budget leaves 2 GPUs of type A100, and 4 are needed"


def test_law_11_new_replicas_may_start_only_on_nodes_of_their_domain() -> None:
    nodes = [
        node("one", under="d/c/b1/m1"),
        replace(node("cordoned", under="d/c/b1/m1"), is_cordoned=True),
        node("scarce", under="d/c/b1/m2"),
        node("scarce-too", "H20", under="d/c/b1/m2"),
        node("beyond", under="d/c/b2/m3"),
    ]
    placed = placed_on(nodes, [group("g", B1, affinity=LinkTier.S2)], 4, 4)
    assert counts(placed) == {"g": (4, 4)}
    assert set(placed.nodes.values()) == {("one",)}
    more = placed_on(nodes, [group("g", B1, affinity=LinkTier.S2)], 5, 5)
    assert not any(more.nodes.values())  # no list is needed: any node of b1 will do


def test_law_12_replicas_without_a_node_for_too_long_go_to_another_group() -> None:
    nodes = [node("b", under="d/c/b1/m2")]  # the one under m1 was lost
    groups = [group("lost", M1, held_replicas=0), group("here", M2, held_replicas=1)]
    now = {"lost": (1, 1), "here": (1, 1)}
    waits = placed_on(nodes, groups, 2, 2, current=now)
    assert counts(waits) == now
    # Without another group they are given up in this cycle and asked for again in the next: other nodes may be free.
    nodes_again = [*nodes, node("a", under="d/c/b1/m1")]
    alone = [group("lost", M1, held_replicas=0)]
    overdue = {PoolKey("lost", role) for role in Role}
    given_up = placed_on(nodes_again, alone, 1, 1, current={"lost": (1, 1)}, overdue=overdue)
    assert counts(given_up) == {}
    assert given_up.passed_over == {"lost": "decode:lost found no node for the replicas that it should get"}
    assert counts(placed_on(nodes_again, alone, 1, 1)) == {"lost": (1, 1)}
    keys = {PoolKey("lost", role) for role in Role}
    assert counts(placed_on(nodes, groups, 2, 2, current=now, overdue=keys)) == {"here": (2, 2)}


def test_law_12_a_minimum_replica_without_a_node_is_added_elsewhere_or_pending() -> None:
    lost = group("lost", M1, bounds=(1, 9), held_replicas=0)
    here = group("here", M2, bounds=(1, 9), held_replicas=1)
    now = {"lost": (1, 1), "here": (1, 1)}
    overdue = {PoolKey("lost", role) for role in Role}
    roomy = [node("b", under="d/c/b1/m2")]
    assert counts(placed_on(roomy, [lost, here], 2, 2, current=now)) == now
    more = placed_on(roomy, [lost, here], 2, 2, current=now, overdue=overdue)
    assert counts(more) == {"lost": (1, 1), "here": (2, 2)}  # Serve goes on asking for the minimum
    assert not any(more.pending.values())
    full = placed_on([node("b", free=0, under="d/c/b1/m2")], [lost, here], 2, 2, current=now, overdue=overdue)
    assert counts(full) == now
    assert full.pending == {P: 1, D: 1}
    assert full.passed_over["lost"] == "decode:lost found no node for the replicas that it should get"
    # Once the lost replicas run, the added ones leave.
    back = [group("lost", M1, bounds=(1, 9), held_replicas=1), group("here", M2, bounds=(1, 9), held_replicas=2)]
    assert counts(placed_on(roomy, back, 2, 2, current={"lost": (1, 1), "here": (2, 2)})) == now


def test_law_12_a_leader_that_lost_its_follower_goes_to_a_group_with_one_to_spare() -> None:
    nodes = [node("a", free=0, under="d/c/b1/m1"), node("b", under="d/c/b1/m2")]
    held = {"starved": (0, 3), "other": (2, 3)}
    groups = [
        group(name, where, held_replicas=dict(zip(Role, held[name], strict=True)))
        for name, where in (("starved", M1), ("other", M2))
    ]
    now = {"starved": (1, 3), "other": (1, 3)}
    placed = placed_on(nodes, groups, 2, 6, "1:3", current=now, overdue={PoolKey("starved", P)})
    assert counts(placed) == {"starved": (0, 2), "other": (2, 4)}  # one replica at a time


def test_law_12_a_leader_that_lost_its_only_follower_goes_to_a_group_with_room_for_a_unit() -> None:
    nodes = [node("a", free=0, under="d/c/b1/m1"), node("b", under="d/c/b1/m2")]  # the node of its prefill is gone
    groups = [group("lost", M1, held_replicas={P: 0, D: 1}), group("empty", M2, held_replicas=0)]
    now = {"lost": (1, 1)}
    assert counts(placed_on(nodes, groups, 1, 1, current=now)) == now
    moved = placed_on(nodes, groups, 1, 1, current=now, overdue={PoolKey("lost", P)})
    assert counts(moved) == {"empty": (1, 1)}
    assert not moved.passed_over.get("empty")


@pytest.mark.parametrize("ratio", ["1:1", "1:2", "2:1"])
def test_law_4_prefill_without_decode_is_given_up_though_prefill_of_another_group_is_stuck(ratio: str) -> None:
    nodes = [node("a", free=0, under="d/c/b1/m1"), node("b", free=0, under="d/c/b1/m2")]
    groups = [
        group("kept", M1, bounds=(1, 2), held_replicas={P: 0, D: 1}),
        group("torn", M2, held_replicas={P: 1, D: 0}),
    ]
    now = {"kept": (1, 1), "torn": (1, 0)}
    placed = placed_on(nodes, groups, 2, 2, ratio, current=now, overdue={PoolKey("kept", P)})
    assert counts(placed) == {"kept": (1, 1)}
    assert placed.pending[P] >= 1


def test_law_13_a_cordoned_node_takes_no_new_replica() -> None:
    nodes = [replace(node("a"), is_cordoned=True)]
    stays = placed_on(nodes, [group("g")], 2, 2, current={"g": (1, 1)})
    assert counts(stays) == {"g": (1, 1)}
    assert stays.passed_over == {"g": "every node that decode:g may be on is cordoned"}


def test_a_demand_that_no_node_meets_is_named() -> None:
    alone = placed_on([node("a")], [group("g", M2, {P: "H100", D: "B200"})], 1, 1)
    assert alone.pending == {P: 1, D: 1}
    assert alone.passed_over == {
        "g": "no node that is alive has GPUs of type B200 and labels s1=m2, as decode:g demands"
    }


def test_law_15_a_group_wakes_with_an_extra_follower_if_no_other_has_room_for_a_leader() -> None:
    groups = [group("cheap", M1, bounds=(0, 3), cost=1.0), group("dear", M2, bounds=(0, 3), cost=2.5)]
    nodes = [node("a", under="d/c/b1/m1"), node("b", under="d/c/b1/m2")]
    held = {P: 1, D: 3}
    now = {"cheap": (1, 3)}
    groups[0] = group("cheap", M1, bounds=(0, 3), cost=1.0, held_replicas=held)
    assert counts(placed_on(nodes, groups, 1, 3, "1:3", current=now, spare_followers=1)) == now
    assert counts(placed_on(nodes, groups, 1, 4, "1:3", current=now)) == now  # without a spare follower it may not wake
    woken = placed_on(nodes, groups, 1, 4, "1:3", current=now, spare_followers=1)
    assert counts(woken) == {"cheap": (1, 3), "dear": (1, 1)}
    # It stays awake as long as its leader is needed.
    both = {"cheap": (1, 3), "dear": (1, 1)}
    assert counts(placed_on(nodes, groups, 1, 4, "1:3", current=both, spare_followers=1)) == both
    assert counts(placed_on(nodes, groups, 1, 3, "1:3", current=both, spare_followers=1)) == now


def test_law_15_a_group_that_sleeps_wakes_with_a_whole_unit_and_sleeps_again() -> None:
    nodes = [node("a", free=2, under="d/c/b1/m1"), node("b", under="d/c/b1/m2")]
    groups = [group("awake", M1, bounds=(1, 99), held_replicas={P: 1, D: 3}), group("asleep", M2)]
    woken = placed_on(nodes, groups, 2, 5, "1:3", current={"awake": (1, 3)})
    assert counts(woken) == {"awake": (1, 4), "asleep": (1, 1)}
    slept = placed_on(nodes, groups, 1, 3, "1:3", current={"awake": (1, 3), "asleep": (1, 1)})
    assert counts(slept) == {"awake": (1, 3)}


def test_withdrawn_replicas_come_back_though_no_node_has_room() -> None:
    nodes = [node("a", free=0)]
    assert counts(placed_on(nodes, [group("g", held_replicas=2)], 2, 2, current={"g": (1, 1)})) == {"g": (2, 2)}
    assert counts(placed_on(nodes, [group("g", held_replicas=1)], 2, 2, current={"g": (1, 1)})) == {"g": (1, 1)}


CLUSTERS = st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from(["H100", "H20"]), st.sampled_from(["b1/m1", "b1/m2", "b2/m3"])),
    min_size=1,
    max_size=8,
)
GROUPS = st.lists(
    st.tuples(
        st.sampled_from([{}, B1, B2, M1, M2, M3]),
        st.sampled_from(["H100", "H20"]),
        st.sampled_from(["H100", "H20"]),
        st.integers(1, 4),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=4,
)


@given(CLUSTERS, GROUPS, st.sampled_from(["1:3", "1:1", "2:1"]), st.integers(0, 12), st.integers(0, 12))
def test_laws_1_3_4_9_16_hold_on_any_cluster(
    cluster: list[tuple[int, str, str]],
    given_groups: list[tuple[dict[str, str], str, str, int, int]],
    ratio: str,
    before: int,
    after: int,
) -> None:
    nodes = [node(f"n{i}", kind, float(free), f"d/c/{under}") for i, (free, kind, under) in enumerate(cluster)]
    groups = [
        group(f"g{i}", selector, {P: prefill, D: decode}, gpus, cost=float(cost), affinity=LinkTier.S2)
        for i, (selector, prefill, decode, gpus, cost) in enumerate(given_groups)
    ]
    room = Room(
        lowest=dict.fromkeys(Role, 0), highest=dict.fromkeys(Role, 99), most_gpus_per_replica=dict.fromkeys(Role, 1)
    )
    wanted = [
        joint_counts({D: float(n), P: 0.0}, PdRatio.parse(ratio), room, band_replicas=1.0) for n in (before, after)
    ]
    assert wanted[0] is not None
    assert wanted[1] is not None
    quota = {"H100": 9.0}

    def twice() -> tuple[Placed, Placed]:
        slots, limits = Slots(Topology(nodes)), (dict(quota),)
        of = [pool for group_ in groups for pool in group_]
        options: Any = {"slots": slots, "limits": limits}
        first = place(wanted[0] or {}, dict.fromkeys([pool.key for pool in of], 0), of, PdRatio.parse(ratio), **options)
        held = [replace(pool, held_replicas=first.counts[pool.key]) for pool in of]
        return first, place(wanted[1] or {}, first.counts, held, PdRatio.parse(ratio), **options)

    first, second = twice()
    assert (first, second) == twice()  # law 16
    topology = Topology(nodes)
    used = dict.fromkeys(["H100", "H20"], 0.0)
    for group_ in groups:
        leader, follower = (group_[0], group_[1]) if PdRatio.parse(ratio).leader is P else (group_[1], group_[0])
        for placed in (first, second):
            has = placed.counts[leader.key], placed.counts[follower.key]
            # Law 4: no leader without a follower, and no group more than one replica off the ratio.
            assert has[1] >= (1 if has[0] else 0)
            assert abs(has[0] * PdRatio.parse(ratio).follower_share - has[1]) <= 1.0 + 1e-9
        reach = 0
        for pool in group_:
            assert pool.demand is not None
            reach |= Slots(topology).candidates(pool.demand)
            used[pool.demand.gpu_type or ""] += first.counts[pool.key] * pool.demand.gpus
        if topology.tier(reach) > LinkTier.S2:  # law 1
            assert not any(first.counts[pool.key] for pool in group_)
    for kind, gpus in used.items():  # law 5
        assert gpus <= sum(one.free_gpus for one in nodes if one.gpu_type == kind) + 1e-6
    assert used["H100"] <= 9.0  # law 9
    for role in Role:
        total = sum(count for key, count in second.counts.items() if key.role is role)
        assert total + second.pending[role] >= (wanted[1] or {})[role]


def test_law_9_a_withdrawn_replica_comes_back_into_its_own_room_once() -> None:
    """Two replicas of each role hold GPUs and one of them serves: the other returns. The budget has no GPU for more."""
    pair = group("g", held_replicas=2)
    current = {pool.key: 1 for pool in pair}
    placed = place({P: 4, D: 4}, current, pair, PdRatio(1, 1), limits=[{"H100": 0.0}])
    assert counts(placed) == {"g": (2, 2)}
    assert placed.pending == {P: 2, D: 2}
