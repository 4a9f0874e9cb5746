"""The prefill replica: computes a prompt's KV and keeps it until a decode replica has pulled it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import PDPrefillServer
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.metrics.stats import RequestStateStats

from deployments.engine_failure import named_cause
from deployments.engine_host import ANSWER_S, EngineHost, engine_client, lease_s
from deployments.engine_stats import engine_stats
from deployments.handoff import PrefillRefusal, PrefillRequest, PrefillResult
from deployments.worker_extension import METHOD_UNREAD_KV
from kvtransfer.connector import LEASES, prefill_request_params
from router.ray_router import QUEUED_TOKENS

_UNREAD_POLL_S = 0.1


def prefill_sampling() -> SamplingParams:
    """What an engine is asked for when a prompt's KV is to be kept for another engine."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": prefill_request_params()},
    )


class PrefillServer(EngineHost, PDPrefillServer):
    """Ray Serve LLM's prefill server with a door for rendered prompts."""

    async def __init__(  # type: ignore[misc]
        self, llm_config: LLMConfig, *, cores_per_worker: int, engine_silence_s: float
    ) -> None:
        self._lease_s = lease_s(llm_config)
        await self._prepare_host(llm_config, cores_per_worker)
        with self._start.judged(), named_cause():
            await super().__init__(llm_config)
        self._watch_host(engine_silence_s)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve passes on to the joint policy."""
        queued = float(engine_client(self).get_num_queued_tokens())
        gpus, unread = await asyncio.gather(self.gpu_report(), self._unread_kv_requests())
        stats = engine_stats()
        return {
            **stats.load.report(),
            **gpus,
            "queued_prefill_tokens": queued,
            **({} if unread is None else {"unread_kv_requests": float(unread)}),
        }

    async def record_routing_stats(self) -> dict[str, Any]:
        """What the routers of decode replicas ask before they choose."""
        return {QUEUED_TOKENS: engine_client(self).get_num_queued_tokens()}

    async def _unread_kv_requests(self) -> int | None:
        """``None`` when the engine does not answer in time: it has died, or computes a long step."""
        with suppress(Exception):
            async with asyncio.timeout(ANSWER_S):
                return int(max(await engine_client(self).collective_rpc(METHOD_UNREAD_KV)))
        return None

    async def __del__(self) -> None:
        """Serve's last call, once no request is in flight: the engine stays until decode has pulled its KV."""
        until_s = time.monotonic() + LEASES * self._lease_s
        with suppress(AttributeError):  # there is no engine: it never started
            client = engine_client(self)
            # Who does not answer computes a long step, unless it has died and keeps nothing.
            while time.monotonic() < until_s and not client.errored and await self._unread_kv_requests() != 0:
                await asyncio.sleep(_UNREAD_POLL_S)
        await super().__del__()

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillResult | PrefillRefusal, None]:
        """Prefill one prompt and say where decode finds its KV, or why not.

        A stream of one, since of a plain call Serve knows only at its end whether the replica took it.

        Raises:
            RuntimeError: the engine ended the request without KV to hand over.
        """
        client = engine_client(self)
        prompt = tokens_input(request.token_ids, cache_salt=request.cache_salt)
        params, computed_s = None, None
        sampling, priority = prefill_sampling(), request.priority
        try:
            async for output in client.generate(prompt, sampling, request.request_id, priority=priority):
                params, computed_s = output.kv_transfer_params, _computed_s(output.metrics)
        except (GracefulHTTPError, VLLMClientError) as error:
            # As an answer: raised, some of vLLM's would not survive the way to decode, and look like a broken replica.
            yield PrefillRefusal(
                why=str(error), backlog_tokens=client.get_num_queued_tokens(), replica_id=self.replica_id
            )
            return
        if not params:
            raise RuntimeError(f"prefill of request {request.request_id} ended without KV to hand over")
        yield PrefillResult(
            kv_transfer_params=params,
            answered_at_s=time.time(),
            backlog_tokens=client.get_num_queued_tokens(),
            replica_id=self.replica_id,
            computed_s=computed_s,
        )


def _computed_s(metrics: RequestStateStats | None) -> float | None:
    """From when the engine began with a prompt to its first token, by the engine's own clock."""
    if metrics is None or not metrics.scheduled_ts or not metrics.first_token_ts:
        return None
    return metrics.first_token_ts - metrics.scheduled_ts
