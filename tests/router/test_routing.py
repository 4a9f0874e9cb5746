"""The routing facts of a call."""

import pickle

from router.routing import Choice, Routing


def test_a_routing_is_pickled_without_its_choice() -> None:
    routing = Routing(work_tokens=7, exclude=frozenset("a"), avoid=frozenset("b"), probe="b", choice=Choice("c"))
    routing.choice.unreached.add("d")
    arrived = pickle.loads(pickle.dumps(routing))
    assert arrived == routing
    assert (arrived.choice.replica_id, arrived.choice.unreached) == (None, set())
    assert routing.choice.replica_id == "c"
