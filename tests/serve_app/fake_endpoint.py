"""A fake of the outside world: an OpenAI endpoint in a thread of its own, and the ways in which it may answer."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

TOKEN = b'data: {"choices": [{"text": "x"}]}\n\n'
DONE = b"data: [DONE]\n\n"
# Routes for tokens; the answer is the same on all.
_PATHS = ("/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")


class FakeEndpoint:
    """Answers completions as ``answer`` says, and keeps what it saw; its clock is the load generator's."""

    def __init__(self, answer: "Answer", metrics_page: str) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.arrived_s: list[float] = []
        self.tokens_s: list[list[float]] = []
        self.most_in_flight = 0
        self._in_flight = 0
        self._answer = answer
        self._metrics_page = metrics_page
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def write_token(self, stream: web.StreamResponse, index: int) -> None:
        """Send one token of request ``index``, and note when."""
        self.tokens_s[index].append(time.perf_counter())
        await stream.write(TOKEN)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        index = len(self.arrived_s)
        self.arrived_s.append(time.perf_counter())
        self.tokens_s.append([])
        self.keys.append(request.headers.get("Authorization"))
        self.bodies.append(await request.json())
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            return await self._answer(self, request, index)
        finally:
            self._in_flight -= 1

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 1000}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._metrics_page)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.post(path, self._completions) for path in _PATHS])
        app.add_routes([web.get("/metrics", self._metrics), web.get("/v1/models", self._models)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)
        assert not self._thread.is_alive()


Answer = Callable[[FakeEndpoint, web.Request, int], Awaitable[web.StreamResponse]]


def tokens(*, first_s: float = 0.0, gap_s: float = 0.0) -> Answer:
    """All requested tokens: the headers and the first token after ``first_s``, the others ``gap_s`` apart."""

    async def answer(endpoint: FakeEndpoint, request: web.Request, index: int) -> web.StreamResponse:
        await asyncio.sleep(first_s)
        stream = web.StreamResponse()
        await stream.prepare(request)
        for number in range(endpoint.bodies[index]["max_tokens"]):
            if number:
                await asyncio.sleep(gap_s)
            await endpoint.write_token(stream, index)
        await stream.write(DONE)
        return stream

    return answer


def hold(requests: int) -> Answer:
    """No answer to any request until this number of requests has arrived."""

    async def answer(endpoint: FakeEndpoint, request: web.Request, index: int) -> web.StreamResponse:
        while len(endpoint.arrived_s) < requests:
            await asyncio.sleep(0.01)
        return await tokens()(endpoint, request, index)

    return answer


def refuse(status: int, *, first: int | None = None) -> Answer:
    """An HTTP error with a body, for the ``first`` requests or for all."""

    async def answer(endpoint: FakeEndpoint, request: web.Request, index: int) -> web.StreamResponse:
        if first is None or index < first:
            return web.json_response({"error": {"message": "no", "type": "server_error"}}, status=status)
        return await tokens()(endpoint, request, index)

    return answer


def raw(*chunks: bytes, cut: bool = False) -> Answer:
    """These bytes with status 200; ``cut`` closes the connection instead of ending the answer."""

    async def answer(_: FakeEndpoint, request: web.Request, __: int) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        for chunk in chunks:
            await stream.write(chunk)
        if cut:
            assert request.transport is not None
            request.transport.close()
        return stream

    return answer
