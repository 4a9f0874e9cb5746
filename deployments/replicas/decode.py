"""The decode replica: serves a request and streams its frames; ``pd_generate`` decides where its prompt is computed."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer, PDDecodeServer
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from autoscale.observe.replica_report import ReplicaReport
from autoscale.observe.request_stats import RequestStats
from autoscale.slo import SloConfig
from deployments.pool_config import EngineSleepConfig
from deployments.pooling_config import is_pooling
from deployments.replicas.engine_host import EngineHost, lease_s, named_cause
from deployments.replicas.generation import CURRENT_TRACE, RequestTrace, note_answer
from deployments.replicas.native_app import NativeApp, unserved
from deployments.replicas.openai_layer import answer_frame, failure_frame, parse_request, requested_max_tokens
from deployments.replicas.pd_generate import PDGenerate
from deployments.replicas.pooling import PoolingRequests
from deployments.replicas.prefill_places import PrefillPlaces
from deployments.replicas.pull_watch import PullWatch
from deployments.replicas.remote_prefill import RemotePrefill
from deployments.serve_seam.llm_server import EngineDoor, engine_client, native_app
from deployments.vllm_seam.answer_ids import install_seeded_ids, seed_ids
from deployments.vllm_seam.engine_stats import engine_stats
from deployments.vllm_seam.media import keep_media
from deployments.wire.call import CallWatch, PoolCaller
from deployments.wire.messages import DecodeRequest, Frame, SentAgain, failure
from router import known_pools
from router.config import RouterConfig
from router.ray_coordinator import is_answering
from router.ray_health import HealthFeed
from router.ray_prefill_queue import QueueFeed

_GENERATE = "generate"  # vLLM's name for what every engine can do but that of a pooling model
_ROUTES = {"chat": "POST /v1/chat/completions", "completions": "POST /v1/completions"}  # by name of the endpoint


class DecodeServer(EngineHost, EngineDoor, PDDecodeServer):
    """Ray Serve LLM's decode server; prompts go to prefill from below vLLM's OpenAI layer (``pd_generate``)."""

    async def __init__(  # type: ignore[misc]
        self,
        llm_config: LLMConfig,
        *,
        prefill_server: DeploymentHandle | None,
        router: RouterConfig,
        slo: SloConfig,
        max_prompt_tokens: int | None,
        cores_per_worker: int,
        engine_silence_s: float,
        engine_sleep: EngineSleepConfig | None,
        pull_timeout_s: float,
    ) -> None:
        await self._prepare_host(llm_config, cores_per_worker, router)
        with self._start.failure_is_crash(), named_cause():
            if prefill_server is None:  # an aggregated group: it has no prefill pool
                await LLMServer.__init__(self, llm_config)
            else:
                await super().__init__(llm_config, prefill_server=prefill_server)
            client = engine_client(self)
            self._tasks = await client.get_supported_tasks()
            _check_tasks(self._tasks, llm_config)
            if _GENERATE in self._tasks:
                await _warm_up(client)
        await self._start_adapters(llm_config)
        remote = None
        if prefill_server is not None:
            keep_media(client)
            pulls = PullWatch(client, pull_timeout_s)
            await pulls.start()
            caller = self._prefill_caller(prefill_server, router)
            places = self._prefill_places(prefill_server, router, slo)
            remote = RemotePrefill(
                caller, pulls, router, lease_s=lease_s(llm_config), places=places, adapters=self._adapters
            )
        self._requests = RequestStats(time.monotonic, slo.ttft_share)
        self._generate = client.generate = PDGenerate(
            client=client,
            remote=remote,
            stats=engine_stats(),
            requests=self._requests,
            length=router.length,
            cache=self._watch_cache(router),
            piece_tokens=router.prefix.piece_tokens if router.follows_prefixes else None,
            max_media_bytes=router.max_media_bytes,
            max_prompt_tokens=max_prompt_tokens,
            awake=self._awake,
        )
        if self._adapters is not None:
            client.generate = self._adapters.generating(self._generate, note_answer)
        if _GENERATE not in self._tasks:
            client.encode = PoolingRequests(client, self._requests, max_prompt_tokens)
        self._native = NativeApp(partial(native_app, self), self._tasks, lambda: bool(client.errored))
        install_seeded_ids()
        self._watch_host(engine_silence_s, engine_sleep)

    def _prefill_caller(self, prefill_server: DeploymentHandle, router: RouterConfig) -> PoolCaller[Any]:
        app_name = serve.get_replica_context().app_name
        health = HealthFeed(app_name, prefill_server.deployment_name, router.outlier)
        health.start()
        # The watch ends calls of a pool without replicas, and decode computes the prompts.
        watch = CallWatch(partial(is_answering, app_name), lambda pool: not known_pools.has_replicas(pool))
        self._watching = asyncio.create_task(watch.run())
        return PoolCaller(prefill_server, "prefill", health=health, watch=watch, is_whole=lambda answer: True)

    def _prefill_places(
        self, prefill_server: DeploymentHandle, router: RouterConfig, slo: SloConfig
    ) -> PrefillPlaces | None:
        """This replica's prompts in the prefill queue; ``None``: its prompts are sent at once."""
        if router.prefill_queue.strategy == "direct":
            return None
        pool = prefill_server.deployment_name
        feed = QueueFeed(serve.get_replica_context().app_name, pool, self.replica_id)
        feed.start()
        most_frac = router.outlier.most_frac
        return PrefillPlaces(feed, engine_stats(), router.prefill_queue, slo, pool=pool, most_ejected_frac=most_frac)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """This replica's signals, which Serve passes on to the joint policy."""
        gpus = await self.gpu_report()  # first, since it may take seconds: the other figures are of one moment
        report = ReplicaReport(
            **asdict(engine_stats().load),
            **gpus,
            queued_prefill_tokens=self._generate.local_prefill_tokens,
            handoffs=self._generate.handoffs,
            handoff_s=self._generate.handoff_s,
        )
        return report.values(self._requests)

    async def holder_of(self, response_id: str) -> str | None:
        """This replica's id, if it holds a stored response of the Responses API; ``None``: it does not."""
        return self.replica_id if self._native.holds(response_id) else None

    async def __del__(self) -> None:
        """Called by Serve once the replica's requests have ended: those in the background have none.

        After ``graceful_shutdown_timeout_s`` since the stop began, Serve ends the process whatever it does.
        """
        if (native := getattr(self, "_native", None)) is not None:
            await native.finish_background()
        await super().__del__()

    async def respond(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """The frames of one OpenAI request's answer, without those that its client has from a lost replica.

        The first frame has the response's status.
        """
        async with self._awake(), aclosing(self._respond(request)) as frames:
            async for frame in frames:
                yield frame

    async def _respond(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        if self._adapters is not None and request.adapter:
            why = self._adapters.refusal(request.adapter, is_resumed=request.sent is not None)
            if why is not None:
                yield failure(503, why, "adapter_not_loaded")
                return
        sent_again = None if request.sent is None else SentAgain(request.sent)
        trace = RequestTrace(
            arrived_s=time.monotonic() - max(0.0, time.time() - request.arrived_at_s),
            sent=request.sent,
            pieces=request.routing.prompt,
            reports_route=request.reports_route,
            http_headers=request.http_headers,
        )
        CURRENT_TRACE.set(trace)
        seed_ids(request.id_seed)
        answer = self._native.frames(request, trace) if request.path else self._openai_frames(request, trace)
        if request.reports_first_token:
            answer = _with_first(answer, trace.has_first)
        try:
            async with aclosing(answer) as frames:
                async for frame in frames:
                    if sent_again is not None and frame.text and frame.error is None:
                        text = sent_again.new_text(frame.text)
                        if text is None:
                            continue
                        frame = frame._replace(text=text)
                    yield frame
                    if frame.error is not None:
                        return
            if sent_again is not None:
                sent_again.check_end()
        except Exception as error:
            yield failure_frame(error, request.request_id, ())

    async def _openai_frames(self, request: DecodeRequest, trace: RequestTrace) -> AsyncGenerator[Frame, None]:
        """The frames of a chat or a completion, from vLLM's serving classes without its HTTP application."""
        body: dict[str, Any] = json.loads(request.body.decode())
        fields = tuple(body)
        try:
            if _GENERATE not in self._tasks:
                raise unserved(_ROUTES[request.endpoint], self._tasks)
            parsed = parse_request(request.endpoint, body, request.request_id)
            del body  # otherwise it would take memory until the answer ends, beside the parsed request
            trace.max_tokens, trace.beam_search = requested_max_tokens(parsed), bool(parsed.use_beam_search)
            handler = self.engine.chat if request.endpoint == "chat" else self.engine.completions
            async with aclosing(handler(parsed, None)) as chunks:
                async for chunk in chunks:
                    yield answer_frame(chunk, trace, fields)
        except Exception as error:
            yield failure_frame(error, request.request_id, fields)


async def _with_first(frames: AsyncGenerator[Frame, None], has_first: asyncio.Event) -> AsyncGenerator[Frame, None]:
    """The frames of an answer; before them one without text, if the first token comes earlier than they."""
    async with aclosing(frames):
        tasks = (asyncio.ensure_future(anext(frames, None)), asyncio.ensure_future(has_first.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                yield Frame("")
            frame = await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if frame is not None:
            yield frame
        async for frame in frames:
            yield frame


def _check_tasks(tasks: Collection[str], llm_config: LLMConfig) -> None:
    """Raises RuntimeError: the engine does not generate, and its configuration does not say so."""
    if _GENERATE not in tasks and not is_pooling(llm_config.engine_kwargs):
        raise RuntimeError(
            f"the engine of this model does not generate, its tasks are {', '.join(sorted(tasks))}: for a pooling "
            "model set runner: pooling in engine_kwargs, and prefill of its groups to null"
        )


async def _warm_up(client: Any) -> None:
    """Sample one answer and then two at a time, so that no request waits for code that vLLM compiles at its first use.

    On CPU this is the code of the sampler (vllm/v1/sample/ops/topk_topp_sampler.py:341): 19 s for the first request
    that is not greedy.
    """
    for n in (1, 2):
        sampling = SamplingParams(
            n=n, temperature=1.0, logprobs=1, max_tokens=2, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        # An engine whose limits exclude such a request compiles at its first request instead.
        with suppress(VLLMClientError, GracefulHTTPError):
            async for _ in client.generate(tokens_input([0]), sampling, f"warm-up-{n}"):
                pass
