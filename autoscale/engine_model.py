"""One engine as a model: queue, continuous batching, chunked prefill, KV with preemption, prefix cache (pure).

Whoever owns the clock asks for what the engine does next, lets its duration pass, and applies it. The emulator does so
step by step by the wall clock. A simulator takes steps in which only decoding happens together, for they are all alike:
every request in the batch gains a token in each, so what they cost and hold is known without looking at any of them.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from autoscale.profile import EngineProfile

_EPSILON = 1e-9
# Of requests that were aborted or preempted, so many are kept among those that decode until they are swept out.
_STALE_ENDS = 64


@dataclass(slots=True, eq=False)
class ModelRequest:
    """A request in an engine.

    Args:
        request_id: its name.
        input_tokens: its prompt.
        output_tokens: what it will generate before it ends, at least 1.
        block_hashes: of the prompt's full blocks, each with all before it, for the prefix cache.
        kv_ready_s: when KV that another engine computed is here; ``None`` where this engine computes it.
        keeps_kv: it holds its KV when it has ended, until ``EngineModel.release``: somebody else is to pull it.
    """

    request_id: str
    input_tokens: int
    output_tokens: int
    block_hashes: Sequence[int] = ()
    kv_ready_s: float | None = None
    keeps_kv: bool = False
    cached_tokens: int = 0
    # Tokens whose KV is here, and output tokens. Both grow by one a step while it decodes, and are as at step 0 then.
    computed_tokens: int = 0
    produced_tokens: int = 0
    reserved_tokens: int = 0
    ends_at_step: int | None = None

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are still to be computed; after a preemption also those that had been produced."""
        return self.input_tokens + self.produced_tokens - self.computed_tokens


class Step(NamedTuple):
    """What the engine does next: one step with prompt chunks, or several in which everyone decodes.

    ``first_s``: what the first of them takes; each takes ``more_s`` more than the one before.
    """

    first_s: float
    more_s: float = 0.0
    steps: int = 1
    decoding: int = 0
    chunks: tuple[tuple[ModelRequest, int], ...] = ()

    @property
    def duration_s(self) -> float:
        """Of all steps."""
        return self.time_s(self.steps)

    def time_s(self, steps: int) -> float:
        """Of the first so many steps."""
        return steps * (self.first_s + self.more_s * (steps - 1) / 2)

    def ended_by(self, elapsed_s: float) -> int:
        """How many steps have ended after a time."""
        if elapsed_s <= 0.0:
            return 0
        # more_s / 2 * k^2 + (first_s - more_s / 2) * k = elapsed_s
        linear = self.first_s - self.more_s / 2
        root = math.sqrt(max(0.0, linear * linear + 2 * self.more_s * elapsed_s))
        return min(self.steps, int(2 * elapsed_s / (linear + root) + _EPSILON))

    def begun_by(self, elapsed_s: float) -> int:
        """How many steps have begun before a time, at least the first; they cannot be stopped."""
        ended = self.ended_by(elapsed_s)
        return min(self.steps, max(1, ended + (self.time_s(ended) < elapsed_s - _EPSILON)))

    def until(self, steps: int) -> "Step":
        """The first so many steps of it."""
        return self._replace(steps=steps)

    def after(self, steps: int) -> "Step":
        """What is left of it after so many steps."""
        return self._replace(first_s=self.first_s + self.more_s * steps, steps=self.steps - steps)


