"""vLLM's output side: the first token of an answer that is not streamed, and outputs of tokens of another engine."""

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

# vLLM's reasons for the end of an answer, by their text in an output.
REASONS = {str(reason): reason for reason in FinishReason}


class FirstTokens:
    """Requests without streaming that wait for their first token; vLLM itself yields nothing before their end.

    Needs: ``output_processor`` of vLLM's client with ``external_req_ids`` and ``request_states``, whose items have
    ``is_prefilling``.
    Without it: admission learns of the first token at the end of the answer, so a long answer looks slow to start.
    """

    def __init__(self, client: Any) -> None:
        """``client``: the engine's ``AsyncLLM``, or an emulated one."""
        self._client = client
        # By request id. Clients choose ids and may use one twice, so an id can have several events.
        self._waiting: dict[str, list[asyncio.Event]] = {}

    def watch(self, request_id: str, has_first: asyncio.Event) -> None:
        """Set ``has_first`` once the engine has the first token of the request, or of one of its answers."""
        self._waiting.setdefault(request_id, []).append(has_first)

    def remove(self, request_id: str, has_first: asyncio.Event) -> None:
        """Stop watching: the request has ended."""
        others = [event for event in self._waiting.pop(request_id, []) if event is not has_first]
        if others:  # of requests with the same id
            self._waiting[request_id] = others

    def update(self) -> None:
        """Set the events of requests that have their first token; called after each step of the engine."""
        for request_id in list(filter(self._has_first, self._waiting)):
            for has_first in self._waiting.pop(request_id):
                has_first.set()

    def _has_first(self, request_id: str) -> bool:
        if (emulated := getattr(self._client, "has_first", None)) is not None:
            return bool(emulated(request_id))
        processor = self._client.output_processor
        internal_ids = processor.external_req_ids.get(request_id, ())  # one for each answer of the request
        states = map(processor.request_states.get, internal_ids)
        return any(state is not None and not state.is_prefilling for state in states)


class OutputSide:
    """vLLM's output side of one request; the caller gives it the tokens, and not the engine core.

    So a stream continues that another replica began (``replicas.resumption``). It has its own processor: the client's
    processor would count the request a second time against the engine's limits.

    Needs: ``vllm.v1.engine.output_processor`` (``OutputProcessor``, ``RequestOutputCollector``),
    ``vllm.v1.engine.EngineCoreOutput``, ``vllm.v1.core.sched.utils.check_sequence_repetition``; ``input_processor``
    (``process_inputs``, ``assign_request_id``), ``output_processor`` and ``get_supported_tasks`` of the client.
    Without it: decode replicas do not start; the error names the missing part.
    """

    def __init__(self, client: Any, processor: OutputProcessor, request: Any, queue: RequestOutputCollector) -> None:
        self._processor = processor
        self._max_model_len = client.model_config.max_model_len
        self._request = request
        self._queue = queue

    @classmethod
    async def open(cls, client: Any, prompt: dict[str, Any], sampling: SamplingParams, request_id: str) -> "OutputSide":
        """The output side of a request, before its first token."""
        tasks = await client.get_supported_tasks()
        request = client.input_processor.process_inputs(request_id, prompt, sampling, supported_tasks=tasks)
        client.input_processor.assign_request_id(request)  # a unique id, since clients may use one id twice
        queue = RequestOutputCollector(sampling.output_kind, request.request_id)
        stock = client.output_processor
        processor = OutputProcessor(stock.tokenizer, log_stats=False, stream_interval=stock.stream_interval)
        processor.add_request(request, prompt.get("prompt"), None, 0, queue)  # no parent request, index 0
        return cls(client, processor, request, queue)

    def ends_with(self, output_ids: list[int], input_tokens: int) -> tuple[FinishReason, int | str | None] | None:
        """vLLM's finish reason and stop reason after these output tokens; ``None``: the answer continues.

        ``input_tokens``: length of the prompt. Source: check_stop in vllm/v1/core/sched/utils.py.
        """
        params = self._request.sampling_params
        last = output_ids[-1] if output_ids else None
        if last is not None and last == params.eos_token_id:
            return FinishReason.STOP, None
        if last in (params.stop_token_ids or ()):
            return FinishReason.STOP, last
        if len(output_ids) >= min(params.max_tokens, self._max_model_len - input_tokens):
            return FinishReason.LENGTH, None
        repeats = params.repetition_detection
        if repeats and len(output_ids) >= params.min_tokens and check_sequence_repetition(output_ids, repeats):
            return FinishReason.REPETITION, "repetition_detected"
        return None

    def feed(
        self, token_ids: Sequence[int], reason: FinishReason | None, stop_reason: int | str | None
    ) -> RequestOutput | None:
        """The output for these tokens; ``None``: it comes with later tokens."""
        output = EngineCoreOutput(
            request_id=self._request.request_id,
            new_token_ids=list(token_ids),
            finish_reason=reason,
            stop_reason=stop_reason,
        )
        self._processor.process_outputs([output])
        return self._queue.get_nowait()
