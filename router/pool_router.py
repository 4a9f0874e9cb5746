"""One router's choice among the replicas of a pool, the same for Serve's router and the simulator's (pure)."""

import random
from collections.abc import Collection, Mapping, Sequence

from router.in_flight import InFlight
from router.policy import POLICIES
from router.types import ReplicaView


class PoolRouter:
    """Counts the tokens that it has itself in flight to each replica, and orders those that it may route to.

    Of what other routers send it knows nothing, so it asks the best few for their queue: ``ask`` names them, and
    ``informed`` takes what they answered, in the unit that its own requests are counted in.
    """

    def __init__(self, policy: str, asked_replicas: int, rng: random.Random) -> None:
        self._order = POLICIES[policy]
        self._asked_replicas = asked_replicas
        self._rng = rng
        self._turn = 0
        self._in_flight = InFlight()
        self._names: Collection[str] = ()
        self._views: dict[str, ReplicaView] = {}

    def set_replicas(self, names: Collection[str]) -> None:
        """Who may be routed to from now on; the same collection again, of however many, costs nothing."""
        if names is not self._names:
            self._names = names
            self._views = {name: self._in_flight.view(name) for name in names}

    def order(self) -> list[ReplicaView]:
        """All of them, best first, as far as this router knows."""
        self._turn += 1
        return self._order(list(self._views.values()), self._turn, self._rng)

    def ask(self, ordered: Sequence[ReplicaView]) -> list[str]:
        """Whom to ask for their queue before one is chosen; nobody where there is no choice."""
        return [view.replica_id for view in ordered[: self._asked_replicas]] if len(ordered) > 1 else []

    def informed(self, ordered: Sequence[ReplicaView], answers: Mapping[str, int | None]) -> list[ReplicaView]:
        """The order once those that were asked have answered; who has not (``None``) comes last."""
        known = [self._in_flight.view(name, answer) for name, answer in answers.items() if answer is not None]
        silent = [view for view in ordered if answers.get(view.replica_id, 0) is None]
        return [*self._order(known, self._turn, self._rng), *ordered[len(answers) :], *silent]

    def begin(self, replica_id: str, request_id: str, tokens: int) -> None:
        """A request has gone to a replica."""
        self._in_flight.begin(replica_id, request_id, tokens)
        self._show(replica_id)

    def end(self, replica_id: str, request_id: str) -> None:
        """It has ended there; one that never was in flight changes nothing."""
        if self._in_flight.end(replica_id, request_id):
            self._show(replica_id)

    def _show(self, replica_id: str) -> None:
        if replica_id in self._views:
            self._views[replica_id] = self._in_flight.view(replica_id)
