"""Going on with a stream that another decode replica began: which can be, and how (private parts of vLLM 0.29).

The engine gets the prompt and the tokens that the client has; vLLM's output side, which holds the detokenizer, the
buffer for stop strings and what the OpenAI layer's parsers see, gets the same tokens as output, in the pieces in which
it had them before. So it says again what it said, to the byte, and then goes on.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from enum import StrEnum
from functools import partial
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from deployments.sent import NotResumableError, Sent

_REASONS = {str(reason): reason for reason in FinishReason}

# (prompt, its token ids, sampling, request id) -> what the engine says.
Generate = Callable[[Any, list[int], SamplingParams, str], AsyncGenerator[RequestOutput, None]]


class Resumption(StrEnum):
    """How a stream goes on."""

    CONTINUED = "continued"  # from the prompt and the tokens so far
    REGENERATED = "regenerated"  # from the prompt: what comes again must be what was sent


def resumption(sampling: SamplingParams) -> Resumption:
    """How a stream with these parameters goes on.

    Raises:
        NotResumableError: it cannot be continued exactly; the message says why.
    """
    if sampling.n != 1:
        raise NotResumableError(f"it has n = {sampling.n} answers")
    if sampling.num_logprobs is not None or sampling.prompt_logprobs is not None:
        raise NotResumableError("it has logprobs")
    is_greedy = sampling.temperature == 0.0
    if _looks_back(sampling) or (sampling.seed is not None and not is_greedy):
        if not is_greedy and sampling.seed is None:
            raise NotResumableError("what is sampled next depends on more than the tokens so far, and it has no seed")
        return Resumption.REGENERATED
    return Resumption.CONTINUED


def _looks_back(sampling: SamplingParams) -> bool:
    """Whether the engine must know which tokens were output, and not only which came before."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.structured_outputs
        or sampling.bad_words
        or sampling.thinking_token_budget is not None
        or sampling.repetition_detection
        or set(sampling.extra_args or ()) - {"kv_transfer_params"}  # a logits processor's own
    )


async def resumed(
    client: Any,
    generate: Generate,
    prompt: dict[str, Any],
    sampling: SamplingParams,
    request_id: str,
    sent: Sent,
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a stream from its start, as if this engine had made them all.

    Args:
        client: the AsyncLLM.
        generate: the engine, by way of prefill or not.
        prompt: as vLLM's OpenAI layer rendered it.
        sampling: the client's.
        request_id: the stream's.
        sent: what the client has of it.

    Raises:
        NotResumableError: the stream cannot be continued exactly.
    """
    how = resumption(sampling)
    ids: list[int] = prompt["prompt_token_ids"]
    before = [token for output in sent.outputs for token in output]
    # The emulated engine has an output side of its own.
    open_front = getattr(client, "open_front", partial(_Front.open, client))
    front = await open_front(prompt, sampling, request_id)
    for at, output in enumerate(sent.outputs):
        reason = front.ends_with(before, len(ids)) if at == len(sent.outputs) - 1 else None
        said = front.feed(output, *(reason or (None, None)))
        if said is not None:
            yield said
            if said.finished:
                return
    asked = sampling.clone()
    asked.stop, asked.detokenize = [], False  # the front's part
    if how is Resumption.CONTINUED:
        ids = [*ids, *before]
        asked.max_tokens = None if sampling.max_tokens is None else sampling.max_tokens - len(before)
        asked.min_tokens = max(0, sampling.min_tokens - len(before))
        expected: list[int] = []
    else:
        expected = before
    async with aclosing(generate({**prompt, "prompt_token_ids": ids}, ids, asked, request_id)) as outputs:
        async for output in outputs:
            part = output.outputs[0]
            new = list(part.token_ids)
            known, expected = expected[: len(new)], expected[len(new) :]
            if new[: len(known)] != known or (part.finish_reason is not None and expected):
                raise NotResumableError("the other replica's engine chose other tokens")
            new = new[len(known) :]
            reason = None if part.finish_reason is None else _REASONS[part.finish_reason]
            # One by one, as an engine gives them: what has gathered on its way here may go beyond a stop string.
            pieces: list[list[int]] = [[token] for token in new] or ([[]] if reason is not None else [])
            for left, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
                said = front.feed(piece, *((None, None) if left else (reason, part.stop_reason)))
                if said is not None:
                    yield said
                    if said.finished:
                        return


class _Front:
    """vLLM's output side of one request whose tokens come from us instead of the engine core.

    Not the client's own, which counts what it has against the engine's limits, and the engine has this request too.
    """

    def __init__(self, client: Any, processor: OutputProcessor, request: Any, queue: RequestOutputCollector) -> None:
        self._processor = processor
        self._max_model_len = client.model_config.max_model_len
        self._request = request
        self._queue = queue

    @classmethod
    async def open(cls, client: Any, prompt: dict[str, Any], sampling: SamplingParams, request_id: str) -> "_Front":
        """Let the output side expect the request."""
        tasks = await client.get_supported_tasks()
        request = client.input_processor.process_inputs(request_id, prompt, sampling, supported_tasks=tasks)
        client.input_processor.assign_request_id(request)
        queue = RequestOutputCollector(sampling.output_kind, request.request_id)
        its = client.output_processor
        processor = OutputProcessor(its.tokenizer, log_stats=False, stream_interval=its.stream_interval)
        processor.add_request(request, prompt.get("prompt"), None, 0, queue)
        return cls(client, processor, request, queue)

    def ends_with(self, output_ids: list[int], input_tokens: int) -> tuple[FinishReason, int | str | None] | None:
        """Why the engine would have ended after these tokens, if it would (vllm/v1/core/sched/utils.py, check_stop)."""
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
        """What the output side makes of more tokens."""
        output = EngineCoreOutput(
            request_id=self._request.request_id,
            new_token_ids=list(token_ids),
            finish_reason=reason,
            stop_reason=stop_reason,
        )
        self._processor.process_outputs([output])
        said: RequestOutput | None = self._queue.get_nowait()
        return said
