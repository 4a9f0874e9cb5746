"""The OpenAI-compatible HTTP endpoint: picks a group, forwards to its decode pool, keeps its place in the stream."""

import asyncio
import json
import logging
import random
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from deployments import metrics as tandem_metrics
from deployments.api_keys import ApiKeys
from deployments.config import IngressConfig
from deployments.frames import DONE, FAILED, LOST, DecodeRequest, Frame, failure
from deployments.gate import Gate
from deployments.metrics_port import MetricsPort
from deployments.openai_errors import OpenAIError
from deployments.replica_port import listen_on_node_address
from deployments.request_body import Bodies, Body, read_body
from deployments.sent import SentFrames
from deployments.start_backoff import StartBackoff
from deployments.waits import Wait, Waits
from router import known_pools
from router.admission import Asked, Priority
from router.outliers import OutlierConfig
from router.ray_coordinator import find_coordinator, is_alive
from router.ray_health import HealthFeed

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_HEALTH_TIMEOUT_S = 5.0
_METRICS_TIMEOUT_S = 5.0  # half of what Prometheus waits
# A shorter stream's pace says little.
_LEAST_PACE_TOKENS = 8
_LOST = failure(503, "the decode replica was lost; the request may be sent again", "replica_lost")
_BYTES_PER_TOKEN = 4
_NO_REPLICA_RETRY_S, _LEAVING_S, _AGAIN_S = 5.0, 5.0, 1.0
_MOST_ANSWERS = 10_000  # decode takes fewer
# What has been written is on its way to its client for a moment yet.
_WRITTEN_S, _DRAIN_POLL_S = 0.5, 0.1
# From drained to deleted.
_END_S = 60.0
_MAX_DEPTH = 100  # what is deeper than some hundred cannot be sent to decode
# A prompt of a million token ids, and more. Eight million small lists in 32 MiB held up an ingress replica for over a
# minute, and took 1 GB.
_MAX_VALUES = 1_200_000

app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, openapi_url=None)


@app.exception_handler(OpenAIError)
async def _openai_error(request: Request, error: OpenAIError) -> Response:
    return _error_response(error)


