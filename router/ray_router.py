"""Serve's request router <-> the pure policy, nothing else."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from router import known_pools
from router.ejection import usable
from router.membership import routable
from router.pool_router import PoolRouter
from router.ray_coordinator import MembershipFeed
from router.routing import Choice, Routing

logger = logging.getLogger(__name__)

# Key of what a prefill replica answers to routers: prompt tokens that wait there or are being computed.
QUEUED_TOKENS = "queued_tokens"
# Seconds that a request waits for a replica that has not failed it, before it goes to one that has.
_EXCLUDED_S = 5.0
# Serve's own wait for a queue length, seconds (RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S).
_ANSWER_S = 0.1
# Seconds for which a replica that could not be reached is tried last.
_UNREACHED_S = 5.0


class TandemRouter(RequestRouter):
    """Tries the replicas of one deployment in the order of a ``PoolRouter``.

    One instance lives in every process that holds a handle. It obeys the ``Routing`` of a request, the attribute
    ``routing`` of its first argument, and writes what it chose into ``routing.choice``.

    Needs: ``_deployment_id`` and ``_choose_replica_for_request`` of Serve's ``RequestRouter``, ``_actor_handle`` of its
    ``RunningReplica``, and ``should_backoff`` of ``routing_context``.
    Without it: no request is routed, or the caller does not learn which replica got its request; queues of prefill are
    not asked.
    """

    def initialize_state(
        self,
        policy: str = "least_tokens",
        is_gated: bool = False,
        asked_replicas: int = 0,
        asks_tokens: bool = False,
        most_ejected_frac: float = 0.5,
        **_: Any,
    ) -> None:
        """Called once by Serve with the deployment's ``request_router_kwargs``; on the router's event loop.

        ``is_gated``: whether the plan of a coordinator says which replicas get requests. ``asks_tokens``: replicas
        report waiting tokens in ``record_routing_stats``, as ``QUEUED_TOKENS``; otherwise they are asked for the number
        of their requests, and a request is worth 1. ``most_ejected_frac``: see ``router.ejection.usable``.
        """
        known_pools.add(self._deployment_id.name, self)
        self._asks_tokens = asks_tokens
        self._most_ejected_frac = most_ejected_frac
        self._pool = PoolRouter(policy, asked_replicas, random.Random())
        self._refreshed: tuple[list[RunningReplica], frozenset[str] | None] = ([], None)
        self._by_id: dict[str, RunningReplica] = {}
        self._unreached_s: dict[str, float] = {}
        self._feed: MembershipFeed | None = None
        if is_gated:
            self._feed = MembershipFeed(self._deployment_id.app_name)
            self._feed_task = asyncio.get_running_loop().create_task(self._feed.run())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates that may be routed to, each its own rank, best first."""
        if pending_request is not None:
            # Without this an empty answer is asked for again at once, in a loop that blocks the process.
            pending_request.routing_context.should_backoff = True
        self._refresh(candidate_replicas)
        routing = _routing(pending_request)
        views = self._pool.order()
        ordered = [view for view in views if view.replica_id not in routing.exclude]
        if not ordered and pending_request is not None and time.time() - pending_request.created_at > _EXCLUDED_S:
            ordered = views  # those that have died are gone by now: it was only the connection
        if routing.avoid:
            names = usable([view.replica_id for view in ordered], routing.avoid, self._most_ejected_frac)
            ordered = [view for view in ordered if view.replica_id in names]
        if asked := self._pool.ask(ordered):
            answers = await asyncio.gather(*map(self._queue, asked))
            ordered = self._pool.informed(ordered, dict(zip(asked, answers, strict=True)))
        first, last = routing.probe, {routing.last_resort, *self._unreached()}
        if first is not None or last != {None}:
            ordered.sort(key=lambda view: (view.replica_id in last, view.replica_id != first))
        # A replica that has gone meanwhile is no candidate any more.
        return [[self._by_id[view.replica_id]] for view in ordered if view.replica_id in self._by_id]

    def routed(self) -> Sequence[str]:
        """The replicas that may be routed to now."""
        return routable([replica_id.unique_id for replica_id in self.curr_replicas], self._obeyed())

    def _obeyed(self) -> frozenset[str] | None:
        holds = self._feed.now() if self._feed is not None else None
        return None if holds is None else holds.admitted

    async def _queue(self, replica_id: str) -> int | None:
        try:
            replica = self._by_id[replica_id]
            async with asyncio.timeout(_ANSWER_S):
                if not self._asks_tokens:
                    return int(await replica.get_queue_len(deadline_s=_ANSWER_S))
                # As get_queue_len does it; Serve has no public way to ask a replica a question of one's own.
                return int((await replica._actor_handle.record_routing_stats.remote())[QUEUED_TOKENS])
        except Exception as error:  # it may be dying, which Serve notices by itself
            logger.debug("%s did not report its queue: %s", replica_id, error)
            return None

    def _refresh(self, candidates: list[RunningReplica]) -> None:
        """Bring the views in line with the replicas that may be routed to; with many replicas this costs the most."""
        admitted = self._obeyed()
        # Serve makes a new list, and the feed a new set, whenever one of them changes.
        if candidates is self._refreshed[0] and admitted is self._refreshed[1]:
            return
        self._refreshed = candidates, admitted
        self._by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        self._pool.set_replicas(routable(list(self._by_id), admitted))

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Serve's own (private), by which a request gets its replica: from here on it is there, accepted or not.

        Serve tries for ever if no replica can be reached.

        Raises:
            RayServeException: the same replica could not be reached again: there is no better one.
        """
        if is_retry:
            self._take_back(_routing(pending_request).choice)
        replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        self.chosen(pending_request, replica.replica_id.unique_id)
        return replica

    def _take_back(self, choice: Choice) -> None:
        """The chosen replica has not taken the request: it is full, or cannot be reached."""
        name = choice.replica_id
        if name is None:
            return
        if name in self._unreached():
            if name in choice.unreached:
                raise RayServeException(f"{name} of {self._deployment_id.name} cannot be reached")
            choice.unreached.add(name)
        choice.replica_id = None

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Called by Serve: a replica could not be reached."""
        super().on_replica_actor_unavailable(replica_id)
        self._unreached_s[replica_id.unique_id] = time.monotonic()

    def _unreached(self) -> set[str]:
        """Replicas that could not be reached lately."""
        if not self._unreached_s:
            return set()
        since_s = time.monotonic() - _UNREACHED_S
        self._unreached_s = {name: at_s for name, at_s in self._unreached_s.items() if at_s > since_s}
        return set(self._unreached_s)

    def chosen(self, pending_request: PendingRequest, replica_id: str) -> None:
        """Count the request's tokens against the replica that gets it, and give the choice to the caller.

        Not in ``on_request_routed``: Serve calls that once a replica has accepted, and one that hangs never accepts.
        """
        routing = _routing(pending_request)
        routing.choice.replica_id = replica_id
        self._pool.begin(replica_id, pending_request.metadata.internal_request_id, routing.work_tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Give the tokens back; Serve calls this for each attempt, also for those that a replica did not take."""
        self._pool.end(replica_id.unique_id, internal_request_id)


def _routing(pending: PendingRequest | None) -> Routing:
    """The routing facts of a request; calls such as health checks have none."""
    first = pending.args[0] if pending is not None and pending.args else None
    return getattr(first, "routing", None) or Routing()
