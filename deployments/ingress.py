"""The OpenAI-compatible HTTP endpoint: picks a group, forwards to its decode pool, keeps its place in the stream."""

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from grpc import StatusCode
from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from deployments import metrics as tandem_metrics
from deployments.api_keys import ApiKeys
from deployments.asked import asked_of, check_types
from deployments.calls import streamed
from deployments.config import IngressConfig
from deployments.frames import DONE, FAILED, FULL, LOST, DecodeRequest, Frame, failure, full
from deployments.gate import Gate
from deployments.http_headers import is_request_id
from deployments.json_body import check_content_type, json_object
from deployments.metrics_port import MetricsPort
from deployments.openai_errors import OpenAIError
from deployments.recent import Recent
from deployments.replica_port import listen_on_node_address
from deployments.request_body import Bodies, Body, read_body
from deployments.sent import SentFrames
from deployments.start_backoff import StartBackoff
from deployments.trim import Trim
from deployments.waits import Wait, Waits
from router import known_pools
from router.admission import AdmissionConfig, Asked, Priority
from router.groups import GroupLoad, choose_group
from router.rate_limit import RateLimits
from router.ray_coordinator import MembershipFeed, answers, find_coordinator
from router.ray_health import HealthFeed
from router.stream_pace import StreamPace

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S, _HEALTH_KEEP_S = 5.0, 1.0
_METRICS_TIMEOUT_S = 5.0  # half of what Prometheus waits
_LOST = failure(503, "the decode replica was lost; the request may be sent again", "replica_lost")
_TOO_LARGE = failure(
    400,
    "the answer is more than a replica can send at once: ask for a stream, or for fewer answers or logprobs",
    "invalid_request",
)
_NO_REPLICA_RETRY_S, _LEAVING_S, _AGAIN_S, _FULL_S = 5.0, 5.0, 1.0, 0.5
# Of a request's time: a replica that said nothing to a stream for so long hangs.
_SILENT_FRAC = 0.5
# What has been written is on its way to its client for a moment yet.
_WRITTEN_S, _DRAIN_POLL_S = 0.5, 0.1
# While a request waits for a service that sleeps.
_WAKE_AGAIN_S, _WAKE_POLL_S = 2.0, 0.05
# From drained to deleted.
_END_S = 60.0

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


def _nobody_runs() -> OpenAIError:
    return OpenAIError(
        503,
        "no decode replica runs; the request may be sent again",
        code="overloaded",
        retry_after_s=_NO_REPLICA_RETRY_S,
    )


def _leaving() -> OpenAIError:
    return OpenAIError(
        503, "this endpoint is being shut down; send the request again", code="overloaded", retry_after_s=_LEAVING_S
    )


def _request_id(request: Request) -> str:
    # Serve gives every request an id, the client's own if it sent one, and returns it in X-Request-ID.
    given = request.headers.get("x-request-id", "")
    return given if is_request_id(given) else uuid.uuid4().hex


def _priority(request: Request) -> Priority:
    given = request.headers.get("x-tandem-priority", "normal")
    if given.upper() not in Priority.__members__:
        names = ", ".join(name.lower() for name in Priority.__members__)
        raise OpenAIError(400, f"X-Tandem-Priority is {given!r}: give one of {names}")
    return Priority[given.upper()]


def _is_too_large(error: AioRpcError) -> bool:
    return error.code() is StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or "")


def _is_whole(last: str | None) -> bool:
    """Whether nothing can follow this text of a response: a stream's end, or a whole body."""
    return last is not None and (last == DONE or not last.startswith("data: "))


async def _unary(handle: DeploymentHandle, method: str) -> Any:
    return await handle.options(method_name=method, stream=False).remote()


