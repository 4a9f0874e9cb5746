"""In which order the replicas of a pool are tried for a request."""

import random
from collections.abc import Callable, Sequence

from router.types import ReplicaView

RoutingPolicy = Callable[[Sequence[ReplicaView], int, random.Random], list[ReplicaView]]


def least_tokens(replicas: Sequence[ReplicaView], turn: int, rng: random.Random) -> list[ReplicaView]:
    """Fewest queued tokens first; ties in random order, or low load would always land on the first replica."""
    return sorted(replicas, key=lambda replica: (replica.queued_tokens, rng.random()))


def round_robin(replicas: Sequence[ReplicaView], turn: int, rng: random.Random) -> list[ReplicaView]:
    """Each replica in turn, whatever its load."""
    ordered = sorted(replicas, key=lambda replica: replica.replica_id)
    start = turn % len(ordered) if ordered else 0
    return ordered[start:] + ordered[:start]


POLICIES: dict[str, RoutingPolicy] = {"least_tokens": least_tokens, "round_robin": round_robin}
