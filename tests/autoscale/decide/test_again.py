"""Replicas that a lowest count requires, on a cluster whose node types do not come."""

from dataclasses import replace

import pytest

from autoscale.decide.controller import Controller
from autoscale.decide.cycle import tick_all
from autoscale.decide.decision_log import config_line, decision_line, replay
from autoscale.decide.possible import possible_nodes, refused_types
from autoscale.decide.slots import Slots
from autoscale.topology_config import TopologyConfig
from autoscale.types import NoteKind, Plan, PoolKey, Snapshot
from kvtransfer.topology import Node, Role, Topology
from tests.autoscale.decide.test_cycle import controller, node, pools, snapshot
from tests.autoscale.decide.test_possible import NOW_S, D, Elastic, P, key, kind, kinds, topology_of

START_S = 300.0
TYPES = {"dear": kind("dear"), "spot": kind("spot", cost_per_gpu_hour=1.0, retry_s=1e5)}
BOTH = {P, D}


class Waiting(Elastic):
    """A service whose replicas, as many as its lowest counts, all wait for a node; the log of every tick replays."""

    def __init__(
        self, *nodes: Node, types: dict[str, object] = TYPES, lowest: int = 1, own: Controller | None = None
    ) -> None:
        super().__init__(own or controller(lowest), topology_of(**types), *nodes, counts=(lowest, lowest))  # type: ignore[arg-type]
        self.pools = tuple(
            replace(pool, replicas=(), held_replicas=0, on={}, limits=replace(pool.limits, lowest_replicas=lowest))
            for pool in self.pools
        )
        self.began_s, self.lowest = self.now_s, lowest
        self.asked: list[tuple[float, set[Role], dict[Role, str]]] = []

    def tick(self, after_s: float = 10.0) -> Plan:
        plan = super().tick(after_s)
        assert min(plan.counts[key(P)], plan.counts[key(D)]) >= self.lowest  # Serve never gets fewer
        lines = [config_line("m", self.controller.config, 0.0, "start"), decision_line("m", self.snapshot, plan)]
        assert list(replay(lines)) == [None]
        if plan.again:
            self.asked.append((self.now_s - self.began_s, {pool.role for pool in plan.again}, kinds(self.labels)))
        return plan

    def run(self, for_s: float) -> list[tuple[float, set[Role], dict[Role, str]]]:
        """When replicas asked again, of which roles, and the node types that roles wait for (not: existing nodes)."""
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            self.tick()
        return self.asked


def test_they_wait_for_any_type_before_the_first_plan_and_then_ask_for_the_cheapest_and_the_next_best() -> None:
    first, second = Waiting(node("a", 0.0)).run(2.5 * START_S)
    assert first[1:] == (BOTH, {P: "spot", D: "spot"})
    assert second[1:] == (BOTH, {P: "dear", D: "dear"})
    assert START_S < first[0] <= START_S + 20.0
    assert START_S < second[0] - first[0] <= START_S + 20.0


def test_a_type_that_no_replica_can_use_delays_nothing() -> None:
    slow = {"a100": kind("a100", gpu_type="A100", start_s=1800, cost_per_gpu_hour=0.1)}
    elastic = Waiting(node("a", 0.0), types={**TYPES, **slow})
    assert elastic.run(1.5 * START_S)[0][0] <= START_S + 20.0


def test_the_log_says_what_they_wait_for() -> None:
    elastic = Waiting(node("a", 0.0))
    while not (plan := elastic.tick()).again:
        pass
    texts = [note.text for note in plan.held_back if note.kind is NoteKind.NO_NODE]
    assert texts == [
        f"{key(role)} waited for a node that has not come, and asks for a node of type spot" for role in (P, D)
    ]


def test_room_on_a_node_that_exists_is_taken_although_a_possible_node_may_still_come() -> None:
    elastic = Waiting(node("a", 0.0))
    elastic.run(1.5 * START_S)  # they wait for a spot node
    elastic.nodes = [node("a", 2.0)]
    assert elastic.tick().again == (key(P), key(D))
    assert kinds(elastic.labels) == {}
    assert elastic.tick().state.refused == {}  # the type is not to blame


