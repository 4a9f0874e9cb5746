"""Prefill/decode below the OpenAI layer: what happens between a rendered prompt and the decode engine."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from ray.serve.handle import DeploymentHandle
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from autoscale.request_stats import RequestStats, RequestTimer
from deployments.engine_stats import EngineStatsLogger
from deployments.first_tokens import FirstTokens
from deployments.handoff import PrefillRefusal, PrefillRequest, PrefillResult
from deployments.metrics import (
    CACHED_TOKENS_ERROR,
    HANDOFF_S,
    PREFILL_BACKLOG,
    PREFILL_FAILURES,
    PREFILL_PATH,
    REMOTE_PREFILL_S,
)
from deployments.pull_watch import PullWatch
from deployments.resume import resumed
from deployments.sent import NotResumableError, Sent
from deployments.waits import Wait, Waits
from router.backlog import PrefillBacklog
from router.config import RouterConfig
from router.length import prefill_path
from router.prefix_index import PrefixIndex
from router.ray_health import HealthFeed
from router.retry_budget import RetryBudget
from router.types import DecodeLoad, PathReason, PrefillPath

logger = logging.getLogger(__name__)

# So many failures with no success between them are not one bad replica of several.
_FAILURES_OF_AN_OUTAGE = 3


# A shorter prompt's time is mostly not its tokens'.
_LEAST_PACE_TOKENS = 500
# Of a lease, in which decode must have got to know of the KV.
_SAFE_LEASE_FRAC = 0.5


@dataclass(slots=True)
class RequestTrace:
    """What one HTTP request leaves behind on its way through the engine, for its frames."""

    max_tokens: int | None = None
    beam_search: bool = False
    arrived_s: float | None = None  # at the endpoint, by this process's monotonic clock
    generations: int = 0
    sent: Sent | None = None  # by the replica that began the stream
    outputs: list[tuple[int, ...]] = field(default_factory=list)  # of one stream of tokens
    tokens: int = 0  # of all there are
    has_first: asyncio.Event = field(default_factory=asyncio.Event)  # on prefill, or here
    error: Exception | None = None

    def drain(self) -> tuple[tuple[tuple[int, ...], ...], int]:
        """The output ids of each output since the last call, and how many output tokens there were."""
        drained = tuple(self.outputs), self.tokens
        self.outputs.clear()
        self.tokens = 0
        return drained


CURRENT_TRACE: ContextVar[RequestTrace | None] = ContextVar("tandem_request_trace", default=None)


class PDGenerate:
    """Stands in for ``AsyncLLM.generate`` on a decode replica.

    vLLM's OpenAI layer has by then validated, rendered and tokenised the request, once; the ids go to prefill as they
    are, and chat, completions and whatever vLLM adds above take the same path. REMOTE: a prefill replica computes the
    prompt and the decode engine pulls its KV. LOCAL, when prefill fails, or where a group has none: the decode engine
    computes it.
    """

    def __init__(
        self,
        *,
        client: Any,
        prefill: DeploymentHandle | None,
        stats: EngineStatsLogger,
        requests: RequestStats,
        config: RouterConfig,
        health: HealthFeed,
        pulls: PullWatch,
        waits: Waits,
        lease_s: float,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._client = client
        self._engine_generate = client.generate
        self._prefill = prefill
        self._stats = stats
        self._first_tokens = FirstTokens(client)
        stats.on_step = self._first_tokens.look
        self._requests = requests
        self._handoff_s = 0.0
        self._handoffs = 0
        self._config = config
        self._health = health
        self._pulls = pulls
        self._waits = waits
        self._lease_s = lease_s
        self._max_model_len = client.model_config.max_model_len
        self._max_prompt_tokens = max_prompt_tokens
        self._index = PrefixIndex(block_tokens=stats.block_tokens, max_blocks=stats.prefix_cache_blocks)
        self._backlog = PrefillBacklog()
        PREFILL_BACKLOG.set_function(lambda: self._backlog.tokens(time.monotonic()))
        self._local_prefill_tokens = 0
        self._prefill_failures = 0  # since the last success
        self._retries = RetryBudget()

    async def __call__(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Same arguments and outputs as ``AsyncLLM.generate``."""
        trace = CURRENT_TRACE.get() or RequestTrace()
        # Beam search generates token by token below one request, whose prompt its first step alone has.
        is_step = trace.beam_search and trace.generations > 0
        trace.generations += 1
        ids: list[int] | None = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if ids is not None and not is_step:
            self._check_context(len(ids), trace.max_tokens)
        timer = None
        is_streamed = sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY
        if not is_step and trace.sent is None:
            arrived_s = time.monotonic() if trace.arrived_s is None else trace.arrived_s
            timer = self._requests.begin(arrived_s, len(ids or ()), is_streamed=is_streamed)

        def run(
            prompt: Any, ids: list[int] | None, sampling: SamplingParams, request_id: str
        ) -> AsyncGenerator[RequestOutput, None]:
            return self._run(prompt, ids, sampling, request_id, trace, is_step, kwargs)

        try:
            if trace.sent is None:
                answer = run(prompt, ids, sampling_params, request_id)
            else:
                if ids is None or trace.beam_search or trace.generations > 1:
                    raise NotResumableError("it is more than one stream of tokens")
                answer = resumed(self._client, run, prompt, sampling_params, request_id, trace.sent)
            async with aclosing(answer) as outputs:
                async for output in outputs:
                    tokens = sum(len(part.token_ids) for part in output.outputs)
                    trace.tokens += tokens
                    if timer is not None:
                        _count(timer, output, tokens, is_streamed)
                    if sampling_params.n == 1 and output.outputs and not trace.beam_search:
                        trace.outputs.append(tuple(output.outputs[0].token_ids))
                    yield output
        except Exception as error:
            trace.error = error  # vLLM's streams only keep its message
            raise
        finally:
            if timer is not None:
                timer.end()

    async def _run(
        self,
        prompt: Any,
        ids: list[int] | None,
        sampling_params: SamplingParams,
        request_id: str,
        trace: RequestTrace,
        is_step: bool,
        kwargs: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        salt = prompt.get("cache_salt") or "" if isinstance(prompt, dict) else ""
        reads_cache = ids is not None and not sampling_params.skip_reading_prefix_cache
        cached = self._index.cached_tokens(ids, salt) if ids is not None and reads_cache else 0
        path, reason = PrefillPath.LOCAL, PathReason.NOT_TRANSFERABLE
        if self._prefill is None:
            reason = PathReason.AGGREGATED
        elif ids is not None and not trace.beam_search and _is_transferable(prompt, sampling_params, kwargs):
            decision = prefill_path(
                input_tokens=len(ids),
                cached_tokens=cached,
                prefill_backlog_tokens=self._backlog.tokens(time.monotonic()),
                decode=self._load(),
                config=self._config.length,
            )
            path, reason = decision.path, decision.reason
            logger.debug("request %s: %s", request_id, decision)
        handed_over: PrefillResult | None = None
        answered_s = 0.0
        if path is PrefillPath.REMOTE and ids is not None:
            self._client.check_admission(1, request_id)  # before prefill computes what this engine has no room for
            handed_over = await self._remote_prefill(ids, prompt, request_id, kwargs.get("priority", 0))
            answered_s = time.monotonic()
            if handed_over is not None and self._is_late(handed_over):
                logger.warning("request %s: its KV may be gone from prefill, so decode prefills", request_id)
                await self._release(request_id, handed_over)
                handed_over, path, reason = None, PrefillPath.LOCAL, PathReason.KV_LATE
            elif handed_over is None:
                path, reason = PrefillPath.LOCAL, PathReason.PREFILL_FAILED
            else:
                trace.has_first.set()
                extra = {**(sampling_params.extra_args or {}), "kv_transfer_params": handed_over.kv_transfer_params}
                sampling_params.extra_args = extra
        if not is_step:
            PREFILL_PATH.labels(path, reason).inc()

        local_tokens = max(0, len(ids) - cached) if ids is not None and path is PrefillPath.LOCAL else 0
        self._local_prefill_tokens += local_tokens
        output_ids: list[int] = []
        first = True
        if handed_over is not None:
            self._pulls.begin(handed_over)
        elif sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
            self._first_tokens.watch(request_id, trace.has_first)
        try:
            async with aclosing(self._engine_generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    if any(part.finish_reason == "abort" for part in output.outputs):
                        raise EngineDeadError  # it ends what it has when it is told to end; who leaves cancels
                    if first:
                        first = False
                        trace.has_first.set()
                        self._local_prefill_tokens -= local_tokens
                        local_tokens = 0
                        if handed_over is not None:
                            self._pulls.here(handed_over)
                            handoff_s = time.monotonic() - answered_s
                            HANDOFF_S.observe(handoff_s)
                            self._handoff_s += handoff_s
                            self._handoffs += 1
                        elif reads_cache and output.num_cached_tokens is not None:
                            CACHED_TOKENS_ERROR.observe(abs(output.num_cached_tokens - cached))
                        if ids is not None:
                            self._index.add(ids, salt)
                    if sampling_params.n == 1 and output.outputs and not trace.beam_search:
                        output_ids.extend(output.outputs[0].token_ids)
                    yield output
        except Exception:
            if first and handed_over is not None:
                await self._release(request_id, handed_over)
            raise
        finally:
            self._first_tokens.leave(request_id, trace.has_first)
            self._local_prefill_tokens -= local_tokens
            if handed_over is not None:
                self._pulls.left(handed_over)
            if ids is not None and output_ids:
                self._index.add([*ids, *output_ids[:-1]], salt)

    def report(self) -> dict[str, float]:
        """Gauges and counters of the hand-over, by the names of ``autoscale.signals``."""
        return {
            "queued_prefill_tokens": float(self._local_prefill_tokens),
            "handoff_s": self._handoff_s,
            "handoffs": float(self._handoffs),
        }

    def _check_context(self, input_tokens: int, max_tokens: int | None) -> None:
        if self._max_prompt_tokens is not None and input_tokens > self._max_prompt_tokens:
            raise VLLMValidationError(
                f"the prompt has {input_tokens} tokens, and this endpoint takes at most {self._max_prompt_tokens}: "
                "send a shorter one",
                parameter="input_tokens",
                value=input_tokens,
            )
        if max_tokens is not None and input_tokens + max_tokens > self._max_model_len:
            raise VLLMValidationError(
                f"max_tokens is {max_tokens} and the prompt has {input_tokens} tokens, together more than the "
                f"model's context of {self._max_model_len}: ask for at most {self._max_model_len - input_tokens}",
                parameter="max_tokens",
                value=max_tokens,
            )

    def _load(self) -> DecodeLoad:
        load = self._stats.load
        return DecodeLoad(
            running_requests=load.running_requests,
            max_running_requests=self._stats.max_running_requests,
            kv_usage_frac=load.kv_usage_frac,
            local_prefill_tokens=self._local_prefill_tokens,
            output_tokens_mean=self._requests.output_tokens_mean,
        )

    async def _remote_prefill(
        self, ids: list[int], prompt: Any, request_id: str, priority: int
    ) -> PrefillResult | None:
        """The prefill pool's answer, or ``None`` when it failed and decode has to prefill itself."""
        if self._prefill_failures >= _FAILURES_OF_AN_OUTAGE and self._backlog.in_flight_tokens:
            return None  # one prompt at a time waits to see whether prefill is back
        self._retries.request()
        deadline_s = time.monotonic() + self._config.prefill_timeout_s
        avoid, probe = await self._health.guide()
        peers, now_s = self._pulls.peers, time.monotonic()
        link = peers.probe(now_s) if probe is None else None
        if probe is None and link is None and peers.is_cut_off(now_s) and not peers.looks_around(now_s):
            return None
        request = PrefillRequest(
            request_id=request_id,
            token_ids=ids,
            cache_salt=prompt.get("cache_salt"),
            priority=priority,
            avoid=avoid,
            probe=probe or link,
            exclude=peers.broken(now_s) - {probe, link},
        )
        result = None
        try:
            result = await self._ask_prefill(request, deadline_s)
        finally:  # or its client has left
            if link is not None and (result is None or result.replica_id != link or self._is_late(result)):
                peers.unknown(link, time.monotonic())
        may_retry = self._prefill_failures < _FAILURES_OF_AN_OUTAGE and time.monotonic() < deadline_s
        if result is None and may_retry and self._retries.take():
            again = replace(request, last_resort=request.routed_to, probe=None, routed_to=None, refused=set())
            result = await self._ask_prefill(again, deadline_s)
        return result

    def _is_late(self, result: PrefillResult) -> bool:
        # From now on this engine's heartbeats keep the lease; what stood still before it knew of the KV may have let it
        # end, and blocks that are another prompt's by now would be pulled without an error (vllm issue 52234).
        return time.time() - result.answered_at_s > _SAFE_LEASE_FRAC * self._lease_s

    async def _ask_prefill(self, request: PrefillRequest, deadline_s: float) -> PrefillResult | None:
        assert self._prefill is not None
        request_id, ids = request.request_id, request.token_ids
        self._backlog.sent(len(ids))
        started_s = time.monotonic()
        result: PrefillResult | PrefillRefusal | None = None
        call = self._prefill.remote(request)
        answers = aiter(call)
        wait = Wait(self._health.pool, request, deadline_s)
        self._waits.add(wait)
        try:
            with suppress(StopAsyncIteration):
                result = await wait.piece(answers)
                await self._end(wait, answers, call)
            if isinstance(result, PrefillRefusal):
                logger.debug("prefill refuses request %s: %s", request_id, result.why)
                self._health.answered(request)
            elif result is None:
                raise RuntimeError("it answered with nothing")
            else:
                REMOTE_PREFILL_S.observe(time.monotonic() - started_s)
                self._health.answered(request)
                if result.computed_s is not None:  # without the queue, which says nothing of the replica
                    pace_s = result.computed_s * 1000 / max(len(ids), _LEAST_PACE_TOKENS)
                    self._health.paced(request, pace_s, self._config.outlier.slow_prefill_s)
                self._pulls.peers.heard(result.replica_id, time.monotonic())
            if self._prefill_failures >= _FAILURES_OF_AN_OUTAGE:
                logger.warning("prefill answers again")
            self._prefill_failures = 0
        except asyncio.CancelledError:
            # The client has gone. Prefill aborts; KV whose answer was on its way is freed when its lease ends.
            call.cancel()
            if isinstance(result, PrefillResult):
                await self._release(request_id, result)
            raise
        except TimeoutError:
            call.cancel()
            timeout_s = self._config.prefill_timeout_s
            why = "its replica is gone or stands still" if wait.is_lost else f"no replica answered in {timeout_s:g} s"
            self._report_failure(request, why)
        except Exception as error:
            self._report_failure(request, error)
        finally:
            self._waits.remove(wait)
            self._health.left(request)
            if result is None:
                self._backlog.failed(len(ids))
            else:
                self._backlog.answered(len(ids), result.replica_id, result.backlog_tokens, time.monotonic())
        return result if isinstance(result, PrefillResult) else None

    @staticmethod
    async def _end(wait: Wait, answers: AsyncIterator[Any], call: Any) -> None:
        """Wait for a stream's end; what breaks after its one piece has broken after all that matters."""
        try:
            await wait.piece(answers)
        except StopAsyncIteration:
            pass
        except Exception as error:
            logger.debug("prefill broke off after its answer: %s", error)
            call.cancel()

    def _report_failure(self, request: PrefillRequest, cause: Exception | str) -> None:
        self._health.failed(request)
        PREFILL_FAILURES.inc()
        self._prefill_failures += 1
        level = logging.WARNING if self._prefill_failures == _FAILURES_OF_AN_OUTAGE else logging.DEBUG
        logger.log(level, "prefill of request %s failed: %s", request.request_id, cause)

    async def _release(self, request_id: str, unread: PrefillResult) -> None:
        """Free KV on prefill that the decode engine will not pull."""
        with suppress(Exception):  # the engine has died; the lease ends by itself
            await self._pulls.release(request_id, unread.kv_transfer_params)


def _count(timer: RequestTimer, output: RequestOutput, tokens: int, is_streamed: bool) -> None:
    if is_streamed:
        timer.add_tokens(tokens)
    elif output.finished and output.metrics is not None:
        # The engine core's times are of the same clock: the machine's monotonic one.
        timer.add_all(tokens, output.metrics.first_token_ts, output.metrics.last_token_ts)


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
