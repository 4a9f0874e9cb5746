"""One client's request at the endpoint, from its headers to the last event of its answer."""

import random
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from deployments import metrics
from deployments.endpoint.adapters import NamedAdapter
from deployments.endpoint.error_forms import error_body, error_event
from deployments.endpoint.explanation import HEADER, explanation
from deployments.endpoint.request_body import Body
from deployments.endpoint.routes import ErrorForm, Route, Work
from deployments.endpoint.served_model import DecodeGroup, Holder, ServedModel
from deployments.serve_seam.http_headers import is_request_id
from deployments.wire.messages import LOAD_FORMAT, DecodeRequest, Frame, PromptRoute, SentFrames
from deployments.wire.openai_errors import OpenAIError
from router.admission import QueuedRequest
from router.admission_config import Priority
from router.prompt_keys import PromptKeys
from router.routing import Chosen, Routing

# Headers of clients that vLLM reads. Not its header of a priority: the endpoint's own is ``X-Tandem-Priority``.
_PASSED_HEADERS = (LOAD_FORMAT, "traceparent", "tracestate")
_RETRY_S = 1.0  # Retry-After, seconds, of a request that a replica refused or lost


def request_id(http: Request) -> str:
    """The id of a request in all processes: X-Request-ID, set by its client or Serve; if it is not valid, a new id."""
    header = http.headers.get("x-request-id", "")
    return header if is_request_id(header) else uuid.uuid4().hex


def requested_priority(http: Request) -> Priority:
    """The priority in a request's headers. Raises OpenAIError: 400, there is no such priority."""
    header = http.headers.get("x-tandem-priority", "normal")
    if header.upper() not in Priority.__members__:
        names = ", ".join(name.lower() for name in Priority.__members__)
        raise OpenAIError(400, f"X-Tandem-Priority is {header!r}: give one of {names}")
    return Priority[header.upper()]


def named_session(http: Request, header: str) -> str | None:
    """The session that a client names in a header. Any text is a name, as it only says where the request should go."""
    return http.headers.get(header) or None


def path_of(http: Request) -> str:
    """The path of a request, without the application's prefix."""
    path: str = http.scope["path"]
    return path.removeprefix(http.scope.get("root_path", ""))


def path_and_query(http: Request) -> str:
    """The path of a request with its query, without the application's prefix."""
    return f"{path_of(http)}?{http.url.query}" if http.url.query else path_of(http)


def passed_headers(http: Request) -> tuple[tuple[str, str], ...]:
    """Those of a request's headers that vLLM reads and clients may set."""
    return tuple((name, http.headers[name]) for name in _PASSED_HEADERS if name in http.headers)


