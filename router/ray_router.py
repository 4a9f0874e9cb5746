"""Serve's request router <-> the pure policy, nothing else."""

import asyncio
import random
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from router.membership import obeyed, routable
from router.policy import POLICIES
from router.ray_coordinator import MembershipFeed
from router.types import ReplicaView

# The coordinator speaks every few seconds even when nothing has changed.
_SILENCE_S = 15.0


class TandemRouter(RequestRouter):
    """Tries the replicas of one deployment in the order of a policy from ``router.policy``.

    One instance lives in every process that holds a handle. It counts the tokens that it has itself in flight to
    each replica; a request says how many it is worth in an attribute ``work_tokens`` of its first argument (1 where
    there is none).
    """

    def initialize_state(self, policy: str = "least_tokens", is_gated: bool = False, **_: Any) -> None:
        """Called once by Serve with the deployment's ``request_router_kwargs``; on the router's event loop."""
        self._order = POLICIES[policy]
        self._turn = 0
        self._rng = random.Random()
        self._tokens: dict[ReplicaID, int] = {}
        self._in_flight: dict[tuple[ReplicaID, str], int] = {}
        self._seen: tuple[list[RunningReplica], frozenset[str] | None] = ([], None)
        self._by_id: dict[str, RunningReplica] = {}
        self._views: dict[str, ReplicaView] = {}
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
        self._turn += 1
        self._refresh(candidate_replicas)
        views = list(self._views.values())
        return [[self._by_id[view.replica_id]] for view in self._order(views, self._turn, self._rng)]

    def _refresh(self, candidates: list[RunningReplica]) -> None:
        """Bring the views in line with who may be routed to; with many replicas building them anew costs the most."""
        membership = self._feed.membership if self._feed is not None else None
        seen = (candidates, obeyed(membership, now_s=time.monotonic(), silence_s=_SILENCE_S))
        # Serve makes a new list, and the feed a new set, whenever one of them changes.
        if seen[0] is self._seen[0] and seen[1] is self._seen[1]:
            return
        self._seen = seen
        self._by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        names = routable(list(self._by_id), seen[1])
        self._views = {name: self._view(self._by_id[name].replica_id) for name in names}

    def _view(self, replica_id: ReplicaID) -> ReplicaView:
        return ReplicaView(replica_id=replica_id.unique_id, queued_tokens=self._tokens.get(replica_id, 0))

    def _count(self, replica_id: ReplicaID, tokens: int) -> None:
        left = self._tokens.get(replica_id, 0) + tokens
        if left > 0:
            self._tokens[replica_id] = left
        else:
            self._tokens.pop(replica_id, None)
        if replica_id.unique_id in self._views:
            self._views[replica_id.unique_id] = self._view(replica_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Count the request's tokens against the replica that got it."""
        if not pending_request.metadata.is_streaming:
            return  # Serve tells of a plain gRPC call, such as a health check, after its end (DECISIONS 12)
        key = (replica_id, pending_request.metadata.internal_request_id)
        first = pending_request.args[0] if pending_request.args else None
        tokens = int(getattr(first, "work_tokens", 1))
        self._in_flight[key] = self._in_flight.get(key, 0) + tokens
        self._count(replica_id, tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Give the tokens back."""
        # Serve also tells of attempts that a replica refused, which were never routed.
        tokens = self._in_flight.pop((replica_id, internal_request_id), 0)
        if tokens:
            self._count(replica_id, -tokens)
