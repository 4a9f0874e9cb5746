"""One router's choice among the replicas of a pool, the same for Serve's router and the simulator's (pure)."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.prefix_map import PrefixMap
from router.prompt_keys import PromptKeys
from router.session import SessionPlaces

# A replica is overloaded if its queue is longer than this multiple of the pool's mean queue, plus ``_SLACK_TOKENS``.
# The idea: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018. The factor is that of
# brpc's load balancer (apache/brpc, -chash_bounded_load_factor).
_LOAD_FACTOR = 1.25
# Queue with which no replica is overloaded, prompt tokens. In simulations of one hot tenant, a tenth of it costs TTFT,
# and more than it changes nothing (DECISIONS 260).
_SLACK_TOKENS = 4000
# Number of the best replicas whose views carry their overlap, at least. A choice is explained by them.
_SHOWN_REPLICAS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica that a router may choose.

    Attributes:
        queued_tokens: its queue as the router knows it.
        overlap_tokens: leading tokens of the prompt that it holds; 0 too if nobody asked.
    """

    replica_id: str
    queued_tokens: int = 0
    overlap_tokens: int = 0


# Orders replicas, best first. Its arguments: the replicas, the tokens of the prompt that each holds (those without any
# are left out), the number of orders so far, a source of randomness.
RoutingPolicy = Callable[[Sequence[ReplicaView], Mapping[str, int], int, random.Random], list[ReplicaView]]


def least_tokens(
    replicas: Sequence[ReplicaView], overlaps: Mapping[str, int], turn: int, rng: random.Random
) -> list[ReplicaView]:
    """Fewest queued tokens first. Ties are in random order: otherwise a low load would all go to the first replica."""
    return sorted(replicas, key=lambda replica: (replica.queued_tokens, rng.random()))


def round_robin(
    replicas: Sequence[ReplicaView], overlaps: Mapping[str, int], turn: int, rng: random.Random
) -> list[ReplicaView]:
    """Each replica in turn, whatever its load."""
    ordered = sorted(replicas, key=lambda replica: replica.replica_id)
    start = turn % len(ordered) if ordered else 0
    return ordered[start:] + ordered[:start]


def prefix(
    replicas: Sequence[ReplicaView], overlaps: Mapping[str, int], turn: int, rng: random.Random
) -> list[ReplicaView]:
    """Fewest tokens to compute first: those queued and those of the prompt that the replica does not hold.

    The prompt's length is the same for all, so it is left out. Ties are in random order. What an overloaded replica
    holds does not count, so a hot prefix spreads.
    """
    queues = [view.queued_tokens for view in replicas]
    most_tokens = overload_tokens(queues)
    if max(queues, default=0) > most_tokens:
        overloaded = {view.replica_id for view in replicas if view.queued_tokens > most_tokens}
        overlaps = {name: tokens for name, tokens in overlaps.items() if name not in overloaded}
    saved, tie = overlaps.get, rng.random
    # Tokens are whole numbers, and a tie-breaker is below 1.
    costs = [tokens - saved(view.replica_id, 0) + tie() for tokens, view in zip(queues, replicas, strict=True)]
    return [replicas[index] for index in sorted(range(len(costs)), key=costs.__getitem__)]


def overload_tokens(queues: Sequence[int]) -> float:
    """Longest queue of a replica that is not overloaded, tokens; ``queues``: of all replicas."""
    return _LOAD_FACTOR * sum(queues) / max(1, len(queues)) + _SLACK_TOKENS


# The order in which the replicas of a pool are tried, by ``router.policy``.
POLICIES: dict[str, RoutingPolicy] = {"least_tokens": least_tokens, "round_robin": round_robin, "prefix": prefix}


