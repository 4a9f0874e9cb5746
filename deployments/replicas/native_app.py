"""vLLM's own HTTP application in the decode replica: it answers all routes but chat and completions.

Below it lies ``PDGenerate``, so its prompts take the same path as those of chat and completions.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

from starlette.routing import Match

from deployments.replicas.body_bounds import check_bounds, is_beam_search
from deployments.replicas.generation import RequestTrace
from deployments.replicas.media_names import with_own_media_names
from deployments.replicas.openai_layer import failure_frame, refusal_frame, without_internal
from deployments.vllm_seam.answer_ids import install_seeded_ids
from deployments.vllm_seam.engine_types import EngineDeadError, EngineRefusal
from deployments.vllm_seam.stored_responses import background_work, has_response
from deployments.wire.messages import BINARY, DecodeRequest, Frame
from deployments.wire.openai_errors import OpenAIError

# Seconds that vLLM has to end a request whose client has left; after that its task is cancelled.
_LEAVE_S = 5.0
_EVENT_STREAM = "text/event-stream"
_ERROR_EVENTS = ("event: error\n", 'data: {"error"')  # beginning of events that report a failure, in any of vLLM's APIs
_PASSED_HEADERS = frozenset({b"content-type", b"endpoint-load-metrics", b"metadata"})  # of vLLM's answer, to the client


class NativeApp:
    """vLLM's application, built at its first request, since most replicas never need it."""

    def __init__(
        self, build: Callable[[], Awaitable[Any]], tasks: Collection[str], has_died: Callable[[], bool]
    ) -> None:
        """Take what makes the application.

        Args:
            build: makes the ASGI application; ``None``: the engine has none.
            tasks: vLLM's names of what the engine can do.
            has_died: whether the engine has died.
        """
        self._build = build
        self._tasks = tasks
        self._has_died = has_died
        self._app: Any = None
        self._lock = asyncio.Lock()

    async def frames(self, request: DecodeRequest, trace: RequestTrace) -> AsyncGenerator[Frame, None]:
        """The frames of vLLM's answer; a failure is the last frame. Raises OpenAIError: the engine lacks the route."""
        async with self._lock:
            if self._app is None:
                self._app = await self._build()
                if self._app is None:
                    raise OpenAIError(404, "an emulated engine answers /v1/chat/completions and /v1/completions alone")
                install_seeded_ids()  # in the modules that it has imported too
        scope = _scope(request, self._app)
        self._check_route(scope)
        fields = _fields(request)
        check_bounds(fields)
        trace.beam_search = is_beam_search(fields)
        exchange = _Exchange(_body(request, fields), trace, request.request_id, self._has_died)
        task = asyncio.create_task(exchange.run(self._app, scope))  # with this request's context
        try:
            while (frame := await exchange.frame()) is not None:
                yield frame
        except BaseException:  # the client has left
            exchange.leave()
            await asyncio.wait({task}, timeout=_LEAVE_S)
            task.cancel()
            await trace.close()
            raise

    def holds(self, response_id: str) -> bool:
        """Whether a response of the Responses API is stored here."""
        return self._app is not None and has_response(self._app, response_id)

    async def finish_background(self) -> None:
        """Wait until no response is computed in the background."""
        while self._app is not None and (work := background_work(self._app)):
            await asyncio.wait(work)

    def _check_route(self, scope: dict[str, Any]) -> None:
        if not any(route.matches(scope)[0] is Match.FULL for route in self._app.routes):
            raise unserved(f"{scope['method']} {scope['path']}", self._tasks)


def unserved(route: str, tasks: Collection[str]) -> OpenAIError:
    """The error of a route that the engine cannot serve; ``tasks``: what it can do."""
    names = ", ".join(sorted(tasks))
    return OpenAIError(404, f"{route}: the engine of this model cannot serve it; it supports these tasks: {names}")


