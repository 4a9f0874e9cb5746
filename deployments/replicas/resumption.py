"""Continuation of a stream that a lost decode replica began: whether it is possible, and its outputs.

The engine gets the prompt and the tokens that the client has. vLLM's output side, which turns tokens into outputs, gets
these tokens in the same pieces as on the lost replica. The output side has the detokenizer, the buffer for stop strings
and the input of the OpenAI layer's parsers. So it first repeats the outputs to the byte, and then continues.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from enum import StrEnum
from functools import partial
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from deployments.vllm_seam.engine_types import FinishReason
from deployments.vllm_seam.media import media_hashes
from deployments.vllm_seam.output_side import REASONS, OutputSide
from deployments.wire.messages import NotResumableError, Sent

# (prompt, its token ids, sampling, request id) -> outputs of the engine
Generate = Callable[[Any, list[int], SamplingParams, str], AsyncGenerator[RequestOutput, None]]
_End = tuple[FinishReason | None, int | str | None]  # reason for the end of an answer, and its stop reason
_OPEN: _End = (None, None)  # the answer has not ended


class Resumption(StrEnum):
    """Input from which the engine continues a stream."""

    CONTINUED = "continued"  # the prompt and the tokens that the client has
    REGENERATED = "regenerated"  # the prompt alone; the tokens that the client has must come again


def resumption(sampling: SamplingParams) -> Resumption:
    """How a stream with these parameters continues. Raises NotResumableError: it cannot continue exactly."""
    if sampling.n != 1:
        raise NotResumableError(f"it has n = {sampling.n} answers")
    if sampling.num_logprobs is not None or sampling.prompt_logprobs is not None:
        raise NotResumableError("it has logprobs")
    is_greedy = sampling.temperature == 0.0
    if _depends_on_outputs(sampling):
        if not is_greedy and sampling.seed is None:
            raise NotResumableError("its next token depends on more than the tokens so far, and it has no seed")
        return Resumption.REGENERATED
    # A seeded generator of random numbers starts at the first output token, so all tokens must be drawn again. Without
    # a seed, any random continuation is right.
    has_random_state = sampling.seed is not None and not is_greedy
    return Resumption.REGENERATED if has_random_state else Resumption.CONTINUED


def _depends_on_outputs(sampling: SamplingParams) -> bool:
    """Whether the next token depends on more than the sequence so far: on which of its tokens are output."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.structured_outputs
        or sampling.bad_words
        or sampling.thinking_token_budget is not None
        or sampling.repetition_detection
        or set(sampling.extra_args or ()) - {"kv_transfer_params"}  # arguments of a logits processor
    )


async def resumed(
    client: Any, generate: Generate, prompt: dict[str, Any], sampling: SamplingParams, request_id: str, sent: Sent
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a stream from its start, as if this engine had made them all.

    ``client``: the engine's ``AsyncLLM``, or an emulated one. ``generate``: the engine's answer to a prompt, which is
    computed here or on prefill.
    ``prompt``: as vLLM's OpenAI layer rendered it. Raises NotResumableError: the stream cannot continue exactly.
    """
    way = resumption(sampling)
    if sent.usage is not None and sent.usage.media != media_hashes(prompt):
        raise NotResumableError("there is another image or other content at a URL of the prompt than before")
    input_ids: list[int] = prompt["prompt_token_ids"]
    sent_ids = [token for output in sent.outputs for token in output]
    # The emulated engine has an output side of its own.
    open_output_side = getattr(client, "open_output_side", partial(OutputSide.open, client))
    output_side = await open_output_side(prompt, sampling, request_id)
    end = output_side.ends_with(sent_ids, len(input_ids)) or _OPEN  # the tokens may be the whole answer
    for repeated in _fed(output_side, sent.outputs, end):
        yield repeated
        if repeated.finished:
            return
    engine_sampling = sampling.clone()
    engine_sampling.stop, engine_sampling.detokenize = [], False  # left to the output side
    expected = sent_ids  # tokens that the engine must repeat
    if way is Resumption.CONTINUED:
        input_ids, expected = [*input_ids, *sent_ids], []
        engine_sampling.max_tokens = None if sampling.max_tokens is None else sampling.max_tokens - len(sent_ids)
        engine_sampling.min_tokens = max(0, sampling.min_tokens - len(sent_ids))
    answer = generate({**prompt, "prompt_token_ids": input_ids}, input_ids, engine_sampling, request_id)
    async with aclosing(answer) as outputs:
        async for output in outputs:
            part = output.outputs[0]
            count, is_last = min(len(part.token_ids), len(expected)), part.finish_reason is not None
            if list(part.token_ids[:count]) != expected[:count] or (is_last and count < len(expected)):
                raise NotResumableError("the other replica's engine chose other tokens")
            expected = expected[count:]
            end = (REASONS[part.finish_reason], part.stop_reason) if is_last else _OPEN
            # One by one, as an engine feeds them: several tokens may go beyond a stop string.
            pieces = [[token] for token in part.token_ids[count:]]
            if is_last and not pieces:
                pieces = [[]]  # feeds the end alone
            for continued in _fed(output_side, pieces, end):
                yield continued
                if continued.finished:
                    return


def _fed(output_side: Any, pieces: Sequence[Sequence[int]], end: _End) -> Iterator[RequestOutput]:
    """The outputs for pieces of tokens; the last piece has ``end``."""
    for number, piece in enumerate(pieces, start=1):
        output = output_side.feed(piece, *(end if number == len(pieces) else _OPEN))
        if output is not None:
            yield output
