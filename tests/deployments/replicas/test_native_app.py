"""Frames of vLLM's own application; in its place is a small application with the same library."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from deployments.wire.messages import BINARY, DecodeRequest, Frame
from deployments.wire.openai_errors import OpenAIError

pytestmark = pytest.mark.vllm


TASKS = ("generate",)


def application(log: list[str], trace: Any) -> FastAPI:
    from vllm.exceptions import VLLMValidationError

    app = FastAPI()

    @app.exception_handler(VLLMValidationError)
    async def refuse(request: Request, error: VLLMValidationError) -> JSONResponse:
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)

    @app.post("/echo")
    async def echo(request: Request) -> Any:
        trace.outputs.append((1, 2))
        return {"body": await request.json(), "id": request.headers["x-request-id"], "query": request.url.query}

    @app.post("/stream")
    async def stream() -> Any:
        async def events() -> AsyncIterator[str]:
            try:
                for number in range(100):
                    trace.outputs.append((number,))
                    yield f"event: n\ndata: {number}\n\n"
                    log.append(f"sent {number}")
            finally:
                log.append("closed")

        answer = events()
        trace.add(answer)
        return StreamingResponse(answer, media_type="text/event-stream")

    @app.post("/broken")
    async def broken() -> Any:
        async def events() -> AsyncIterator[str]:
            yield "event: n\ndata: 1\n\n"
            raise RuntimeError("broken")

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/refused-late")
    async def refused_late() -> Any:
        async def events() -> AsyncIterator[str]:
            raise VLLMValidationError("Unknown response_id: resp_1", parameter="response_id")
            yield ""

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/event")
    async def event() -> Any:
        async def events() -> AsyncIterator[str]:
            yield 'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"no tool"}}\n\n'
            yield "event: n\ndata: 1\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/refused")
    async def refused() -> Any:
        error = {"message": "max_tokens is wrong", "type": "BadRequestError", "param": "max_tokens", "code": 422}
        return JSONResponse({"error": error}, status_code=422)

    @app.post("/bytes")
    async def binary() -> Any:
        return Response(bytes(range(256)), media_type=BINARY, headers={"metadata": "m", "x-other": "o"})

    return app


@pytest.fixture(name="ask")
def _ask() -> Callable[..., Any]:
    from deployments.replicas.generation import RequestTrace
    from deployments.replicas.native_app import NativeApp

    trace, log = RequestTrace(), list[str]()
    app = application(log, trace)

    async def build() -> Any:
        return app

    died = [False]
    native = NativeApp(build, TASKS, lambda: died[0])

    def ask(path: str, body: bytes = b"{}", **fields: Any) -> Any:
        request = DecodeRequest(
            endpoint="x", body=body, request_id="r-1", id_seed="s", arrived_at_s=0.0, path=path, **fields
        )
        return native.frames(request, trace)

    return SimpleNamespace(frames=ask, trace=trace, log=log, died=died, native=native, app=app)  # type: ignore[return-value]


async def all_frames(frames: Any) -> list[Frame]:
    return [frame async for frame in frames]


async def test_whole_answer_is_one_frame(ask: Any) -> None:
    removed = {"priority": -9, "vllm_xargs": {"kv_transfer_params": {}, "b": 2}, "content_parts": [{"uuid": "mine"}]}
    body = json.dumps({"a": 1, **removed}).encode()
    (frame,) = await all_frames(ask.frames("/echo?x=1", body, response_id="resp_1"))
    assert json.loads(frame.text) == {
        "body": {"a": 1, "vllm_xargs": {"b": 2}, "content_parts": [{}], "request_id": "resp_1"},
        "id": "r-1",
        "query": "x=1",
    }
    assert (frame.status, frame.outputs, frame.is_last, frame.error) == (200, ((1, 2),), True, None)


async def test_each_event_is_a_frame_with_its_tokens(ask: Any) -> None:
    frames = await all_frames(ask.frames("/stream"))
    assert [frame.text for frame in frames[:-1]] == [f"event: n\ndata: {number}\n\n" for number in range(100)]
    assert [frame.outputs for frame in frames[:3]] == [((0,),), ((1,),), ((2,),)]
    assert all(frame.is_event and not frame.is_last for frame in frames[:-1])
    assert (frames[-1].text, frames[-1].is_last) == ("", True)


async def test_client_that_leaves_ends_the_request(ask: Any) -> None:
    frames = ask.frames("/stream")
    await anext(frames)
    await frames.aclose()
    assert ask.log[-1] == "closed"
    assert len(ask.log) < 10  # it has not run ahead of its reader


async def test_cancelled_task_ends_the_request(ask: Any) -> None:
    got = asyncio.Event()

    async def read() -> None:
        async for _ in ask.frames("/stream"):
            got.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(read())
    await got.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5.0):
        while "closed" not in ask.log:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/broken", 500, "internal error"),
        ("/refused-late", 400, "Unknown response_id"),
        ("/event", 500, "no tool"),
        ("/refused", 422, "max_tokens is wrong"),
    ],
)
async def test_failure_is_the_last_frame(ask: Any, path: str, status: int, message: str) -> None:
    frames = await all_frames(ask.frames(path))
    assert [frame.error is None for frame in frames] == [True] * (len(frames) - 1) + [False]
    assert frames[-1].status == status
    assert message in json.loads(frames[-1].text)["error"]["message"]


async def test_dead_engine_is_the_cause(ask: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    ask.trace.error = EngineDeadError()
    for path in ("/broken", "/refused-late", "/event", "/refused"):
        assert (await all_frames(ask.frames(path)))[-1].error == "engine_dead"


async def test_a_request_that_comes_after_the_engine_has_died_may_go_to_another_one(ask: Any) -> None:
    """vLLM answers such a request with 500 before it reaches the engine, so no call of the engine has failed."""
    ask.died[0] = True
    for path in ("/broken", "/refused"):
        assert (await all_frames(ask.frames(path)))[-1].error == "engine_dead"


async def test_bytes_arrive_unchanged(ask: Any) -> None:
    (frame,) = await all_frames(ask.frames("/bytes"))
    assert frame.content() == bytes(range(256))
    assert dict(frame.headers) == {"content-type": BINARY, "metadata": "m"}


async def test_bounds_of_bodies_hold_on_every_route(ask: Any) -> None:
    with pytest.raises(OpenAIError, match="tools has 1001 items"):
        await all_frames(ask.frames("/echo", json.dumps({"tools": [1] * 1001}).encode()))


async def test_route_that_the_engine_lacks_is_named_with_its_tasks(ask: Any) -> None:
    with pytest.raises(OpenAIError, match=r"POST /v1/embeddings: .* these tasks: generate") as caught:
        await all_frames(ask.frames("/v1/embeddings"))
    assert caught.value.status == 404


async def test_emulated_engine_says_what_it_answers() -> None:
    from deployments.replicas.generation import RequestTrace
    from deployments.replicas.native_app import NativeApp

    async def build() -> Any:
        return None

    request = DecodeRequest(endpoint="x", body=b"", request_id="r", id_seed="s", arrived_at_s=0.0, path="/tokenize")
    with pytest.raises(OpenAIError, match="emulated engine answers /v1/chat/completions"):
        await all_frames(NativeApp(build, TASKS, lambda: False).frames(request, RequestTrace()))


async def test_a_replica_that_stops_waits_for_responses_in_the_background(ask: Any) -> None:
    """One of them may begin another while the replica waits."""
    await ask.native.finish_background()  # no request has come: there is no application yet
    await all_frames(ask.frames("/echo"))
    await ask.native.finish_background()  # an application without the Responses API
    ended, tasks = list[str](), dict[str, asyncio.Task[None]]()
    ask.app.state.openai_serving_responses = SimpleNamespace(response_store={}, background_tasks=tasks)

    async def compute(name: str, next_name: str = "") -> None:
        await asyncio.sleep(0.05)
        ended.append(name)
        if next_name:
            begin(next_name)

    def begin(name: str, next_name: str = "") -> None:
        tasks[name] = asyncio.create_task(compute(name, next_name))
        tasks[name].add_done_callback(lambda _: tasks.pop(name))

    begin("resp_1", "resp_3")
    begin("resp_2")
    await asyncio.wait_for(ask.native.finish_background(), 30.0)
    assert ended == ["resp_1", "resp_2", "resp_3"]
