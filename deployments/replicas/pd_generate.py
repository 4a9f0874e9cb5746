"""Where a rendered prompt is computed: a generator between vLLM's OpenAI layer and the decode engine."""

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from autoscale.observe.request_stats import RequestStats, RequestTimer
from deployments.metrics import CACHED_TOKENS_ERROR, HANDOFF_S, PREFILL_PATH
from deployments.replicas.cache_watch import CacheWatch, piece_keys
from deployments.replicas.generation import CURRENT_TRACE, Generation, RequestTrace, with_transfer
from deployments.replicas.prompt_bounds import check_prompt
from deployments.replicas.remote_prefill import RemotePrefill
from deployments.replicas.resumption import resumed
from deployments.replicas.usage import UsageReport
from deployments.vllm_seam.engine_stats import EngineStatsLogger
from deployments.vllm_seam.engine_types import EngineDeadError, with_arrival
from deployments.vllm_seam.media import PackedMedia, media_hashes, packed_media
from deployments.vllm_seam.output_side import FirstTokens
from deployments.wire.messages import NotResumableError, PrefillRequest, PromptRoute
from router.config import LengthConfig
from router.length import DecodeLoad, PathReason, PrefillPath, prefill_path
from router.prompt_keys import PromptKeys
from router.routing import Routing

logger = logging.getLogger(__name__)


