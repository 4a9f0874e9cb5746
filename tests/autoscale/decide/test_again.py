"""Replicas that a lowest count requires, on a cluster whose node types do not come."""

from dataclasses import replace

from autoscale.decide.decision_log import config_line, decision_line, replay
from autoscale.types import NoteKind
from kvtransfer.topology import Node
from tests.autoscale.decide.test_cycle import controller, node
from tests.autoscale.decide.test_possible import D, Elastic, P, key, kind, kinds, topology_of

START_S = 300.0
TYPES = {"dear": kind("dear"), "spot": kind("spot", cost_per_gpu_hour=1.0, retry_s=1e5)}


def waiting(*nodes: Node, types: dict[str, object] = TYPES, **config: object) -> Elastic:
    """A service with one replica of each role as its lowest count; both wait for a node, and Ray chose its type."""
    elastic = Elastic(controller(1, **config), topology_of(**types), *nodes, counts=(1, 1))  # type: ignore[arg-type]
    elastic.pools = tuple(replace(pool, replicas=(), held_replicas=0, on={}) for pool in elastic.pools)
    return elastic


def again(elastic: Elastic, for_s: float) -> list[tuple[float, dict[object, str]]]:
    """The plans that let replicas ask again: when, and which node types they ask for."""
    plans, until_s = [], elastic.now_s + for_s
    while elastic.now_s < until_s:
        plan = elastic.tick(after_s=10.0)
        assert plan.counts == {key(P): 1, key(D): 1}  # Serve never gets fewer than the lowest count
        if plan.again:
            assert set(plan.again) == {key(P), key(D)}
            plans.append((elastic.now_s, kinds(elastic.labels)))
    return plans


def test_they_wait_for_any_type_before_the_first_plan_and_then_ask_for_the_cheapest_and_the_next_best() -> None:
    elastic = waiting(node("a", 0.0))
    began_s = elastic.now_s
    (first_s, cheapest), (second_s, next_best) = again(elastic, 2.5 * START_S)
    assert cheapest == {P: "spot", D: "spot"}
    assert next_best == {P: "dear", D: "dear"}
    assert START_S < first_s - began_s <= START_S + 20.0
    assert START_S < second_s - first_s <= START_S + 20.0


def test_the_log_says_what_they_ask_for_and_replays() -> None:
    elastic = waiting(node("a", 0.0))
    while not (plan := elastic.tick(after_s=10.0)).again:
        pass
    texts = [note.text for note in plan.held_back if note.kind is NoteKind.NO_NODE]
    assert texts == [f"no node has come for 1 of {key(role)}: it asks for a node of type spot" for role in (P, D)]
    lines = [config_line("m", elastic.controller.config, 0.0, "start"), decision_line("m", elastic.snapshot, plan)]
    assert list(replay(lines)) == [None]


def test_a_node_that_exists_by_then_is_taken_first() -> None:
    elastic = waiting(node("a", 0.0))
    elastic.tick(after_s=10.0)
    elastic.nodes = [node("a", 2.0)]
    (only, *_) = again(elastic, START_S + 20.0)
    assert only[1] == {}  # no labels: nodes that exist are chosen by their ids, or all are allowed


def test_without_another_type_they_go_on_waiting() -> None:
    elastic = waiting(node("a", 0.0), types={"spot": kind("spot", retry_s=1e5)})
    assert [asked for _, asked in again(elastic, 3.5 * START_S)] == [{P: "spot", D: "spot"}]


def test_a_paused_service_asks_for_nothing() -> None:
    assert again(waiting(node("a", 0.0), is_paused=True), 2.5 * START_S) == []


def test_on_a_cluster_that_does_not_grow_nothing_is_asked_again() -> None:
    assert again(waiting(node("a", 0.0), types={}), 2.5 * START_S) == []
