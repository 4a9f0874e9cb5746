"""Serve's request router <-> the pure policy, nothing else."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from router.membership import routable
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
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names: Sequence[str] = list(by_id)
        if self._feed is not None:
            names = routable(names, self._feed.membership, now_s=time.monotonic(), silence_s=_SILENCE_S)
        views = [
            ReplicaView(replica_id=name, queued_tokens=self._tokens.get(by_id[name].replica_id, 0)) for name in names
        ]
        return [[by_id[view.replica_id]] for view in self._order(views, self._turn, self._rng)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Count the request's tokens against the replica that got it."""
        if not pending_request.metadata.is_streaming:
            return  # Serve tells of a plain gRPC call, such as a health check, after its end (DECISIONS 12)
        key = (replica_id, pending_request.metadata.internal_request_id)
        first = pending_request.args[0] if pending_request.args else None
        tokens = int(getattr(first, "work_tokens", 1))
        self._in_flight[key] = self._in_flight.get(key, 0) + tokens
        self._tokens[replica_id] = self._tokens.get(replica_id, 0) + tokens

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Give the tokens back."""
        # Serve also tells of attempts that a replica refused, which were never routed.
        tokens = self._in_flight.pop((replica_id, internal_request_id), 0)
        left = self._tokens.get(replica_id, 0) - tokens
        if left > 0:
            self._tokens[replica_id] = left
        else:
            self._tokens.pop(replica_id, None)