async def _broadcast(handle: DeploymentHandle, method: str) -> list[Any]:
    """What those replicas of one deployment answer that do so in time."""
    until_s = time.monotonic() + _METRICS_TIMEOUT_S
    try:
        async with asyncio.timeout(_METRICS_TIMEOUT_S):
            # results_async() answers with nothing where one replica does not answer.
            asked = await handle.broadcast(method)._fetch_replica_results_async()
    except (TimeoutError, RayServeException) as error:
        # Serve starts all of them anew: the others have figures all the same.
        logger.warning("no replica of %s gives its metrics: %s", handle.deployment_name, error or "not in time")
        return []
    replies = [asyncio.ensure_future(one.get_async()) for one in asked]
    if not replies:
        return []
    done, late = await asyncio.wait(replies, timeout=max(0.0, until_s - time.monotonic()))
    for reply in late:
        reply.cancel()
    if late:
        missing = len(late), len(replies), handle.deployment_name, _METRICS_TIMEOUT_S
        logger.warning("%d of %d replicas of %s did not give their metrics in %g s", *missing)
    return [reply.result() for reply in done if not reply.cancelled() and reply.exception() is None]


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


class _Service:
    """What the endpoint knows of one model."""

    def __init__(
        self,
        model_id: str,
        config: IngressConfig,
        rates: RateLimits,
        *,
        admission: AdmissionConfig,
        groups: Collection[str],
        max_model_len: int | None,
        prefill_replicas: int,
        slow_tpot_s: float,
        can_sleep: bool,
    ) -> None:
        self.model_id = model_id
        self.groups = tuple(groups)
        self.max_model_len = max_model_len
        known = [most for most in (max_model_len, config.max_prompt_tokens) if most is not None]
        self.most_prompt_tokens = min(known, default=None)
        self.gate = Gate(admission, rates, replicas=config.replicas, prefill_replicas=prefill_replicas)
        self.slow_tpot_s = slow_tpot_s
        self.can_sleep = can_sleep


