"""Nodes that Ray's autoscaler may add: when placement requests them, and what it does if they do not come."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from pydantic import ValidationError

from autoscale.decide.controller import Controller
from autoscale.decide.cycle import tick_all
from autoscale.decide.decision_log import config_line, decision_line, replay
from autoscale.decide.gate import choose_victims, rank_of_nodes
from autoscale.decide.possible import possible_nodes, refused_types, with_savings
from autoscale.decide.slots import Slots
from autoscale.decide.supply import start_nodes
from autoscale.topology_config import NodeTypeConfig, TopologyConfig
from autoscale.types import Demand, NoteKind, Plan, PoolKey
from kvtransfer.topology import Node, Role, Topology
from tests.autoscale.decide.test_cycle import controller, node, pools, snapshot

NOW_S = 1000.0
D, P = Role.DECODE, Role.PREFILL


PRICE = {"cost_per_gpu_hour": 1.0}


def kind(name: str, **fields: object) -> NodeTypeConfig:
    return NodeTypeConfig.model_validate(
        {"labels": {"kind": name}, "gpu_type": "H100", "gpus": 2, "cpus": 8, "max_nodes": 2, "start_s": 300} | fields
    )


def topology_of(**types: NodeTypeConfig) -> TopologyConfig:
    return TopologyConfig(node_types=types, cost_per_gpu_hour={"H100": 3.0})


class Elastic:
    """A service on a cluster that grows: its controller, and the nodes and replicas that there are."""

    def __init__(self, controller: Controller, config: TopologyConfig, *nodes: Node, counts: tuple[int, int]) -> None:
        self.controller, self.config, self.nodes = controller, config, list(nodes)
        self.now_s, self.plan, self.before = NOW_S, None, dict[PoolKey, tuple[str, ...]]()
        self.pools = pools("m", counts, at=nodes[0].name)

    def tick(self, after_s: float = 5.0) -> Plan:
        """One cycle; Serve then asks for the plan's counts, and no replica that waits gets a node."""
        self.now_s += after_s
        seen = snapshot(self.pools)
        if self.plan is not None:
            seen = replace(seen, state=self.plan.state)
        fresh = tuple(
            replace(pool, replicas=tuple(replace(one, observed_s=self.now_s) for one in pool.replicas))
            for pool in seen.pools
        )
        seen = replace(seen, now_s=self.now_s, pools=fresh)
        refused = refused_types(seen.state, self.now_s)
        nodes = [*with_savings(self.config, self.nodes), *possible_nodes(self.config, self.nodes, refused)]
        slots = Slots(Topology(nodes).with_scarcity())
        self.snapshot, plan = tick_all({"m": self.controller}, {"m": seen}, slots=slots)["m"]
        offers = plan.state.offers
        self.before, self.labels = start_nodes(self.before, plan.nodes, plan.counts, self.pools, slots, offers)
        self.pools = tuple(replace(pool, target_replicas=plan.counts[pool.key]) for pool in self.pools)
        self.plan = plan
        return plan


def key(role: Role) -> PoolKey:
    return PoolKey("m-g", role)


def kinds(labels: Mapping[PoolKey, Mapping[str, str]]) -> dict[Role, str]:
    return {pool.role: one["kind"] for pool, one in labels.items()}


def test_a_node_that_exists_is_taken_before_a_possible_one() -> None:
    elastic = Elastic(controller(2), topology_of(spot=kind("spot")), node("a", 2.0), counts=(1, 1))
    plan = elastic.tick()
    assert plan.counts == {key(P): 2, key(D): 2}
    assert elastic.labels == {}


def test_replicas_wait_for_the_cheapest_type_when_no_node_has_room() -> None:
    types = {"dear": kind("dear"), "spot": kind("spot", cost_per_gpu_hour=1.0)}
    elastic = Elastic(controller(2), topology_of(**types), node("a", 0.0), counts=(1, 1))
    plan = elastic.tick()
    assert plan.counts == {key(P): 2, key(D): 2}
    assert plan.pending == {}
    assert kinds(elastic.labels) == {P: "spot", D: "spot"}
    # They go on waiting for it, for as long as such a node may take.
    for _ in range(7):
        plan = elastic.tick(after_s=40.0)
        assert plan.counts == {key(P): 2, key(D): 2}
        assert kinds(elastic.labels) == {P: "spot", D: "spot"}