def test_room_on_nodes_that_exist_of_which_ray_makes_no_use_delays_no_type() -> None:
    elastic = Waiting(node("a", 0.0))
    elastic.run(1.2 * START_S)  # they wait for a spot node
    elastic.nodes = [node("a", 2.0)]  # such as two halves of two GPUs each
    elastic.asked.clear()
    asked = [(at_s, labels.get(P, "existing")) for at_s, _, labels in elastic.run(4.0 * START_S)]
    assert [name for _, name in asked[:5]] == ["existing", "spot", "existing", "dear", "existing"]
    assert asked[2][0] - asked[1][0] > START_S
    assert asked[4][0] - asked[3][0] > START_S


def test_room_on_nodes_that_exist_is_left_alone_if_it_is_not_enough_for_all_that_wait() -> None:
    elastic = Elastic(controller(3), topology_of(spot=kind("spot", start_s=900)), node("a", 0.0), counts=(1, 1))
    elastic.tick(10.0)
    elastic.nodes = [node("a", 1.0)]
    for _ in range(10):
        assert elastic.tick(10.0).again == ()
    assert kinds(elastic.labels) == {P: "spot", D: "spot"}


@pytest.mark.parametrize("is_of_the_type", [False, True])
def test_room_on_nodes_that_exist_is_taken_also_once_no_node_of_the_type_may_come(is_of_the_type: bool) -> None:
    spot = kind("spot", start_s=900, max_nodes=1)
    elastic = Elastic(controller(2), topology_of(spot=spot), node("a", 0.0), counts=(1, 1))
    for _ in range(5):
        elastic.tick(10.0)
    assert kinds(elastic.labels) == {P: "spot", D: "spot"}
    # The last node of the type has come, and another service has it; there is room on a node of the type or another.
    labels = {"kind": "spot"}
    free = replace(node("b", 2.0), labels=labels if is_of_the_type else {})
    elastic.nodes += [replace(node("s", 0.0), labels=labels), free]
    asked = [pool for _ in range(10) for pool in elastic.tick(10.0).again]
    assert asked == ([] if is_of_the_type else [key(P), key(D)])  # their labels lead them to nodes of the type


def test_labels_of_replicas_that_wait_survive_a_restart_of_the_controller() -> None:
    elastic = Elastic(controller(2), topology_of(spot=kind("spot", start_s=900)), node("a", 0.0), counts=(1, 1))
    elastic.tick(10.0)
    elastic.before = {}
    elastic.tick(10.0)
    assert kinds(elastic.labels) == {P: "spot", D: "spot"}


def test_labels_stay_once_the_last_node_of_the_type_has_come_for_another_pool() -> None:
    spot = kind("spot", start_s=900, max_nodes=1)
    elastic = Elastic(controller(2), topology_of(spot=spot), node("a", 0.0), counts=(1, 1))
    elastic.tick(10.0)
    elastic.nodes.append(replace(node("s", 0.0), labels={"kind": "spot"}))
    elastic.tick(10.0)
    assert kinds(elastic.labels) == {P: "spot", D: "spot"}


def test_a_replica_whose_node_came_back_under_another_name_asks_again() -> None:
    # Serve started a replica for the lost one before a tick saw that the node was gone, so it waits for the old name.
    elastic = Waiting(node("a", 0.0), types={})
    elastic.run(30.0)
    elastic.nodes = [node("a2", 8.0)]
    asked = elastic.run(60.0)
    assert asked[0][1:] == (BOTH, {})


def test_a_type_is_offered_for_its_whole_time_while_serve_still_has_the_count_before() -> None:
    types = {"dear": kind("dear"), "spot": kind("spot", cost_per_gpu_hour=1.0)}
    elastic = Elastic(controller(2), topology_of(**types), node("a", 0.0), counts=(1, 1))
    while not elastic.tick(10.0).state.refused:
        pass
    for _ in range(2):
        elastic.pools = tuple(replace(pool, target_replicas=2) for pool in elastic.pools)
        plan = elastic.tick(5.0)
    assert kinds(elastic.labels) == {P: "dear", D: "dear"}
    assert set(plan.state.refused) == {"spot"}


