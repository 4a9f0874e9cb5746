"""Messages between the endpoint, decode and prefill about one request, and the record that resumes a lost stream.

The endpoint records the frames that a client has (``SentFrames``). If the decode replica is lost, the next one gets
this record (``Sent``), makes the frames again, and drops those that the client has (``SentAgain``).
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deployments.wire.openai_errors import OpenAIError
from router.routing import Chosen, Routing

# The time of an answer, which differs in the answer of another replica. vLLM's Responses API calls it ``created_at``.
_CREATED = re.compile(r'"created(?:_at)?":\d+')
LOAD_FORMAT = "endpoint-load-metrics-format"  # header by which a client asks for the load of the engine
DONE = "data: [DONE]\n\n"  # the last event of a stream of OpenAI's completions
_EVENTS = ("data: ", "event: ")  # beginning of every event of a stream, and of no other answer
BINARY = "application/octet-stream"  # content type of an answer that is no text
LOST = frozenset({"replica_lost", "engine_dead"})  # failures after which another replica can continue
FULL = "overloaded"  # the replica has no room for one more request
FAILED = LOST | {"internal", "engine"}  # failures that count against the replica's health


class NotResumableError(Exception):
    """Another replica would not continue the stream exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of a request by the monotonic clock of one node, seconds; 0.0: not observed."""

    queued_s: float  # arrival at the endpoint
    scheduled_s: float  # an engine, of prefill or of decode, began to compute the prompt
    first_token_s: float
    last_token_s: float  # the latest token
    clock_s: float  # wall-clock time at which the node's monotonic clock was zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a replica that resumes an answer must know beside its tokens; ``None``: not observed."""

    cached_tokens: int | None = None  # prompt tokens that no engine computed for this request
    created_tokens: int | None = None  # prompt tokens that an engine computed and added to its prefix cache
    times: Times | None = None
    media: tuple[str, ...] = ()  # hashes of the images and other media in the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The part of a stream that its client has."""

    outputs: tuple[tuple[int, ...], ...]  # token ids of each output of the engine
    frames: int  # number of frames
    digest: bytes  # hash of all frames' texts together
    created: str  # the field ``created`` of the answer, such as ``"created":1764264000``
    usage: Usage | None = None  # the latest that a frame reported; ``None``: none has


class SentFrames:
    """Records the frames that a client has, in case its replica is lost."""

    def __init__(self) -> None:
        self._outputs: list[tuple[int, ...]] = []
        self.frames = 0  # number of frames that the client has
        self._hash = hashlib.blake2b(digest_size=16)
        self._created = ""
        self._usage: Usage | None = None

    def add(self, text: str, outputs: Sequence[tuple[int, ...]], usage: Usage | None = None) -> None:
        """Record one more frame; ``usage``: what the frame reports of it."""
        if not self.frames:
            match = _CREATED.search(text)
            self._created = match[0] if match else ""
        self._outputs += outputs
        self.frames += 1
        self._hash.update(text.encode())
        self._usage = usage or self._usage

    def sent(self) -> Sent | None:
        """The record up to now; ``None``: the client has no frame."""
        if not self.frames:
            return None
        outputs, digest = tuple(self._outputs), self._hash.digest()
        return Sent(outputs=outputs, frames=self.frames, digest=digest, created=self._created, usage=self._usage)