class PDGenerate:
    """Replaces ``AsyncLLM.generate`` on a decode replica.

    vLLM's OpenAI layer has validated, rendered and tokenised the request once, and prefill gets the same token ids. All
    endpoints of vLLM call ``generate``, so none needs code of its own for prefill.

    REMOTE: a prefill replica computes the prompt, and the decode engine pulls its KV. LOCAL: the decode engine computes
    the prompt, also in a group without prefill or if prefill fails.
    """

    def __init__(
        self,
        *,
        client: Any,
        remote: RemotePrefill | None,
        stats: EngineStatsLogger,
        requests: RequestStats,
        length: LengthConfig,
        cache: CacheWatch,
        piece_tokens: int | None = None,
        max_media_bytes: int = 0,
        max_prompt_tokens: int | None = None,
        awake: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """Set up before ``client.generate`` is replaced.

        Args:
            client: the engine's ``AsyncLLM``, or an emulated one.
            remote: the prefill pool of the group, if it has one.
            stats: the engine's load after its last step.
            requests: counts this replica's requests.
            length: which prompts go to prefill.
            cache: what this engine has cached.
            piece_tokens: tokens in a piece of a prompt, by which prefill replicas are chosen; ``None``: by load alone.
            max_media_bytes: bytes of a prompt's images and other media up to which it goes to prefill.
            max_prompt_tokens: longest prompt that this endpoint takes; ``None``: the model's context is the limit.
            awake: context in which the engine does not sleep; a response in the background outlives its request.
        """
        self._client = client
        self._engine_generate = client.generate
        self._remote = remote
        self._places = None if remote is None else remote.places
        self._stats = stats
        self._first_tokens = FirstTokens(client)
        stats.on_step = self._first_tokens.update  # the engine's statistics call it after each step
        self._requests = requests
        self._length = length
        self._max_model_len = client.model_config.max_model_len
        self._max_prompt_tokens = max_prompt_tokens
        self._awake = awake
        self._cache = cache
        self._piece_tokens = piece_tokens
        self._max_media_bytes = max_media_bytes
        self.local_prefill_tokens = 0  # prompt tokens that this engine has yet to compute
        self.handoffs = 0  # prompts since the start whose KV came from prefill
        self.handoff_s = 0.0  # total seconds of all handoffs, each from prefill's answer to the first token

    def __call__(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Same arguments and outputs as ``AsyncLLM.generate``."""
        trace = CURRENT_TRACE.get() or RequestTrace()  # without one, the caller is not ``respond``
        answer = self._answer(trace, prompt, sampling_params, request_id, **kwargs)
        trace.add(answer)
        return answer

    async def _answer(
        self, trace: RequestTrace, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        # A beam search calls this method for each token of each beam. Only its first call has the request's own prompt;
        # the others are steps, and are not counted.
        is_step = trace.beam_search and trace.generations > 0
        trace.generations += 1
        ids: list[int] | None = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if ids is not None and not is_step:
            self._check_context(len(ids), trace.max_tokens)
        sampling_params = with_transfer(sampling_params, None)
        arrived_s = time.monotonic() if trace.arrived_s is None else trace.arrived_s
        usage = UsageReport(arrived_s, trace.sent, media_hashes(prompt))
        timer = None  # a resumed stream gets none: the lost replica has counted the request
        is_streamed = sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY
        if not is_step and trace.sent is None:
            timer = self._requests.begin(arrived_s, len(ids or ()), is_streamed=is_streamed)
            prompt = with_arrival(prompt, usage.arrived_at_s)

        def run(*arguments: Any) -> AsyncGenerator[RequestOutput, None]:
            return self._run(Generation(*arguments, trace=trace, is_step=is_step, usage=usage, kwargs=kwargs))

        try:
            if trace.sent is None:
                answer = run(prompt, ids, sampling_params, request_id)
            else:
                if ids is None or trace.beam_search or trace.generations > 1:
                    raise NotResumableError(
                        "a request with beam search, several prompts or prompt embeddings cannot be resumed"
                    )
                answer = resumed(self._client, run, prompt, sampling_params, request_id, trace.sent)
            is_one_stream = sampling_params.n == 1 and not trace.beam_search
            async with self._awake(), aclosing(answer) as outputs:
                async for output in outputs:
                    tokens = sum(len(part.token_ids) for part in output.outputs)
                    trace.tokens += tokens
                    if timer is not None:
                        _count(timer, output, tokens, is_streamed)
                    reported = usage.correct(output)
                    if is_one_stream and output.outputs:
                        trace.usage = reported or trace.usage
                        trace.outputs.append(tuple(output.outputs[0].token_ids))
                    yield output
        except Exception as error:
            trace.error = error  # vLLM's streams pass on only the error's message
            raise
        finally:
            if timer is not None:
                timer.end()

    async def _run(self, generation: Generation) -> AsyncGenerator[RequestOutput, None]:
        """Choose where the prompt is computed, and yield the engine's outputs.

        Raises EngineDeadError: the engine shuts down.
        """
        path, reason = await self._compute_prompt(generation)
        if not generation.is_step:
            PREFILL_PATH.labels(path, reason).inc()
            self._note_route(generation, path, reason)
        if generation.ids is not None and path is PrefillPath.LOCAL:
            generation.local_tokens = max(0, len(generation.ids) - generation.cached_tokens)
            self.local_prefill_tokens += generation.local_tokens
        # The engine yields an answer in one piece (FINAL_ONLY) only at its end, so its first token is watched for. If
        # prefill has computed the prompt, ``_compute_prompt`` has already reported the first token.
        if generation.pull is None and generation.sampling.output_kind is RequestOutputKind.FINAL_ONLY:
            self._first_tokens.watch(generation.request_id, generation.trace.has_first)
        is_one_stream = generation.is_one_stream
        try:
            answer = self._engine_generate(
                generation.prompt, generation.sampling, generation.request_id, **generation.kwargs
            )
            async with aclosing(answer) as outputs:
                async for output in outputs:
                    if any(part.finish_reason == "abort" for part in output.outputs):
                        # Only an engine that shuts down ends like this: a client that leaves cancels this generator.
                        raise EngineDeadError
                    generation.usage.observe(output)
                    if not generation.has_first:
                        self._count_first(generation, output)
                    if is_one_stream and output.outputs:
                        generation.output_ids.extend(output.outputs[0].token_ids)
                    yield output
        except Exception:
            # The engine may have refused the prompt, and then it pulls nothing. A client that leaves raises no
            # ``Exception``: vLLM aborts its request.
            if not generation.has_first and generation.pull is not None and self._remote is not None:
                await self._remote.release(generation.request_id, generation.pull.params)
            raise
        finally:
            self._count_end(generation)

    async def _compute_prompt(self, generation: Generation) -> tuple[PrefillPath, PathReason]:
        """Decide where the prompt is computed; if the path is REMOTE, let prefill compute it."""
        self._look_up(generation)
        if self._remote is None:
            return PrefillPath.LOCAL, PathReason.AGGREGATED
        if generation.ids is None or not generation.is_transferable:
            return PrefillPath.LOCAL, PathReason.NOT_TRANSFERABLE
        decision = prefill_path(
            input_tokens=len(generation.ids),
            cached_tokens=generation.cached_tokens,
            prefill_backlog_tokens=self._remote.backlog_tokens(),
            decode=self._load(),
            config=self._length,
        )
        logger.debug("request %s: %s", generation.request_id, decision)
        if decision.path is PrefillPath.LOCAL:
            return decision.path, decision.reason
        media = () if generation.is_plain else packed_media(generation.prompt, self._max_media_bytes)
        if isinstance(media, PathReason):
            return PrefillPath.LOCAL, media
        # Raises an error if the engine has no room for 1 more answer, before prefill computes the prompt in vain.
        self._client.check_admission(1, generation.request_id)
        result = await self._remote.prefill(
            self._prefill_request(generation, generation.ids, media),
            time.monotonic() if generation.trace.arrived_s is None else generation.trace.arrived_s,
        )
        if isinstance(result, PathReason):
            return PrefillPath.LOCAL, result
        generation.prefill = result.chosen
        generation.pull = self._remote.pulls.begin(result)
        generation.trace.has_first.set()  # prefill has made the first token
        generation.usage.prefilled(result, generation.pull.began_s)
        generation.sampling = with_transfer(generation.sampling, result.kv_transfer_params)
        return decision.path, decision.reason

    def _look_up(self, generation: Generation) -> None:
        """Find out what this engine has of the prompt. Raises VLLMValidationError: a token id is too large."""
        if generation.ids is None or not generation.is_plain:
            return
        try:
            blocks = self._cache.blocks(generation.ids, lora=generation.lora, salt=generation.salt)
        except OverflowError:  # the engine would refuse it too
            message = f"token id {max(generation.ids)} is out of vocabulary"
            raise VLLMValidationError(message, parameter="prompt", value=max(generation.ids)) from None
        generation.blocks = blocks
        pieces = generation.trace.pieces
        if pieces is not None and generation.trace.sent is None:  # a resumed prompt has more tokens than its pieces
            self._cache.name(pieces, blocks)
        if generation.reads_cache:
            generation.cached_tokens = self._cache.index.cached_tokens(blocks)

    def _prefill_request(self, generation: Generation, ids: list[int], media: PackedMedia) -> PrefillRequest:
        pieces: PromptKeys | None = None
        if self._piece_tokens is not None and generation.is_plain:
            pieces = piece_keys(ids, self._piece_tokens, lora=generation.lora, salt=generation.salt)
        return PrefillRequest(
            request_id=generation.request_id,
            token_ids=ids,
            cache_salt=generation.prompt.get("cache_salt"),
            adapter=generation.lora,
            media=media,
            priority=generation.kwargs.get("priority", 0),
            routing=Routing(prompt=pieces),
        )

    def _note_route(self, generation: Generation, path: PrefillPath, reason: PathReason) -> None:
        """Note where the prompt was computed, if the endpoint wants to know it.

        The prompt of a resumed stream is no longer that of the request, so the endpoint would learn wrong numbers.
        """
        if not generation.trace.reports_route or generation.trace.sent is not None:
            return
        generation.trace.route = PromptRoute(
            path=path,
            reason=reason,
            input_tokens=len(generation.ids or ()),
            cached_tokens=generation.cached_tokens,
            block_tokens=self._cache.block_tokens,
            prefill=generation.prefill,
        )

    def _count_first(self, generation: Generation, output: RequestOutput) -> None:
        """Count a prompt at its first output: the engine has the prompt's KV, pulled or computed."""
        generation.has_first = True
        generation.trace.has_first.set()
        self.local_prefill_tokens -= generation.local_tokens
        generation.local_tokens = 0
        if self._places is not None:
            self._places.begin_answer(generation.request_id)
        local_cached_tokens: int | None = None  # not known if prefill computed the prompt: then pulled tokens count too
        if generation.pull is not None:
            generation.pull.has_first = True
            # The engine's time: an answer in one piece yields its first output only at its end.
            first_s = output.metrics.first_token_ts if output.metrics is not None else time.monotonic()
            handoff_s = first_s - generation.pull.began_s
            HANDOFF_S.observe(handoff_s)
            self.handoff_s += handoff_s
            self.handoffs += 1
        elif generation.reads_cache and output.num_cached_tokens is not None:
            CACHED_TOKENS_ERROR.observe(abs(output.num_cached_tokens - generation.cached_tokens))
            local_cached_tokens = output.num_cached_tokens
            if (route := generation.trace.route) is not None:
                generation.trace.route = replace(route, cached_tokens=output.num_cached_tokens)
        if generation.blocks is not None:
            self._cache.computed(generation.blocks, local_cached_tokens)

    def _count_end(self, generation: Generation) -> None:
        """Count a prompt whose answer has ended, complete or not."""
        self._first_tokens.remove(generation.request_id, generation.trace.has_first)
        self.local_prefill_tokens -= generation.local_tokens
        if self._places is not None:
            self._places.end_answer(generation.request_id)
        if generation.pull is not None:
            generation.pull.has_ended = True
        if generation.ids is not None and generation.blocks is not None and generation.output_ids:
            # The engine computes a token's KV one step after the token, so the last token has none.
            computed_ids = [*generation.ids, *generation.output_ids[:-1]]
            self._cache.answered(generation.blocks, computed_ids, lora=generation.lora, salt=generation.salt)

    def _check_context(self, input_tokens: int, max_tokens: int | None) -> None:
        """Raises VLLMValidationError: the prompt is too long, or the prompt and ``max_tokens`` together."""
        check_prompt(input_tokens, self._max_prompt_tokens)
        # vLLM's OpenAI layer refuses a prompt that fills the context, so the limit in the message is at least 1.
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
            local_prefill_tokens=self.local_prefill_tokens,
            output_tokens_mean=self._requests.output_tokens_mean,
        )


def _count(timer: RequestTimer, output: RequestOutput, tokens: int, is_streamed: bool) -> None:
    if is_streamed:
        timer.add_tokens(tokens)
    elif output.finished and output.metrics is not None:
        # The engine core has the same clock: the machine's monotonic one.
        timer.add_all(tokens, output.metrics.first_token_ts, output.metrics.last_token_ts)
