"""What decode and prefill say to each other about one prompt."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class PrefillRequest:
    """A rendered prompt for a prefill replica; the ids are those that decode tokenised, once.

    ``last_resort``: the replica that has failed this very prompt.

    ``avoid``: replicas that fail, which it goes to only where most of the pool do. ``probe``: one of which it shows
    whether it still does. ``exclude``: those whose KV this decode replica cannot pull. ``routed_to``: the replica that
    it is sent to, and ``refused``: those that did not take it since they could not be reached; the router sets both
    here, in the caller's own process.
    """

    request_id: str
    token_ids: list[int]
    cache_salt: str | None = None
    priority: int = 0
    avoid: frozenset[str] = frozenset()
    probe: str | None = None
    exclude: frozenset[str] = frozenset()
    last_resort: str | None = None
    routed_to: str | None = None
    refused: set[str] = field(default_factory=set)

    @property
    def work_tokens(self) -> int:
        """What this request weighs for the router."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """Where the KV lies, for the decode engine's connector, and how much still waits behind this prompt.

    ``answered_at_s``: by the wall clock, which both nodes are taken to share; its lease has begun by then.
    ``computed_s``: what the engine took for it without the queue before; ``None`` where it does not say.
    """

    kv_transfer_params: dict[str, Any]
    answered_at_s: float
    backlog_tokens: int
    replica_id: str
    computed_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRefusal:
    """A healthy replica does not take this prompt: its queue is at its limit, or its engine refuses such a request."""

    why: str
    backlog_tokens: int
    replica_id: str