class Rivals:
    """A more important service whose replicas are stuck, and a less important one, on one existing node."""

    def __init__(self, config: TopologyConfig, highest: int = 32, lo: int = 1, **fields: object) -> None:
        self.config, self.free_gpus, self.at_s = config, 0.0, NOW_S
        self.services = {"hi": controller(1, priority=5, **fields), "lo": controller(lo)}
        stuck = (
            replace(pool, replicas=(), held_replicas=0, on={}, limits=replace(pool.limits, highest_replicas=highest))
            for pool in pools("hi", (1, 1))
        )
        self.seen = {"hi": snapshot(tuple(stuck)), "lo": snapshot(pools("lo", (lo, lo), at="a"))}
        self.plans: dict[str, Plan] = {}

    def tick(self, after_s: float) -> dict[str, Plan]:
        self.at_s += after_s
        refused = refused_types(self.seen["hi"].state, self.at_s)
        nodes = [node("a", self.free_gpus), *possible_nodes(self.config, [], refused)]
        self.seen = {name: reported(one, self.at_s) for name, one in self.seen.items()}
        decided = tick_all(self.services, self.seen, slots=Slots(Topology(nodes).with_scarcity()))
        for name, (seen, plan) in decided.items():
            lines = [config_line(name, self.services[name].config, 0.0, "start"), decision_line(name, seen, plan)]
            assert list(replay(lines)) == [None]
        self.plans = {name: plan for name, (_, plan) in decided.items()}
        self.seen = {
            name: replace(
                one,
                state=self.plans[name].state,
                pools=tuple(
                    replace(pool, target_replicas=self.plans[name].counts[pool.key]) for pool in self.seen[name].pools
                ),
            )
            for name, one in self.seen.items()
        }
        return self.plans


@pytest.mark.parametrize("ticks", range(140, 150))
def test_a_stuck_service_looks_for_room_in_every_tick_so_that_a_less_important_one_does_not_get_it(ticks: int) -> None:
    rivals = Rivals(topology_of(spot=kind("spot", retry_s=1e5)))
    for _ in range(ticks):
        rivals.tick(5.0)
    rivals.services["lo"] = controller(2)
    rivals.tick(5.0)
    rivals.free_gpus = 2.0
    plans = rivals.tick(5.0)
    assert plans["hi"].again == (PoolKey("hi-g", P), PoolKey("hi-g", D))
    assert set(plans["lo"].counts.values()) == {1}


@pytest.mark.parametrize("highest", [1, 32])
def test_a_stuck_service_claims_room_of_a_less_important_one(highest: int) -> None:
    rivals = Rivals(topology_of(), highest=highest, lo=2, quota_gpus={"H100": 2.0})
    for _ in range(20):
        plans = rivals.tick(10.0)
    assert set(plans["lo"].counts.values()) == {1}
    assert rivals.seen["hi"].claims == {}


def test_replicas_above_the_lowest_count_take_existing_room_too() -> None:
    elastic = Elastic(controller(2), topology_of(spot=kind("spot", start_s=900)), node("a", 0.0), counts=(1, 1))
    for _ in range(5):
        assert elastic.tick(10.0).again == ()
    elastic.nodes = [node("a", 1.0)]
    plan = elastic.tick(10.0)
    assert plan.again == (key(P),)
    assert plan.counts == {key(P): 2, key(D): 2}
    assert kinds(elastic.labels) == {D: "spot"}
    for _ in range(2):  # it starts there, and is not withdrawn meanwhile
        plan = elastic.tick(10.0)
        assert plan.counts == {key(P): 2, key(D): 2}
        assert plan.again == ()


def test_room_that_comes_after_all_types_are_given_up_is_found() -> None:
    for gap_s in (0.0, 600.0):
        elastic = Waiting(node("a", 0.0), types={"spot": kind("spot", retry_s=1e5)})
        elastic.run(3.5 * START_S)
        assert [labels for _, _, labels in elastic.asked] == [{P: "spot", D: "spot"}]
        Elastic.tick(elastic, gap_s)
        elastic.nodes, elastic.config = [node("a", 2.0)], topology_of()  # no node may come any more
        room_s = elastic.now_s - elastic.began_s
        second = elastic.run(0.5 * START_S)[1]
        assert second[1:] == (BOTH, {})
        assert second[0] - room_s <= elastic.controller.config.no_node_s + 20.0


def test_as_many_ask_as_one_selector_leads_to_nodes_with_room() -> None:
    # Each role has two replicas that wait, one GPU is free on a node that exists, and two on possible ones.
    elastic = Waiting(node("a", 0.0), lowest=2, types={"spot": kind("spot", max_nodes=1, start_s=200, retry_s=1e5)})
    elastic.run(1.5 * START_S)
    assert elastic.asked[0][1:] == ({P}, {P: "spot"})  # both of prefill, and no room is left for decode


