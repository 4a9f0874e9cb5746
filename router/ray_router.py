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
from router.membership import routable
from router.outliers import usable
from router.pool_router import PoolRouter
from router.ray_coordinator import MembershipFeed

logger = logging.getLogger(__name__)

# In what a prefill replica answers: prompt tokens that wait there or are being computed.
QUEUED_TOKENS = "queued_tokens"
# So long a request waits for another replica than those that have failed it, where there is none.
_EXCLUDED_S = 5.0
# Serve's own wait for a queue length (RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S).
_ANSWER_S = 0.1
# Who could not be reached is tried last for so long.
_UNREACHED_S = 5.0


class TandemRouter(RequestRouter):
    """Tries the replicas of one deployment in the order of a ``PoolRouter``.

    One instance lives in every process that holds a handle. Of a request's first argument it reads ``work_tokens``, how
    many tokens it is worth (1 where there is none), ``exclude``, replicas that it must not go to, and ``avoid``, those
    that it goes to only where most of the pool are such, ``probe``, one that it tries first, and ``last_resort``, one
    that it tries last. It sets ``routed_to`` there, for the caller to know, as soon as it has chosen, and adds to
    ``refused`` those that did not take it since they could not be reached.
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

        ``asks_tokens``: replicas say in ``record_routing_stats`` how many tokens wait there, as ``QUEUED_TOKENS``.
        Others are asked for the number of their requests, where a request is worth 1. ``most_ejected_frac``: where a
        request would rather avoid a larger share of the pool, it avoids nobody.
        """
        known_pools.add(self._deployment_id.name, self)
        self._asks_tokens = asks_tokens
        self._most_ejected_frac = most_ejected_frac
        self._pool = PoolRouter(policy, asked_replicas, random.Random())
        self._seen: tuple[list[RunningReplica], frozenset[str] | None] = ([], None)
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
        asked_for = _asked(pending_request)
        exclude: frozenset[str] = getattr(asked_for, "exclude", frozenset())
        avoid: frozenset[str] = getattr(asked_for, "avoid", frozenset())
        views = self._pool.order()
        ordered = [view for view in views if view.replica_id not in exclude]
        if not ordered and pending_request is not None and time.time() - pending_request.created_at > _EXCLUDED_S:
            ordered = views  # those that have died are gone by now: it was only the connection
        if avoid:
            left = usable([view.replica_id for view in ordered], avoid, self._most_ejected_frac)
            ordered = [view for view in ordered if view.replica_id in left]
        if asked := self._pool.ask(ordered):
            answers = await asyncio.gather(*map(self._queue, asked))
            ordered = self._pool.informed(ordered, dict(zip(asked, answers, strict=True)))
        first, last = getattr(asked_for, "probe", None), {getattr(asked_for, "last_resort", None), *self._unreached()}
        if first is not None or last != {None}:
            ordered.sort(key=lambda view: (view.replica_id in last, view.replica_id != first))
        # One that has gone meanwhile is no candidate any more.
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
                # As get_queue_len does it; Serve has no other way to ask a replica something of one's own.
                return int((await replica._actor_handle.record_routing_stats.remote())[QUEUED_TOKENS])
        except Exception as error:  # it may be dying, which Serve notices by itself
            logger.debug("%s did not say how long its queue is: %s", replica_id, error)
            return None

    def _refresh(self, candidates: list[RunningReplica]) -> None:
        """Bring the views in line with who may be routed to; with many replicas this costs the most."""
        seen = (candidates, self._obeyed())
        # Serve makes a new list, and the feed a new set, whenever one of them changes.
        if seen[0] is self._seen[0] and seen[1] is self._seen[1]:
            return
        self._seen = seen
        self._by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        self._pool.set_replicas(routable(list(self._by_id), seen[1]))

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Serve's own (private), by which a request gets its replica: from here on it is there, accepted or not.

        Serve tries for ever where a replica cannot be reached.

        Raises:
            RayServeException: the same one could not be reached again: there is no better one.
        """
        if is_retry:
            self._left(_asked(pending_request))
        replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        self.chosen(pending_request, replica.replica_id.unique_id)
        return replica

    def _left(self, asked: Any) -> None:
        """The replica that was chosen before has not taken the request: it is full, or cannot be reached."""
        name = getattr(asked, "routed_to", None)
        if name is None:
            return
        if name in self._unreached():
            if name in asked.refused:
                raise RayServeException(f"{name} of {self._deployment_id.name} cannot be reached")
            asked.refused.add(name)
        asked.routed_to = None

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """It could not be reached."""
        super().on_replica_actor_unavailable(replica_id)
        self._unreached_s[replica_id.unique_id] = time.monotonic()

    def _unreached(self) -> set[str]:
        """Who could not be reached of late."""
        if not self._unreached_s:
            return set()
        since_s = time.monotonic() - _UNREACHED_S
        self._unreached_s = {name: at_s for name, at_s in self._unreached_s.items() if at_s > since_s}
        return set(self._unreached_s)

    def chosen(self, pending_request: PendingRequest, replica_id: str) -> None:
        """Count the request's tokens against the replica that gets it.

        Not by ``on_request_routed``: Serve calls that once a replica has accepted, and one that hangs never does.
        """
        asked = _asked(pending_request)
        if hasattr(asked, "routed_to"):
            asked.routed_to = replica_id
        tokens = int(getattr(asked, "work_tokens", 1))
        self._pool.begin(replica_id, pending_request.metadata.internal_request_id, tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Give the tokens back; Serve tells of each attempt, of those too that a replica did not take."""
        self._pool.end(replica_id.unique_id, internal_request_id)


def _asked(pending: PendingRequest | None) -> Any:
    """What a request's caller passed first."""
    return pending.args[0] if pending is not None and pending.args else None
