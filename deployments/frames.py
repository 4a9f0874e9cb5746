"""What the ingress and a decode replica say to each other about one request."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deployments.openai_errors import OpenAIError
from deployments.sent import Sent

# A stream's last event.
DONE = "data: [DONE]\n\n"
# Failures of a replica and not of the request: another replica can go on.
LOST = frozenset({"replica_lost", "engine_dead"})
# It has no room for one more.
FULL = "overloaded"
# What speaks against a replica.
FAILED = LOST | {"internal", "engine"}


@dataclass(slots=True, kw_only=True)
class DecodeRequest:
    """One OpenAI request for a decode replica.

    Attributes:
        endpoint: ``chat`` or ``completions``.
        body: the client's JSON object.
        request_id: the id under which the request is known everywhere.
        arrived_at_s: when it arrived at the ingress, by the wall clock, which both nodes are taken to share.
        sent: of a stream that another replica began, what its client has.
        exclude: replicas that have failed this request; it waits rather than go there again.
        avoid: replicas that fail, which it goes to only where most of the pool do.
        probe: one of which it shows whether it still does.
        tells_first: of an answer in one piece, whether the endpoint wants to know when its first token has come.
        routed_to: the replica that it is sent to; the router sets it here, in the caller's own process.
        refused: those that did not take it since they could not be reached, also set by the router.
    """

    endpoint: str
    body: dict[str, Any]
    request_id: str
    arrived_at_s: float
    sent: Sent | None = None
    exclude: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    probe: str | None = None
    tells_first: bool = False
    routed_to: str | None = None
    refused: set[str] = field(default_factory=set)


class Frame(NamedTuple):
    """One piece of a response, in the order in which the client gets it; one without text says that tokens have come.

    ``text`` is what goes to the client as it is: a server-sent event of a stream, or the whole JSON body. ``outputs``
    are the output ids of each output that the engine gave since the frame before (a detokenizer may hold text back, so
    an event and its ids need not line up one to one), where there is one stream of tokens; ``tokens`` counts those of
    all, as of ``n`` answers. ``status`` is the HTTP status that the first frame decides; ``error`` the class of a
    failure, on the frame that carries it.
    """

    text: str
    outputs: tuple[tuple[int, ...], ...] = ()
    tokens: int = 0
    status: int = 200
    error: str | None = None


def failure(status: int, message: str, error: str) -> Frame:
    """The frame of a failure; ``error`` is its class."""
    return Frame(OpenAIError(status, message).body(), status=status, error=error)


def full(message: str) -> Frame:
    """The frame of a replica without room, which says what an endpoint without room does."""
    return Frame(OpenAIError(429, message, code=FULL).body(), status=429, error=FULL)
