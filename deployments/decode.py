"""The decode replica: owns the request, decides where its prompt is prefilled, and streams its frames."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer, PDDecodeServer
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from autoscale.request_stats import RequestStats
from autoscale.slo import SloConfig
from deployments.calls import streamed
from deployments.engine_failure import named_cause
from deployments.engine_host import EngineHost, engine_client, lease_s
from deployments.engine_stats import engine_stats
from deployments.frames import DecodeRequest, Frame, failure, full
from deployments.openai_errors import OpenAIError, field_at_fault
from deployments.pd_generate import CURRENT_TRACE, PDGenerate, RequestTrace
from deployments.pull_watch import PullWatch
from deployments.requests import parse_request, requested_max_tokens
from deployments.sent import NotResumableError, SentAgain
from deployments.waits import Waits
from router import known_pools
from router.config import RouterConfig
from router.ray_coordinator import answers
from router.ray_health import HealthFeed

logger = logging.getLogger(__name__)


class DecodeServer(EngineHost, PDDecodeServer):
    """Ray Serve LLM's decode server, with prefill/decode moved below the OpenAI layer (``pd_generate``)."""

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
        pull_timeout_s: float,
    ) -> None:
        await self._prepare_host(llm_config, cores_per_worker)
        with self._start.judged(), named_cause():
            if prefill_server is None:  # of an aggregated group
                await LLMServer.__init__(self, llm_config)
            else:
                await super().__init__(llm_config, prefill_server=prefill_server)
            client = engine_client(self)
            await _warm_up(client)
        app_name = serve.get_replica_context().app_name
        health = HealthFeed(app_name, prefill_server.deployment_name if prefill_server else "", router.outlier)
        if prefill_server is not None:
            health.start()
        # Where prefill has no replica at all, decode prefills.
        waits = Waits(partial(answers, app_name), lambda pool: not known_pools.has_replicas(pool))
        self._watching = asyncio.create_task(waits.run())
        pulls = PullWatch(client, pull_timeout_s)
        await pulls.start()
        self._requests = RequestStats(time.monotonic, slo.ttft_share)
        self._generate = client.generate = PDGenerate(
            client=client,
            prefill=None if prefill_server is None else streamed(prefill_server, "prefill"),
            stats=engine_stats(),
            requests=self._requests,
            config=router,
            health=health,
            pulls=pulls,
            waits=waits,
            lease_s=lease_s(llm_config),
            max_prompt_tokens=max_prompt_tokens,
        )
        self._watch_host(engine_silence_s)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve passes on to the joint policy."""
        gpus = await self.gpu_report()
        return {**engine_stats().load.report(), **gpus, **self._requests.report(), **self._generate.report()}

    async def _pd_handle_request(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        # Ray's chat() and completions() come here; their orchestration would prefill a second time.
        method = "chat" if hasattr(request, "messages") else "completions"
        stream = await self._run_request(request, engine_method=method, raw_request_info=raw_request_info)
        async for chunk in stream:
            yield chunk

    async def respond(self, asked: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """Serve one OpenAI request.

        Yields:
            Frames; the first one's status is the response's. Of a stream that another replica began, those that its
            client does not have.
        """
        fields = dict.fromkeys(asked.body)  # their names are all that a refusal needs
        again = None if asked.sent is None else SentAgain(asked.sent)
        try:
            request = parse_request(asked.endpoint, asked.body, asked.request_id)
            asked.body = {}  # it would be held as long as the answer takes, beside what was made of it
            trace = RequestTrace(
                max_tokens=requested_max_tokens(request),
                beam_search=bool(request.use_beam_search),
                arrived_s=time.monotonic() - max(0.0, time.time() - asked.arrived_at_s),
                sent=asked.sent,
            )
            CURRENT_TRACE.set(trace)
            handler = self.engine.chat if asked.endpoint == "chat" else self.engine.completions
            tells_first = asked.tells_first and not request.stream
            answer = handler(request, None)
            async with aclosing(_told(answer, trace.has_first) if tells_first else answer) as chunks:
                async for chunk in chunks:
                    if chunk is None:
                        yield Frame("")
                        continue
                    frame = _frame(chunk, trace, fields)
                    if again is not None and frame.error is None:
                        text = again.passes(frame.text)
                        if text is None:
                            continue
                        frame = frame._replace(text=text)
                    yield frame
                    if frame.error is not None:
                        return
            if again is not None:
                again.check_end()
        except NotResumableError as error:
            yield _not_resumable(error)
        except OpenAIError as error:
            yield Frame(error.body(), status=error.status, error="invalid_request")
        except (VLLMClientError, ValueError) as error:
            # Such as a grammar that does not compile.
            yield _refusal(400, str(error), getattr(error, "parameter", None), fields)
        except (GracefulHTTPError, EngineDeadError) as error:
            yield _engine_failure(error)
        except Exception:
            logger.exception("request %s failed", asked.request_id)
            yield failure(500, f"internal error; request {asked.request_id} is in the decode replica's log", "internal")


async def _told(chunks: AsyncGenerator[Any, None], has_first: asyncio.Event) -> AsyncGenerator[Any, None]:
    """The chunks of an answer in one piece, and ``None`` before them once its first token has come."""
    async with aclosing(chunks):
        tasks = (asyncio.ensure_future(anext(chunks, None)), asyncio.ensure_future(has_first.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                yield None
            chunk = await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if chunk is not None:
            yield chunk
        async for chunk in chunks:
            yield chunk


async def _warm_up(client: Any) -> None:
    """Sample alone and in a batch, so that no user waits for what vLLM compiles on first use.

    On CPU that is its sampler (vllm/v1/sample/ops/topk_topp_sampler.py:341): 19 s for the first request that is not
    greedy.
    """
    for n in (1, 2):
        sampling = SamplingParams(
            n=n, temperature=1.0, logprobs=1, max_tokens=2, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        # An engine whose limits are below these compiles at its first request.
        with suppress(VLLMClientError, GracefulHTTPError):
            async for _ in client.generate(tokens_input([0]), sampling, f"warm-up-{n}"):
                pass


def _engine_failure(error: GracefulHTTPError | EngineDeadError) -> Frame:
    if isinstance(error, GracefulHTTPError):  # the engine's own limits, such as max_num_queued_reqs
        return full(error.message)
    return failure(503, "the decode engine has died; the request may be sent again", "engine_dead")


def _not_resumable(error: NotResumableError) -> Frame:
    return failure(
        503, f"the decode replica was lost, and no other can go on with this stream: {error}", "not_resumable"
    )


def _refusal(status: int, message: str, param: str | None, sent: dict[str, Any]) -> Frame:
    """What vLLM refuses, in OpenAI's words, whatever the place where vLLM says it."""
    code = "context_length_exceeded" if status == 400 and "context length" in message else None
    error = OpenAIError(status, message, param=field_at_fault(message, param, sent), code=code)
    return Frame(error.body(), status=status, error="invalid_request" if status < 500 else "engine")


def _frame(chunk: Any, trace: RequestTrace, sent: dict[str, Any]) -> Frame:
    if isinstance(chunk, str):
        if chunk.startswith('data: {"error"'):
            # vLLM reports a failure inside a stream as an event on HTTP 200.
            if isinstance(trace.error, (GracefulHTTPError, EngineDeadError)):
                return _engine_failure(trace.error)
            if isinstance(trace.error, NotResumableError):
                return _not_resumable(trace.error)
            error = json.loads(chunk[len("data: ") :])["error"]
            return _refusal(int(error.get("code") or 500), str(error.get("message")), error.get("param"), sent)
        return Frame(chunk, *trace.drain())
    error = getattr(chunk, "error", None)
    if error is not None:
        return _refusal(int(error.code or 500), error.message, error.param, sent)
    return Frame(chunk.model_dump_json(), *trace.drain())
