"""The prefill replica: computes a prompt's KV and keeps it until a decode replica has pulled it."""

from collections.abc import AsyncGenerator

from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import PDPrefillServer
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.engine_failure import named_cause
from deployments.engine_host import EngineHost, engine_client
from deployments.engine_stats import engine_stats
from deployments.handoff import PrefillRequest, PrefillResult
from kvtransfer.connector import prefill_request_params


class PrefillServer(EngineHost, PDPrefillServer):
    """Ray Serve LLM's prefill server with a door for rendered prompts."""

    async def __init__(self, llm_config: LLMConfig, *, cores_per_worker: int) -> None:  # type: ignore[misc]
        self._prepare_host(llm_config, cores_per_worker)
        with named_cause():
            await super().__init__(llm_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve passes on to the joint policy, once a second."""
        queued = float(engine_client(self).get_num_queued_tokens())
        stats = engine_stats()
        return {**stats.load.report(), **stats.gpu_report(), "queued_prefill_tokens": queued}

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillResult, None]:
        """Prefill one prompt and say where decode finds its KV.

        A stream of one, since Serve tells its request router of a plain call only once the call has ended.

        Raises:
            RuntimeError: the engine ended the request without KV to hand over.
        """
        client = engine_client(self)
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": prefill_request_params()},
        )
        prompt = tokens_input(request.token_ids, cache_salt=request.cache_salt)
        params = None
        async for output in client.generate(prompt, sampling, request.request_id, priority=request.priority):
            params = output.kv_transfer_params
        if not params:
            raise RuntimeError(f"prefill of request {request.request_id} ended without KV to hand over")
        yield PrefillResult(
            kv_transfer_params=params, backlog_tokens=client.get_num_queued_tokens(), replica_id=self.replica_id
        )
