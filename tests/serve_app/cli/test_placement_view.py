"""What users see of nodes, of groups, and of the nodes that replicas are on."""

from dataclasses import replace

import pytest
from rich.console import Console

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.status import PlanRecord, ServiceStatus, Status
from autoscale.decide.tuning import Pools
from autoscale.ratio import PdRatio
from autoscale.topology_config import TopologyConfig
from autoscale.types import (
    ControllerState,
    Decision,
    Demand,
    Latency,
    Plan,
    PoolKey,
    PoolLimits,
    PoolStats,
    Traffic,
)
from kvtransfer.topology import LinkTier, Node, Role
from serve_app.cli.placement_view import (
    cordonable,
    explain_table,
    fragmentation,
    gpus_left,
    label_findings,
    nodes_to_come,
    pools_now,
    topology_tree,
    type_lines,
    waits_for,
    would_fit,
)

P, D = Role.PREFILL, Role.DECODE


def node(name: str, under: str, kind: str | None = "H100", free: float = 8.0, **more: object) -> Node:
    dc, cluster, s2, s1, s0 = (part.strip() for part in under.split("/"))
    gpus = 0.0 if kind is None else 8.0
    fields = {"gpus": gpus, "free_gpus": min(free, gpus), "cpus": 64.0, "free_cpus": 60.0, **more}
    return Node(name=name, labels={"s1": s1}, under=(dc, cluster, s2, s1, s0), gpu_type=kind, **fields)  # type: ignore[arg-type]


NODES = [
    node("common", "d/c/b0/m0/", free=6.0),
    node("scarce-1", "d/c/b1/m1/"),
    node("scarce-2", "d/c/b1/m1/", "H20", is_cordoned=True),
    node("beside", "d/c/b1/m2/", "H20"),
    node("head", "////", None),
]


def group(name: str, switch: str, types: tuple[str, str] = ("H100", "H100"), **fields: object) -> list[PoolStats]:
    return [
        PoolStats(
            key=PoolKey(name, role),
            replicas=(),
            target_replicas=1 if name == "here" else 0,
            held_replicas=1 if name == "here" else 0,
            limits=PoolLimits(
                lowest_replicas=0,
                highest_replicas=4,
                gpus_per_replica=2,
                demand=Demand(selector={"s1": switch} if switch else {}, gpu_type=kind, workers=2, gpus_per_worker=1.0),
                cost=8.0 if kind == "H100" else 3.0,
                affinity=LinkTier.S1,
            ),
            **fields,
        )
        for role, kind in zip(Role, types, strict=True)
    ]


def shown(what: object) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_the_tree_has_levels_gpus_scarcity_and_replicas() -> None:
    lines = shown(topology_tree(NODES, dict.fromkeys(("r1", "r2"), (PoolKey("here", P), ("common",)))))
    assert "Ray cluster: 8 of 16 H20 free" not in lines  # both H20 nodes are free
    assert "16 of 16 H20 free" in lines and "14 of 16 H100 free" in lines
    assert "S1 m0: 6 of 8 H100 free (common)" in lines
    assert "S1 m1: 8 of 8 H100 free, 8 of 8 H20 free (scarcest: GPU types differ under its S1)" in lines
    assert "S1 m2: 8 of 8 H20 free (scarce: GPU types differ under its S2)" in lines
    assert "common: 6 of 8 H100 free, 60 of 64 CPUs  2 prefill:here" in lines
    assert "scarce-2: 8 of 8 H20 free, 60 of 64 CPUs  cordoned" in lines
    assert "head: no GPU" in lines


def test_missing_and_contradicting_labels_are_reported() -> None:
    nodes = [
        node("a", "d/c/b0/m0/"),
        node("b", "d/c/b1/m0/"),
        node("c", "d/c/b1//"),
        node("liar", "d/c/b1/m1/", free_gpus=9.0),
        node("torn", "d/c/b1/m1/", contradiction="it has GPUs of type A and of B, and counts as A"),
    ]
    found = list(label_findings(nodes))
    assert "1 nodes with GPUs have no S1, and others have: c" in found
    assert "S1 'm0' is under d/c/b0 and d/c/b1: a selector of that label alone takes nodes of both" in found
    assert "node liar has 9 GPUs free of 8" in found
    assert "node torn: it has GPUs of type A and of B, and counts as A" in found
    assert list(label_findings(NODES[:4])) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("scarce-1", "scarce-1"),
        ("scarce-", None),  # two names begin with it
        ("com", "common"),
        ("m1", "m1"),
        ("b1", "b1"),
        ("machine", "machine"),
        ("", None),
        ("nowhere", None),
    ],
)
def test_a_name_to_cordon_stands_for_one_node_or_switch(name: str, meant: str | None) -> None:
    assert cordonable(name, [*NODES, node("other", "////", host="machine")]) == meant


def test_free_gpus_that_no_group_can_use_are_counted() -> None:
    # A prefill replica takes two H100s and a decode replica two H20s; the H20 node under m1 is cordoned.
    assert fragmentation(NODES, group("mixed", "m1", ("H100", "H20"))) == (
        "of 30 free GPUs 30 lie where no unit of any group fits"
    )
    assert fragmentation(NODES, group("here", "m0")) == "of 30 free GPUs 24 lie where no unit of any group fits"
    assert fragmentation([node("full", "d/c/b0/m0/", free=0.0)], group("here", "m0")) is None


