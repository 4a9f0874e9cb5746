"""Requests of a pooling model on a decode replica: each text is one request of the engine, with one result."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm.outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams

from autoscale.observe.request_stats import RequestStats
from deployments.replicas.generation import CURRENT_TRACE, RequestTrace
from deployments.replicas.prompt_bounds import check_prompt


class PoolingRequests:
    """Replaces ``AsyncLLM.encode``, which all of vLLM's pooling routes call: it counts requests, and bounds texts."""

    def __init__(self, client: Any, requests: RequestStats, max_prompt_tokens: int | None) -> None:
        """Set up before ``client.encode`` is replaced; the other arguments are those of ``PDGenerate``."""
        self._encode = client.encode
        self._requests = requests
        self._max_prompt_tokens = max_prompt_tokens

    def __call__(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Same arguments and outputs as ``AsyncLLM.encode``."""
        trace = CURRENT_TRACE.get() or RequestTrace()  # without one, the caller is not ``respond``
        answer = self._answer(trace, prompt, pooling_params, request_id, **kwargs)
        trace.add(answer)
        return answer

    async def _answer(
        self, trace: RequestTrace, prompt: Any, pooling_params: PoolingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        ids: list[int] = (prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None) or []
        check_prompt(len(ids), self._max_prompt_tokens)
        arrived_s = time.monotonic() if trace.arrived_s is None else trace.arrived_s
        timer = self._requests.begin(arrived_s, len(ids), is_streamed=True)  # its result comes as soon as it is there
        try:
            async with aclosing(self._encode(prompt, pooling_params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    if output.finished:
                        timer.add_result()
                    yield output
        except Exception as error:
            trace.error = error  # vLLM's answer has only the error's message
            raise
        finally:
            timer.end()
