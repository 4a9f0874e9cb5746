"""State of a request and of its prompts while a decode replica serves them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from vllm.sampling_params import SamplingParams

from deployments.replicas.pull_watch import Pull
from deployments.replicas.usage import UsageReport
from deployments.vllm_seam.media import has_media
from deployments.wire.messages import PromptRoute, Sent, Usage
from router.prompt_keys import PromptKeys
from router.routing import Chosen


@dataclass(slots=True)
class RequestTrace:
    """One request; ``DecodeServer.respond`` shares it with ``PDGenerate``, below vLLM's OpenAI layer."""

    max_tokens: int | None = None  # output limit that the client set
    beam_search: bool = False
    arrived_s: float | None = None  # arrival at the endpoint, by this process's monotonic clock
    # The answers of ``PDGenerate``, but for those that have ended.
    answers: list[AsyncGenerator[Any, None]] = field(default_factory=list)
    generations: int = 0  # calls of ``PDGenerate``: one for each prompt, or for each step of a beam search
    sent: Sent | None = None  # part of the stream that the client has from a replica that was lost
    # Token ids of each output since the last ``drain``; empty with several streams.
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    tokens: int = 0  # output tokens of all streams since the last ``drain``
    # Set at the first token, which comes from prefill or from this engine.
    has_first: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None  # error that ended the last stream
    pieces: PromptKeys | None = None  # the prompt as the endpoint's router cut it; ``None``: it has not
    http_headers: tuple[tuple[str, str], ...] = ()  # the client's headers that vLLM reads
    reports_route: bool = False  # whether the endpoint wants to know where the prompt was computed
    route: PromptRoute | None = None  # where the prompt was computed, until the next frame takes it along
    usage: Usage | None = None  # what the client is told of the request, until the next frame takes it along

    def take_route(self) -> PromptRoute | None:
        """Where the prompt was computed, once."""
        route, self.route = self.route, None
        return route

    async def close(self) -> None:
        """End the answers that no code reads any more, since the client has left.

        The interpreter would close them too, but only when it collects the objects that refer to them.
        """
        for answer in self.answers:
            # Some task may still read it: that of a response that is computed in the background.
            with suppress(RuntimeError):
                await answer.aclose()

    def add(self, answer: AsyncGenerator[Any, None]) -> None:
        """Note an answer, and drop those that have ended: a beam search has thousands."""
        self.answers = [other for other in self.answers if getattr(other, "ag_frame", None) is not None]
        self.answers.append(answer)

    def take_usage(self) -> Usage | None:
        """What the client is told of the request, once after each change."""
        usage, self.usage = self.usage, None
        return usage

    def drain(self) -> tuple[tuple[tuple[int, ...], ...], int]:
        """Token ids by output, and the number of output tokens, both since the last call."""
        drained = tuple(self.outputs), self.tokens
        self.outputs.clear()
        self.tokens = 0
        return drained


# Registry: the request that a task serves. vLLM's OpenAI layer lies between `respond` and `PDGenerate`, and passes on
# none of Tandem's values.
CURRENT_TRACE: ContextVar[RequestTrace | None] = ContextVar("tandem_request_trace", default=None)


def note_answer(answer: AsyncGenerator[Any, None]) -> None:
    """Let an answer end with the client of this task's request."""
    if (trace := CURRENT_TRACE.get()) is not None:
        trace.add(answer)


# Arguments of an engine that name other engines and blocks of KV there. With them a caller could read the KV of others.
_TRANSFER_ARGUMENTS = ("kv_transfer_params", "ec_transfer_params")


def with_transfer(sampling: SamplingParams, params: dict[str, Any] | None) -> SamplingParams:
    """Sampling parameters with these ``kv_transfer_params``, and without any of the caller's.

    They are a copy, since a caller may use its object for several prompts.
    """
    arguments = sampling.extra_args or {}
    if params is None and arguments.keys().isdisjoint(_TRANSFER_ARGUMENTS):
        return sampling
    arguments = {name: value for name, value in arguments.items() if name not in _TRANSFER_ARGUMENTS}
    if params is not None:
        arguments["kv_transfer_params"] = params
    changed = copy(sampling)
    changed.extra_args = arguments or None
    return changed


@dataclass(slots=True)
class Generation:
    """One prompt on its way through the decode engine."""

    prompt: Any
    ids: list[int] | None  # the prompt's token ids; ``None``: the prompt is not one sequence of tokens
    sampling: SamplingParams
    request_id: str
    _: KW_ONLY
    trace: RequestTrace
    is_step: bool  # whether it is a later step of a beam search
    usage: UsageReport
    kwargs: dict[str, Any]  # vLLM's other arguments of ``generate``
    blocks: PromptKeys | None = None  # keys of the prompt's blocks; ``None``: it has none
    cached_tokens: int = 0  # prompt tokens in the engine's prefix cache, as this replica knows it (``CacheWatch``)
    local_tokens: int = 0  # prompt tokens that this engine has yet to compute
    prefill: Chosen | None = None  # the prefill replica that has computed the prompt; ``None``: none has
    pull: Pull | None = None  # the pull of the prompt's KV; ``None``: prefill has not computed it
    has_first: bool = False  # whether the decode engine has yielded its first output
    output_ids: list[int] = field(default_factory=list)  # token ids of the answer; empty with several streams

    @property
    def is_one_stream(self) -> bool:
        """Whether the answer is one stream of tokens."""
        return self.sampling.n == 1 and not self.trace.beam_search

    @property
    def salt(self) -> str:
        """The client's ``cache_salt``: prompts with different salts share no prefix cache."""
        salt = self.prompt.get("cache_salt") if isinstance(self.prompt, dict) else None
        return salt or ""

    @property
    def lora(self) -> str:
        """Identity of the LoRA adapter: prompts of different adapters share no prefix cache. Empty: none."""
        return str(getattr(self.kwargs.get("lora_request"), "lora_name", ""))

    @property
    def is_plain(self) -> bool:
        """Whether the KV of the prompt depends on nothing but its tokens, adapter and salt."""
        return self.ids is not None and self.prompt.get("type") == "token"

    @property
    def reads_cache(self) -> bool:
        """Whether the engine may use cached KV for the prompt."""
        return self.ids is not None and not self.sampling.skip_reading_prefix_cache

    @property
    def is_transferable(self) -> bool:
        """Whether decode can use KV of this prompt that prefill has computed.

        It cannot with several answers (they would share one handoff), prompt logprobs (only a local forward pass yields
        them), and prompts with embeddings of the client.
        """
        return (
            not self.trace.beam_search
            and (self.is_plain or has_media(self.prompt))
            and self.sampling.n == 1
            and self.sampling.prompt_logprobs is None
        )
