"""Chooses the replica of a deployment to which Serve sends a request: Serve's request router with a ``PoolRouter``."""

import asyncio
import logging
import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from router import known_pools
from router.ejection import usable
from router.membership import routable
from router.pool_router import PoolRouter, ReplicaView
from router.prefix_map import PrefixMap
from router.prompt_keys import PromptKeys
from router.ray_coordinator import MembershipFeed
from router.ray_prefix import PrefixFeed
from router.routing import Choice, Routing

logger = logging.getLogger(__name__)

# Name of a prefill replica's queue in its routing stats: prompt tokens that wait there or are being computed.
QUEUED_TOKENS = "queued_tokens"
# Longest time, seconds, for which a request waits for a replica that it does not exclude. Then it may go to an excluded
# one.
_EXCLUDED_S = 5.0
# Longest wait for the report of a replica's queue, seconds: the default of RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S.
_ANSWER_S = 0.1
# Replicas that are remembered of a choice, so that it can be explained.
_CONSIDERED = 4
# Pieces that a replica may hold until it has reported its KV: a million tokens of 128 in a piece.
_CAPACITY_PIECES = 8192
# Time, seconds, for which a replica is tried last after it could not be reached.
_UNREACHED_S = 5.0


class TandemRouter(RequestRouter):
    """Tries the replicas of one deployment in the order of a ``PoolRouter``.

    One instance lives in every process that holds a handle. A request's first argument has an attribute ``routing``, a
    ``Routing``: the router obeys it, and writes the replica that it chose into ``routing.choice``.

    Needs: ``_deployment_id`` and ``_choose_replica_for_request`` of Serve's ``RequestRouter``, ``_actor_handle`` of its
    ``RunningReplica``, and ``should_backoff`` of ``routing_context``.
    Without it: no request is routed, or the caller does not learn which replica got its request. Prefill replicas are
    not asked for their queues.
    """

    def initialize_state(
        self,
        policy: str = "least_tokens",
        is_gated: bool = False,
        asked_replicas: int = 0,
        asks_tokens: bool = False,
        most_ejected_frac: float = 0.5,
        follows_prefixes: bool = False,
        request_tokens: int | None = None,
        sent_s: float = 0.0,
        **_: Any,
    ) -> None:
        """Called once by Serve, on the router's event loop, with the deployment's ``request_router_kwargs``.

        Args:
            policy: a name in ``router.pool_router.POLICIES``.
            is_gated: whether the plan of a coordinator says which replicas get requests.
            asked_replicas: number of replicas that are asked for their queue before one is chosen.
            asks_tokens: whether a queue is a number of tokens, which replicas report in ``record_routing_stats`` as
                ``QUEUED_TOKENS``. If not, it is a number of requests.
            follows_prefixes: whether replicas report which pieces of prompts they hold.
            request_tokens: prompt tokens that a request in a queue is worth; ``None``: a queue is a number of tokens.
            sent_s: time for which a prompt that was sent counts as held without a report of its replica, seconds.
            most_ejected_frac: largest share of the pool that is avoided, 0..1; see ``router.ejection.usable``.
        """
        known_pools.add(self._deployment_id.name, self)
        self._asks_tokens = asks_tokens
        self._most_ejected_frac = most_ejected_frac
        prefixes = PrefixMap(capacity_pieces=_CAPACITY_PIECES, sent_s=sent_s) if follows_prefixes else None
        self._pool = PoolRouter(
            policy, asked_replicas, random.Random(), prefixes=prefixes, request_tokens=request_tokens
        )
        # Candidates and admitted replicas for which the replicas of ``_pool`` were set.
        self._refreshed_for: tuple[list[RunningReplica], frozenset[str] | None] = ([], None)
        self._by_id: dict[str, RunningReplica] = {}  # the candidates
        self._unreached_s: dict[str, float] = {}  # monotonic time at which a replica could not be reached
        self._feed: MembershipFeed | None = None  # ``None``: no coordinator says which replicas get requests
        loops, app = [], self._deployment_id.app_name
        if is_gated:
            self._feed = MembershipFeed(app)
            loops.append(self._feed.run())
        if prefixes is not None:
            loops.append(PrefixFeed(app, self._deployment_id.name, prefixes).run())
        # Kept, since the loop itself has only weak references to its tasks.
        self._feed_tasks = [asyncio.get_running_loop().create_task(loop) for loop in loops]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates that the request may go to, best first.

        Serve tries the lists in turn and has its own order within a list. So each list has one candidate.
        """
        if pending_request is not None:
            # Without backoff, Serve calls again at once after an empty answer, in a loop that blocks the process.
            pending_request.routing_context.should_backoff = True
        self._refresh(candidate_replicas)
        routing = _routing(pending_request)
        has_waited = pending_request is not None and time.time() - pending_request.created_at > _EXCLUDED_S
        ordered = self._permitted(self._pool.order(routing.prompt, routing.session), routing, has_waited=has_waited)
        if routing.exclude or routing.avoid:  # the session's replica may be one of them; then all routers take the next
            ordered = self._pool.session_first(ordered, routing.session, ordered)
        if routing.preferred is None:  # the queue that has named a replica knows all of them
            ordered = await self._informed(ordered, routing)
        tried_last = {routing.last_resort, *self._unreached()} - {None}
        tried_first = [name for name in (routing.probe, routing.preferred) if name is not None]
        if tried_last or tried_first:
            # The sort is stable: the order stays, but for the replicas that come first or last.
            ordered.sort(key=lambda view: _rank(view.replica_id, tried_first, tried_last))
        routing.choice.considered = tuple(ordered[:_CONSIDERED])
        routing.choice.session_place = self._pool.place_of(routing.session, [view.replica_id for view in ordered])
        # Replicas that have gone while queues were asked are no candidates any more.
        return [[self._by_id[view.replica_id]] for view in ordered if view.replica_id in self._by_id]

    def _permitted(self, views: list[ReplicaView], routing: Routing, *, has_waited: bool) -> list[ReplicaView]:
        """The replicas that a request may go to, in the same order; empty: the request waits for a replica."""
        permitted = [view for view in views if view.replica_id not in routing.exclude]
        if not permitted and has_waited:
            # Excluded replicas that died have left the pool by now. Those that are still here lost only a connection.
            permitted = views
        if not routing.avoid:
            return permitted
        names = set(usable([view.replica_id for view in permitted], routing.avoid, self._most_ejected_frac))
        return [view for view in permitted if view.replica_id in names]

    async def _informed(self, ordered: list[ReplicaView], routing: Routing) -> list[ReplicaView]:
        """The order after the best few replicas have reported their queues."""
        asked = self._pool.ask(ordered)
        if not asked:
            return ordered
        answers = await asyncio.gather(*map(self._queue, asked))
        return self._pool.informed(ordered, dict(zip(asked, answers, strict=True)), routing.prompt, routing.session)

    def routed(self) -> Sequence[str]:
        """Names of the replicas that requests may go to now."""
        return routable([replica_id.unique_id for replica_id in self.curr_replicas], self._admitted())

    def _admitted(self) -> frozenset[str] | None:
        """Names of the replicas that the plan admits; ``None``: no plan holds."""
        membership = self._feed.now() if self._feed is not None else None
        return None if membership is None else membership.admitted

    async def _queue(self, replica_id: str) -> int | None:
        """Ask a replica for its queue, in tokens or requests; ``None``: it did not answer in time."""
        try:
            replica = self._by_id[replica_id]
            async with asyncio.timeout(_ANSWER_S):
                if not self._asks_tokens:
                    return int(await replica.get_queue_len(deadline_s=_ANSWER_S))
                # The same kind of call as in get_queue_len. Serve has no public way to ask a replica for other values.
                return int((await replica._actor_handle.record_routing_stats.remote())[QUEUED_TOKENS])
        except Exception as error:  # the replica may be dying, which Serve notices by itself
            logger.debug("%s did not report its queue: %s", replica_id, error)
            return None

    def _refresh(self, candidates: list[RunningReplica]) -> None:
        """Set the replicas that requests may go to. With many replicas this is the most expensive step."""
        admitted = self._admitted()
        # Serve makes a new list at every change of the candidates, and the feed a new set at every change of the plan.
        # So it is enough to compare the objects.
        if candidates is self._refreshed_for[0] and admitted is self._refreshed_for[1]:
            return
        self._refreshed_for = candidates, admitted
        gone = self._by_id.keys() - {replica.replica_id.unique_id for replica in candidates}
        if self._pool.prefixes is not None:
            for name in gone:
                self._pool.prefixes.clear(name)
        self._by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        self._pool.set_replicas(routable(list(self._by_id), admitted))

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Serve's private method that chooses a replica for a request; Serve then sends the request there.

        Serve's own method would try for ever if no replica can be reached. ``is_retry``: the replica that was chosen
        before has not taken the request.

        Raises:
            RayServeException: for the second time the same replica could not be reached for this request.
        """
        if is_retry:
            self._withdraw(_routing(pending_request).choice)
        replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        self.record_choice(pending_request, replica.replica_id.unique_id)
        return replica

    def _withdraw(self, choice: Choice) -> None:
        """Clear a choice, since the chosen replica has not taken the request: it is full, or could not be reached.

        Raises:
            RayServeException: for the second time the same replica could not be reached. The router has no other one,
                since it tries such a replica last.
        """
        name = choice.replica_id
        if name is None:
            return
        if name in self._unreached():
            if name in choice.unreached:
                pool = self._deployment_id.name
                raise RayServeException(
                    f"{name} of {pool} cannot be reached, and no other replica may take the request"
                )
            choice.unreached.add(name)
        choice.replica_id = None

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Called by Serve: a replica could not be reached."""
        super().on_replica_actor_unavailable(replica_id)
        self._unreached_s[replica_id.unique_id] = time.monotonic()

    def _unreached(self) -> set[str]:
        """Replicas that could not be reached in the last ``_UNREACHED_S``."""
        if not self._unreached_s:
            return set()
        since_s = time.monotonic() - _UNREACHED_S
        self._unreached_s = {name: at_s for name, at_s in self._unreached_s.items() if at_s > since_s}
        return set(self._unreached_s)

    def record_choice(self, pending_request: PendingRequest, replica_id: str) -> None:
        """Count the request's tokens for the replica that gets it, and tell the caller which one it is.

        ``on_request_routed`` would be too late: Serve calls it once a replica has accepted, and a replica that hangs
        never accepts.
        """
        routing = _routing(pending_request)
        routing.choice.replica_id = replica_id
        self._pool.begin(
            replica_id,
            pending_request.metadata.internal_request_id,
            routing.work_tokens,
            routing.prompt,
            time.monotonic(),
        )

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting the request's tokens. Serve calls this after each attempt, also an unsuccessful one."""
        self._pool.end(replica_id.unique_id, internal_request_id)

    def overlap_tokens(self, prompt: PromptKeys) -> Mapping[str, int]:
        """Tokens of a prompt that the replicas hold, by replica; replicas without any are left out."""
        return {} if self._pool.prefixes is None else self._pool.prefixes.overlap_tokens(prompt)

    def note_false_hit(self, replica: ReplicaView, prompt: PromptKeys, found_tokens: int) -> None:
        """Correct what a replica is taken to hold of a prompt; ``replica``: as it was when it was chosen."""
        prefixes = self._pool.prefixes
        if prefixes is None:
            return
        expected_tokens = replica.overlap_tokens
        prefixes.found(replica.replica_id, prompt, expected_tokens=expected_tokens, found_tokens=found_tokens)
        # Its engine has computed the prompt now.
        prefixes.sent(replica.replica_id, prompt, time.monotonic())


def _rank(name: str, tried_first: Sequence[str], tried_last: Collection[str | None]) -> tuple[bool, int]:
    """Sort key of a replica: those that are tried first, the others, and those that are tried last."""
    return name in tried_last, tried_first.index(name) if name in tried_first else len(tried_first)


def _routing(pending: PendingRequest | None) -> Routing:
    """The ``Routing`` of a request; the default one for calls without, such as health checks."""
    first = pending.args[0] if pending is not None and pending.args else None
    return getattr(first, "routing", None) or Routing()
