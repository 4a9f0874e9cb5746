"""A request and its prompts on their way through the decode engine."""

import asyncio
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from vllm.sampling_params import SamplingParams

from deployments.wire.messages import PrefillResult, Sent


@dataclass(slots=True)
class RequestTrace:
    """One request, between the frames of ``DecodeServer.respond`` and ``PDGenerate`` below vLLM's OpenAI layer."""

    max_tokens: int | None = None
    beam_search: bool = False
    arrived_s: float | None = None  # at the endpoint, by this process's monotonic clock
    generations: int = 0  # calls of ``PDGenerate``: several prompts, or the steps of a beam search
    sent: Sent | None = None  # by the replica that began the stream
    outputs: list[tuple[int, ...]] = field(default_factory=list)  # of a request with one stream of tokens
    tokens: int = 0  # output tokens of all streams
    has_first: asyncio.Event = field(default_factory=asyncio.Event)  # the first token has come, from prefill or here
    error: Exception | None = None

    def drain(self) -> tuple[tuple[tuple[int, ...], ...], int]:
        """The output ids of each output since the last call, and the number of output tokens."""
        drained = tuple(self.outputs), self.tokens
        self.outputs.clear()
        self.tokens = 0
        return drained


# Registry: the request that a task serves. vLLM's OpenAI layer stands between `respond` and `PDGenerate`, and passes on
# nothing of ours.
CURRENT_TRACE: ContextVar[RequestTrace | None] = ContextVar("tandem_request_trace", default=None)


@dataclass(slots=True)
class Generation:
    """One prompt on its way through the decode engine."""

    prompt: Any
    ids: list[int] | None  # of a prompt of one sequence of tokens
    sampling: SamplingParams
    request_id: str
    _: KW_ONLY
    trace: RequestTrace
    is_step: bool  # of a beam search, after its first
    kwargs: dict[str, Any]  # vLLM's other arguments of ``generate``
    cached_tokens: int = 0  # as far as is known here
    local_tokens: int = 0  # that this engine has to compute and has not yet
    handoff: PrefillResult | None = None
    handoff_began_s: float = 0.0  # monotonic time of prefill's answer
    has_first: bool = False  # the decode engine has given its first output
    output_ids: list[int] = field(default_factory=list)  # of an answer that is one stream of tokens

    @property
    def is_one_stream(self) -> bool:
        """Whether the answer is one stream of tokens."""
        return self.sampling.n == 1 and not self.trace.beam_search

    @property
    def salt(self) -> str:
        """What separates the prefix cache of this prompt from others."""
        return self.prompt.get("cache_salt") or "" if isinstance(self.prompt, dict) else ""

    @property
    def reads_cache(self) -> bool:
        """Whether the engine may use cached KV for the prompt."""
        return self.ids is not None and not self.sampling.skip_reading_prefix_cache

    @property
    def is_transferable(self) -> bool:
        """Whether the KV of this prompt, computed elsewhere, is all that decode needs.

        Not for several sequences from one prompt (they would share one handoff), prompt logprobs (only a local
        forward pass yields them), other than plain token prompts, and adapters (prefill has none loaded).
        """
        return (
            not self.trace.beam_search
            and self.prompt.get("type") == "token"
            and self.sampling.n == 1
            and self.sampling.prompt_logprobs is None
            and self.kwargs.get("lora_request") is None
        )
