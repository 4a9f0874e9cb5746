"""An engine that keeps time instead of computing, behind Ray Serve LLM's engine protocol.

It exists for scale: a dozen replicas under real Ray Serve on one machine. Everything above the engine is the real
thing, ``PDGenerate`` and the prefill hand-over too: its client has the surface of vLLM's ``AsyncLLM`` that they use.
Its times come from ``autoscale.engine_model`` and an ``EngineProfile``; its words mean nothing: each token is the one
after the token before it.
"""

import asyncio
import json
import logging
import os
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from ray.serve.llm import LLMConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.stats import RequestStateStats

from autoscale.engine_model import EngineModel, ModelRequest, Step
from autoscale.profile import EngineProfile
from deployments.config import EMULATOR_KEY, EmulatorConfig
from deployments.cores import run_at_once
from deployments.engine_stats import EngineLoad, register_engine
from deployments.requests import requested_max_tokens
from deployments.worker_extension import METHOD_GPU, METHOD_UNREAD_KV

logger = logging.getLogger(__name__)

_CHARS_PER_TOKEN = 4
_DEFAULT_OUTPUT_TOKENS = 128
_MOST_LATE_S = 0.25
# As vLLM writes JSON, in which what goes on elsewhere is compared.
_COMPACT = (",", ":")
_OBJECTS = {True: "chat.completion", False: "text_completion"}
_WORDS = (" alpha", " beta", " gamma", " delta", " epsilon", " zeta", " eta", " theta")
# So large a prime that no answer looks like a part of itself, or like another's.
_TOKENS = 1_000_003


def next_tokens(last: int, count: int) -> list[int]:
    """What an emulated engine says after a token."""
    return [(last + 1 + index) % _TOKENS for index in range(count)]