class SentAgain:
    """Drops the frames that a client already has, and checks that they are the same."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._hash = hashlib.blake2b(digest_size=16)
        self._remaining = sent.frames

    def new_text(self, text: str) -> str | None:
        """The text of the next frame; ``None``: the client has it.

        Raises NotResumableError, at the last frame that the client has: the texts up to it differ from the client's.
        """
        # A frame's first ``created`` is the field, since it comes before any text of the model.
        text = _CREATED.sub(self._sent.created, text, count=1) if self._sent.created else text
        if not self._remaining:
            return text
        self._remaining -= 1
        self._hash.update(text.encode())
        if not self._remaining and self._hash.digest() != self._sent.digest:
            raise NotResumableError("the other replica's answer began otherwise")
        return None

    def check_end(self) -> None:
        """Raises NotResumableError: the answer is shorter than the part that the client has."""
        if self._remaining:
            raise NotResumableError("the other replica's answer is shorter")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoute:
    """Where a prompt was computed and why, and what the decode engine had of it; decode tells the endpoint."""

    path: str  # ``router.length.PrefillPath``
    reason: str  # ``router.length.PathReason``
    input_tokens: int
    cached_tokens: int  # prompt tokens that the decode engine had cached
    block_tokens: int  # the engine's block size
    prefill: Chosen | None = None  # the prefill replica to which it went; ``None``: it went to none


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """One OpenAI request for a decode replica."""

    endpoint: str  # ``chat``, ``completions``, or the name of a route of vLLM's own application
    body: bytes  # the client's JSON object, unchanged, in UTF-8; Serve keeps it until the answer has ended
    request_id: str  # the same in all processes
    id_seed: str  # of random ids in the answer, so that another replica gives the same ones; new for each request
    arrived_at_s: float  # wall-clock time of arrival at the endpoint; the clocks of both nodes are taken as equal
    sent: Sent | None = None  # the part of the stream that the client has from a lost replica
    adapter: str = ""  # identity of the LoRA adapter that the body names (``router.adapters``); empty: none
    reports_route: bool = False  # whether the first frame with text says where the prompt was computed
    reports_first_token: bool = False  # whether a frame without text reports the first token of an answer in one piece
    routing: Routing = field(default_factory=Routing)
    http_headers: tuple[tuple[str, str], ...] = ()  # those of the client's headers that vLLM reads
    path: str = ""  # path and query of a route of vLLM's own application; empty: ``endpoint`` says all
    method: str = "POST"  # HTTP method of ``path``
    response_id: str | None = None  # id of the answer of the Responses API; ``None``: it is another route


class Frame(NamedTuple):
    """One piece of a response; a frame without text only reports that tokens have come.

    ``outputs`` has the token ids of each output of the engine since the previous frame; it is empty for a request with
    several streams of tokens. The detokenizer may delay text, so an event may lack the text of its ids.
    """

    text: str  # for the client, unchanged: a server-sent event, or the whole JSON body
    outputs: tuple[tuple[int, ...], ...] = ()
    tokens: int = 0  # output tokens of all answers since the previous frame
    status: int = 200  # HTTP status; the response has the first frame's status
    error: str | None = None  # class of the failure, if the frame is one
    route: PromptRoute | None = None  # where the prompt was computed; in one frame, and if the endpoint wants it
    headers: tuple[tuple[str, str], ...] = ()  # HTTP headers of the response, in its first frame
    usage: Usage | None = None  # in the frames of the first and of the last output, for another replica that resumes
    ends: bool = False  # whether the answer is complete, as the frame itself does not show it

    def content(self) -> str | bytes:
        """The body of the response; each character of one that is no text stands for a byte (``latin-1``)."""
        return self.text.encode("latin-1") if ("content-type", BINARY) in self.headers else self.text

    @property
    def is_event(self) -> bool:
        """Whether the frame is an event of a stream; otherwise it is a whole body."""
        return self.text.startswith(_EVENTS)

    @property
    def reports_first(self) -> bool:
        """Whether a frame without tokens shows that the prompt is computed: it has no text, or a whole result."""
        if self.text:
            return self.error is None and not self.is_event
        return not self.ends

    @property
    def is_last(self) -> bool:
        """Whether the answer is complete with this frame: the end of a stream, or a whole body."""
        return self.ends or self.text == DONE or (self.text != "" and not self.is_event)


def failure(status: int, message: str, error: str) -> Frame:
    """The frame of a failure; ``error``: its class."""
    return Frame(OpenAIError(status, message).body(), status=status, error=error)


def full(message: str) -> Frame:
    """The frame of a replica without room; its client gets the same answer as from an endpoint without room."""
    return Frame(OpenAIError(429, message, code=FULL).body(), status=429, error=FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """A prompt for a prefill replica, tokenised by decode."""

    request_id: str
    token_ids: list[int]
    cache_salt: str | None = None
    adapter: str = ""  # identity of the LoRA adapter (``router.adapters``); empty: none
    media: tuple[bytearray, ...] = ()  # images and other media of the prompt (``vllm_seam.media``); empty: none
    priority: int = 0
    routing: Routing = field(default_factory=Routing)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """The place of a prompt's KV."""

    kv_transfer_params: dict[str, Any]  # for the connector of the decode engine
    answered_at_s: float  # wall-clock time, shortly after the KV's lease began; the nodes' clocks are taken as equal
    backlog_tokens: int  # prompt tokens that still wait at the replica
    replica_id: str
    computed_s: float | None = None  # time in the engine, seconds, without the queue; ``None``: not observed
    cached_tokens: int | None = None  # prompt tokens that its engine had cached; ``None``: not observed
    created_tokens: int | None = None  # prompt tokens that its engine computed and cached; ``None``: not observed
    block_tokens: int = 1  # block size of its engine
    chosen: Chosen | None = None  # how the caller's router chose the replica, which the caller adds


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRefusal:
    """A healthy replica refuses a prompt: its queue is at its limit, or its engine refuses such a request."""

    why: str
    backlog_tokens: int  # prompt tokens that wait at the replica
    replica_id: str
