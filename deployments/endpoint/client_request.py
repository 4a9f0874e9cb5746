"""One client's request on its way through the endpoint, from its headers to the last event of its answer."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from deployments import metrics
from deployments.endpoint.request_body import Body
from deployments.endpoint.served_model import ServedModel
from deployments.serve_seam.http_headers import is_request_id
from deployments.wire.messages import DONE, DecodeRequest, Frame, SentFrames
from deployments.wire.openai_errors import OpenAIError
from router.admission import QueuedRequest
from router.admission_config import Priority
from router.routing import Routing

_RETRY_S = 1.0  # seconds after which a client may repeat a request that a replica refused or lost


def request_id(http: Request) -> str:
    """The id of a request everywhere: Serve gives it, or the client; Serve returns it in X-Request-ID."""
    header = http.headers.get("x-request-id", "")
    return header if is_request_id(header) else uuid.uuid4().hex


def requested_priority(http: Request) -> Priority:
    """The priority that a request asks for. Raises OpenAIError: 400, there is no such priority."""
    header = http.headers.get("x-tandem-priority", "normal")
    if header.upper() not in Priority.__members__:
        names = ", ".join(name.lower() for name in Priority.__members__)
        raise OpenAIError(400, f"X-Tandem-Priority is {header!r}: give one of {names}")
    return Priority[header.upper()]


@dataclass(slots=True, kw_only=True, eq=False)
class ClientRequest:
    """One request; the body's stage sets ``raw``, ``model`` and ``place``."""

    endpoint: str  # ``chat`` or ``completions``
    request_id: str  # under which the request is known everywhere
    arrived_s: float  # monotonic
    arrived_at_s: float  # by the wall clock
    deadline_s: float  # monotonic
    key: str | None  # name of its API key; ``None``: the endpoint has no keys
    priority: Priority  # that it asks for
    body: Body  # the memory that its body takes
    raw: bytes = field(init=False)  # its body
    model: ServedModel = field(init=False)
    place: QueuedRequest = field(init=False)  # in the model's admission
    sent: SentFrames = field(default_factory=SentFrames)  # what its client has of the answer
    lost_replicas: int = 0  # number of decode replicas that it has lost
    exclude: frozenset[str] = frozenset()  # replicas that have failed it, or were full
    failed_groups: set[str] = field(default_factory=set)  # groups of which a replica has failed it
    full_groups: set[str] = field(default_factory=set)  # groups of which every replica is full

    @property
    def has_lost_replica(self) -> bool:
        """Whether a decode replica was lost while it served this request."""
        return self.lost_replicas > 0

    def for_decode(self, routing: Routing) -> DecodeRequest:
        """The request as a decode replica gets it."""
        return DecodeRequest(
            endpoint=self.endpoint,
            body=self.raw,
            request_id=self.request_id,
            arrived_at_s=self.arrived_at_s,
            sent=self.sent.sent(),
            tells_first=self.model.gate.has_objective,
            routing=routing,
        )


def error_response(error: OpenAIError) -> Response:
    """The response to a request that cannot be served."""
    return Response(error.body(), status_code=error.status, headers=error.headers(), media_type="application/json")


async def frames_response(request: ClientRequest, frames: AsyncGenerator[Frame, None]) -> Response:
    """The response, once its first frame has come. Raises OpenAIError: 429, it is refused; 500, there is no answer."""
    try:
        first = await anext(frames)
    except StopAsyncIteration:
        raise OpenAIError(500, "the decode replica answered with nothing") from None
    if first.error is None and first.is_event:
        return StreamingResponse(_events(first, frames, request.arrived_s), media_type="text/event-stream")
    await anext(frames, None)  # the end, which would otherwise be a cancellation
    await frames.aclose()
    headers = {"Retry-After": f"{_RETRY_S:.0f}"} if first.status in (429, 503) else None
    if first.status == 429:
        metrics.REFUSED.labels("engine", request.priority.name.lower()).inc()
    return Response(first.text, status_code=first.status, headers=headers, media_type="application/json")


async def _events(first: Frame, frames: AsyncGenerator[Frame, None], arrived_s: float) -> AsyncGenerator[str, None]:
    """The stream's events; a failure after the headers becomes an error event and an end, never silence."""
    tokens = 0
    first_s = last_s = 0.0
    async with aclosing(frames):
        frame: Frame | None = first
        while frame is not None:
            if frame.outputs:
                last_s = time.monotonic()
                if not tokens:
                    first_s = last_s
                    metrics.TTFT_S.observe(first_s - arrived_s)
                tokens += sum(map(len, frame.outputs))
            if frame.error is not None:
                yield f"data: {frame.text}\n\n{DONE}"
                return
            yield frame.text
            frame = await anext(frames, None)
    if tokens > 1:
        metrics.TPOT_S.observe((last_s - first_s) / (tokens - 1))
