"""Prefill/decode below the OpenAI layer: what happens between a rendered prompt and the decode engine."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ray.serve.handle import DeploymentHandle
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from deployments.engine_stats import EngineStatsLogger
from deployments.handoff import PrefillRequest, PrefillResult
from deployments.metrics import CACHED_TOKENS_ERROR, HANDOFF_S, PREFILL_BACKLOG, PREFILL_PATH, REMOTE_PREFILL_S
from router.config import LengthConfig
from router.length import prefill_path
from router.prefix_index import PrefixIndex
from router.types import DecodeLoad, PathReason, PrefillPath

logger = logging.getLogger(__name__)

# A prefill replica's report of its queue says nothing any more after this long without another.
_REPORT_FRESH_S = 1.0
_REPLICA_SEEN_S = 60.0


@dataclass(slots=True)
class RequestTrace:
    """What one HTTP request leaves behind on its way through the engine, for its frames."""

    max_tokens: int | None = None
    transferable: bool = True
    token_ids: list[int] = field(default_factory=list)

    def drain(self) -> tuple[int, ...]:
        """The output ids since the last call."""
        ids = tuple(self.token_ids)
        self.token_ids.clear()
        return ids


CURRENT_TRACE: ContextVar[RequestTrace | None] = ContextVar("tandem_request_trace", default=None)


class PrefillBacklog:
    """What a decode replica believes waits on its prefill pool, tokens per replica."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_flight_tokens = 0
        self._reports: dict[str, tuple[float, int]] = {}

    def sent(self, tokens: int) -> None:
        """A prompt was sent to prefill."""
        self._in_flight_tokens += tokens

    def answered(self, tokens: int, result: PrefillResult | None) -> None:
        """Its call ended, with or without a result."""
        self._in_flight_tokens -= tokens
        if result is not None:
            self._reports[result.replica_id] = (self._clock(), result.backlog_tokens)

    def tokens(self) -> int:
        """Own prompts in flight, spread over the replicas seen lately, or the shortest fresh report if longer."""
        now = self._clock()
        self._reports = {k: v for k, v in self._reports.items() if now - v[0] < _REPLICA_SEEN_S}
        own = self._in_flight_tokens // max(1, len(self._reports))
        fresh = [tokens for at, tokens in self._reports.values() if now - at < _REPORT_FRESH_S]
        return max(own, min(fresh, default=0))