def test_other_groups_stand_in_until_the_replicas_are_on_nodes() -> None:
    elastic = Waiting(node("a", 0.0), types={name: kind(name, labels={"kind": name, "s1": "m9"}) for name in TYPES})
    far = pools("m", (0, 0), group="h", lowest=0, selector={"s1": "m1"})
    near = pools("m", (0, 0), lowest=1, selector={"s1": "m9"})
    elastic.pools = (*(replace(pool, target_replicas=1) for pool in near), *far)
    elastic.nodes = [node("a", 8.0)]
    elastic.controller = controller(1)
    counts, asked = [], 0
    for _ in range(150):
        plan = Elastic.tick(elastic, 10.0)
        asked += bool(plan.again)
        counts.append(sum(count for pool, count in plan.counts.items() if pool.group == "m-h"))
        elastic.pools = tuple(
            replace(made, target_replicas=plan.counts[made.key], limits=pool.limits)
            if (made := next((one for one in stood if one.key == pool.key), None)) is not None
            else pool
            for pool in elastic.pools
            for stood in [pools("m", (plan.counts[far[0].key], plan.counts[far[1].key]), group="h")]
        )
    assert counts[10:] == [2] * 140
    assert asked >= 2


def reported(seen: Snapshot, now_s: float) -> Snapshot:
    """A snapshot at another time, in which every replica has just reported."""
    fresh = (
        replace(pool, replicas=tuple(replace(one, observed_s=now_s) for one in pool.replicas)) for pool in seen.pools
    )
    return replace(seen, now_s=now_s, pools=tuple(fresh))


def test_the_node_for_which_they_wait_is_not_promised_to_a_less_important_service() -> None:
    config = topology_of(spot=kind("spot", max_nodes=1, start_s=1000))
    services = {"hi": controller(1, priority=5), "lo": controller(2)}
    stuck = tuple(replace(pool, replicas=(), held_replicas=0, on={}) for pool in pools("hi", (1, 1)))
    seen = {"hi": snapshot(stuck), "lo": snapshot(pools("lo", (1, 1), at="a"))}
    for tick in range(130):
        at_s = NOW_S + 10.0 * tick
        slots = Slots(Topology([node("a", 0.0), *possible_nodes(config, [], ())]).with_scarcity())
        services["lo"] = controller(2 if tick > 105 else 1)  # the important service has asked for the node by then
        seen = {name: reported(one, at_s) for name, one in seen.items()}
        decided = tick_all(services, seen, slots=slots)
        lo = decided["lo"][1].counts
        seen = {name: replace(seen[name], state=plan.state) for name, (_, plan) in decided.items()}
    assert set(seen["hi"].state.offers) == {PoolKey("hi-g", P), PoolKey("hi-g", D)}
    assert set(lo.values()) == {1}
    assert decided["lo"][1].pending == {P: 1, D: 1}


def test_without_another_type_they_go_on_waiting() -> None:
    elastic = Waiting(node("a", 0.0), types={"spot": kind("spot", retry_s=1e5)})
    assert [labels for _, _, labels in elastic.run(3.5 * START_S)] == [{P: "spot", D: "spot"}]


def test_a_paused_service_asks_for_nothing() -> None:
    assert Waiting(node("a", 0.0), own=controller(1, is_paused=True)).run(2.5 * START_S) == []


def test_on_a_cluster_that_does_not_grow_nothing_is_asked_again() -> None:
    assert Waiting(node("a", 0.0), types={}).run(2.5 * START_S) == []


def test_a_replica_that_is_on_a_node_at_last_is_no_longer_in_the_state() -> None:
    elastic = Waiting(node("a", 0.0))
    elastic.run(1.5 * START_S)
    assert set(elastic.tick().state.again_s) == {key(P), key(D)}
    elastic.pools = pools("m", (1, 1))
    state = Elastic.tick(elastic, 10.0).state
    assert (state.again_s, state.offers) == ({}, {})


def test_the_clock_may_be_set_back() -> None:
    elastic = Waiting(node("a", 0.0))
    elastic.run(1.5 * START_S)
    elastic.tick(after_s=-86400.0)
    assert snapshot(elastic.pools).now_s == NOW_S  # the factory's own time is another one
    elastic.began_s = elastic.now_s
    elastic.asked.clear()
    # They wait for the spot node again, for its whole time.
    ((asked_s, _, labels),) = elastic.run(1.5 * START_S)
    assert asked_s > START_S
    assert labels == {P: "dear", D: "dear"}
