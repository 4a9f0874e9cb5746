"""The routing facts of a call."""

import pickle

from router.routing import Choice, Routing


def test_a_choice_does_not_travel_and_the_rest_does() -> None:
    routing = Routing(work_tokens=7, exclude=frozenset("a"), avoid=frozenset("b"), probe="b", choice=Choice("c"))
    routing.choice.unreached.add("d")
    arrived = pickle.loads(pickle.dumps(routing))
    assert arrived == routing
    assert (arrived.choice.replica_id, arrived.choice.unreached) == (None, set())
    assert routing.choice.replica_id == "c"