class PDGenerate:
    """Stands in for ``AsyncLLM.generate`` on a decode replica.

    vLLM's OpenAI layer has by then validated, rendered and tokenised the request, once; the ids go to prefill as they
    are, and chat, completions and whatever vLLM adds above take the same path. REMOTE: a prefill replica computes the
    prompt and the decode engine pulls its KV. LOCAL, or when prefill fails: the decode engine computes it.
    """

    def __init__(
        self,
        *,
        client: Any,
        prefill: DeploymentHandle,
        stats: EngineStatsLogger,
        config: LengthConfig,
    ) -> None:
        self._client = client
        self._engine_generate = client.generate
        self._prefill = prefill
        self._stats = stats
        self._config = config
        self._max_model_len = client.model_config.max_model_len
        self._index = PrefixIndex(block_tokens=stats.block_tokens, max_blocks=stats.kv_blocks)
        self._backlog = PrefillBacklog(time.monotonic)
        PREFILL_BACKLOG.set_function(self._backlog.tokens)
        self._local_prefill_tokens = 0
        self._releases: set[asyncio.Task[None]] = set()

    async def __call__(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Same arguments and outputs as ``AsyncLLM.generate``."""
        trace = CURRENT_TRACE.get() or RequestTrace()
        ids: list[int] | None = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if ids is not None and trace.max_tokens is not None and len(ids) + trace.max_tokens > self._max_model_len:
            raise VLLMValidationError(
                f"max_tokens is {trace.max_tokens} and the prompt has {len(ids)} tokens, together more than the "
                f"model's context of {self._max_model_len}: ask for at most {self._max_model_len - len(ids)}",
                parameter="max_tokens",
                value=trace.max_tokens,
            )
        salt = prompt.get("cache_salt") or "" if isinstance(prompt, dict) else ""
        cached = self._index.cached_tokens(ids, salt) if ids is not None else 0
        path, reason = PrefillPath.LOCAL, PathReason.NOT_TRANSFERABLE
        if ids is not None and trace.transferable and _is_transferable(prompt, sampling_params, kwargs):
            decision = prefill_path(
                input_tokens=len(ids),
                cached_tokens=cached,
                prefill_backlog_tokens=self._backlog.tokens(),
                decode=self._load(),
                config=self._config,
            )
            path, reason = decision.path, decision.reason
        answered_s: float | None = None
        if path is PrefillPath.REMOTE and ids is not None:
            result = await self._remote_prefill(ids, prompt, request_id, kwargs.get("priority", 0))
            if result is None:
                path, reason = PrefillPath.LOCAL, PathReason.PREFILL_FAILED
            else:
                answered_s = time.monotonic()
                extra = {**(sampling_params.extra_args or {}), "kv_transfer_params": result.kv_transfer_params}
                sampling_params.extra_args = extra
        PREFILL_PATH.labels(path, reason).inc()

        local_tokens = max(0, len(ids) - cached) if ids is not None and path is PrefillPath.LOCAL else 0
        self._local_prefill_tokens += local_tokens
        output_ids: list[int] = []
        try:
            async with aclosing(self._engine_generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
                first = True
                async for output in outputs:
                    if first:
                        first = False
                        self._local_prefill_tokens -= local_tokens
                        local_tokens = 0
                        self._observe_first(output, path, cached, answered_s, ids, salt)
                    if sampling_params.n == 1 and output.outputs:
                        output_ids.extend(output.outputs[0].token_ids)
                        trace.token_ids.extend(output.outputs[0].token_ids)
                    yield output
        finally:
            self._local_prefill_tokens -= local_tokens
            if ids is not None and output_ids:
                self._index.add([*ids, *output_ids[:-1]], salt)

    def _load(self) -> DecodeLoad:
        counters = self._stats.counters
        return DecodeLoad(
            running_requests=counters.running_requests,
            max_running_requests=self._stats.max_running_requests,
            kv_usage_frac=counters.kv_usage_frac,
            local_prefill_tokens=self._local_prefill_tokens,
        )

    async def _remote_prefill(
        self, ids: list[int], prompt: Any, request_id: str, priority: int
    ) -> PrefillResult | None:
        """The prefill pool's answer, or ``None`` when it failed and decode has to prefill itself."""
        request = PrefillRequest(
            request_id=request_id, token_ids=ids, cache_salt=prompt.get("cache_salt"), priority=priority
        )
        self._backlog.sent(len(ids))
        started_s = time.monotonic()
        result: PrefillResult | None = None
        call = self._prefill.remote(request)
        try:
            result = await call
            REMOTE_PREFILL_S.observe(time.monotonic() - started_s)
        except asyncio.CancelledError:
            # The client has gone. Prefill aborts, unless it has answered already: then its KV waits to be released.
            call.cancel()
            release = asyncio.create_task(self._release_late(call, request_id))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
            raise
        except Exception as error:
            logger.warning("remote prefill of request %s failed, prefilling here: %s", request_id, error)
        finally:
            self._backlog.answered(len(ids), result)
        return result

    async def _release_late(self, call: Any, request_id: str) -> None:
        try:
            result: PrefillResult = await call
        except BaseException:
            return
        await self._client.notify_kv_transfer_request_rejected(request_id, result.kv_transfer_params)

    def _observe_first(
        self,
        output: RequestOutput,
        path: PrefillPath,
        cached: int,
        answered_s: float | None,
        ids: list[int] | None,
        salt: str,
    ) -> None:
        if answered_s is not None:
            HANDOFF_S.observe(time.monotonic() - answered_s)
        if ids is None:
            return
        if path is PrefillPath.LOCAL and output.num_cached_tokens is not None:
            CACHED_TOKENS_ERROR.observe(abs(output.num_cached_tokens - cached))
        self._index.add(ids, salt)


def _is_transferable(prompt: dict[str, Any], sampling: SamplingParams, kwargs: dict[str, Any]) -> bool:
    """Whether the KV of this prompt, computed elsewhere, is all that decode needs.

    Not for several sequences from one prompt (they would share one hand-over), prompt logprobs (only a local forward
    pass yields them), other than plain token prompts, and adapters (prefill has none loaded).
    """
    return (
        prompt.get("type") == "token"
        and sampling.n == 1
        and sampling.prompt_logprobs is None
        and kwargs.get("lora_request") is None
    )