# serve.ingress pickles the app, and with it copies of the globals that its routes use, right here: what they use stands
# above, and metrics are reached through their module, which is not copied.
@serve.ingress(app)
class Ingress:
    """One replica of the endpoint; any number may run."""

    async def __init__(  # type: ignore[misc]
        self,
        *,
        services: dict[str, dict[str, Any]],
        config: IngressConfig,
        is_autoscaled: bool,
    ) -> None:
        """``services``: by model, as ``deployments.graph`` says them, with handles for deployments."""
        listen_on_node_address()
        self._start = StartBackoff()
        await self._start.wait()
        self._created_s = int(time.time())
        groups: dict[str, DeploymentHandle] = {}
        for of in services.values():
            groups |= of["groups"]
        self._groups = {name: streamed(handle, "respond") for name, handle in groups.items()}
        self._engines = [*groups.values(), *(one for of in services.values() for one in of["prefills"].values())]
        self._decode_replicas = {
            name: count for of in services.values() for name, count in of["decode_replicas"].items()
        }
        self._loads = {name: GroupLoad() for name in groups}
        self._config = config
        self._timeout_s = config.request_timeout_s
        self._retries = config.retries
        with self._start.judged():
            file, limited = config.api_keys_file, config.admission.keys
            self._keys = None if file is None else ApiKeys(file, limited=limited)
        rates = RateLimits(config.admission.limits, config.replicas)
        self._services = {
            name: _Service(
                name,
                config,
                rates,
                admission=of["admission"],
                groups=of["groups"],
                max_model_len=of["max_model_len"],
                prefill_replicas=max(1, of["prefill_replicas"]),
                slow_tpot_s=of["outlier"].slow_tpot_s,
                can_sleep=is_autoscaled and not any(of["decode_replicas"].values()),
            )
            for name, of in services.items()
        }
        self._bodies, self._trim = Bodies(config), Trim()
        self._reads = 0  # bodies
        self._waking = 0  # requests that wait for a replica of a model that sleeps
        self._unhealthy = Recent(self._look_for_health, _HEALTH_KEEP_S)
        self._drains_until_s = 0.0
        self._rng = random.Random()
        context = serve.get_replica_context()
        self._own_handle = serve.get_deployment_handle(context.deployment, context.app_name)
        self._replica = context.replica_id.unique_id
        self._app_name, self._is_autoscaled = context.app_name, is_autoscaled
        self._health = {
            name: HealthFeed(context.app_name, handle.deployment_name, of["outlier"])
            for of in services.values()
            for name, handle in of["groups"].items()
        }
        for feed in self._health.values():
            feed.start()
        self._membership = MembershipFeed(context.app_name) if is_autoscaled else None
        self._hearing = None if self._membership is None else asyncio.create_task(self._membership.run())
        self._waits = Waits(partial(answers, context.app_name), self._is_stranded)
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
        """200 when a decode pool of every model answers, where it does not sleep."""
        if self._is_draining():
            return _error_response(_leaving())
        error = await self._unhealthy.get()  # nobody is asked for a key here, and each look asks every pool
        return Response(status_code=200) if error is None else _error_response(error)

    async def _look_for_health(self) -> OpenAIError | None:
        for service in self._services.values():
            serving = self._serving(service)
            if not serving and service.can_sleep:
                continue
            for group in serving or service.groups:
                try:
                    await asyncio.wait_for(_unary(self._groups[group], "check_health"), _HEALTH_TIMEOUT_S)
                except Exception as error:
                    what = f"no healthy decode replica of {service.model_id}: {type(error).__name__}"
                    return OpenAIError(503, what, retry_after_s=_NO_REPLICA_RETRY_S)
        return None

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

        Who drains an application ends it then; where that does not come, requests are taken again. Not before every
        other replica's time is over too, since it ends when the last of them has answered.

        Returns:
            How many have not been after ``timeout_s``.
        """
        until_s = time.monotonic() + timeout_s
        self._drains_until_s = until_s + _END_S
        while (left := self._reads + self._waking + self._here()) and time.monotonic() < until_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        await asyncio.sleep(_WRITTEN_S)
        return left

    def _here(self) -> int:
        """Requests of all models that wait or are being answered."""
        return sum(service.gate.here for service in self._services.values())

    def _is_draining(self) -> bool:
        return time.monotonic() < self._drains_until_s

    async def process_page(self) -> list[Any]:
        """This replica's own metrics."""
        return tandem_metrics.process_metrics(role="ingress", replica=self._replica)

    @app.get("/v1/models")
    async def models(self, request: Request) -> JSONResponse:
        """The models."""
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._card(one) for one in self._services.values()]})

    @app.get("/v1/models/{model:path}")
    async def model(self, request: Request, model: str) -> JSONResponse:
        """One model by name."""
        self._check_key(request)
        return JSONResponse(self._card(self._service_of(model)))

    @app.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        """OpenAI chat completions."""
        return await self._serve("chat", request)

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """OpenAI completions."""
        return await self._serve("completions", request)

    def _card(self, service: _Service) -> dict[str, Any]:
        return {
            "id": service.model_id,
            "object": "model",
            "created": self._created_s,
            "owned_by": "tandem",
            "max_model_len": service.max_model_len,
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

    def _service_of(self, model: Any) -> _Service:
        found = self._services.get(model) if isinstance(model, str) else None
        if found is None:
            serves = ", ".join(map(repr, self._services))
            raise OpenAIError(
                404,
                f"the model {model!r} does not exist; this endpoint serves {serves}",
                param="model",
                code="model_not_found",
            )
        return found

    async def _serve(self, endpoint: str, request: Request) -> Response:
        arrived_s = time.monotonic()
        request_id = _request_id(request)
        try:
            if self._is_draining():
                raise _leaving()
            key = self._check_key(request)  # before the body is read
            check_content_type(request.headers.get("content-type"))
            response = await self._respond(endpoint, request, request_id, arrived_s, key)
        except OpenAIError as error:
            response = _error_response(error)
        tandem_metrics.REQUESTS.labels(endpoint, str(response.status_code)).inc()
        return response

    async def _respond(
        self, endpoint: str, request: Request, request_id: str, arrived_s: float, key: str | None
    ) -> Response:
        if not any(self._can_answer(service) for service in self._services.values()):
            raise _nobody_runs()
        priority = _priority(request)
        first_gate = next(iter(self._services.values())).gate  # keys and requests count over all models
        first_gate.check(key, priority, self._reads + self._waking + self._here() - first_gate.here)
        held = Body(self._bodies, key, priority)
        try:
            try:
                body, service = await self._body(request, held)
            except BaseException as error:  # its client may have left as well
                if not (isinstance(error, OpenAIError) and error.status == 429):  # which is about others' bodies
                    first_gate.refused(key)
                raise
            if not self._can_answer(service):
                raise _nobody_runs()
            self._waking += 1
            try:
                await self._awake(service, arrived_s)
            finally:
                self._waking -= 1
            place = asked_of(endpoint, body, key, priority, service.most_prompt_tokens)
            answer = self._frames(service, endpoint, body, request_id, arrived_s, place.tokens)
            frames = self._admitted(service, place, held, answer)
            first = await anext(frames)
        except StopAsyncIteration:
            raise OpenAIError(500, "the decode replica answered with nothing") from None
        except BaseException:
            self._free(held)
            raise
        if first.error is not None or not first.text.startswith("data: "):
            await anext(frames, None)  # the end, which would otherwise be a cancellation
            await frames.aclose()
            text = first.text.removeprefix("data: ").strip()
            again = {"Retry-After": f"{_AGAIN_S:.0f}"} if first.status in (429, 503) else None
            if first.status == 429:
                tandem_metrics.REFUSED.labels("engine", priority.name.lower()).inc()
            return Response(text, status_code=first.status, headers=again, media_type="application/json")
        return StreamingResponse(_events(first, frames, arrived_s), media_type="text/event-stream")

    async def _body(self, request: Request, held: Body) -> tuple[dict[str, Any], _Service]:
        """The request's JSON object, checked as far as an endpoint can, and whom it is for."""
        self._reads += 1
        try:
            raw = await read_body(request, self._config, held)
        finally:
            self._reads -= 1
        body = json_object(raw, held.take)
        if "model" not in body:
            raise OpenAIError(400, "model is missing", param="model")
        service = self._service_of(body["model"])
        check_types(body)
        return body, service

    def _can_answer(self, service: _Service) -> bool:
        """Whether a decode replica runs, or will when asked: who came before waits, but nobody else."""
        return service.can_sleep or bool(self._serving(service))

    async def _awake(self, service: _Service, arrived_s: float) -> None:
        """Wait until a service that sleeps has a decode replica, and have it woken.

        Raises:
            OpenAIError: it had none in a request's time.
        """
        asked_s = -math.inf
        while service.can_sleep and not self._serving(service):
            now_s = time.monotonic()
            if now_s - arrived_s > self._timeout_s:
                raise _nobody_runs()
            if now_s - asked_s > _WAKE_AGAIN_S:
                asked_s = now_s
                await self._wake(service.model_id)
            await asyncio.sleep(_WAKE_POLL_S)

    async def _wake(self, model_id: str) -> None:
        try:
            coordinator = await asyncio.to_thread(find_coordinator, self._app_name)
            if coordinator is not None:
                await coordinator.wake.remote(model_id)
        except RayError as error:
            logger.warning("the coordinator cannot be asked to wake %s: %s", model_id, error)

    async def _admitted(
        self, service: _Service, place: Asked, held: Body, frames: AsyncGenerator[Frame, None]
    ) -> AsyncGenerator[Frame, None]:
        """The frames of a request once it is its turn.

        Raises:
            OpenAIError: 429, it is refused.
        """
        try:
            async with aclosing(frames), service.gate.enter(place):
                async for frame in frames:
                    if frame.tokens:
                        service.gate.output(place, frame.tokens)
                    elif not frame.text:
                        service.gate.first(place)
                    if frame.text:
                        service.gate.pause(place)
                        yield frame
                        service.gate.go_on(place)
        finally:
            self._free(held)

    def _free(self, held: Body) -> None:
        held.free()
        self._trim.freed(held.held_bytes)

    def _group(self, service: _Service, avoid: set[str]) -> str:
        """The least loaded group, of those that have replicas and have not failed the request if there are any."""
        serving = self._serving(service) or service.groups
        names = [name for name in serving if name not in avoid] or serving
        counts = {name: known_pools.count(self._health[name].pool) or self._decode_replicas[name] for name in names}
        return choose_group({name: self._loads[name] for name in names}, counts, self._rng)

    def _is_stranded(self, pool: str) -> bool:
        """Whether a pool has no replica while another one of the same model has."""
        if known_pools.has_replicas(pool):
            return False
        group = next(name for name, health in self._health.items() if health.pool == pool)
        return any(group in service.groups and self._serving(service) for service in self._services.values())

    def _serving(self, service: _Service) -> list[str]:
        """The groups of a model whose decode pool has replicas; where the plan lets some serve, those of them."""
        here = [name for name in service.groups if known_pools.has_replicas(self._health[name].pool)]
        holds = None if self._membership is None else self._membership.now()
        # Replicas that wait, or are under observation, would get requests: their own router knows of no other group.
        return here if holds is None else [name for name in here if self._health[name].pool in holds.pools] or here

    async def _frames(
        self,
        service: _Service,
        endpoint: str,
        body: dict[str, Any],
        request_id: str,
        arrived_s: float,
        prompt_tokens: int,
    ) -> AsyncGenerator[Frame, None]:
        """The answer, from as many decode replicas as it takes: a stream goes on where the one before was lost."""
        arrived_at_s = time.time() - (time.monotonic() - arrived_s)
        asked = DecodeRequest(
            endpoint=endpoint,
            body=body,
            request_id=request_id,
            arrived_at_s=arrived_at_s,
            tells_first=service.gate.has_objective,
        )
        sent, failed_groups, full_groups = SentFrames(), set[str](), set[str]()
        lost: Frame | None = None
        has_moved = False  # since it lost its replica
        tries, deadline_s = 1 + self._retries, arrived_s + self._timeout_s
        while tries:
            group = self._group(service, failed_groups | full_groups)
            asked.avoid, asked.probe = await self._health[group].guide()
            async with aclosing(self._attempt(service, group, asked, deadline_s, prompt_tokens)) as frames:
                lost = None
                async for frame in frames:
                    # All that a lost replica had comes to the others at once, and waits for room there.
                    if frame.error in LOST or (
                        frame.error == FULL
                        and (tries <= self._retries or self._has_others(service, group, asked, full_groups))
                    ):
                        lost = frame
                        break
                    if has_moved and frame.error is None:
                        has_moved = False
                        (tandem_metrics.RETRIED if asked.sent is None else tandem_metrics.RESUMED).inc()
                    if frame.text:
                        sent.add(frame.text, frame.outputs)
                    yield frame
            if lost is None:
                return
            exclude = asked.exclude if asked.routed_to is None else asked.exclude | {asked.routed_to}
            if lost.error == FULL and tries > self._retries:  # it has lost nobody: another one may have room
                if asked.routed_to is None or not known_pools.has_others(self._health[group].pool, exclude):
                    full_groups.add(group)
                asked = replace(asked, exclude=exclude, routed_to=None, refused=set())
                continue
            if lost.error == FULL and time.monotonic() + _FULL_S < deadline_s:
                await asyncio.sleep(_FULL_S)
                continue
            tries, has_moved = tries - 1, True
            failed_groups.add(group)
            asked = replace(asked, sent=sent.sent(), exclude=exclude, routed_to=None, refused=set())
        if lost is not None:
            yield lost

    def _has_others(self, service: _Service, group: str, asked: DecodeRequest, full_groups: set[str]) -> bool:
        """Whether there is a replica that has not refused or failed this request."""
        if asked.routed_to in asked.exclude:  # it was asked again: nobody else was there
            return False
        than = {*asked.exclude, asked.routed_to}
        others = [self._health[name].pool for name in {*self._serving(service)} - full_groups - {group}]
        if any(known_pools.has_others(pool, than) or not known_pools.is_known(pool) for pool in others):
            return True
        # Of this group Serve itself has asked all where it names none.
        return asked.routed_to is not None and known_pools.has_others(self._health[group].pool, than)

    async def _attempt(
        self, service: _Service, group: str, asked: DecodeRequest, deadline_s: float, prompt_tokens: int
    ) -> AsyncGenerator[Frame, None]:
        """What one decode replica answers; its last frame is a failure if it did not answer to the end."""
        health, pace, is_judged, has_begun = self._health[group], StreamPace(), False, False
        started_s = time.monotonic()
        stream = self._groups[group].remote(asked)
        iterator: AsyncIterator[Frame] = stream.__aiter__()
        done = False
        text: str | None = None
        wait = Wait(health.pool, asked, deadline_s)
        self._waits.add(wait)
        load = self._loads[group]
        load.requests += 1
        load.prompt_tokens += prompt_tokens
        waits_s: float | None = None  # since when
        try:
            while True:
                waits_s = time.monotonic()
                try:
                    frame = await wait.piece(iterator)
                except StopAsyncIteration:
                    done = True
                    break
                now_s = time.monotonic()
                pace_s = pace.frame(sum(map(len, frame.outputs)), now_s - waits_s, now_s)
                waits_s = None
                if pace_s is not None:
                    health.paced(asked, pace_s, service.slow_tpot_s)
                if asked.refused:
                    health.refused(asked)
                if not has_begun:
                    has_begun = True
                    load.prompt_tokens -= prompt_tokens
                if not frame.text:
                    yield frame
                    continue
                if frame.error in FAILED:
                    is_judged = True
                    health.failed(asked)  # at once: who asked may go elsewhere and not come back here
                elif frame.error == FULL:  # likewise, and it has answered
                    is_judged = True
                    health.answered(asked)
                text = frame.text
                yield frame
            if not _is_whole(text):
                health.failed(asked)
                yield failure(503, "the decode replica broke off; the request may be sent again", "replica_lost")
            elif not is_judged:
                health.answered(asked)
        except TimeoutError:
            if wait.is_lost and _is_whole(text):
                return
            # An answer in one piece may well take longer than that, and so may what came here late.
            had_time = time.monotonic() - started_s > _SILENT_FRAC * self._timeout_s
            if wait.is_lost or (asked.body.get("stream") and not has_begun and had_time):
                health.failed(asked)
            yield (
                _LOST
                if wait.is_lost
                else failure(
                    408, f"the request took longer than {self._timeout_s:g} s (ingress.request_timeout_s)", "timeout"
                )
            )
        except BackPressureError as error:
            yield full(f"every decode replica is full: {error.message}")
        except Exception as error:  # Serve's and Ray's, and most of gRPC's, which Serve passes on as they are
            if _is_whole(text):
                return  # it ended after its last word
            if isinstance(error, AioRpcError) and _is_too_large(error):
                yield _TOO_LARGE  # as it would be from any other replica
                return
            is_known = isinstance(error, (RayError, RayServeException, AioRpcError))
            what = f"{type(error).__name__}: {error}"
            logger.warning("request %s lost its decode replica: %s", asked.request_id, what, exc_info=not is_known)
            health.failed(asked)
            yield _LOST
        finally:
            now_s = time.monotonic()
            pace_s = pace.ended(0.0 if waits_s is None else now_s - waits_s, now_s)
            if pace_s is not None:
                health.paced(asked, pace_s, service.slow_tpot_s)
            health.left(asked)
            self._waits.remove(wait)
            load.requests -= 1
            if not has_begun:
                load.prompt_tokens -= prompt_tokens
            if not done:
                stream.cancel()
