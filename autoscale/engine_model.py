"""One engine as a model: queue, continuous batching, chunked prefill, KV with preemption, prefix cache (pure).

It is driven step by step: whoever owns the clock asks for the next step, lets its duration pass, and applies it. The
emulator does so by the wall clock, a simulator by its own.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from autoscale.profile import EngineProfile


@dataclass(slots=True, eq=False)
class ModelRequest:
    """A request in an engine.

    Args:
        request_id: its name.
        input_tokens: its prompt.
        output_tokens: what it will generate before it ends, at least 1.
        block_hashes: of the prompt's full blocks, each with all before it, for the prefix cache.
        kv_ready_s: when KV that another engine computed is here; ``None`` where this engine computes it.
    """

    request_id: str
    input_tokens: int
    output_tokens: int
    block_hashes: Sequence[int] = ()
    kv_ready_s: float | None = None
    computed_tokens: int = 0
    produced_tokens: int = 0
    cached_tokens: int = 0
    reserved_tokens: int = 0

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are still to be computed; after a preemption also those that had been produced."""
        return self.input_tokens + self.produced_tokens - self.computed_tokens if self.is_prefilling else 0

    @property
    def is_prefilling(self) -> bool:
        """Whether its next step is prompt, not output."""
        return self.computed_tokens < self.input_tokens + max(0, self.produced_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the engine does next, and how long that takes."""

    duration_s: float
    chunks: tuple[tuple[ModelRequest, int], ...]
    decoding: tuple[ModelRequest, ...]
    flops: float


@dataclass(slots=True)
class ModelCounters:
    """What an engine has done since it started."""

    output_tokens: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    flops: float = 0.0
    steps: int = 0


class EngineModel:
    """An engine of one profile; see the module."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile
        self.counters = ModelCounters()
        self.waiting: deque[ModelRequest] = deque()
        self.deferred: list[ModelRequest] = []
        self.running: list[ModelRequest] = []
        self._used_tokens = 0
        self._cache: OrderedDict[int, None] = OrderedDict()

    @property
    def kv_usage_frac(self) -> float:
        """Share of KV that requests hold; cached prefixes of nobody do not count."""
        return self._used_tokens / self.profile.kv_tokens

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that wait for their first output token."""
        waiting = sum(request.input_tokens for request in self.waiting)
        return waiting + sum(request.prompt_left for request in self.running)

    def add(self, request: ModelRequest) -> None:
        """Take in a request.

        Raises:
            ValueError: it can never fit the engine's KV.
        """
        total = request.input_tokens + request.output_tokens
        if self._blocks(total) > self.profile.kv_tokens:
            raise ValueError(f"{total} tokens do not fit the engine's KV of {self.profile.kv_tokens}")
        if request.kv_ready_s is not None:
            self.deferred.append(request)
        else:
            self.waiting.append(request)

    def abort(self, request: ModelRequest) -> None:
        """Forget a request, wherever it is."""
        for queue in (self.waiting, self.deferred, self.running):
            if request in queue:
                queue.remove(request)
        self._release(request)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._cache.clear()

    def next_ready_s(self) -> float | None:
        """When the next KV from elsewhere is here; ``None`` where none is awaited."""
        return min((r.kv_ready_s for r in self.deferred if r.kv_ready_s is not None), default=None)

    def plan(self, now_s: float) -> Step | None:
        """The next step, or ``None`` while there is nothing to compute."""
        self._take_remote(now_s)
        profile = self.profile
        decoding: list[ModelRequest] = []
        for request in list(self.running):
            if request in self.running and not request.is_prefilling and self._reserve_for_next(request):
                decoding.append(request)
        decoding = [request for request in decoding if request in self.running]
        budget = profile.max_batch_tokens - len(decoding)
        chunks: list[tuple[ModelRequest, int]] = []
        for request in self.running:
            if request.is_prefilling and budget > 0:
                tokens = min(request.prompt_left, budget)
                chunks.append((request, tokens))
                budget -= tokens
        while self.waiting and budget > 0 and len(self.running) < profile.max_running:
            request = self.waiting[0]
            request.cached_tokens = request.computed_tokens = self._cached(request)
            if not self._reserve(request, request.input_tokens + request.produced_tokens + 1):
                request.computed_tokens = 0
                break
            self.waiting.popleft()
            self.running.append(request)
            tokens = min(request.prompt_left, budget)
            chunks.append((request, tokens))
            budget -= tokens
        if not decoding and not chunks:
            return None
        duration_s = self._duration_s(decoding, chunks)
        tokens = len(decoding) + sum(count for _, count in chunks)
        return Step(
            duration_s=duration_s,
            chunks=tuple(chunks),
            decoding=tuple(decoding),
            flops=tokens * profile.flops_per_token,
        )

    def apply(self, step: Step) -> list[ModelRequest]:
        """The step has passed; who got an output token. A request that is done has left the engine."""
        self.counters.busy_s += step.duration_s
        self.counters.flops += step.flops
        self.counters.steps += 1
        produced = []
        for request, tokens in step.chunks:
            if request not in self.running:
                continue  # aborted meanwhile
            request.computed_tokens += tokens
            self.counters.prefill_tokens += tokens
            if not request.is_prefilling:
                self._remember(request)
                produced.append(request)
        for request in step.decoding:
            if request in self.running:
                request.computed_tokens += 1
                produced.append(request)
        for request in produced:
            request.produced_tokens += 1
            self.counters.output_tokens += 1
            if request.produced_tokens >= request.output_tokens:
                self.running.remove(request)
                self._release(request)
        return produced

    def _duration_s(self, decoding: Sequence[ModelRequest], chunks: Sequence[tuple[ModelRequest, int]]) -> float:
        profile = self.profile
        if decoding:
            context = sum(request.computed_tokens for request in decoding) / len(decoding)
            duration_s = profile.decode.seconds_for(len(decoding), context)
        else:
            duration_s = profile.prefill.step_s
        for request, tokens in chunks:
            duration_s += profile.prefill.chunk_s(request.computed_tokens, request.computed_tokens + tokens)
        return duration_s

    def _take_remote(self, now_s: float) -> None:
        """Let requests in whose KV has arrived, in the order of its arrival."""
        ready = [r for r in self.deferred if r.kv_ready_s is not None and r.kv_ready_s <= now_s]
        for request in sorted(ready, key=lambda r: r.kv_ready_s or 0.0):
            if len(self.running) >= self.profile.max_running:
                return
            if not self._reserve(request, request.input_tokens + 1):
                return
            self.deferred.remove(request)
            # The last prompt token is computed again: its logits give the first output token.
            request.cached_tokens = request.input_tokens - 1
            request.computed_tokens = request.input_tokens - 1
            self.running.append(request)

    def _cached(self, request: ModelRequest) -> int:
        """Prompt tokens in the prefix cache; at least the last one is always computed."""
        tokens = 0
        for block in request.block_hashes:
            if block not in self._cache:
                break
            self._cache.move_to_end(block)
            tokens += self.profile.block_tokens
        return min(tokens, request.input_tokens - 1)

    def _remember(self, request: ModelRequest) -> None:
        for block in request.block_hashes:
            self._cache[block] = None
            self._cache.move_to_end(block)
        self._evict()

    def _evict(self) -> None:
        free = self.profile.kv_tokens - self._used_tokens
        while self._cache and len(self._cache) * self.profile.block_tokens > free:
            self._cache.popitem(last=False)

    def _blocks(self, tokens: int) -> int:
        """Tokens rounded up to whole blocks."""
        size = self.profile.block_tokens
        return -(-tokens // size) * size

    def _reserve(self, request: ModelRequest, tokens: int) -> bool:
        more = self._blocks(tokens) - request.reserved_tokens
        if more > self.profile.kv_tokens - self._used_tokens:
            return False
        if more > 0:
            request.reserved_tokens += more
            self._used_tokens += more
            self._evict()
        return True

    def _reserve_for_next(self, request: ModelRequest) -> bool:
        """Room for one more token, at the cost of who came last."""
        while not self._reserve(request, request.computed_tokens + 1):
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: ModelRequest) -> None:
        self.counters.preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.computed_tokens = 0
        request.kv_ready_s = None  # it is computed again here
        self.waiting.appendleft(request)

    def _release(self, request: ModelRequest) -> None:
        self._used_tokens -= request.reserved_tokens
        request.reserved_tokens = 0