def test_would_fit_shows_replicas_that_fit_and_why_others_do_not() -> None:
    pools = [*group("here", "m0"), *group("mixed", "m1", ("H100", "H20"))]
    gained, placed = would_fit(pools, PdRatio(1, 1), NODES, {P: 1, D: 1})
    assert gained == {"here": (1, 1)} and not any(placed.pending.values())
    gained, placed = would_fit(pools, PdRatio(1, 1), NODES, {P: 3, D: 3})
    assert gained == {"here": (1, 1)} and placed.pending == {P: 2, D: 2}
    assert placed.passed_over["mixed"] == "every node that decode:mixed may be on is cordoned"


def test_would_fit_counts_slow_replicas_as_what_they_are_worth() -> None:
    """Four replicas that are worth a half are two: one more standard replica is one of the fast group."""
    slow = [
        replace(pool, target_replicas=4, limits=replace(pool.limits, capacity=0.5))
        for pool in group("slow", "m1", ("H100", "H20"))
    ]
    gained, _ = would_fit([*group("here", "m0"), *slow], PdRatio(1, 1), NODES, {P: 1, D: 1})
    assert gained == {"here": (1, 1)}


def test_the_table_says_for_each_group_where_it_may_be_and_where_it_is() -> None:
    pools = [*group("here", "m0"), *group("mixed", "m1", ("H100", "H20")), *group("wide", "")]
    lines = shown(explain_table(pools, NODES, {"r": (PoolKey("here", D), ("common",))})).splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()}
    assert "common" in rows["here"] and rows["here"].split()[1:3] == ["1", "1"]
    assert "scarcest" in rows["mixed"] and "11" in rows["mixed"]
    assert "beyond s1" in rows["wide"]  # its nodes share no S1


def service(**autoscale: object) -> ServiceStatus:
    """A service with one wanted replica of each role, and a replica ``leaves`` that ends."""
    policy = {"kind": "static", "prefill": 1, "decode": 1}
    limits = {
        PoolKey("one", role): PoolLimits(
            lowest_replicas=0, highest_replicas=4, demand=Demand(gpu_type="H100", workers=2, gpus_per_worker=1.0)
        )
        for role in Role
    }
    plan = Plan(
        counts={},
        admitted=(),
        withdrawn=(),
        reinstated=(),
        victims=(),
        decision=Decision(wanted=None, reason=""),
        held_back=(),
        state=ControllerState(desired=dict.fromkeys(limits, 1), victims=("leaves",)),
    )
    return ServiceStatus(
        config=AutoscaleConfig.model_validate({"policy": policy, **autoscale}),
        tuned={},
        pools=Pools(limits),
        last=PlanRecord(plan=plan, running={}, draining={}, latency=Latency(), traffic=Traffic()),
    )


def test_would_fit_keeps_budgets_and_counts_replicas_that_still_end() -> None:
    topology = TopologyConfig(budget_gpus={"H100": 12.0})
    services = {"a": service(quota_gpus={"H100": 5.0}), "b": service()}
    limits = gpus_left(Status(log_path="", cordoned=(), topology=topology, services=services), "a")
    assert limits == [{"H100": 4.0}, {"H100": 1.0}]
    places = dict.fromkeys(("here", "leaves"), (PoolKey("one", D), ("common",)))
    prefill, decode = pools_now(services["a"], places)
    assert (prefill.held_replicas, decode.held_replicas, decode.target_replicas) == (0, 1, 1)
    assert set(decode.on) == {"here", "leaves"}
    gained, placed = would_fit([prefill, decode], PdRatio(1, 1), NODES, {P: 1, D: 1}, limits)
    assert gained == {} and placed.pending == {P: 1, D: 1}
    assert placed.passed_over == {"one": "a budget leaves 1 GPUs of type H100, and 4 are needed"}
    assert would_fit([prefill, decode], PdRatio(1, 1), NODES, {P: 1, D: 1}, limits[:1])[0] == {"one": (1, 1)}


def test_nodes_that_may_come_are_shown_and_take_what_would_fit_nowhere_else() -> None:
    kind = {"labels": {"s1": "m9", "kind": "spot"}, "gpu_type": "H100", "gpus": 8, "cpus": 64, "max_nodes": 2}
    topology = TopologyConfig.model_validate(
        {"node_types": {"spot": kind, "gone": {**kind, "labels": {"kind": "gone"}}}, "labels": {"s1": "s1"}}
    )
    one = service()
    assert one.last is not None
    state = replace(one.last.plan.state, refused={"gone": 1060.0})
    one = replace(one, last=replace(one.last, plan=replace(one.last.plan, state=state)))
    status = Status(log_path="", cordoned=(), topology=topology, services={"a": one})
    assert list(type_lines(status, NODES, 1000.0)) == [
        "node type spot (8 H100): up to 2 more",
        "node type gone (8 H100): none came, next request in 60 s",
    ]
    assert list(type_lines(status, NODES, 1061.0))[1] == "node type gone (8 H100): up to 2 more"
    nodes = [*NODES, *nodes_to_come(status, NODES, 1000.0)]
    pools = group("new", "m9")
    assert would_fit(pools, PdRatio(1, 1), NODES, {P: 1, D: 1})[0] == {}
    gained, placed = would_fit(pools, PdRatio(1, 1), nodes, {P: 1, D: 1})
    assert gained == {"new": (1, 1)}
    assert waits_for(placed, (pool.key for pool in pools), nodes) == ", on new nodes of type spot"
    assert waits_for(placed, (), nodes) == ""