@app.exception_handler(HTTPException)
async def _http_error(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {request.url.path}: {error.detail}"
    return _error_response(OpenAIError(error.status_code, what))


def _error_response(error: OpenAIError) -> Response:
    return Response(error.body(), status_code=error.status, headers=error.headers(), media_type="application/json")


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
                    tandem_metrics.TTFT_S.observe(first_s - arrived_s)
                tokens += sum(map(len, frame.outputs))
            if frame.error is not None:
                yield f"data: {frame.text}\n\ndata: [DONE]\n\n"
                return
            yield frame.text
            frame = await anext(frames, None)
    if tokens > 1:
        tandem_metrics.TPOT_S.observe((last_s - first_s) / (tokens - 1))


def _json_object(raw: bytes) -> dict[str, Any]:
    if (values := raw.count(b",") + raw.count(b"[") + raw.count(b"{")) > _MAX_VALUES:  # those in texts too
        raise OpenAIError(400, f"the body has about {values} values (commas and brackets), more than {_MAX_VALUES}")
    try:
        body = json.loads(raw.decode())  # of bytes, json takes what is half of a surrogate pair in them
    except UnicodeDecodeError as error:
        raise OpenAIError(400, f"the body is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from None
    except (ValueError, RecursionError) as error:
        raise OpenAIError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise OpenAIError(400, f"the body must be a JSON object, got {type(body).__name__}")
    if raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH and _depth(body) > _MAX_DEPTH:
        raise OpenAIError(400, f"the body is nested more than {_MAX_DEPTH} deep")
    if _SURROGATE.search(raw):
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise OpenAIError(400, "the body has half a surrogate pair (\\ud800 to \\udfff): no text has it") from None
    return body


def _depth(value: Any) -> int:
    """How many lists and objects lie in each other, without recursion."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (dict, list))]:
        depth += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return depth


def _leaving() -> OpenAIError:
    return OpenAIError(
        503, "this endpoint is being shut down; send the request again", code="overloaded", retry_after_s=_LEAVING_S
    )


def _request_id(request: Request) -> str:
    # Serve gives every request an id, the client's own if it sent one, and returns it in X-Request-ID.
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.match(given) else uuid.uuid4().hex


def _priority(request: Request) -> Priority:
    given = request.headers.get("x-tandem-priority", "normal")
    if given.upper() not in Priority.__members__:
        names = ", ".join(name.lower() for name in Priority.__members__)
        raise OpenAIError(400, f"X-Tandem-Priority is {given!r}: give one of {names}")
    return Priority[given.upper()]


def _prompt_tokens(body: dict[str, Any], size_bytes: int) -> int:
    """How many tokens a prompt has, about: its ids, or 4 bytes of the body each."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return max(1, size_bytes // _BYTES_PER_TOKEN)


def _place(body: dict[str, Any], size_bytes: int, key: str | None, priority: Priority) -> Asked:
    """What admission is told of a request; decode refuses what is no number."""
    most_tokens, answers = body.get("max_completion_tokens") or body.get("max_tokens"), body.get("n")
    return Asked(
        tokens=_prompt_tokens(body, size_bytes),
        most_output_tokens=most_tokens if isinstance(most_tokens, int) and most_tokens > 0 else None,
        is_stream=body.get("stream") is True,
        key=key,
        priority=priority,
        answers=min(answers, _MOST_ANSWERS) if isinstance(answers, int) and answers > 0 else 1,
    )


def _is_whole(last: str | None) -> bool:
    """Whether nothing can follow this text of a response: a stream's end, a whole body, or no text at all."""
    return last is None or last == DONE or not last.startswith("data: ")


async def _unary(handle: DeploymentHandle, method: str) -> Any:
    return await handle.options(method_name=method, stream=False).remote()


async def _broadcast(handle: DeploymentHandle, method: str) -> list[Any]:
    """What the replicas of one deployment answer, if there are any and they do so in time."""
    try:
        results = await handle.broadcast(method).results_async(timeout_s=_METRICS_TIMEOUT_S, return_exceptions=True)
    except TimeoutError:
        logger.warning("a replica of %s did not give its metrics in %g s", handle.deployment_name, _METRICS_TIMEOUT_S)
        return []
    except RayServeException as error:  # Serve starts all of its replicas anew: the others have figures all the same
        logger.warning("no replica of %s gives its metrics: %s", handle.deployment_name, error)
        return []
    return [result for result in results if not isinstance(result, BaseException)]


async def _coordinators_page(app_name: str | None) -> list[Any]:
    """What the autoscaler says, if there is one and it answers."""
    if app_name is None:
        return []
    try:
        async with asyncio.timeout(_METRICS_TIMEOUT_S):
            coordinator = await asyncio.to_thread(find_coordinator, app_name)
            return [] if coordinator is None else [await coordinator.metrics.remote()]
    except (TimeoutError, RayError) as error:
        logger.warning("the coordinator did not give its metrics: %s", error)
        return []


# serve.ingress pickles the app, and with it copies of the globals that its routes use, right here: what they use stands
# above, and metrics are reached through their module, which is not copied.
@serve.ingress(app)
class Ingress:
    """One replica of the endpoint; any number may run."""

    async def __init__(  # type: ignore[misc]
        self,
        *,
        model_id: str,
        max_model_len: int | None,
        groups: dict[str, DeploymentHandle],
        prefills: dict[str, DeploymentHandle],
        decode_replicas: dict[str, int],
        prefill_replicas: int,
        config: IngressConfig,
        outlier: OutlierConfig,
        is_autoscaled: bool,
    ) -> None:
        listen_on_node_address()
        self._start = StartBackoff()
        await self._start.wait()
        self._model_id = model_id
        self._created_s = int(time.time())
        self._groups = {name: handle.options(method_name="respond", stream=True) for name, handle in groups.items()}
        self._engines = [*groups.values(), *prefills.values()]
        self._decode_replicas = decode_replicas
        self._in_flight = dict.fromkeys(groups, 0)
        self._config = config
        self._timeout_s = config.request_timeout_s
        self._retries = config.retries
        self._keys = None if config.api_keys_file is None else ApiKeys(config.api_keys_file)
        self._gate = Gate(config.admission, replicas=config.replicas, prefill_replicas=prefill_replicas)
        self._max_model_len = max_model_len
        self._bodies = Bodies(config.max_bodies_bytes)
        self._reads = 0  # bodies
        self._drains_until_s = 0.0
        self._rng = random.Random()
        context = serve.get_replica_context()
        self._own_handle = serve.get_deployment_handle(context.deployment, context.app_name)
        self._replica = context.replica_id.unique_id
        self._app_name, self._is_autoscaled = context.app_name, is_autoscaled
        self._slow_tpot_s = outlier.slow_tpot_s
        self._health = {
            name: HealthFeed(context.app_name, handle.deployment_name, outlier) for name, handle in groups.items()
        }
        for feed in self._health.values():
            feed.start()
        self._waits = Waits(partial(is_alive, context.app_name), self._is_stranded)
        self._watching = asyncio.create_task(self._waits.run())
        self._has_public_metrics = config.metrics_on_public_port
        metrics_port = MetricsPort(config.metrics_host, config.metrics_port, context.app_name, self._metrics_page)
        self._listening = asyncio.create_task(metrics_port.run())
        self._start.ready()

    async def __del__(self) -> None:
        """Serve's last call."""
        self._start.leave()

    @app.get("/health")
    async def health(self) -> Response:
        """200 when every group's decode pool answers."""
        if self._is_draining():
            return _error_response(_leaving())
        for handle in self._groups.values():
            try:
                await asyncio.wait_for(_unary(handle, "check_health"), _HEALTH_TIMEOUT_S)
            except Exception as error:
                return _error_response(OpenAIError(503, f"no healthy decode replica: {type(error).__name__}"))
        return Response(status_code=200)

    @app.get("/metrics")
    async def metrics(self, request: Request) -> Response:
        """The metrics page, where it was asked for on this port."""
        if not self._has_public_metrics:
            raise OpenAIError(404, "GET /metrics: they are on ingress.metrics_port, see ingress.metrics_on_public_port")
        self._check_key(request)
        return Response(await self._metrics_page(), media_type="text/plain; version=0.0.4")

    async def _metrics_page(self) -> bytes:
        """Prometheus page of the whole application: every ingress, decode and prefill replica, vLLM's metrics too."""
        pools = await asyncio.gather(
            _broadcast(self._own_handle, "process_page"),
            *(_broadcast(handle, "metrics") for handle in self._engines),
            _coordinators_page(self._app_name if self._is_autoscaled else None),
        )
        pages = [page for pool in pools for page in pool]
        return await asyncio.to_thread(tandem_metrics.render, pages)

    async def drain(self, timeout_s: float) -> int:
        """Take no new request from now on, and wait until the others have been answered.

        Who drains an application ends it then; where that does not come, requests are taken again.

        Returns:
            How many have not been after ``timeout_s``.
        """
        until_s = time.monotonic() + timeout_s
        self._drains_until_s = until_s + _END_S
        while (left := self._reads + self._gate.here) and time.monotonic() < until_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        await asyncio.sleep(_WRITTEN_S)
        self._drains_until_s = time.monotonic() + _END_S
        return left

    def _is_draining(self) -> bool:
        return time.monotonic() < self._drains_until_s

    async def process_page(self) -> list[Any]:
        """This replica's own metrics."""
        return tandem_metrics.process_metrics(role="ingress", replica=self._replica)

    @app.get("/v1/models")
    async def models(self, request: Request) -> JSONResponse:
        """The one model."""
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    @app.get("/v1/models/{model:path}")
    async def model(self, request: Request, model: str) -> JSONResponse:
        """One model by name."""
        self._check_key(request)
        self._check_model(model)
        return JSONResponse(self._card())

    @app.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        """OpenAI chat completions."""
        return await self._serve("chat", request)

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """OpenAI completions."""
        return await self._serve("completions", request)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model_id,
            "object": "model",
            "created": self._created_s,
            "owned_by": "tandem",
            "max_model_len": self._max_model_len,
        }

    def _check_key(self, request: Request) -> str | None:
        """The name of the client's key; ``None`` where there are no keys."""
        if self._keys is None:
            return None
        name = self._keys.name_of(request.headers.get("authorization"))
        if name is None:
            raise OpenAIError(
                401, "this endpoint wants a key that it knows: send 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
        return name

    def _check_model(self, model: Any) -> None:
        if model != self._model_id:
            raise OpenAIError(
                404,
                f"the model {model!r} does not exist; this endpoint serves {self._model_id!r}",
                param="model",
                code="model_not_found",
            )

    async def _serve(self, endpoint: str, request: Request) -> Response:
        arrived_s = time.monotonic()
        request_id = _request_id(request)
        try:
            if self._is_draining():
                raise _leaving()
            key = self._check_key(request)  # before the body is read
            response = await self._respond(endpoint, request, request_id, arrived_s, key)
        except OpenAIError as error:
            response = _error_response(error)
        tandem_metrics.REQUESTS.labels(endpoint, str(response.status_code)).inc()
        return response

    async def _respond(
        self, endpoint: str, request: Request, request_id: str, arrived_s: float, key: str | None
    ) -> Response:
        self._check_pools()
        self._gate.check(key, self._reads)
        held = Body(self._bodies)
        try:
            body, size = await self._body(request, held)
            place = _place(body, size, key, _priority(request))
            frames = self._admitted(place, held, self._frames(endpoint, body, request_id, arrived_s))
            first = await anext(frames)
        except StopAsyncIteration:
            raise OpenAIError(500, "the decode replica answered with nothing") from None
        except BaseException:
            held.free()
            raise
        if first.error is not None or not first.text.startswith("data: "):
            await anext(frames, None)  # the end, which would otherwise be a cancellation
            await frames.aclose()
            text = first.text.removeprefix("data: ").strip()
            again = {"Retry-After": f"{_AGAIN_S:.0f}"} if first.status == 503 else None
            return Response(text, status_code=first.status, headers=again, media_type="application/json")
        return StreamingResponse(_events(first, frames, arrived_s), media_type="text/event-stream")

    async def _body(self, request: Request, held: Body) -> tuple[dict[str, Any], int]:
        """The request's JSON object, checked as far as an endpoint can, and its bytes."""
        self._reads += 1
        try:
            raw = await read_body(request, self._config, held)
        finally:
            self._reads -= 1
        body = _json_object(raw)
        if "model" not in body:
            raise OpenAIError(400, "model is missing", param="model")
        self._check_model(body["model"])
        return body, len(raw)

    def _check_pools(self) -> None:
        """Raise 503 where no decode replica runs at all: who came before waits, but nobody else."""
        if not self._serving():
            raise OpenAIError(
                503,
                "no decode replica runs; the request may be sent again",
                code="overloaded",
                retry_after_s=_NO_REPLICA_RETRY_S,
            )

    async def _admitted(
        self, place: Asked, held: Body, frames: AsyncGenerator[Frame, None]
    ) -> AsyncGenerator[Frame, None]:
        """The frames of a request once it is its turn.

        Raises:
            OpenAIError: 429, it is refused.
        """
        try:
            async with aclosing(frames), self._gate.enter(place):
                async for frame in frames:
                    if frame.tokens:
                        self._gate.output(place, frame.tokens)
                    elif not frame.text:
                        self._gate.first(place)
                    if frame.text:
                        yield frame
        finally:
            held.free()

    def _load(self, group: str) -> tuple[float, float]:
        """Requests in flight per decode replica; equals in random order."""
        return self._in_flight[group] / self._decode_replicas[group], self._rng.random()

    def _group(self, avoid: set[str]) -> str:
        """The least loaded group, of those that have replicas and have not failed the request if there are any."""
        serving = self._serving() or list(self._groups)
        return min([name for name in serving if name not in avoid] or serving, key=self._load)

    def _is_stranded(self, pool: str) -> bool:
        """Whether a pool has no replica while another one has."""
        return not known_pools.has_replicas(pool) and bool(self._serving())

    def _serving(self) -> list[str]:
        """The groups whose decode pool has replicas."""
        return [name for name, health in self._health.items() if known_pools.has_replicas(health.pool)]

    async def _frames(
        self, endpoint: str, body: dict[str, Any], request_id: str, arrived_s: float
    ) -> AsyncGenerator[Frame, None]:
        """The answer, from as many decode replicas as it takes: a stream goes on where the one before was lost."""
        arrived_at_s = time.time() - (time.monotonic() - arrived_s)
        asked = DecodeRequest(
            endpoint=endpoint,
            body=body,
            request_id=request_id,
            arrived_at_s=arrived_at_s,
            tells_first=self._gate.has_objective,
        )
        sent, failed_groups = SentFrames(), set[str]()
        lost: Frame | None = None
        for _ in range(1 + self._retries):
            group = self._group(failed_groups)
            asked.avoid, asked.probe = self._health[group].guide()
            async with aclosing(self._attempt(group, asked, arrived_s + self._timeout_s)) as frames:
                was_lost, lost = lost is not None, None
                async for frame in frames:
                    if frame.error in LOST:
                        lost = frame
                        break
                    if was_lost and frame.error is None:
                        was_lost = False
                        (tandem_metrics.RETRIED if asked.sent is None else tandem_metrics.RESUMED).inc()
                    if frame.text:
                        sent.add(frame.text, frame.outputs)
                    yield frame
            if lost is None:
                return
            failed_groups.add(group)
            exclude = asked.exclude if asked.routed_to is None else asked.exclude | {asked.routed_to}
            asked = replace(asked, sent=sent.sent(), exclude=exclude, routed_to=None)
        if lost is not None:
            yield lost

    async def _attempt(self, group: str, asked: DecodeRequest, deadline_s: float) -> AsyncGenerator[Frame, None]:
        """What one decode replica answers; its last frame is a failure if it did not answer to the end."""
        health, has_failed = self._health[group], False
        tokens, first_s, last_s = 0, 0.0, 0.0
        stream = self._groups[group].remote(asked)
        iterator: AsyncIterator[Frame] = stream.__aiter__()
        done = False
        text: str | None = None
        wait = Wait(health.pool, asked)
        self._waits.add(wait)
        self._in_flight[group] += 1
        try:
            while True:
                try:
                    async with wait.frame(deadline_s):
                        frame = await anext(iterator)
                except StopAsyncIteration:
                    done = True
                    break
                if not frame.text:
                    yield frame
                    continue
                if frame.error in FAILED:
                    has_failed = True
                    health.failed(asked.routed_to)  # at once: who asked may go elsewhere and not come back here
                text = frame.text
                if frame.outputs:
                    last_s = time.monotonic()
                    first_s = first_s or last_s
                    tokens += sum(map(len, frame.outputs))
                yield frame
            if _is_whole(text) and not has_failed:  # at the end: a stream that begins well may be slow
                has_pace = tokens >= _LEAST_PACE_TOKENS
                pace_s = (last_s - first_s) / tokens if has_pace else None
                health.answered(asked.routed_to, pace_s, self._slow_tpot_s)
            if not _is_whole(text):
                health.failed(asked.routed_to)
                yield failure(503, "the decode replica broke off; the request may be sent again", "replica_lost")
        except TimeoutError:
            if wait.is_lost and _is_whole(text) and text is not None:
                return
            if text is None or wait.is_lost:
                health.failed(asked.routed_to)
            yield (
                _LOST
                if wait.is_lost
                else failure(
                    408, f"the request took longer than {self._timeout_s:g} s (ingress.request_timeout_s)", "timeout"
                )
            )
        except BackPressureError as error:
            yield failure(503, f"every decode replica is full: {error.message}", "overloaded")
        except (RayError, RayServeException, AioRpcError) as error:  # Serve passes most gRPC errors on as they are
            if text is not None and _is_whole(text):
                return  # it ended after its last word
            logger.warning("request %s lost its decode replica: %s", asked.request_id, error)
            health.failed(asked.routed_to)
            yield _LOST
        finally:
            self._waits.remove(wait)
            self._in_flight[group] -= 1
            if not done:
                stream.cancel()