class PoolRouter:
    """Counts its own tokens in flight to each replica, and orders the replicas that it may route to.

    It does not see what other routers send, so it asks the best few replicas for their queue: ``ask`` names them, and
    ``informed`` takes their answers. Tokens here are the unit of ``Routing.work_tokens``. If each request weighs 1
    there, the answers are numbers of requests.
    """

    def __init__(
        self,
        policy: str,
        asked_replicas: int,
        rng: random.Random,
        *,
        prefixes: PrefixMap | None = None,
        request_tokens: int | None = None,
    ) -> None:
        """A router without replicas.

        Args:
            policy: a name in ``POLICIES``.
            asked_replicas: number of replicas that ``ask`` names.
            rng: breaks ties.
            prefixes: what the replicas hold; ``None``: that is not known.
            request_tokens: prompt tokens that one request in a queue is worth, if queues count requests; ``None``:
                queues count prompt tokens, and a request weighs only those that its replica does not hold.
        """
        self.prefixes = prefixes
        self._order = POLICIES[policy]
        self._asked_replicas = asked_replicas
        self._shown_replicas = max(_SHOWN_REPLICAS, asked_replicas)
        self._rng = rng
        self._request_tokens = request_tokens
        self._turn = 0  # number of orders so far
        # Tokens of each attempt in flight, by replica and request: a list, since a request may be sent to a replica
        # again before its first attempt there has ended.
        self._in_flight: dict[tuple[str, str], list[int]] = {}
        self._tokens: Counter[str] = Counter()  # tokens in flight by replica
        self._names: Collection[str] = ()
        self._views: dict[str, ReplicaView] = {}
        self._places = SessionPlaces()
        # The prompt that was looked up last, and what the replicas held of it then.
        self._overlaps: tuple[PromptKeys | None, Mapping[str, int]] = (None, {})

    def set_replicas(self, names: Collection[str]) -> None:
        """Set the replicas that may be routed to; the same collection object again costs nothing."""
        if names is not self._names:
            self._names = names
            self._views = {name: self._view(name) for name in names}
            self._places.set_replicas(names)

    def order(self, prompt: PromptKeys | None = None, session: str | None = None) -> list[ReplicaView]:
        """All replicas, best first, by this router's own count.

        ``prompt``: the prompt of the request. ``session``: its replica comes first, unless it is overloaded. The first
        few views carry the overlap.
        """
        self._turn += 1
        self._overlaps = None, {}  # a prompt that was ordered for may come again, when replicas hold more of it
        views = list(self._views.values())
        return self._ordered(views, self._overlaps_of(prompt), session, views)

    def ask(self, ordered: Sequence[ReplicaView]) -> list[str]:
        """Names of the replicas to ask for their queue before one is chosen; a single replica is not asked.

        Half are the best, half are the best of those without the prefix: all replicas that hold it may be busy.
        """
        if len(ordered) < 2:
            return []
        best = (self._asked_replicas + 1) // 2
        others = sorted(ordered[best : self._shown_replicas], key=lambda view: view.overlap_tokens > 0)
        return [view.replica_id for view in (*ordered[:best], *others[: self._asked_replicas - best])]

    def informed(
        self,
        ordered: Sequence[ReplicaView],
        answers: Mapping[str, int | None],
        prompt: PromptKeys | None = None,
        session: str | None = None,
    ) -> list[ReplicaView]:
        """The order after the answers: first the replicas that answered, then those not asked, then the silent ones.

        ``ordered``: the order that ``ask`` got. ``answers``: queue by replica, ``None`` without answer. A replica's
        queue is its answer, or this router's own tokens if that is more: the answer counts the tokens of every router,
        but not those that are still on their way. ``prompt``, ``session``: as in ``order``.
        """
        answered = [self._view(name, answer) for name, answer in answers.items() if answer is not None]
        # Those asked are among the first.
        shown, rest = ordered[: self._shown_replicas], ordered[self._shown_replicas :]
        not_asked = [view for view in shown if view.replica_id not in answers]
        silent = [view for view in shown if view.replica_id in answers and answers[view.replica_id] is None]
        overlaps = self._overlaps_of(prompt)
        return [*self._ordered(answered, overlaps, session, ordered), *not_asked, *rest, *silent]

    def session_first(
        self, ordered: list[ReplicaView], session: str | None, choices: Sequence[ReplicaView]
    ) -> list[ReplicaView]:
        """The views, a session's replica first unless it is overloaded. It is one of ``choices``."""
        place = None if session is None else self.place_of(session, [view.replica_id for view in choices])
        if place is None:
            return ordered
        most_tokens = overload_tokens([view.queued_tokens for view in ordered])
        first = [view for view in ordered if view.replica_id == place and view.queued_tokens <= most_tokens]
        return first + [view for view in ordered if view is not first[0]] if first else ordered

    def place_of(self, session: str | None, names: Iterable[str]) -> str | None:
        """The replica of a session among some replicas; those that have gone meanwhile do not count."""
        present = [name for name in names if name in self._views]
        return None if session is None or not present else self._places.replica_of(session, present)

    def begin(
        self, replica_id: str, request_id: str, tokens: int, prompt: PromptKeys | None = None, now_s: float = 0.0
    ) -> None:
        """Count a request that goes to a replica, which will hold its prompt; ``now_s`` never falls."""
        if self.prefixes is not None and prompt is not None:
            if self._request_tokens is None:
                tokens = max(1, tokens - self._overlaps_of(prompt).get(replica_id, 0))
            self.prefixes.sent(replica_id, prompt, now_s)
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

    def _ordered(
        self,
        views: list[ReplicaView],
        overlaps: Mapping[str, int],
        session: str | None,
        choices: Sequence[ReplicaView],
    ) -> list[ReplicaView]:
        """The views in the policy's order, after the session's replica, which is one of ``choices``."""
        ordered = self.session_first(self._order(views, overlaps, self._turn, self._rng), session, choices)
        if overlaps:
            for index, view in enumerate(ordered[: self._shown_replicas]):
                if tokens := overlaps.get(view.replica_id):
                    ordered[index] = ReplicaView(
                        replica_id=view.replica_id, queued_tokens=view.queued_tokens, overlap_tokens=tokens
                    )
        return ordered

    def _overlaps_of(self, prompt: PromptKeys | None) -> Mapping[str, int]:
        """Tokens of a prompt that each replica holds; looked up once for the steps of one choice."""
        if self.prefixes is None or prompt is None:
            return {}
        if self._overlaps[0] is not prompt:
            self._overlaps = prompt, self.prefixes.overlap_tokens(prompt)
        return self._overlaps[1]

    def _add(self, replica_id: str, tokens: int) -> None:
        self._tokens[replica_id] += tokens
        if self._tokens[replica_id] <= 0:
            del self._tokens[replica_id]
        if replica_id in self._views:
            self._views[replica_id] = self._view(replica_id)

    def _view(self, replica_id: str, answer: int = 0) -> ReplicaView:
        """A replica as it is now; ``answer``: its queue as it reported it."""
        queue = max(self._tokens[replica_id], answer)
        return ReplicaView(replica_id=replica_id, queued_tokens=queue * (self._request_tokens or 1))
