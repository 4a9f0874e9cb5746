"""Going on with a stream that another decode replica began: whether it can, and how.

The engine gets the prompt and the tokens that the client has. vLLM's output side, which holds the detokenizer, the
buffer for stop strings and the input of the OpenAI layer's parsers, gets the same tokens as output, in the same pieces
as before. So it repeats its outputs to the byte, and then goes on.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from enum import StrEnum
from functools import partial
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from deployments.vllm_seam.output_side import REASONS, OutputSide
from deployments.wire.messages import NotResumableError, Sent

# (prompt, its token ids, sampling, request id) -> outputs of the engine
Generate = Callable[[Any, list[int], SamplingParams, str], AsyncGenerator[RequestOutput, None]]


class Resumption(StrEnum):
    """How a stream goes on."""

    CONTINUED = "continued"  # from the prompt and the tokens so far
    REGENERATED = "regenerated"  # from the prompt: the tokens that come again must be those that were sent


def resumption(sampling: SamplingParams) -> Resumption:
    """How a stream with these parameters goes on. Raises NotResumableError: it cannot be continued exactly."""
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
    """Whether the next token depends on which of the tokens before were output."""
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
    client: Any, generate: Generate, prompt: dict[str, Any], sampling: SamplingParams, request_id: str, sent: Sent
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a stream from its start, as if this engine had made them all.

    ``client`` is the AsyncLLM, ``generate`` reaches its engine by way of prefill or not, ``prompt`` is as vLLM's OpenAI
    layer rendered it, ``sent`` is what the client has. Raises NotResumableError: it cannot be continued exactly.
    """
    how = resumption(sampling)
    input_ids: list[int] = prompt["prompt_token_ids"]
    sent_ids = [token for output in sent.outputs for token in output]
    # The emulated engine has an output side of its own.
    open_front = getattr(client, "open_front", partial(OutputSide.open, client))
    front = await open_front(prompt, sampling, request_id)
    for repeated in _repeated(front, sent.outputs, sent_ids, len(input_ids)):
        yield repeated
        if repeated.finished:
            return
    engine_sampling = sampling.clone()
    engine_sampling.stop, engine_sampling.detokenize = [], False  # the front's part
    expected = sent_ids
    if how is Resumption.CONTINUED:
        input_ids, expected = [*input_ids, *sent_ids], []
        engine_sampling.max_tokens = None if sampling.max_tokens is None else sampling.max_tokens - len(sent_ids)
        engine_sampling.min_tokens = max(0, sampling.min_tokens - len(sent_ids))
    answer = generate({**prompt, "prompt_token_ids": input_ids}, input_ids, engine_sampling, request_id)
    async with aclosing(answer) as outputs:
        async for output in outputs:
            part = output.outputs[0]
            count = min(len(part.token_ids), len(expected))
            again, new = list(part.token_ids[:count]), list(part.token_ids[count:])
            if again != expected[:count] or (part.finish_reason is not None and count < len(expected)):
                raise NotResumableError("the other replica's engine chose other tokens")
            expected = expected[count:]
            for continued in _continued(front, new, part):
                yield continued
                if continued.finished:
                    return


def _repeated(
    front: Any, outputs: Sequence[tuple[int, ...]], output_ids: list[int], input_tokens: int
) -> Iterator[RequestOutput]:
    """The outputs that the client has; the last one ends the answer where the engine would have ended it."""
    for number, output in enumerate(outputs, start=1):
        end = front.ends_with(output_ids, input_tokens) if number == len(outputs) else None
        repeated = front.feed(output, *(end or (None, None)))
        if repeated is not None:
            yield repeated


def _continued(front: Any, new_ids: list[int], part: Any) -> Iterator[RequestOutput]:
    """Outputs of new tokens, fed one by one as an engine gives them: several may go beyond a stop string."""
    reason = None if part.finish_reason is None else REASONS[part.finish_reason]
    pieces = [[token] for token in new_ids] or ([[]] if reason is not None else [])
    for number, piece in enumerate(pieces, start=1):
        end = (reason, part.stop_reason) if number == len(pieces) else (None, None)
        continued = front.feed(piece, *end)
        if continued is not None:
            yield continued
