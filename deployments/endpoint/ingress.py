"""The OpenAI-compatible HTTP endpoint: its routes, and the stages of a request.

Key and limits, body, admission, relay: each stage may refuse the request with an ``OpenAIError``.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from ray import serve

from autoscale.observe.endpoint_report import joined
from autoscale.types import PoolKey
from deployments import metrics as tandem_metrics
from deployments.endpoint.adapter_routes import AdapterRoutes
from deployments.endpoint.adapters import AdapterNames
from deployments.endpoint.api_keys import ApiKeys
from deployments.endpoint.client_request import (
    ClientRequest,
    error_response,
    frames_response,
    named_session,
    passed_headers,
    path_and_query,
    request_id,
    requested_priority,
)
from deployments.endpoint.config import CorsConfig, IngressConfig
from deployments.endpoint.gate import Gate, Intake
from deployments.endpoint.http_app import app
from deployments.endpoint.json_body import check_content_type, json_object, place_of, prompt_tokens
from deployments.endpoint.metrics_port import MetricsPage, MetricsPort
from deployments.endpoint.model_card import model_card
from deployments.endpoint.openai_fields import openai_fields
from deployments.endpoint.pages import Pages
from deployments.endpoint.prompt_pieces import prompt_pieces
from deployments.endpoint.relay import Relay
from deployments.endpoint.request_body import Bodies, Body, read_body
from deployments.endpoint.requested_answer import requested_answer
from deployments.endpoint.response_ids import check_owner, new_response_id, response_not_found
from deployments.endpoint.routes import CHAT, COMPLETIONS, NATIVE, ErrorForm, Route, Work
from deployments.endpoint.served_model import (
    NO_REPLICA_RETRY_S,
    DecodeGroup,
    ServedModel,
    Service,
    count_prefill,
    find_holder,
    no_replica,
    wait_until_awake,
)
from deployments.serve_seam.replica_process import listen_on_node_address
from deployments.serve_seam.start_backoff import StartBackoff
from deployments.wire.answer_limit import check_answers
from deployments.wire.call import CallWatch, PoolCaller
from deployments.wire.messages import Frame
from deployments.wire.openai_errors import OpenAIError
from kvtransfer.topology import Role
from router.ray_coordinator import MembershipFeed, is_answering
from router.ray_health import HealthFeed
from router.request_limits import RequestLimits

# Time, seconds, for which the result of a health check holds. Each check asks every pool, and clients need no key for
# it: without this, clients of GET /health could keep the pools busy.
_HEALTH_KEEP_S = 1.0

_NATIVE_BY_PLACE = {(route.path, route.method): route for route in NATIVE}


# ``serve.ingress`` pickles the app here, with copies of the globals that routes and handlers use. So all of these must
# be defined above. Metrics are used through their module, which is not copied: a copy of a counter would be on no page.
@serve.ingress(app)
class Ingress(Pages):
    """One replica of the endpoint; any number of replicas may run."""

    _adapters = AdapterNames.none()

    async def __init__(  # type: ignore[misc]
        self, *, services: Sequence[Service], config: IngressConfig
    ) -> None:
        """``services``: the models, with handles of their deployments; ``config``: settings of the endpoint itself."""
        listen_on_node_address()
        self._start = StartBackoff()
        await self._start.wait()
        self._created_s = int(time.time())
        self._config = config
        with self._start.failure_is_crash():
            file, limited = config.api_keys_file, config.admission.keys
            keys = None if file is None else ApiKeys(file, limited=limited)
        context = serve.get_replica_context()
        self._app_name, self._replica = context.app_name, context.replica_id.unique_id
        is_autoscaled = any(service.config.autoscale is not None for service in services)
        self._membership = MembershipFeed(context.app_name) if is_autoscaled else None
        limits = RequestLimits(config.admission, config.replicas)
        self._watch = CallWatch(partial(is_answering, context.app_name), self._is_stranded)
        self._models = {service.config.model.id: self._served_model(service, limits) for service in services}
        self._autoscaled = [
            (self._models[service.config.model.id], service.config.autoscale.slo)
            for service in services
            if service.config.autoscale is not None
        ]
        self._intake = Intake(limits, keys, [model.gate for model in self._parts()])
        self._bodies, self._relay = Bodies(config), Relay(config.retries)
        self._adapters = await AdapterNames.follow(context.app_name, [service.config.model for service in services])
        self._adapter_routes = AdapterRoutes(
            context.app_name,
            config,
            self._bodies,
            {service.config.model.id: service.config.model for service in services},
        )
        self._health_error: OpenAIError | None = None  # result of the last health check
        self._health_checked_s = -math.inf  # monotonic time of the last health check
        self._health_lock = asyncio.Lock()
        endpoint = serve.get_deployment_handle(context.deployment, context.app_name)
        engines = [pool for service in services for pool in service.handles()]
        self._page = MetricsPage(endpoint, engines, context.app_name if is_autoscaled else None)
        port = MetricsPort(config.metrics_host, config.metrics_port, context.app_name, self._page.render)
        loops = [self._watch.run(), port.run(), *([] if self._membership is None else [self._membership.run()])]
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        self._start.ready()

    def _served_model(self, service: Service, limits: RequestLimits, usual: ServedModel | None = None) -> ServedModel:
        """The model; ``usual``: the model of whose very long prompts this is the part."""
        config, groups = service.config, []
        for group in config.groups:
            handle = service.decodes[group.name]
            health = HealthFeed(self._app_name, handle.deployment_name, config.router.outlier)
            health.start()
            caller = PoolCaller[Frame](
                handle, "respond", health=health, watch=self._watch, is_whole=lambda frame: frame.is_last
            )
            capacity = service.worth[PoolKey(group.name, Role.DECODE)].own
            prefill_pool = None if group.prefill is None else str(PoolKey(group.name, Role.PREFILL))
            groups.append(
                DecodeGroup(
                    group.name,
                    caller,
                    replicas=group.decode.replicas,
                    capacity=capacity,
                    prefill_pool=prefill_pool,
                )
            )
        gate = Gate(
            config.admission_in(self._config.admission),
            limits,
            replicas=self._config.replicas,
            prefill_replicas=count_prefill(config, service.worth, self._membership),
        )
        membership = None if config.autoscale is None else self._membership
        model = ServedModel(
            config, groups, gate, membership, max_prompt_tokens=self._config.max_prompt_tokens, usual=usual
        )
        if service.long is not None:
            model.long = self._served_model(service.long, limits, model)
        return model

    def _is_stranded(self, pool: str) -> bool:
        """Whether a decode pool has no replica while another pool of the same model has one."""
        return any(model.is_stranded(pool) for model in self._parts())

    def _parts(self) -> list[ServedModel]:
        """All models, and their parts for very long prompts."""
        return [part for model in self._models.values() for part in (model, model.long) if part is not None]

    async def __del__(self) -> None:
        """Called by Serve when it ends the replica."""
        self._start.leave()

    @property
    def cors(self) -> CorsConfig | None:
        """Which web pages may call this endpoint; ``None``: no page of another site."""
        return self._config.cors

    @app.head("/health", include_in_schema=False)
    @app.get("/ping")
    @app.post("/ping")
    @app.get("/health")
    async def health(self) -> Response:
        """200 if every model has a healthy decode pool, or sleeps."""
        self._intake.check_open()
        arrived_s = time.monotonic()
        async with self._health_lock:  # one check serves all clients that wait for it
            if arrived_s - self._health_checked_s >= _HEALTH_KEEP_S:
                self._health_error, self._health_checked_s = await self._check_health(), time.monotonic()
        error = self._health_error
        return Response(status_code=200) if error is None else error_response(error)

    async def _check_health(self) -> OpenAIError | None:
        """The error of the first model that cannot be served; ``None``: all can."""
        for model in self._models.values():
            if (message := await model.check_health()) is not None:
                return OpenAIError(503, message, retry_after_s=NO_REPLICA_RETRY_S)
        return None

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics(self, request: Request) -> Response:
        """The application's metrics page, if the configuration puts it on this port."""
        if not self._config.metrics_on_public_port:
            raise OpenAIError(
                404,
                "GET /metrics: this port has no metrics: ask ingress.metrics_port for them, or set "
                "ingress.metrics_on_public_port",
            )
        self._intake.key_of(request)
        return Response(await self._page.render(), media_type="text/plain; version=0.0.4")

    async def process_page(self) -> list[Any]:
        """This replica's own metrics, for the application's metrics page; called by other replicas."""
        return tandem_metrics.process_metrics(role="ingress", replica=self._replica)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The demand for each autoscaled model, which Serve passes on to the joint policy."""
        return joined({model.model_id: model.gate.figures(slo) for model, slo in self._autoscaled})

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait until earlier ones have been answered. Returns the number of unanswered ones."""
        return await self._intake.drain(timeout_s)

    @app.get("/v1/models")
    async def models(self, request: Request) -> JSONResponse:
        """All models, as OpenAI lists them."""
        self._intake.key_of(request)
        cards = [self._model_card(model) for model in self._models.values()]
        return JSONResponse({"object": "list", "data": [*cards, *self._adapters.cards(self._created_s)]})

    @app.get("/v1/models/{model:path}")
    async def model(self, request: Request, model: str) -> JSONResponse:
        """One model by name."""
        if not model:  # a slash after /v1/models
            return await self.models(request)
        self._intake.key_of(request)
        return JSONResponse(self._adapters.card(model, self._created_s) or self._model_card(self._named_model(model)))

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(self, request: Request) -> Response:
        """Load a LoRA adapter on all replicas of its model, as vLLM's route of this name."""
        return await self._adapter_routes.load(request, self._intake.key_of(request))

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(self, request: Request) -> Response:
        """Unload a LoRA adapter that was loaded at run time."""
        return await self._adapter_routes.unload(request, self._intake.key_of(request))

    @app.post(CHAT.path)
    async def chat(self, request: Request) -> Response:
        """OpenAI chat completions."""
        return await self._serve(CHAT, request)

    @app.post(COMPLETIONS.path)
    async def completions(self, request: Request) -> Response:
        """OpenAI completions."""
        return await self._serve(COMPLETIONS, request)

    async def native(self, request: Request) -> Response:
        """A route that vLLM's own application answers on a decode replica."""
        place = request.scope["route"]
        return await self._serve(_NATIVE_BY_PLACE[place.path, request.method], request)

    for _route in NATIVE:
        app.add_api_route(_route.path, native, methods=[_route.method], name=_route.name)
    del _route

    def _model_card(self, model: ServedModel) -> dict[str, Any]:
        return model_card(
            model.model_id,
            root=model.source,
            max_model_len=(model.long or model).max_model_len,
            created_s=self._created_s,
        )

    def _named_model(self, name: Any) -> ServedModel:
        """The model of this name, or the base of the adapter of this name; without a name, the only model.

        Raises OpenAIError: 404, there is no such model; 400, no name was given and there are several models.
        """
        if (name is None or name == "") and len(self._models) == 1:
            return next(iter(self._models.values()))
        model = self._models.get(self._adapters.base_of(name)) if isinstance(name, str) else None
        if model is not None:
            return model
        names = ", ".join(map(repr, (*self._models, *self._adapters.names())))
        if not isinstance(name, str | None):
            kind = type(name).__name__
            raise OpenAIError(400, f"model must be a string, got {kind}; this endpoint serves {names}", param="model")
        if name is None or name == "":
            raise OpenAIError(400, f"model is missing, and this endpoint serves {names}: name one", param="model")
        message = f"the model {name!r} does not exist; this endpoint serves {names}"
        raise OpenAIError(404, message, param="model", code="model_not_found")

    async def _serve(self, route: Route, http: Request) -> Response:
        """The response to a request; counts the request by its route and status."""
        arrived_s, arrived_at_s = time.monotonic(), time.time()
        try:
            self._intake.check_open()
            # All that the headers can tell is checked before the body is read.
            key = None if route.is_public else self._intake.key_of(http)
            if route.has_body:
                check_content_type(http.headers.get("content-type"))
            if not any(model.can_answer_any() for model in self._models.values()):
                raise no_replica()
            priority = requested_priority(http)
            self._intake.check_limits(key, priority)
            request = ClientRequest(
                route=route,
                request_id=request_id(http),
                arrived_s=arrived_s,
                arrived_at_s=arrived_at_s,
                deadline_s=arrived_s + self._config.request_timeout_s,
                key=key,
                priority=priority,
                session=named_session(http, self._config.session_header),
                is_explained=self._config.explains_routing and http.headers.get("x-tandem-explain") == "1",
                body=Body(self._bodies, key, priority),
                path=path_and_query(http) if route.is_native else "",
                http_headers=passed_headers(http),
            )
            response = await self._respond(request, http)
        except OpenAIError as error:
            response = error_response(error, route.errors)
        tandem_metrics.REQUESTS.labels(route.name, str(response.status_code)).inc()
        return response

    async def _respond(self, request: ClientRequest, http: Request) -> Response:
        """The response, once its first frame has come. Raises OpenAIError: the request is refused."""
        try:
            with self._intake.arriving():
                await self._read(request, http)
                if not request.model.can_answer():
                    raise no_replica()
                await wait_until_awake(self._app_name, request.model, request.deadline_s)
                if request.adapter is not None:
                    await request.adapter.check(request.model)
                if request.route.work is Work.NONE:
                    return await frames_response(request, self._unqueued_frames(request))
            return await frames_response(request, self._admitted_frames(request))
        except BaseException:  # also if the client has disconnected
            request.body.free()
            raise

    async def _read(self, request: ClientRequest, http: Request) -> None:
        """Read the body, and set the request's ``raw``, ``model`` and ``place`` from it.

        The endpoint checks only what it uses itself; vLLM checks the rest on decode. Raises OpenAIError: the body is
        refused.
        """
        with self._refusals_counted(request.key):
            request.raw = await read_body(http, self._config, request.body) if request.route.has_body else b""
            fields = json_object(request.raw, request.body.take) if request.route.has_body else dict(http.query_params)
            endpoint, prompt_fields = openai_fields(request.route, fields)
            answer = requested_answer(endpoint, prompt_fields, is_checked=not request.route.is_native)
            if (stored := http.path_params.get("response_id")) is None:
                request.model = self._named_model(fields.get("model"))
                request.adapter = self._adapters.named(fields.get("model") or "")
        await self._find_response(request, stored, fields)
        prompts = prompt_tokens(endpoint, prompt_fields)
        if request.route.is_native:  # of a chat or a completion decode checks it, with the field's name
            check_answers(answer.answers(len(prompts)), None)
        if request.holder is None:
            request.model = request.model.serving_prompt(max(prompts))
        request.place = place_of(answer, prompts, request.key, request.priority, request.model.most_prompt_tokens)
        if (piece_tokens := request.model.piece_tokens) is not None and request.route.work is Work.ANSWER:
            request.pieces = prompt_pieces(
                endpoint,
                prompt_fields,
                model=request.cache_name,
                tokens=request.place.tokens,
                piece_tokens=piece_tokens,
                chars_per_token=request.model.chars_per_token,
            )

    async def _find_response(self, request: ClientRequest, stored: str | None, fields: dict[str, Any]) -> None:
        """Give a new response its id, and find the replica and the model of a stored one.

        ``stored``: the id in the path, which may be of any model. Raises OpenAIError: 404, it is not here.
        """
        if request.route.errors is not ErrorForm.RESPONSES:
            return
        models, param = list(self._models.values()), "response_id"
        if stored is None:
            request.response_id = new_response_id(request.id_seed, request.key)
            models, param = [request.model], "previous_response_id"
            if (stored := fields.get(param)) is None:
                return
        check_owner(stored, request.key, param)
        request.holder = await find_holder(models, stored)
        if request.holder is None:
            raise response_not_found(stored, param)
        request.model = request.holder.model

    @contextmanager
    def _refusals_counted(self, key: str | None) -> Iterator[None]:
        """Count a request against its key if the body is refused, or its client leaves before the body is complete."""
        try:
            yield
        except BaseException as error:
            # 429: bodies of other requests left no room for this one, so nothing was done for the key.
            if not (isinstance(error, OpenAIError) and error.status == 429):
                self._intake.body_refused(key)
            raise

    async def _admitted_frames(self, request: ClientRequest) -> AsyncGenerator[Frame, None]:
        """Wait for the request's turn, then yield its answer's frames that have text.

        The gate learns from every frame how fast the engines are. Raises OpenAIError: 429, the request is refused.
        """
        gate, place = request.model.gate, request.place
        try:
            # The relay does nothing until its first frame is requested, which is after the request's turn has come.
            async with aclosing(self._relay.frames(request)) as frames, gate.enter(place):
                async for frame in frames:
                    if frame.tokens:
                        gate.output(place, frame.tokens)
                    elif frame.reports_first:
                        gate.note_first_token(place)
                    if frame.text:
                        # While the client reads, the engine's pace is not measured.
                        gate.pause(place)
                        yield frame
                        gate.go_on(place)
        finally:
            request.body.free()

    async def _unqueued_frames(self, request: ClientRequest) -> AsyncGenerator[Frame, None]:
        """The frames with text of an answer that no engine computes."""
        try:
            async with aclosing(self._relay.frames(request)) as frames:
                async for frame in frames:
                    if frame.text:
                        yield frame
        finally:
            request.body.free()