@dataclass(slots=True)
class ModelCounters:
    """What an engine has done since it started.

    ``cached_tokens``: of prompts, that were in the prefix cache and so not computed. ``sm_active_s``: for how long its
    SMs had work, by the roofline of each step: what takes longer, its arithmetic or its memory.
    """

    output_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    sm_active_s: float = 0.0
    steps: int = 0

    def since(self, before: "ModelCounters") -> "ModelCounters":
        """What has been done since it had done so much."""
        return ModelCounters(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


class EngineModel:
    """An engine of one profile; see the module."""

    def __init__(self, profile: EngineProfile, prefix_block_tokens: int | None = None) -> None:
        """An idle engine.

        Args:
            profile: how fast it is, and what it holds.
            prefix_block_tokens: how many tokens each of ``ModelRequest.block_hashes`` stands for; the engine's block.
        """
        self.profile = profile
        self._prefix_block_tokens = prefix_block_tokens or profile.block_tokens
        self.counters = ModelCounters()
        self.waiting: deque[ModelRequest] = deque()
        self.deferred: list[ModelRequest] = []
        # In the order in which they came in; those with prompt left to compute are also in the second one.
        self.running: dict[ModelRequest, None] = {}
        self._prefilling: dict[ModelRequest, None] = {}
        self.queued_prefill_tokens = 0
        self._used_tokens = 0
        self._cache: OrderedDict[int, None] = OrderedDict()
        # All requests that decode, together: their number, the tokens of their KV, and by the length of that KV
        # modulo the block's, each as if at step 0.
        self._step = 0
        self._decoding = 0
        self._context_tokens = 0
        self._by_phase = [0] * profile.block_tokens
        self._ends: list[tuple[int, int, ModelRequest]] = []
        self._begun = 0
        self._fresh: list[ModelRequest] = []  # decode, and have no token yet

    @property
    def kv_usage_frac(self) -> float:
        """Share of KV that requests hold; cached prefixes of nobody do not count."""
        return self._used_tokens / self.profile.kv_tokens

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
            self.queued_prefill_tokens += request.input_tokens

    def abort(self, request: ModelRequest) -> None:
        """Forget a request, wherever it is."""
        if request in self.running:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.queued_prefill_tokens -= request.prompt_left
        elif request in self.deferred:
            self.deferred.remove(request)

    def release(self, request: ModelRequest) -> None:
        """Give back the KV of a request that has ended in its first step."""
        self._used_tokens -= request.reserved_tokens
        request.reserved_tokens = 0

    def cached_tokens(self, block_hashes: Sequence[int]) -> int:
        """Leading tokens of a prompt that are in the prefix cache, without touching them."""
        found = 0
        for block in block_hashes:
            if block not in self._cache:
                break
            found += 1
        return found * self._prefix_block_tokens

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._cache.clear()

    def next_ready_s(self) -> float | None:
        """When the next KV from elsewhere is here; ``None`` where none is awaited."""
        return min((r.kv_ready_s for r in self.deferred if r.kv_ready_s is not None), default=None)

    def produced(self, request: ModelRequest) -> int:
        """Output tokens of a request so far."""
        return request.produced_tokens + (self._step if request.ends_at_step is not None else 0)

    def plan(self, now_s: float, most_steps: int = 1) -> Step | None:
        """What comes next, at most so many steps; ``None`` while there is nothing to compute."""
        if self._decoding:
            self._make_room()
        if self.deferred:
            self._take_remote(now_s)
        chunks = self._chunks() if self._prefilling or self.waiting else ()
        if not chunks:
            return self._decode_steps(most_steps) if self._decoding else None
        prefill = self.profile.prefill
        duration_s = self._decode_line()[0] if self._decoding else prefill.step_s
        for request, tokens in chunks:
            duration_s += prefill.chunk_s(request.computed_tokens, request.computed_tokens + tokens)
        return Step(first_s=duration_s, decoding=self._decoding, chunks=tuple(chunks))

    def apply(self, step: Step, steps: int | None = None) -> tuple[list[ModelRequest], list[ModelRequest]]:
        """Steps have passed: all of them, or the first few of those in which only decoding happens.

        Returns:
            Who got its first token, at the end of the first step, and who its last one, at the end of the last, and has
            left the engine.
        """
        done = step.steps if steps is None else steps
        if not done:
            return [], []
        counters = self.counters
        counters.busy_s += step.time_s(done)
        counters.steps += done
        decoding, context_tokens, prompt_tokens = self._decoding, self._context_tokens, 0
        counters.output_tokens += decoding * done
        first, self._fresh = self._fresh, []
        for request in first:
            self._remember(request)
        self._grow(done)
        ended = self._pop_ended()
        for request, count in step.chunks:
            if request not in self._prefilling:
                continue  # aborted meanwhile
            prompt_tokens += count
            counters.prefill_tokens += count
            self.queued_prefill_tokens -= count
            request.computed_tokens += count
            if request.prompt_left:
                continue
            del self._prefilling[request]
            self._remember(request)
            request.produced_tokens += 1
            counters.output_tokens += 1
            if request.produced_tokens == 1:
                first.append(request)
            if request.produced_tokens == request.output_tokens:
                del self.running[request]
                if not request.keeps_kv:
                    self.release(request)
                ended.append(request)
            else:
                self._join(request)
        counters.sm_active_s += self.profile.roofline_s(
            decoding + prompt_tokens, context_tokens, more_tokens=decoding, steps=done
        )
        return first, ended

    def _decode_line(self) -> tuple[float, float, float]:
        return self.profile.decode.line(self._decoding, self._context_tokens / self._decoding)

    def _decode_steps(self, most_steps: int) -> Step:
        """Steps until someone leaves, KV runs out, or the next point of the profile."""
        first_s, more_s, knot_tokens = self._decode_line()
        if most_steps > 1:
            ends = self._ends
            while ends[0][2].ends_at_step != ends[0][0]:
                heappop(ends)  # preempted or aborted
            to_knot = knot_tokens - self._context_tokens / self._decoding
            most_steps = min(most_steps, ends[0][0] - self._step)
            if to_knot < most_steps:
                most_steps = int(to_knot) + 1
            most_steps = self._steps_with_room(most_steps)
        return Step(first_s=first_s, more_s=more_s, steps=most_steps, decoding=self._decoding)

    def _chunks(self) -> list[tuple[ModelRequest, int]]:
        """Prompt tokens of the next step, those of requests that come in now too."""
        profile = self.profile
        budget = profile.max_batch_tokens - self._decoding
        chunks: list[tuple[ModelRequest, int]] = []
        for request in self._prefilling:
            if budget <= 0:
                break
            tokens = min(request.prompt_left, budget)
            chunks.append((request, tokens))
            budget -= tokens
        while self.waiting and budget > 0 and len(self.running) < profile.max_running:
            request = self.waiting[0]
            needed = self._blocks(request.input_tokens + request.produced_tokens + 1)
            cached = self._cached(request)
            if not self._has_room(needed):
                break
            self.waiting.popleft()
            request.cached_tokens = request.computed_tokens = cached
            self.counters.cached_tokens += cached
            self.queued_prefill_tokens -= cached
            request.reserved_tokens = needed
            self._used_tokens += needed
            self._evict()
            self.running[request] = self._prefilling[request] = None
            tokens = min(request.prompt_left, budget)
            chunks.append((request, tokens))
            budget -= tokens
        return chunks

    def _take_remote(self, now_s: float) -> None:
        """Let requests in whose KV has arrived, in the order of its arrival."""
        ready = [r for r in self.deferred if r.kv_ready_s is not None and r.kv_ready_s <= now_s + _EPSILON]
        ready.sort(key=lambda r: r.kv_ready_s or 0.0)
        for request in ready:
            needed = self._blocks(request.input_tokens + 1)
            if len(self.running) >= self.profile.max_running or not self._has_room(needed):
                return
            self.deferred.remove(request)
            self.running[request] = None
            # The last prompt token is computed again, as in a decode step: its logits give the first output token.
            request.cached_tokens = request.computed_tokens = request.input_tokens - 1
            self.counters.prefill_tokens += 1
            self._fresh.append(request)
            self._join(request)

    def _join(self, request: ModelRequest) -> None:
        """From the next step on it decodes."""
        computed = request.computed_tokens
        self._used_tokens += self._blocks(computed) - request.reserved_tokens
        request.reserved_tokens = 0
        self._evict()
        request.computed_tokens -= self._step
        request.produced_tokens -= self._step
        request.ends_at_step = request.output_tokens - request.produced_tokens
        self._decoding += 1
        self._context_tokens += computed
        self._by_phase[request.computed_tokens % self.profile.block_tokens] += 1
        self._begun += 1
        heappush(self._ends, (request.ends_at_step, self._begun, request))
        if len(self._ends) > 2 * self._decoding + _STALE_ENDS:
            self._ends = [entry for entry in self._ends if entry[2].ends_at_step == entry[0]]
            heapify(self._ends)

    def _unjoin(self, request: ModelRequest) -> None:
        """It decodes no more and holds no KV."""
        self._by_phase[request.computed_tokens % self.profile.block_tokens] -= 1
        request.computed_tokens += self._step
        request.produced_tokens += self._step
        request.ends_at_step = None
        self._decoding -= 1
        self._context_tokens -= request.computed_tokens
        self._used_tokens -= self._blocks(request.computed_tokens)

    def _pop_ended(self) -> list[ModelRequest]:
        ended, ends = [], self._ends
        while ends and ends[0][0] <= self._step:
            end, _, request = heappop(ends)
            if request.ends_at_step == end:
                self._unjoin(request)
                del self.running[request]
                ended.append(request)
        return ended

    def _has_room(self, tokens: int) -> bool:
        """Whether so much KV is free beside what those who decode take next, in whichever step."""
        return tokens + max(self._by_phase) * self.profile.block_tokens <= self.profile.kv_tokens - self._used_tokens

    def _due_tokens(self, after_steps: int = 0) -> int:
        """KV that the step after so many more takes: whoever's last block is full gets another."""
        block = self.profile.block_tokens
        return self._by_phase[-(self._step + after_steps) % block] * block

    def _make_room(self) -> None:
        """Free the KV that the next step takes, at the cost of who came last."""
        while self._due_tokens() > self.profile.kv_tokens - self._used_tokens:
            self._preempt(next(reversed(self.running)))

    def _steps_with_room(self, most_steps: int) -> int:
        """How many steps KV lasts for, at most so many."""
        block = self.profile.block_tokens
        free = self.profile.kv_tokens - self._used_tokens
        each_cycle = self._decoding * block
        if (most_steps // block + 1) * each_cycle <= free:
            return most_steps
        cycles = min(most_steps // block, free // each_cycle)
        free -= cycles * each_cycle
        steps = cycles * block
        while steps < most_steps and (due := self._due_tokens(steps)) <= free:
            free -= due
            steps += 1
        return steps

    def _grow(self, steps: int) -> None:
        """Everyone who decodes has got so many tokens more."""
        if not self._decoding:
            return
        block = self.profile.block_tokens
        cycles, rest = divmod(steps, block)
        # As _due_tokens of each step that is left: whose KV ends there, and the next ones from it downwards.
        last = -self._step % block + 1
        blocks = sum(self._by_phase[max(0, last - rest) : last])
        if rest > last:
            blocks += sum(self._by_phase[block + last - rest :])
        taken = (cycles * self._decoding + blocks) * block
        self._used_tokens += taken
        self._context_tokens += self._decoding * steps
        self._step += steps
        if taken:
            self._evict()

    def _cached(self, request: ModelRequest) -> int:
        """Prompt tokens in the prefix cache; at least the last one is always computed."""
        tokens = 0
        for block in request.block_hashes:
            if block not in self._cache:
                break
            self._cache.move_to_end(block)
            tokens += self._prefix_block_tokens
        return min(tokens, request.input_tokens - 1)

    def _remember(self, request: ModelRequest) -> None:
        for block in request.block_hashes:
            self._cache[block] = None
            self._cache.move_to_end(block)
        self._evict()

    def _evict(self) -> None:
        if self._cache:
            free = self.profile.kv_tokens - self._used_tokens
            while self._cache and len(self._cache) * self._prefix_block_tokens > free:
                self._cache.popitem(last=False)

    def _blocks(self, tokens: int) -> int:
        """Tokens rounded up to whole blocks."""
        size = self.profile.block_tokens
        return -(-tokens // size) * size

    def _preempt(self, request: ModelRequest) -> None:
        self.counters.preemptions += 1
        self._leave(request)
        request.computed_tokens = 0
        request.kv_ready_s = None  # it is computed again here
        self.waiting.appendleft(request)
        self.queued_prefill_tokens += request.prompt_left

    def _leave(self, request: ModelRequest) -> None:
        del self.running[request]
        if request.ends_at_step is not None:
            self._unjoin(request)
            if request in self._fresh:
                self._fresh.remove(request)
            return
        del self._prefilling[request]
        self.queued_prefill_tokens -= request.prompt_left
        self._used_tokens -= request.reserved_tokens
        request.reserved_tokens = 0