def test_a_type_that_does_not_come_is_given_up_for_the_next_best_and_tried_again_later() -> None:
    types = {"dear": kind("dear"), "spot": kind("spot", cost_per_gpu_hour=1.0, retry_s=900)}
    elastic = Elastic(controller(2), topology_of(**types), node("a", 0.0), counts=(1, 1))
    for _ in range(10):
        plan = elastic.tick(after_s=40.0)
    notes = [note for note in plan.held_back if note.kind is NoteKind.NO_NODE]
    assert [note.text for note in notes] == [
        "no node of type spot has come in time as declared: none is requested for 900 s"
    ]
    assert plan.counts == {key(P): 1, key(D): 1}  # what waited is withdrawn, so Serve asks Ray for it no more
    given_up_s = elastic.now_s
    plan = elastic.tick()
    assert plan.counts == {key(P): 2, key(D): 2}
    assert kinds(elastic.labels) == {P: "dear", D: "dear"}
    assert refused_types(plan.state, given_up_s + 899.0) == {"spot"}
    assert refused_types(plan.state, given_up_s + 901.0) == frozenset()


def test_a_type_of_which_all_nodes_exist_offers_none() -> None:
    own = replace(node("a", 0.0), labels={"kind": "spot"})
    config = topology_of(spot=kind("spot", max_nodes=1))
    assert possible_nodes(config, [own], ()) == []
    other = replace(own, labels={"kind": "other"})
    (possible,) = possible_nodes(config, [other], ())
    assert (possible.name, possible.free_gpus, possible.under) == ("spot#1", 2.0, ("", "", "", "", ""))
    assert possible_nodes(config, [other], {"spot"}) == []


def test_replicas_of_one_pool_start_on_nodes_that_one_selector_leads_to() -> None:
    # One free GPU on an existing node without the type's labels, and possible nodes: not both for one pool at once.
    elastic = Elastic(controller(4), topology_of(spot=kind("spot")), node("a", 2.0), counts=(1, 1))
    plan = elastic.tick()
    assert plan.counts == {key(P): 2, key(D): 2}
    assert elastic.labels == {}
    assert "start first, on nodes that this one's labels do not lead to" in plan.passed_over["m-g"]
    # Once these are on nodes, the others wait for the possible ones.
    elastic.pools = tuple(
        replace(made, limits=pool.limits, target_replicas=pool.target_replicas)
        for made, pool in zip(pools("m", (2, 2)), elastic.pools, strict=True)
    )
    elastic.nodes = [node("a", 0.0)]
    plan = elastic.tick()
    assert plan.counts == {key(P): 4, key(D): 4}
    assert kinds(elastic.labels) == {P: "spot", D: "spot"}


def test_replicas_on_free_nodes_of_the_type_wait_for_more_of_them_at_once() -> None:
    own = replace(node("a", 2.0), labels={"kind": "spot", "zone": "z"})
    elastic = Elastic(controller(3), topology_of(spot=kind("spot", max_nodes=3)), own, counts=(1, 1))
    assert elastic.tick().counts == {key(P): 3, key(D): 3}
    assert kinds(elastic.labels) == {D: "spot", P: "spot"}


def test_a_budget_holds_on_possible_nodes_too() -> None:
    elastic = Elastic(
        controller(4, quota_gpus={"H100": 4.0}),
        topology_of(spot=kind("spot", max_nodes=8)),
        node("a", 0.0),
        counts=(1, 1),
    )
    assert elastic.tick().counts == {key(P): 2, key(D): 2}


