"""The decode replica: owns the request, decides where its prompt is prefilled, and streams its frames."""

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import PDDecodeServer
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.engine_failure import named_cause
from deployments.engine_host import EngineHost, engine_client
from deployments.engine_stats import engine_stats
from deployments.frames import Frame
from deployments.openai_errors import OpenAIError
from deployments.pd_generate import CURRENT_TRACE, PDGenerate, RequestTrace
from deployments.requests import from_vllm, parse_request, requested_max_tokens
from router.config import RouterConfig

logger = logging.getLogger(__name__)


class DecodeServer(EngineHost, PDDecodeServer):
    """Ray Serve LLM's decode server, with prefill/decode moved below the OpenAI layer (``pd_generate``)."""

    async def __init__(  # type: ignore[misc]
        self,
        llm_config: LLMConfig,
        *,
        prefill_server: DeploymentHandle,
        router: RouterConfig,
        cores_per_engine: int,
    ) -> None:
        self._prepare_host(llm_config, cores_per_engine)
        with named_cause():
            await super().__init__(llm_config, prefill_server=prefill_server)
        client = engine_client(self)
        client.generate = PDGenerate(
            client=client,
            prefill=prefill_server.options(method_name="prefill", stream=True),
            stats=engine_stats(),
            config=router,
        )

    async def _pd_handle_request(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        # Ray's chat() and completions() come here; their orchestration would prefill a second time.
        method = "chat" if hasattr(request, "messages") else "completions"
        stream = await self._run_request(request, engine_method=method, raw_request_info=raw_request_info)
        async for chunk in stream:
            yield chunk

    async def respond(self, endpoint: str, body: dict[str, Any], request_id: str) -> AsyncGenerator[Frame, None]:
        """Serve one OpenAI request.

        Args:
            endpoint: ``chat`` or ``completions``.
            body: the client's JSON object.
            request_id: the id under which the request is known everywhere.

        Yields:
            Frames; the first one's status is the response's.
        """
        try:
            request = parse_request(endpoint, body, request_id)
        except OpenAIError as error:
            yield Frame(error.body(), status=error.status, error="invalid_request")
            return
        trace = RequestTrace(max_tokens=requested_max_tokens(request), beam_search=bool(request.use_beam_search))
        CURRENT_TRACE.set(trace)
        handler = self.engine.chat if endpoint == "chat" else self.engine.completions
        try:
            async with aclosing(handler(request, None)) as chunks:
                async for chunk in chunks:
                    yield _frame(chunk, trace)
        except EngineDeadError:
            yield _failure(503, "the decode engine has died; the request may be sent again", "engine_dead")
        except VLLMClientError as error:
            yield Frame(from_vllm(error).body(), status=400, error="invalid_request")
        except ValueError as error:  # a grammar that does not compile, a text that cannot be tokenised
            yield _failure(400, f"the request cannot be served: {error}", "invalid_request")
        except Exception:
            logger.exception("request %s failed", request_id)
            yield _failure(500, f"internal error; request {request_id} is in the decode replica's log", "internal")


def _failure(status: int, message: str, error: str) -> Frame:
    return Frame(OpenAIError(status, message).body(), status=status, error=error)


def _frame(chunk: Any, trace: RequestTrace) -> Frame:
    if isinstance(chunk, str):
        if chunk.startswith('data: {"error"'):
            # vLLM reports a failure inside a stream as an event on HTTP 200.
            code = int(json.loads(chunk[len("data: ") :])["error"].get("code") or 500)
            return Frame(chunk, trace.drain(), code, "invalid_request" if code < 500 else "engine")
        return Frame(chunk, trace.drain())
    error = getattr(chunk, "error", None)
    if error is not None:
        status = int(error.code or 500)
        message, param = error.message, error.param
        body = OpenAIError(status, message, param=param, code=_openai_code(status, message), kind=error.type).body()
        return Frame(body, status=status, error="invalid_request" if status < 500 else "engine")
    return Frame(chunk.model_dump_json(), trace.drain())


def _openai_code(status: int, message: str) -> str | None:
    return "context_length_exceeded" if status == 400 and "context length" in message else None
