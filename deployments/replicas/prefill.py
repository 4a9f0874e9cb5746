"""The prefill replica: computes a prompt's KV and keeps it until a decode replica has pulled it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any

from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import PDPrefillServer
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from autoscale.observe.replica_report import ReplicaReport
from deployments.pool_config import EngineSleepConfig
from deployments.replicas.engine_host import EngineHost, lease_s, named_cause
from deployments.serve_seam.llm_server import engine_client
from deployments.vllm_seam.engine_stats import engine_stats
from deployments.vllm_seam.engine_types import computed_s
from deployments.vllm_seam.media import prompt_with_media
from deployments.vllm_seam.worker_extension import METHOD_UNREAD_KV
from deployments.wire.messages import PrefillRefusal, PrefillRequest, PrefillResult
from kvtransfer.connector import MAX_KV_KEEP_LEASES, prefill_request_params
from router.config import RouterConfig
from router.prompt_keys import PromptKeys
from router.ray_router import QUEUED_TOKENS

_UNREAD_POLL_S = 0.1  # seconds between two checks for unread KV while a replica ends


def prefill_sampling() -> SamplingParams:
    """Sampling parameters that make an engine keep a prompt's KV for another engine."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": prefill_request_params()},
    )


class PrefillServer(EngineHost, PDPrefillServer):
    """Ray Serve LLM's prefill server with a method for rendered prompts."""

    async def __init__(  # type: ignore[misc]
        self,
        llm_config: LLMConfig,
        *,
        router: RouterConfig,
        cores_per_worker: int,
        engine_silence_s: float,
        engine_sleep: EngineSleepConfig | None,
    ) -> None:
        self._lease_s = lease_s(llm_config)
        await self._prepare_host(llm_config, cores_per_worker, router)
        with self._start.failure_is_crash(), named_cause():
            await super().__init__(llm_config)
        self._cache = self._watch_cache(router)
        await self._start_adapters(llm_config)
        self._watch_host(engine_silence_s, engine_sleep)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """This replica's signals, which Serve passes on to the joint policy."""
        gpus, unread = await asyncio.gather(self.gpu_report(), self._unread_kv_requests())
        # After the workers' answers, which may take seconds: the queue and the load are of one moment.
        load, queued = asdict(engine_stats().load), engine_client(self).get_num_queued_tokens()
        return ReplicaReport(**load, **gpus, queued_prefill_tokens=queued, unread_kv_requests=unread).values()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Prompt tokens in the queue, by which the routers of decode replicas choose."""
        return {QUEUED_TOKENS: engine_client(self).get_num_queued_tokens()}

    async def _unread_kv_requests(self) -> int | None:
        """Number of prompts whose KV decode has not pulled; ``None``: the engine does not answer."""
        return max(await self.worker_answers(METHOD_UNREAD_KV), default=None)

    async def _has_nothing_left(self) -> bool:
        """Whether decode has pulled all KV."""
        return await self._unread_kv_requests() == 0

    async def __del__(self) -> None:
        """Called by Serve once no request is in flight.

        The engine stays until decode has pulled all KV from it, for at most ``MAX_KV_KEEP_LEASES`` leases.
        """
        until_s = time.monotonic() + MAX_KV_KEEP_LEASES * self._lease_s
        with suppress(AttributeError):  # the engine never started
            client = engine_client(self)
            # Without an answer (``None``) the engine is in a long step, unless it has died.
            while time.monotonic() < until_s and not client.errored and await self._unread_kv_requests() != 0:
                await asyncio.sleep(_UNREAD_POLL_S)
        await super().__del__()

    def _named_blocks(self, request: PrefillRequest) -> PromptKeys | None:
        """The blocks of a prompt whose router wants to know what this engine holds; ``None``: it does not."""
        pieces = request.routing.prompt
        if pieces is None:
            return None
        blocks = self._cache.blocks(request.token_ids, lora=request.adapter, salt=request.cache_salt or "")
        self._cache.name(pieces, blocks)
        return blocks

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillResult | PrefillRefusal, None]:
        """Compute one prompt. Yields where its KV is, or the reason of a refusal.

        It is a stream of one piece: with a plain call, Serve learns only at the end whether a replica has taken the
        call. Raises RuntimeError: the engine ended the request without KV to hand over.
        """
        with self._adapter(request.adapter) as adapter:
            if request.adapter and adapter is None:
                yield self._refusal(f"this replica has no adapter {request.adapter}")
                return
            async with aclosing(self._prefill(request, adapter)) as answers:
                async for answer in answers:
                    yield answer

    def _refusal(self, why: str) -> PrefillRefusal:
        backlog_tokens = engine_client(self).get_num_queued_tokens()
        return PrefillRefusal(why=why, backlog_tokens=backlog_tokens, replica_id=self.replica_id)

    async def _prefill(
        self, request: PrefillRequest, adapter: LoRARequest | None
    ) -> AsyncGenerator[PrefillResult | PrefillRefusal, None]:
        client = engine_client(self)
        prompt = _rendered(request)
        params, engine_s, cached_tokens, created_tokens = None, None, None, None
        blocks = self._named_blocks(request)
        sampling, priority = prefill_sampling(), request.priority
        try:
            async with self._awake():
                outputs = client.generate(prompt, sampling, request.request_id, lora_request=adapter, priority=priority)
                async for output in outputs:
                    params, engine_s = output.kv_transfer_params, computed_s(output.metrics)
                    cached_tokens, created_tokens = output.num_cached_tokens, output.num_cache_creation_tokens
        except (GracefulHTTPError, VLLMClientError) as error:
            # Not raised: Serve cannot pickle some of vLLM's errors, and an error would count as a broken replica.
            yield self._refusal(str(error))
            return
        if not params:
            raise RuntimeError(f"prefill of request {request.request_id} ended without KV to hand over")
        if blocks is not None:
            self._cache.computed(blocks, cached_tokens)
        yield PrefillResult(
            kv_transfer_params=params,
            answered_at_s=time.time(),
            backlog_tokens=client.get_num_queued_tokens(),
            replica_id=self.replica_id,
            computed_s=engine_s,
            cached_tokens=cached_tokens,
            created_tokens=created_tokens,
            block_tokens=self._cache.block_tokens,
        )


def _rendered(request: PrefillRequest) -> Any:
    """The prompt as decode's renderer made it."""
    if request.media:
        return prompt_with_media(request.token_ids, request.media, request.cache_salt)
    return tokens_input(request.token_ids, cache_salt=request.cache_salt)