def test_a_plan_that_waits_for_a_possible_node_replays() -> None:
    elastic = Elastic(controller(2), topology_of(spot=kind("spot")), node("a", 0.0), counts=(1, 1))
    plan = elastic.tick()
    lines = [config_line("m", elastic.controller.config, 0.0, "start"), decision_line("m", elastic.snapshot, plan)]
    assert list(replay(lines)) == [None]


def test_possible_nodes_make_no_existing_switch_scarce() -> None:
    here = [node("a", 8.0, s1="m1"), node("b", 8.0, s1="m1")]
    below_m1 = {"dc": "d", "cl": "c", "s2": "b", "s1": "m1"}
    possible = possible_nodes(
        TopologyConfig(
            labels={"data_centre": "dc", "cluster": "cl", "s2": "s2", "s1": "s1"},
            node_types={"a100": kind("a100", labels=below_m1, gpu_type="A100")},
        ),
        here,
        (),
    )
    assert possible[0].under == here[0].under
    assert Topology([*here, *possible]).priority(1) == Topology(here).priority(1)


def test_room_is_taken_step_by_step_and_given_back() -> None:
    config = topology_of(dear=kind("dear", max_nodes=1), spot=kind("spot", max_nodes=1, cost_per_gpu_hour=1.0))
    slots = Slots(Topology([node("a", 1.0), *possible_nodes(config, [], ())]))
    one = Demand(gpu_type="H100", workers=1, gpus_per_worker=1.0)
    taken = [slots.take(one) for _ in range(6)]
    names = [None if part is None else slots.topology.nodes[part[0][0]].name for part in taken]
    assert names == ["a", "spot#1", "spot#1", "dear#1", "dear#1", None]
    slots.refuse(["spot"])
    assert taken[1] is not None
    slots.give_back(taken[1])
    assert slots.take(one) is None


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ({"a": {"labels": {}, "cpus": 1, "max_nodes": 1}}, "at least 1"),
        ({"a#": {"labels": {"k": "a"}, "cpus": 1, "max_nodes": 1}}, "rename it"),
        ({"a": {"labels": {"k": "a"}, "cpus": 1, "max_nodes": 1, "gpus": 8}}, "give both or neither"),
        ({"a": {"labels": {"k": "a"}, "cpus": 1, "max_nodes": 1, "cost_per_gpu_hour": -1}}, "greater than or equal"),
        (
            {name: {"labels": {"k": "same"}, "cpus": 1, "max_nodes": 1} for name in ("a", "b")},
            "b has all labels of a, so replicas that wait for a may get a node of b: give each type a label",
        ),
        (
            {
                "a": {"labels": {"k": "x", "zone": "z"}, "cpus": 1, "max_nodes": 1},
                "b": {"labels": {"k": "x"}, "cpus": 1, "max_nodes": 1},
            },
            "a has all labels of b",
        ),
    ],
)
def test_types_that_cannot_be_used_are_refused(types: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TopologyConfig.model_validate({"node_types": types})


def test_types_with_other_gpus_may_share_labels_but_not_all() -> None:
    wider = kind("h", labels={"k": "x", "net": "ib"})
    assert topology_of(a=kind("a", labels={"k": "x"}, gpu_type="A100", cost_per_gpu_hour=1.0), h=wider)
    with pytest.raises(ValidationError, match="h has all labels of a"):
        topology_of(a=kind("a", labels={"k": "x"}), h=wider)


def test_the_group_on_the_cheapest_type_grows_first_by_the_price_of_the_type() -> None:
    # By list prices an A100 (2 per hour) is cheaper than an H100 (3 per hour), but spot nodes have H100s for 1.
    types = {
        "spot": kind("spot", cost_per_gpu_hour=1.0),
        "a100": kind("a100", gpu_type="A100", cost_per_gpu_hour=2.0),
    }
    config = TopologyConfig(node_types=types, cost_per_gpu_hour={"H100": 3.0, "A100": 2.0})
    both = (
        *pools("m", (1, 1), group="h", cost=3.0, at="a"),
        *pools("m", (0, 0), group="a", lowest=0, cost=2.0, gpu_type="A100"),
    )
    for refused, grown in (((), "m-h"), (["spot"], "m-a")):
        slots = Slots(Topology([node("a", 0.0), *possible_nodes(config, [], refused)]).with_scarcity())
        _, plan = tick_all({"m": controller(2)}, {"m": snapshot(both)}, slots=slots)["m"]
        before = {pool.key: pool.target_replicas for pool in both}
        assert {key.group for key, count in plan.counts.items() if count > before[key]} == {grown}


def test_the_group_on_the_dearest_nodes_shrinks_first_by_their_prices() -> None:
    # By list prices the H100s are dearer, but theirs are on a spot node.
    types = {
        "spot": kind("spot", cost_per_gpu_hour=1.0),
        "a100": kind("a100", gpu_type="A100", cost_per_gpu_hour=2.0),
    }
    config = TopologyConfig(node_types=types, cost_per_gpu_hour={"H100": 3.0, "A100": 2.0})
    nodes = [
        replace(node("h", 4.0), labels={"kind": "spot"}),
        replace(node("g", 4.0, gpu_type="A100"), labels={"kind": "a100"}),
    ]
    both = (
        *pools("m", (2, 2), group="h", cost=3.0, at="h"),
        *pools("m", (2, 2), group="a", cost=2.0, gpu_type="A100", at="g"),
    )
    slots = Slots(Topology(with_savings(config, nodes)).with_scarcity())
    _, plan = tick_all({"m": controller(3)}, {"m": snapshot(both)}, slots=slots)["m"]
    assert {key.group: plan.state.desired[key] for key in plan.state.desired} == {"m-h": 2, "m-a": 1}


def test_a_price_of_zero_is_a_price() -> None:
    config = topology_of(free=kind("free", cost_per_gpu_hour=0.0), usual=kind("usual"))
    costs = {one.offer.node_type: one.offer.cost_per_gpu_hour for one in possible_nodes(config, [], ()) if one.offer}
    assert costs == {"free": 0.0, "usual": 3.0}


def test_replicas_leave_the_expensive_nodes_first_and_of_these_the_one_that_is_empty_soonest() -> None:
    config = topology_of(dear=kind("dear", cost_per_gpu_hour=9.0), spot=kind("spot", cost_per_gpu_hour=1.0))
    names = {"stays": {}, "cheap": {"kind": "spot"}, "nearly-empty": {"kind": "dear"}, "full": {"kind": "dear"}}
    free = {"stays": 7.0, "cheap": 7.0, "full": 0.0, "nearly-empty": 7.0}
    nodes = [replace(node(name, free[name]), labels=labels) for name, labels in names.items()]
    slots = Slots(Topology(with_savings(config, nodes)))
    _, pool = pools("m", (1, 4))
    pool = replace(pool, on={f"m-g-decode{index}": (name,) for index, name in enumerate(names)})
    ids = [replica.replica_id for replica in pool.replicas]
    order = choose_victims(pool.replicas, frozenset(ids), 4, rank_of_nodes(pool, slots))
    assert [dict(zip(ids, names, strict=True))[name] for name in order] == ["nearly-empty", "full", "cheap", "stays"]


def test_replicas_on_a_node_that_will_be_taken_away_leave_before_all_others() -> None:
    nodes = [replace(node("goes", 1.0), is_leaving=True, is_cordoned=True), node("stays", 7.0)]
    slots = Slots(Topology(nodes))
    _, pool = pools("m", (1, 2))
    pool = replace(pool, on={"m-g-decode0": ("goes",), "m-g-decode1": ("stays",)})
    admitted = frozenset(replica.replica_id for replica in pool.replicas)
    assert choose_victims(pool.replicas, admitted, 1, rank_of_nodes(pool, slots)) == ["m-g-decode0"]
    assert slots.take(Demand(gpu_type="H100", workers=7, gpus_per_worker=1.0)) == [(1, 7.0, 0.0)]
    assert slots.take(Demand(gpu_type="H100", workers=1, gpus_per_worker=1.0)) is None


def test_a_type_without_a_price_beside_priced_ones_is_refused() -> None:
    types = {"a": {"labels": {"k": "a"}, "cpus": 1, "max_nodes": 1, "gpu_type": "A100", "gpus": 1}}
    with pytest.raises(ValidationError, match="a has no price"):
        TopologyConfig.model_validate({"node_types": types, "cost_per_gpu_hour": {"H100": 4.0}})
    TopologyConfig.model_validate({"node_types": types})
    with pytest.raises(ValidationError, match="a has no price"):
        TopologyConfig.model_validate({"node_types": {**types, "b": {**types["a"], "labels": {"k": "b"}, **PRICE}}})


def test_replicas_that_wait_for_one_type_are_not_counted_for_another() -> None:
    types = {
        "dear": kind("dear", max_nodes=1, start_s=900),
        "spot": kind("spot", max_nodes=1, cost_per_gpu_hour=1.0, retry_s=100),
    }
    elastic = Elastic(controller(4), topology_of(**types), node("a", 0.0), counts=(1, 1))
    given_up = []
    for _ in range(70):
        plan = elastic.tick(after_s=20.0)
        given_up += [note.text.split()[4] for note in plan.held_back if note.kind is NoteKind.NO_NODE]
    # Each type gets its whole time, although the other one is requested again in the meantime.
    assert given_up == ["spot", "dear"]


def test_a_replica_on_several_nodes_is_on_existing_or_on_possible_ones() -> None:
    config = topology_of(spot=kind("spot", max_nodes=2))
    slots = Slots(Topology([node("a", 2.0), *possible_nodes(config, [], ())]))
    taken = slots.take(Demand(gpu_type="H100", workers=4, gpus_per_worker=1.0, strategy="PACK"))
    assert taken is not None
    assert [slots.topology.nodes[index].name for index, _, _ in taken] == ["spot#1", "spot#2"]


def test_a_type_that_one_service_gives_up_is_not_logged_for_the_next_one() -> None:
    config = topology_of(spot=kind("spot"))
    slots = Slots(Topology([node("a", 1.0), *possible_nodes(config, [], ())]).with_scarcity())
    one = Demand(gpu_type="H100", workers=1, gpus_per_worker=1.0)
    assert [each.name for each in slots.nodes([one], slots.free())] == ["a", "spot#1", "spot#2"]
    slots.refuse(["spot"])
    assert [each.name for each in slots.nodes([one], slots.free())] == ["a"]


def test_a_clock_that_is_set_back_prolongs_no_refusal() -> None:
    elastic = Elastic(controller(2), topology_of(spot=kind("spot")), node("a", 0.0), counts=(1, 1))
    for _ in range(10):
        plan = elastic.tick(after_s=40.0)
    assert set(plan.state.refused) == {"spot"}
    assert elastic.tick(after_s=-86400.0).state.refused == {}


def test_possible_nodes_for_which_a_service_waits_are_not_promised_to_another() -> None:
    config = topology_of(spot=kind("spot", max_nodes=1))
    services = {"hi": controller(2, priority=5), "lo": controller(2)}
    seen = {name: snapshot(pools(name, (1, 1), at="a")) for name in services}
    for tick in range(3):
        slots = Slots(Topology([node("a", 0.0), *possible_nodes(config, [], ())]).with_scarcity())
        at_s = NOW_S + 5.0 * tick
        decided = tick_all(services, {name: replace(one, now_s=at_s) for name, one in seen.items()}, slots=slots)
        assert {name: tuple(plan.counts.values()) for name, (_, plan) in decided.items()} == {
            "hi": (2, 2),
            "lo": (1, 1),
        }
        seen = {
            name: replace(
                seen[name],
                state=plan.state,
                pools=tuple(replace(pool, target_replicas=plan.counts[pool.key]) for pool in seen[name].pools),
            )
            for name, (_, plan) in decided.items()
        }
