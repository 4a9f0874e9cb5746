"""What one router has in flight to each replica, and what a replica adds by its own count of requests (pure)."""

from collections import Counter

from router.types import ReplicaView

# Of the last twenty requests or so.
_NEWEST_WEIGHT = 0.05


class InFlight:
    """The requests of one router. Others may send to the same replicas: of them it knows what replicas answer."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str], int] = {}
        self._tokens_by_replica: Counter[str] = Counter()
        self._requests_by_replica: Counter[str] = Counter()
        self._usual_tokens: float | None = None

    def begin(self, replica_id: str, request_id: str, tokens: int) -> None:
        """A request has gone to a replica; it may go there again under the same id."""
        key = (replica_id, request_id)
        if key not in self._tokens:
            self._requests_by_replica[replica_id] += 1
        self._tokens[key] = self._tokens.get(key, 0) + tokens
        self._tokens_by_replica[replica_id] += tokens
        before = tokens if self._usual_tokens is None else self._usual_tokens
        self._usual_tokens = before + _NEWEST_WEIGHT * (tokens - before)

    def end(self, replica_id: str, request_id: str) -> bool:
        """It has ended there; ``False`` if it was never in flight."""
        tokens = self._tokens.pop((replica_id, request_id), None)
        if tokens is None:
            return False
        for counter, left in ((self._tokens_by_replica, tokens), (self._requests_by_replica, 1)):
            counter[replica_id] -= left
            if counter[replica_id] <= 0:
                del counter[replica_id]
        return True

    def view(self, replica_id: str, ongoing_requests: int | None = None) -> ReplicaView:
        """A replica's queue: one's own tokens, and the usual number for each request of others.

        Args:
            replica_id: the replica.
            ongoing_requests: what it answered, requests of every router; ``None`` where it was not asked.
        """
        tokens = self._tokens_by_replica.get(replica_id, 0)
        if ongoing_requests is not None:
            others = max(0, ongoing_requests - self._requests_by_replica.get(replica_id, 0))
            tokens += round(others * (1.0 if self._usual_tokens is None else self._usual_tokens))
        return ReplicaView(replica_id=replica_id, queued_tokens=tokens)