class EmulatedEngine(LLMEngine):
    """The engine of one replica."""

    def __init__(self, llm_config: LLMConfig) -> None:
        self._config = EmulatorConfig.model_validate(llm_config.experimental_configs[EMULATOR_KEY])
        profile = EngineProfile.load(self._config.profile)
        if self._config.max_running is not None:
            profile = profile.model_copy(update={"max_running": self._config.max_running})
        self._model_id = llm_config.model_id
        max_len = int(llm_config.engine_kwargs.get("max_model_len") or profile.kv_tokens)
        self._engine_client = EmulatedClient(profile, self._config, max_model_len=max_len)

    async def start(self) -> None:
        """Take as long as the real one would."""
        profile = self._engine_client.profile
        await asyncio.sleep(profile.start_s if self._config.start_s is None else self._config.start_s)
        if os.nice(0) > 0:  # as where imports of others would make it late
            with suppress(PermissionError):
                run_at_once(os.getpid())
        register_engine(self._engine_client.stats)
        self._engine_client.start()

    async def check_health(self) -> None:
        """Healthy while its loop runs."""
        self._engine_client.check()

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """A chat completion, in OpenAI's stream format."""
        text = "\n".join(str(message.get("content") or "") for message in request.messages)
        # A chat template says at least who speaks.
        async for chunk in self._answer(request, _tokens(text or "user"), is_chat=True):
            yield chunk

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """A completion, in OpenAI's stream format."""
        if request.prompt_embeds is not None:
            raise VLLMValidationError("the emulated engine has no embeddings: give a prompt", parameter="prompt_embeds")
        ids = _tokens(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
        if not all(isinstance(token, int) for token in ids):
            raise VLLMValidationError("the emulated engine takes one prompt at a time", parameter="prompt")
        async for chunk in self._answer(request, ids, is_chat=False):
            yield chunk

    async def _answer(self, request: Any, ids: list[int], *, is_chat: bool) -> AsyncGenerator[Any, None]:
        room = self._engine_client.model_config.max_model_len - len(ids)
        if room < 1:
            raise VLLMValidationError(
                f"the prompt has {len(ids)} tokens, the model's context length is {room + len(ids)}", parameter="prompt"
            )
        asked = requested_max_tokens(request)
        sampling = SamplingParams(
            max_tokens=min(asked or _DEFAULT_OUTPUT_TOKENS, room),
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        )
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request.request_id}",
            "object": "chat.completion.chunk" if is_chat and request.stream else _OBJECTS[is_chat],
            "created": int(time.time()),
            "model": self._model_id,
        }
        prompt = {"type": "token", "prompt_token_ids": ids}
        produced = 0
        async for output in self._engine_client.generate(prompt, sampling, request.request_id):
            (part,) = output.outputs
            produced += len(part.token_ids)
            usage = {
                "prompt_tokens": len(ids),
                "completion_tokens": produced,
                "total_tokens": len(ids) + produced,
            }
            message = {"role": "assistant", "content": part.text}
            if not request.stream:
                said = {"message": message} if is_chat else {"text": part.text}
                yield _Json(
                    {**head, "choices": [{"index": 0, **said, "finish_reason": part.finish_reason}], "usage": usage}
                )
                return
            said = {"delta": message} if is_chat else {"text": part.text}
            ids_too = {"token_ids": list(part.token_ids)} if request.return_token_ids else {}
            yield _event({**head, "choices": [{"index": 0, **said, **ids_too, "finish_reason": part.finish_reason}]})
        if request.stream_options is not None and request.stream_options.include_usage:
            yield _event({**head, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def routing_stats(self) -> dict[str, Any]:
        """Nothing beyond what Tandem's router counts itself."""
        return {}

    async def reset_prefix_cache(self) -> None:
        """Forget every prefix."""
        self._engine_client.forget_prefixes()

    async def resolve_lora(self, lora_model: Any) -> None:
        """Adapters change no time here."""

    def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Not emulated."""
        raise NotImplementedError("the emulated engine generates text only")

    def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Not emulated."""
        raise NotImplementedError("the emulated engine generates text only")


class _Stream:
    """One request's tokens on their way to whoever waits for them."""

    __slots__ = ("begun_s", "due_s", "first_s", "fresh", "last_s", "produced", "wake")

    def __init__(self) -> None:
        self.fresh = self.produced = 0
        self.begun_s = self.first_s = self.last_s = self.due_s = 0.0
        self.wake = asyncio.Event()


class EmulatedStats:
    """What ``EngineStatsLogger`` is for a real engine."""

    def __init__(self, model: EngineModel, time_factor: float) -> None:
        self._model = model
        self._time_factor = time_factor
        self._last = (time.monotonic(), 0.0, 0.0)
        self.on_step: Callable[[], None] | None = None
        self.max_running_requests = model.profile.max_running
        self.block_tokens = model.profile.block_tokens
        self.prefix_cache_blocks = model.profile.kv_tokens // model.profile.block_tokens

    @property
    def load(self) -> EngineLoad:
        """What the engine holds now."""
        model, counters = self._model, self._model.counters
        return EngineLoad(
            running_requests=len(model.running),
            waiting_requests=len(model.waiting),
            deferred_requests=len(model.deferred),
            kv_usage_frac=model.kv_usage_frac,
            output_tokens=counters.output_tokens,
            prefill_tokens=counters.prefill_tokens,
            cached_prefill_tokens=counters.cached_tokens,
        )

    def gpu_report(self) -> dict[str, float]:
        """Since the last call: utilisation, the busy share; SM activity, the share that the steps' rooflines take."""
        now_s, counters = time.monotonic(), self._model.counters
        then_s, busy_s, active_s = self._last
        self._last = (now_s, counters.busy_s, counters.sm_active_s)
        engine_s = max(1e-9, (now_s - then_s) * self._time_factor)
        return {
            "gpu_utilization_frac": min(1.0, (counters.busy_s - busy_s) / engine_s),
            "sm_activity_frac": min(1.0, (counters.sm_active_s - active_s) / engine_s),
        }


class EmulatedClient:
    """The part of vLLM's ``AsyncLLM`` that Tandem uses, over an ``EngineModel`` by the wall clock."""

    def __init__(self, profile: EngineProfile, config: EmulatorConfig, *, max_model_len: int) -> None:
        self.profile = profile
        self.model_config = SimpleNamespace(max_model_len=max_model_len)
        self._model = EngineModel(profile)
        self.stats = EmulatedStats(self._model, config.time_factor)
        self._config = config
        self._streams: dict[ModelRequest, _Stream] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._origin_s = time.monotonic()
        self._unread_until_s: list[float] = []

    def start(self) -> None:
        """Let time pass."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def errored(self) -> bool:
        """Whether the loop has ended."""
        return self._task is not None and self._task.done()

    async def is_paused(self) -> bool:
        """Never: asked to see that the engine answers."""
        return False

    def check(self) -> None:
        """Raise what ended the loop, if it has ended."""
        if self._task is not None and self._task.done():
            self._task.result()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Never full: what there is no room for waits."""

    async def open_front(self, prompt: Any, sampling_params: SamplingParams, request_id: str) -> "_Front":
        """The output side of a request whose first tokens come from another engine."""
        return _Front(request_id, sampling_params.max_tokens or _DEFAULT_OUTPUT_TOKENS)

    def has_first(self, request_id: str) -> bool:
        """Whether a request has its first output token."""
        return any(stream.first_s and request.request_id == request_id for request, stream in self._streams.items())

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._model.forget_prefixes()

    def get_num_queued_tokens(self) -> int:
        """Prompt tokens that wait for their first output token."""
        return self._model.queued_prefill_tokens

    async def notify_kv_transfer_request_rejected(self, request_id: str, params: dict[str, Any]) -> None:
        """What is kept here is let go by the clock."""

    async def collective_rpc(self, method: str, **_: Any) -> list[Any]:
        """What ``deployments.worker_extension`` answers about the GPU, and KV that is still on its way.

        Raises:
            NotImplementedError: another method.
        """
        if method == METHOD_GPU:
            return [self.stats.gpu_report()]
        if method != METHOD_UNREAD_KV:
            raise NotImplementedError(f"the emulated engine has no worker method {method!r}")
        now_s = self._now_s()
        self._unread_until_s = [until_s for until_s in self._unread_until_s if until_s > now_s]
        return [len(self._unread_until_s)]

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Same arguments and outputs as ``AsyncLLM.generate``."""
        ids: Sequence[int] = prompt["prompt_token_ids"]
        transfer = (sampling_params.extra_args or {}).get("kv_transfer_params") or {}
        ready_s = (
            self._now_s() + self.profile.handoff.seconds_for(len(ids)) if transfer.get("do_remote_prefill") else None
        )
        request = ModelRequest(
            request_id=request_id,
            input_tokens=len(ids),
            output_tokens=sampling_params.max_tokens or _DEFAULT_OUTPUT_TOKENS,
            block_hashes=_block_hashes(ids, self.profile.block_tokens, prompt.get("cache_salt") or ""),
            kv_ready_s=ready_s,
        )
        self._model.add(request)
        stream = self._streams[request] = _Stream()
        self._work.set()
        metrics = RequestStateStats(arrival_time=time.time())
        is_whole = sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        produced = 0
        try:
            while produced < request.output_tokens:
                await stream.wake.wait()
                stream.wake.clear()
                fresh, stream.fresh = stream.fresh, 0
                is_last = produced + fresh >= request.output_tokens
                if is_whole and not is_last:
                    stream.fresh = fresh
                    continue
                metrics.scheduled_ts = stream.begun_s
                metrics.first_token_ts, metrics.last_token_ts = stream.first_s, stream.last_s
                new = next_tokens(ids[-1] + produced, fresh)
                output = _output(request_id, new, "length" if is_last else None)
                produced += fresh
                if is_last and transfer.get("do_remote_decode"):
                    self._unread_until_s.append(self._now_s() + self.profile.handoff.seconds_for(len(ids)))
                    output.kv_transfer_params = {"do_remote_prefill": True, "request_id": request_id}
                output.metrics, output.num_cached_tokens = metrics, request.cached_tokens
                yield output
        finally:
            del self._streams[request]
            self._model.abort(request)

    def _now_s(self) -> float:
        """The engine's time."""
        return (time.monotonic() - self._origin_s) * self._config.time_factor

    async def _run(self) -> None:
        at_s = 0.0
        while True:
            # A step that ends late does not move those after it, as long as the engine does not fall far behind.
            at_s = max(at_s, self._now_s() - _MOST_LATE_S * self._config.time_factor)
            step = self._model.plan(at_s)
            if step is None:
                await self._wait()
                at_s = self._now_s()
                continue
            self._begin(step)
            at_s += step.duration_s
            await asyncio.sleep(max(0.0, (at_s - self._now_s()) / self._config.time_factor))
            self._model.apply(step)
            self._show()

    def _begin(self, step: Step) -> None:
        """Note when the engine begins with a prompt."""
        for request, _ in step.chunks:
            if (stream := self._streams.get(request)) is not None:
                stream.begun_s = stream.begun_s or time.monotonic()

    def _show(self) -> None:
        """Let go of first and last tokens at once, of the others a chunk at a time."""
        now_s = time.monotonic()
        for request, stream in self._streams.items():
            produced = self._model.produced(request)
            if produced == stream.produced:
                continue
            stream.fresh += produced - stream.produced
            stream.produced = produced
            stream.first_s = stream.first_s or now_s
            stream.last_s = now_s
            if now_s >= stream.due_s or produced >= request.output_tokens:
                stream.due_s = now_s + self._config.chunk_s
                stream.wake.set()
        if self.stats.on_step is not None:
            self.stats.on_step()

    async def _wait(self) -> None:
        """Until there is something to compute."""
        ready_s = self._model.next_ready_s()
        timeout_s = None if ready_s is None else max(0.0, (ready_s - self._now_s()) / self._config.time_factor)
        self._work.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._work.wait()
        except TimeoutError:
            pass


class _Front:
    """The emulated engine's output side of a request that goes on here (``deployments.resume``)."""

    def __init__(self, request_id: str, max_tokens: int) -> None:
        self._request_id = request_id
        self._max_tokens = max_tokens

    def ends_with(self, output_ids: list[int], input_tokens: int) -> tuple[FinishReason, None] | None:
        """Why the engine would have ended after these tokens, if it would."""
        return (FinishReason.LENGTH, None) if len(output_ids) >= self._max_tokens else None

    def feed(self, token_ids: Sequence[int], reason: FinishReason | None, stop_reason: Any) -> RequestOutput:
        """What the output side makes of more tokens."""
        return _output(self._request_id, token_ids, "length" if reason else None)


class _Json:
    """A whole answer, as the real engine's response objects show it."""

    error = None

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def model_dump_json(self) -> str:
        return json.dumps(self._answer, separators=_COMPACT)


def _output(request_id: str, token_ids: Sequence[int], finish_reason: str | None) -> RequestOutput:
    part = CompletionOutput(
        index=0,
        text=_text(token_ids),
        token_ids=token_ids,
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=finish_reason,
    )
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=None,
        prompt_logprobs=None,
        outputs=[part],
        finished=finish_reason is not None,
    )


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, separators=_COMPACT)}\n\n"


def _text(token_ids: Sequence[int]) -> str:
    return "".join([_WORDS[token % len(_WORDS)] for token in token_ids])


def _tokens(text: str) -> list[int]:
    """A token for every few characters; the same text is always the same tokens."""
    pieces = (text[i : i + _CHARS_PER_TOKEN] for i in range(0, len(text), _CHARS_PER_TOKEN))
    return [zlib.crc32(piece.encode()) for piece in pieces]


def _block_hashes(ids: Sequence[int], block_tokens: int, salt: str) -> list[int]:
    """Of each full block with all before it."""
    hashes: list[int] = []
    last = zlib.crc32(salt.encode())
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        last = hash((last, *ids[start : start + block_tokens]))
        hashes.append(last)
    return hashes
