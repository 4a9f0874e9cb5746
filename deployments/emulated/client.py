"""An emulated engine: the part of vLLM's ``AsyncLLM`` that Tandem uses, and its statistics.

Engine time is the time of its ``EngineModel``. It runs ``time_factor`` times as fast as the clock.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from autoscale.engines.engine_model import EngineModel
from autoscale.engines.engine_step import ModelRequest
from autoscale.engines.prefix_cache import OnChange
from autoscale.engines.profile import EngineProfile
from deployments.emulated.text import next_tokens, text_of
from deployments.pool_config import EmulatorConfig
from deployments.vllm_seam.engine_stats import EngineLoad
from deployments.vllm_seam.engine_types import FinishReason, RequestStateStats
from deployments.vllm_seam.worker_extension import METHOD_GPU, METHOD_UNREAD_KV
from router.engine_blocks import block_seed
from router.prompt_keys import token_keys

DEFAULT_OUTPUT_TOKENS = 128  # length of an answer without max_tokens
# After a late step the engine starts the next steps without a pause until it has caught up. It catches up at most this
# delay, seconds of real time.
_MOST_LATE_S = 0.25


@dataclass(slots=True)
class _Stream:
    """The output of one request. Times are monotonic; 0.0: this has not happened yet."""

    produced: int = 0  # output tokens that the engine has produced
    fresh: int = 0  # of these, tokens that ``generate`` has not yielded yet
    begun_s: float = 0.0  # start of the prefill
    first_s: float = 0.0  # first output token
    last_s: float = 0.0  # last output token
    due_s: float = 0.0  # earliest time of the next output
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set: there is an output to yield


class EmulatedStats:
    """Statistics of an emulated engine, with the interface of ``EngineStatsLogger``."""

    def __init__(self, model: EngineModel, time_factor: float) -> None:
        self._model = model
        self._time_factor = time_factor
        self.pulled_bytes = self.pull_s = 0.0
        self._last = (time.monotonic(), 0.0, 0.0)  # at the last report: the time, ``busy_s`` and ``sm_active_s``
        self.on_step: Callable[[], None] | None = None  # called after every step
        self.max_running_requests = model.profile.max_running
        self.block_tokens = model.profile.block_tokens
        self.kv_tokens = model.profile.kv_tokens
        self.prefix_cache_blocks = model.profile.kv_tokens // model.profile.block_tokens

    @property
    def load(self) -> EngineLoad:
        """The engine's present load."""
        model, counters = self._model, self._model.counters
        return EngineLoad(
            running_requests=len(model.running),
            waiting_requests=len(model.waiting),
            deferred_requests=len(model.deferred),
            kv_usage_frac=model.kv_usage_frac,
            decode_tokens=counters.output_tokens,
            prefill_tokens=counters.prefill_tokens,
            cached_prefill_tokens=counters.cached_tokens,
            pulled_bytes=self.pulled_bytes,
            pull_s=self.pull_s,
            decode_steps=counters.decode_steps,
            decode_steps_s=counters.decode_steps_s / self._time_factor,
            decode_steps_requests=counters.decode_steps_requests,
            decode_steps_kv_tokens=counters.decode_steps_kv_tokens,
        )

    def note_pull(self, size_bytes: float, engine_s: float) -> None:
        """Count a pull of KV; ``engine_s``: its duration in engine time, seconds."""
        self.pulled_bytes += size_bytes
        self.pull_s += engine_s / self._time_factor

    def gpu_report(self) -> dict[str, float]:
        """GPU utilisation and SM activity since the last call, each 0..1.

        Utilisation is the share of time in which steps run. SM activity is the share of time that these steps would
        take at the hardware's limits (``EngineProfile.roofline_s``).
        """
        now_s, counters = time.monotonic(), self._model.counters
        last_s, busy_s, active_s = self._last
        self._last = (now_s, counters.busy_s, counters.sm_active_s)
        engine_s = max(1e-9, (now_s - last_s) * self._time_factor)
        return {
            "gpu_utilization_frac": min(1.0, (counters.busy_s - busy_s) / engine_s),
            "sm_activity_frac": min(1.0, (counters.sm_active_s - active_s) / engine_s),
        }