class _Exchange:
    """One request at vLLM's application: it takes ASGI messages, and gives frames."""

    def __init__(self, body: bytes, trace: RequestTrace, request_id: str, has_died: Callable[[], bool]) -> None:
        self._body = body
        self._trace = trace
        self._request_id = request_id
        self._has_died = has_died
        self._is_read = False  # whether vLLM has the body
        self._has_left = asyncio.Event()  # set once the client no longer waits
        # One place: vLLM waits while the client reads, as its own server's answers do.
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue(1)
        self._status = 200
        self._headers: tuple[tuple[str, str], ...] = ()
        self._is_stream = False
        self._parts: list[bytes] = []  # of a body that is no stream
        self._has_failed = False  # whether the failure is among the frames; vLLM may send more after it

    async def run(self, app: Any, scope: dict[str, Any]) -> None:
        """Let the application answer. After it there are no more frames."""
        try:
            await app(scope, self._receive, self._send)
            if self._is_stream:
                await self._put(Frame("", ends=True))
        except Exception as error:  # vLLM's streams raise what ends them, once their headers are sent
            await self._fail(failure_frame(self._engines_error() or _cause(error), self._request_id, ()))
        finally:
            await self._put(None)

    async def frame(self) -> Frame | None:
        """The next frame; ``None``: there are no more."""
        return await self._frames.get()

    def leave(self) -> None:
        """The client no longer waits: vLLM learns it, and ends the request."""
        self._has_left.set()
        while not self._frames.empty():
            self._frames.get_nowait()

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
            return
        part = message.get("body", b"")
        if self._is_stream:
            if part:
                await self._put_event(part.decode())
            return
        self._parts.append(part)
        if not message.get("more_body", False):
            await self._put_whole(b"".join(self._parts))

    def _start(self, status: int, headers: Any) -> None:
        passed = [(name.decode(), value.decode()) for name, value in headers if name.lower() in _PASSED_HEADERS]
        self._status, self._headers = status, tuple(passed)
        self._is_stream = dict(passed).get("content-type", "").startswith(_EVENT_STREAM)

    async def _put_event(self, text: str) -> None:
        if text.startswith(_ERROR_EVENTS):
            await self._fail(self._failure(_error_of(text.partition("data: ")[2])))
            return
        frame = Frame(
            text,
            *self._trace.drain(),
            route=self._trace.take_route(),
            headers=self._headers,
            usage=self._trace.take_usage(),
        )
        self._headers = ()
        await self._put(frame)

    async def _put_whole(self, body: bytes) -> None:
        text = body.decode("latin-1" if dict(self._headers).get("content-type") == BINARY else "utf-8")
        if self._status >= 400:
            await self._fail(self._failure(_error_of(text)))
            return
        drained, route = self._trace.drain(), self._trace.take_route()
        await self._put(Frame(text, *drained, status=self._status, route=route, headers=self._headers, ends=True))

    def _failure(self, error: dict[str, Any]) -> Frame:
        """The frame of vLLM's error, or of its cause if that is not the request's fault."""
        if (cause := self._engines_error()) is not None:
            return failure_frame(cause, self._request_id, ())
        status = self._status if self._status >= 400 else _status_of(error.get("code"))
        refusal = EngineRefusal(
            status=status, message=str(error.get("message") or "vLLM gives no reason"), parameter=error.get("param")
        )
        return refusal_frame(refusal, ())

    def _engines_error(self) -> Exception | None:
        """What the engine raised; ``None``: nothing. vLLM refuses a request early if its engine has died."""
        if self._trace.error is None and self._has_died():
            return EngineDeadError()
        return self._trace.error

    async def _fail(self, frame: Frame) -> None:
        await self._put(frame)
        self._has_failed = True

    async def _put(self, frame: Frame | None) -> None:
        """Wait until the client has taken the frame before; a client that has left takes none (``leave``)."""
        if self._has_left.is_set() or (self._has_failed and frame is not None):
            await asyncio.sleep(0)  # so that the task runs that ends the request
        else:
            await self._frames.put(frame)


def _cause(error: Exception) -> Exception:
    """The error of a stream; Starlette wraps one that vLLM would have answered before the headers were sent."""
    wrapped = error.__cause__ if isinstance(error, RuntimeError) else None
    return wrapped if isinstance(wrapped, Exception) else error


def _scope(request: DecodeRequest, app: Any) -> dict[str, Any]:
    path, _, query = request.path.partition("?")
    headers = [
        (b"content-type", b"application/json"),
        (b"x-request-id", request.request_id.encode()),
        *((name.encode(), value.encode()) for name, value in request.http_headers),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},  # below 2.4 Starlette listens for a client that leaves
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "app": app,
        "state": {},
    }


def _fields(request: DecodeRequest) -> dict[str, Any]:
    """The client's fields without those that no client may set, and with the id of a response."""
    if not request.body:
        return {}
    fields = with_own_media_names(without_internal(json.loads(request.body.decode())))
    return fields if request.response_id is None else {**fields, "request_id": request.response_id}


def _body(request: DecodeRequest, fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode() if request.body else b""


def _error_of(text: str) -> dict[str, Any]:
    """The fields of an error in one of vLLM's forms; a body in another form is its own message."""
    with suppress(ValueError):
        body = json.loads(text)
        if isinstance(body, dict):
            error = body.get("error", body)
            if isinstance(error, dict):
                return error
            return {"message": str(error)}
    return {"message": text}


def _status_of(code: Any) -> int:
    return code if isinstance(code, int) and 400 <= code < 600 else 500
