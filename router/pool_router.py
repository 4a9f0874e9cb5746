"""One router's choice among the replicas of a pool, the same for Serve's router and the simulator's (pure)."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica that a router may choose, and its queue as the router knows it."""

    replica_id: str
    queued_tokens: int = 0


# Orders replicas, best first. Its arguments: the replicas, the number of orders so far, a source of randomness.
RoutingPolicy = Callable[[Sequence[ReplicaView], int, random.Random], list[ReplicaView]]


def least_tokens(replicas: Sequence[ReplicaView], turn: int, rng: random.Random) -> list[ReplicaView]:
    """Fewest queued tokens first. Ties are in random order: otherwise a low load would all go to the first replica."""
    return sorted(replicas, key=lambda replica: (replica.queued_tokens, rng.random()))


def round_robin(replicas: Sequence[ReplicaView], turn: int, rng: random.Random) -> list[ReplicaView]:
    """Each replica in turn, whatever its load."""
    ordered = sorted(replicas, key=lambda replica: replica.replica_id)
    start = turn % len(ordered) if ordered else 0
    return ordered[start:] + ordered[:start]


# The order in which the replicas of a pool are tried, by ``router.policy``.
POLICIES: dict[str, RoutingPolicy] = {"least_tokens": least_tokens, "round_robin": round_robin}


class PoolRouter:
    """Counts its own tokens in flight to each replica, and orders the replicas that it may route to.

    It does not see what other routers send, so it asks the best few replicas for their queue: ``ask`` names them, and
    ``informed`` takes their answers. Tokens here are the unit of ``Routing.work_tokens``. If each request weighs 1
    there, the answers are numbers of requests.
    """

    def __init__(self, policy: str, asked_replicas: int, rng: random.Random) -> None:
        self._order = POLICIES[policy]
        self._asked_replicas = asked_replicas
        self._rng = rng
        self._turn = 0  # number of orders so far
        # Tokens of each attempt in flight, by replica and request: a list, since a request may be sent to a replica
        # again before its first attempt there has ended.
        self._in_flight: dict[tuple[str, str], list[int]] = {}
        self._tokens: Counter[str] = Counter()  # tokens in flight by replica
        self._names: Collection[str] = ()
        self._views: dict[str, ReplicaView] = {}

    def set_replicas(self, names: Collection[str]) -> None:
        """Set the replicas that may be routed to; the same collection object again costs nothing."""
        if names is not self._names:
            self._names = names
            self._views = {name: self._view(name) for name in names}

    def order(self) -> list[ReplicaView]:
        """All replicas, best first, by this router's own count."""
        self._turn += 1
        return self._order(list(self._views.values()), self._turn, self._rng)

    def ask(self, ordered: Sequence[ReplicaView]) -> list[str]:
        """Names of the replicas to ask for their queue before one is chosen; a single replica is not asked."""
        return [view.replica_id for view in ordered[: self._asked_replicas]] if len(ordered) > 1 else []

    def informed(self, ordered: Sequence[ReplicaView], answers: Mapping[str, int | None]) -> list[ReplicaView]:
        """The order after the answers: first the replicas that answered, then those not asked, then the silent ones.

        ``ordered``: the order that ``ask`` got. ``answers``: queue by replica, ``None`` without answer. A replica's
        queue is its answer, or this router's own tokens if that is more: the answer counts the tokens of every router,
        but not those that are still on their way.
        """
        answered = [self._view(name, answer) for name, answer in answers.items() if answer is not None]
        not_asked = ordered[len(answers) :]  # the first ones were asked
        silent = [view for view in ordered if view.replica_id in answers and answers[view.replica_id] is None]
        return [*self._order(answered, self._turn, self._rng), *not_asked, *silent]

    def begin(self, replica_id: str, request_id: str, tokens: int) -> None:
        """Count a request that goes to a replica."""
        self._in_flight.setdefault((replica_id, request_id), []).append(tokens)
        self._add(replica_id, tokens)

    def end(self, replica_id: str, request_id: str) -> None:
        """Stop counting a request. If it is not in flight, nothing changes."""
        tokens = self._in_flight.get((replica_id, request_id))
        if tokens is None:
            return
        self._add(replica_id, -tokens.pop(0))
        if not tokens:
            del self._in_flight[replica_id, request_id]

    def _add(self, replica_id: str, tokens: int) -> None:
        self._tokens[replica_id] += tokens
        if self._tokens[replica_id] <= 0:
            del self._tokens[replica_id]
        if replica_id in self._views:
            self._views[replica_id] = self._view(replica_id)

    def _view(self, replica_id: str, answered_tokens: int = 0) -> ReplicaView:
        return ReplicaView(replica_id=replica_id, queued_tokens=max(self._tokens[replica_id], answered_tokens))
