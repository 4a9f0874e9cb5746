"""What one router has in flight to each replica (pure)."""

from collections import Counter

from router.types import ReplicaView


class InFlight:
    """The requests of one router. Others may send to the same replicas: of them it knows what replicas answer."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str], list[int]] = {}
        self._tokens_by_replica: Counter[str] = Counter()

    def begin(self, replica_id: str, request_id: str, tokens: int) -> None:
        """A request has gone to a replica; it may go there again under the same id before its first end is known."""
        self._tokens.setdefault((replica_id, request_id), []).append(tokens)
        self._tokens_by_replica[replica_id] += tokens

    def end(self, replica_id: str, request_id: str) -> bool:
        """It has ended there; ``False`` if it was never in flight."""
        key = (replica_id, request_id)
        begun = self._tokens.get(key)
        if begun is None:
            return False
        self._tokens_by_replica[replica_id] -= begun.pop(0)
        if not begun:
            del self._tokens[key]
        if self._tokens_by_replica[replica_id] <= 0:
            del self._tokens_by_replica[replica_id]
        return True

    def view(self, replica_id: str, answered_tokens: int | None = None) -> ReplicaView:
        """A replica's queue: one's own tokens, or what it answered if that is more.

        Its answer holds those of every router, but of one's own not what is still on the way.

        Args:
            replica_id: the replica.
            answered_tokens: what it answered; ``None`` where it was not asked.
        """
        own = self._tokens_by_replica.get(replica_id, 0)
        return ReplicaView(replica_id=replica_id, queued_tokens=max(own, answered_tokens or 0))