class EmulatedClient:
    """The part of vLLM's ``AsyncLLM`` that Tandem uses: runs an ``EngineModel``'s steps, and waits while each lasts."""

    def __init__(self, profile: EngineProfile, config: EmulatorConfig, *, max_model_len: int) -> None:
        self.profile = profile
        self.model_config = SimpleNamespace(max_model_len=max_model_len)
        self._model = EngineModel(profile)
        self.stats = EmulatedStats(self._model, config.time_factor)
        self._config = config
        self._streams: dict[ModelRequest, _Stream] = {}
        self._work = asyncio.Event()  # set: a request has come
        self._task: asyncio.Task[None] | None = None
        self._origin_s = time.monotonic()
        self._unread_until_s: list[float] = []  # for each prompt, engine time at which decode has pulled its KV

    def start(self) -> None:
        """Start the engine's loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def errored(self) -> bool:
        """Whether the loop has ended."""
        return self._task is not None and self._task.done()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What vLLM calls the tasks of an engine that generates."""
        return ("generate",)

    async def is_paused(self) -> bool:
        """Never paused; the call shows that the engine answers."""
        return False

    def check(self) -> None:
        """Raise the error that ended the loop, if it has ended."""
        if self._task is not None and self._task.done():
            self._task.result()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Accept every request; one without room waits in the engine's queue."""

    async def open_output_side(self, prompt: Any, sampling_params: SamplingParams, request_id: str) -> "_OutputSide":
        """The object that makes outputs from tokens, to continue a lost replica's request (``replicas.resumption``)."""
        return _OutputSide(request_id, sampling_params.max_tokens or DEFAULT_OUTPUT_TOKENS)

    def has_first(self, request_id: str) -> bool:
        """Whether a request has its first output token."""
        return any(stream.first_s and request.request_id == request_id for request, stream in self._streams.items())

    def follow_cache(self, on_change: OnChange) -> None:
        """Call a function with the keys of the blocks that come into the prefix cache, and of those that leave it."""
        self._model.prefixes.on_change = on_change

    def _block_keys(self, ids: Sequence[int], salt: str) -> tuple[int, ...]:
        tokens = self.profile.block_tokens
        return token_keys(ids, tokens, block_seed(tokens, "", salt)).keys

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._model.prefixes.clear()

    def get_num_queued_tokens(self) -> int:
        """Prompt tokens that wait for their first output token."""
        return self._model.queued_prefill_tokens

    async def notify_kv_transfer_request_rejected(self, request_id: str, params: dict[str, Any]) -> None:
        """Do nothing: an emulated prefill engine counts KV as pulled after the time of a handoff."""

    async def collective_rpc(self, method: str, **_: Any) -> list[Any]:
        """The only worker's answer: GPU figures, or the number of prompts whose KV decode has yet to pull.

        Raises NotImplementedError: another method.
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
        # A decode engine gets ``do_remote_prefill`` (another engine has computed the prompt), a prefill engine
        # ``do_remote_decode`` (another engine will pull the KV).
        transfer = (sampling_params.extra_args or {}).get("kv_transfer_params") or {}
        handoff_s = self.profile.handoff.seconds_for(len(ids))
        request = ModelRequest(
            request_id=request_id,
            input_tokens=len(ids),
            output_tokens=sampling_params.max_tokens or DEFAULT_OUTPUT_TOKENS,
            block_hashes=self._block_keys(ids, prompt.get("cache_salt") or ""),
            kv_ready_s=self._now_s() + handoff_s if transfer.get("do_remote_prefill") else None,
        )
        if request.kv_ready_s is not None:
            handoff = self.profile.handoff
            self.stats.note_pull(len(ids) * handoff.kv_bytes_per_token, handoff_s - handoff.base_s)
        self._model.add(request)
        stream = self._streams[request] = _Stream()
        self._work.set()
        metrics = RequestStateStats(arrival_time=time.time())  # wall clock, as in vLLM; its other times are monotonic
        is_in_one_piece = sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        yielded = 0  # output tokens
        try:
            while yielded < request.output_tokens:
                await stream.wake.wait()
                stream.wake.clear()
                is_last = yielded + stream.fresh >= request.output_tokens
                if is_in_one_piece and not is_last:
                    continue
                fresh, stream.fresh = stream.fresh, 0
                metrics.scheduled_ts = stream.begun_s
                metrics.first_token_ts, metrics.last_token_ts = stream.first_s, stream.last_s
                last_token = ids[-1] + yielded  # each token is the token before it plus one
                output = _output(request_id, next_tokens(last_token, fresh), "length" if is_last else None)
                yielded += fresh
                if is_last and transfer.get("do_remote_decode"):
                    self._unread_until_s.append(self._now_s() + handoff_s)
                    output.kv_transfer_params = {"do_remote_prefill": True, "request_id": request_id}
                output.metrics, output.num_cached_tokens = metrics, request.cached_tokens
                yield output
        finally:
            del self._streams[request]
            self._model.abort(request)

    def _now_s(self) -> float:
        """Engine time, seconds."""
        return (time.monotonic() - self._origin_s) * self._config.time_factor

    async def _run(self) -> None:
        next_s = 0.0  # engine time at which the next step begins, if no step is late
        while True:
            next_s = max(next_s, self._now_s() - _MOST_LATE_S * self._config.time_factor)
            step = self._model.plan(next_s)
            if step is None:
                await self._wait()
                next_s = self._now_s()
                continue
            for request, _ in step.chunks:  # parts of prompts that this step computes
                if (stream := self._streams.get(request)) is not None:
                    stream.begun_s = stream.begun_s or time.monotonic()
            next_s += step.duration_s
            await asyncio.sleep(max(0.0, (next_s - self._now_s()) / self._config.time_factor))
            self._model.apply(step)
            self._wake_streams()

    def _wake_streams(self) -> None:
        """Wake streams with new tokens: for the first and the last token at once, otherwise once per ``chunk_s``."""
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
        """Wait for a new request, or until the next KV has come from prefill."""
        ready_s = self._model.next_ready_s()
        timeout_s = None if ready_s is None else max(0.0, (ready_s - self._now_s()) / self._config.time_factor)
        self._work.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._work.wait()


@dataclass(frozen=True, slots=True)
class _OutputSide:
    """Replaces ``vllm_seam.output_side.OutputSide``: makes outputs from token ids."""

    request_id: str
    max_tokens: int

    def ends_with(self, output_ids: list[int], input_tokens: int) -> tuple[FinishReason, None] | None:
        """The reason to end after these tokens; ``None``: the answer continues."""
        return (FinishReason.LENGTH, None) if len(output_ids) >= self.max_tokens else None

    def feed(self, token_ids: Sequence[int], reason: FinishReason | None, stop_reason: Any) -> RequestOutput:
        """The output for these tokens."""
        return _output(self.request_id, token_ids, "length" if reason else None)


def _output(request_id: str, token_ids: Sequence[int], finish_reason: str | None) -> RequestOutput:
    part = CompletionOutput(
        index=0,
        text=text_of(token_ids),
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
