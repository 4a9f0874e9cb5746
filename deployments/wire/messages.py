"""What goes between processes about one request: the endpoint's, decode's and prefill's messages."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deployments.wire.openai_errors import OpenAIError
from router.routing import Routing

_CREATED = re.compile(r'"created":\d+')
DONE = "data: [DONE]\n\n"  # the last event of a stream
_EVENT = "data: "  # what every event of a stream begins with, and no other answer
# Failures of a replica and not of the request: another replica can go on.
LOST = frozenset({"replica_lost", "engine_dead"})
FULL = "overloaded"  # the replica has no room for one more request
FAILED = LOST | {"internal", "engine"}  # failures that count against a replica


class NotResumableError(Exception):
    """A stream whose rest another replica would not continue exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The part of a stream that its client has."""

    outputs: tuple[tuple[int, ...], ...]  # output ids that came with it, as the engine's outputs had them
    frames: int
    digest: bytes  # of the frames' texts, without the times in them
    created: str  # the answer's field ``created``, as its frames have it


class SentFrames:
    """Records what goes to a client, for the case that its replica is lost."""

    def __init__(self) -> None:
        self._outputs: list[tuple[int, ...]] = []
        self._frames = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._created = ""

    @property
    def is_empty(self) -> bool:
        """Whether the client has nothing."""
        return not self._frames

    def add(self, text: str, outputs: Sequence[tuple[int, ...]]) -> None:
        """Record one more frame."""
        if not self._frames:
            match = _CREATED.search(text)
            self._created = match[0] if match else ""
        self._outputs += outputs
        self._frames += 1
        self._hash.update(text.encode())

    def sent(self) -> Sent | None:
        """The record so far; ``None``: the client has nothing."""
        if not self._frames:
            return None
        return Sent(
            outputs=tuple(self._outputs), frames=self._frames, digest=self._hash.digest(), created=self._created
        )


class SentAgain:
    """Drops the frames that a client has, and checks that they are the same."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._again = SentFrames()
        self._remaining = sent.frames

    def passes(self, text: str) -> str | None:
        """The text for the client; ``None``: it has this. Raises NotResumableError: the client has something else."""
        # ``created`` is written first in a frame, before any text of the model.
        text = _CREATED.sub(self._sent.created, text, count=1) if self._sent.created else text
        if not self._remaining:
            return text
        self._remaining -= 1
        self._again.add(text, ())
        if not self._remaining:
            again = self._again.sent()
            if again is None or again.digest != self._sent.digest:
                raise NotResumableError("the other replica's answer began otherwise")
        return None

    def check_end(self) -> None:
        """Raises NotResumableError: the answer ended within what the client has."""
        if self._remaining:
            raise NotResumableError("the other replica's answer is shorter")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """One OpenAI request for a decode replica."""

    endpoint: str  # ``chat`` or ``completions``
    body: bytes  # the client's JSON object as it came, in UTF-8; Serve keeps it until the answer has ended
    request_id: str  # under which the request is known everywhere
    arrived_at_s: float  # at the endpoint, by the wall clock, which both nodes are taken to share
    sent: Sent | None = None  # what the client has of the stream, if another replica began it
    tells_first: bool = False  # whether the first token of an answer in one piece is reported when it has come
    routing: Routing = field(default_factory=Routing)


class Frame(NamedTuple):
    """One piece of a response, in the order in which the client gets it; one without text says that tokens have come.

    ``outputs`` are the output ids of each output of the engine since the frame before, of a request with one stream of
    tokens. A detokenizer may hold text back, so an event and its ids need not match one to one.
    """

    text: str  # what the client gets as it is: a server-sent event, or the whole JSON body
    outputs: tuple[tuple[int, ...], ...] = ()
    tokens: int = 0  # output tokens since the frame before, of all answers of the request
    status: int = 200  # HTTP status of the response; the first frame's counts
    error: str | None = None  # class of the failure, if it is one

    @property
    def is_event(self) -> bool:
        """Whether it is an event of a stream, and not a whole body."""
        return self.text.startswith(_EVENT)

    @property
    def is_last(self) -> bool:
        """Whether nothing can follow it: the end of a stream, or a whole body."""
        return self.text == DONE or (self.text != "" and not self.is_event)


def failure(status: int, message: str, error: str) -> Frame:
    """The frame of a failure; ``error`` is its class."""
    return Frame(OpenAIError(status, message).body(), status=status, error=error)


def full(message: str) -> Frame:
    """The frame of a replica without room; the client gets the same answer as from an endpoint without room."""
    return Frame(OpenAIError(429, message, code=FULL).body(), status=429, error=FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """A rendered prompt for a prefill replica; the ids are those that decode tokenised, once."""

    request_id: str
    token_ids: list[int]
    cache_salt: str | None = None
    priority: int = 0
    routing: Routing = field(default_factory=Routing)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """Where the KV of a prompt is."""

    kv_transfer_params: dict[str, Any]  # for the connector of the decode engine
    answered_at_s: float  # by the wall clock, which both nodes are taken to share; the KV's lease has begun by then
    backlog_tokens: int  # that still wait at the replica
    replica_id: str
    computed_s: float | None = None  # the engine's time for the prompt without the queue; ``None``: not observed


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRefusal:
    """A healthy replica does not take a prompt: its queue is at its limit, or its engine refuses such a request."""

    why: str
    backlog_tokens: int
    replica_id: str