@dataclass(slots=True, kw_only=True, eq=False)
class ClientRequest:
    """One request; ``raw``, ``model`` and ``place`` are set once its body has been read."""

    route: Route
    request_id: str  # the same in all processes
    arrived_s: float  # monotonic time
    arrived_at_s: float  # wall-clock time
    deadline_s: float  # monotonic time
    key: str | None  # name of its API key; ``None``: the endpoint has no keys
    priority: Priority  # priority that its client has requested
    session: str | None = None  # session that its client has named
    is_explained: bool = False  # whether its answer says where it went
    body: Body  # counts the memory that its body takes
    path: str = ""  # path and query of a route of vLLM's own application
    http_headers: tuple[tuple[str, str], ...] = ()  # those of its headers that vLLM reads
    id_seed: str = field(default_factory=lambda: uuid.uuid4().hex)  # of random ids in its answer
    response_id: str | None = None  # id of the answer of the Responses API
    holder: Holder | None = None  # of the stored response to which it refers
    raw: bytes = field(init=False)  # the body itself
    model: ServedModel = field(init=False)
    place: QueuedRequest = field(init=False)  # its place in the queue of the model
    adapter: NamedAdapter | None = None  # the LoRA adapter that it names; ``None``: it names the model
    pieces: PromptKeys | None = None  # pieces of its prompt, by which the router finds a decode replica
    chosen: Chosen | None = None  # the decode replica of its latest attempt, and those beside it
    prompt_route: PromptRoute | None = None  # where its prompt was computed
    sent: SentFrames = field(default_factory=SentFrames)  # record of the answer's part that its client has
    lost_replicas: int = 0  # number of decode replicas that were lost while they answered it
    exclude: frozenset[str] = frozenset()  # ids of replicas that were lost with it, or were full
    failed_groups: set[str] = field(default_factory=set)  # names of groups in which a replica was lost with it
    full_groups: set[str] = field(default_factory=set)  # names of groups in which every replica is full

    @property
    def cache_name(self) -> str:
        """Name of the KV of its model or adapter, for the pieces of its prompt."""
        return self.model.model_id if self.adapter is None else self.adapter.identity(self.model)

    def lacking(self, pool: str) -> frozenset[str]:
        """Replicas of a decode pool that do not have its adapter."""
        return frozenset() if self.adapter is None else self.adapter.lacking(pool)

    def choose_group(self, rng: random.Random) -> DecodeGroup:
        """The group for its next attempt: that of the stored response to which it refers, or the least loaded one."""
        avoid = self.failed_groups | self.full_groups | self.lacking_groups()
        if self.holder is not None and self.holder.group.name not in avoid:
            return self.holder.group
        return self.model.choose(avoid, rng)

    def lacking_groups(self) -> frozenset[str]:
        """Names of groups that do not have its adapter in both roles."""
        return frozenset() if self.adapter is None else self.adapter.lacking_groups(self.model)

    @property
    def _reports_first_token(self) -> bool:
        """Whether admission must learn of its first token before its answer comes, which is in one piece."""
        return self.model.gate.has_objective and self.route.work is Work.ANSWER and not self.place.is_stream

    def for_decode(self, routing: Routing) -> DecodeRequest:
        """The request as a decode replica gets it."""
        return DecodeRequest(
            endpoint=self.route.name,
            body=self.raw,
            request_id=self.request_id,
            id_seed=self.id_seed,
            arrived_at_s=self.arrived_at_s,
            sent=self.sent.sent(),
            adapter="" if self.adapter is None else self.adapter.identity(self.model),
            reports_first_token=self._reports_first_token,
            reports_route=self.is_explained or self.pieces is not None,
            routing=routing,
            http_headers=self.http_headers,
            path=self.path,
            method=self.route.method,
            response_id=self.response_id,
        )


def error_response(error: OpenAIError, form: ErrorForm = ErrorForm.OPENAI) -> Response:
    """The response to a request that cannot be served, in the form of its API."""
    body = error_body(error.body(), error.status, form)
    return Response(body, status_code=error.status, headers=error.headers(), media_type="application/json")


async def frames_response(request: ClientRequest, frames: AsyncGenerator[Frame, None]) -> Response:
    """The response, once the answer's first frame has come.

    Raises OpenAIError: 429, the request is refused; 500, the answer has no frame.
    """
    try:
        first = await anext(frames)
    except StopAsyncIteration:
        raise OpenAIError(500, "the decode replica answered with nothing") from None
    headers = {HEADER: explanation(request.chosen, request.prompt_route)} if request.is_explained else {}
    headers |= dict(first.headers)
    media_type = headers.pop("content-type", "application/json")
    if first.error is None and first.is_event:
        events = _events(first, frames, request)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    await anext(frames, None)  # reach the end: if the frames were closed before it, the call would be cancelled
    await frames.aclose()
    if first.status in (429, 503):
        headers["Retry-After"] = f"{_RETRY_S:.0f}"
    if first.status == 429:
        metrics.REFUSED.labels("engine", request.priority.name.lower()).inc()
    if first.error is not None:
        body = error_body(first.text, first.status, request.route.errors)
        return Response(body, status_code=first.status, headers=headers, media_type="application/json")
    return Response(first.content(), status_code=first.status, headers=headers, media_type=media_type)


async def _events(
    first: Frame, frames: AsyncGenerator[Frame, None], request: ClientRequest
) -> AsyncGenerator[str, None]:
    """The stream's events; a failure after the headers becomes the error event of the route's API."""
    tokens = events = 0
    first_s = last_s = 0.0
    frame: Frame | None = first
    async with aclosing(frames):
        while frame is not None:
            if frame.outputs:
                last_s = time.monotonic()
                if not tokens:
                    first_s = last_s
                    metrics.TTFT_S.observe(first_s - request.arrived_s)
                tokens += sum(map(len, frame.outputs))
            if frame.error is not None:
                yield error_event(frame.text, frame.status, request.route.errors, events)
                return
            events += 1
            yield frame.text
            frame = await anext(frames, None)
    if tokens > 1:
        metrics.TPOT_S.observe((last_s - first_s) / (tokens - 1))
