"""One engine as a model: queue, continuous batching, chunked prefill, KV with preemption, prefix cache (pure).

The model has no clock: the emulator or the simulator calls ``plan``, lets the time of the planned steps pass, and calls
``apply``. The emulator plans one step at a time, by the wall clock. The simulator plans many decode-only steps at once:
every request in the batch gains a token in each of them. So sums over the batch give the steps' time and KV, without a
loop over requests.

The phase of a request is its KV length modulo the block's length. A request needs another block in the step that begins
with full blocks, which is phase 0.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from autoscale.engines.engine_step import EPSILON, ModelCounters, ModelRequest, Step
from autoscale.engines.prefix_cache import PrefixCache
from autoscale.engines.profile import EngineProfile

# The heap of ends may have this number of entries more than twice the requests that decode. Then entries of aborted and
# preempted requests are removed: rarely enough to cost little.
_STALE_ENDS = 64


class EngineModel:
    """An engine with the speed and the KV of one profile."""

    def __init__(self, profile: EngineProfile, prefix_block_tokens: int | None = None) -> None:
        """``prefix_block_tokens``: tokens in each block of ``block_hashes``; ``None``: as many as in a KV block."""
        self.profile = profile
        self.counters = ModelCounters()
        self.waiting: deque[ModelRequest] = deque()  # requests to prefill here, the next one first
        self.deferred: list[ModelRequest] = []  # requests whose KV comes from another engine
        # Running requests in the order of admission. Requests that still prefill are in ``_prefilling`` too.
        self.running: dict[ModelRequest, None] = {}
        self._prefilling: dict[ModelRequest, None] = {}
        self.queued_prefill_tokens = 0  # tokens that waiting and prefilling requests must still compute
        self._used_tokens = 0  # KV that requests occupy, in whole blocks, as if none shared any
        self.prefixes = PrefixCache(prefix_block_tokens or profile.block_tokens)
        self._step = 0  # number of steps with decoding requests so far
        # Requests that decode: their number, the tokens of their KV, and their number by phase at step 0. With each
        # step all phases grow by one. So the list does not change: requests of index i now have phase i + _step, modulo
        # the block's length.
        self._decoding = 0
        self._context_tokens = 0
        self._by_phase = [0] * profile.block_tokens
        # Heap of (last step, number, request); the number orders requests with the same last step. Entries of preempted
        # and aborted requests may remain.
        self._ends: list[tuple[int, int, ModelRequest]] = []
        self._last_number = 0
        self._without_token: list[ModelRequest] = []  # requests that decode and have no token yet

    @property
    def kv_usage_frac(self) -> float:
        """Share of the KV that requests occupy, without prefixes that are only cached."""
        return self._occupied_tokens / self.profile.kv_tokens

    @property
    def _occupied_tokens(self) -> int:
        """KV that requests occupy; cached blocks that several of them hold count once."""
        return self._used_tokens - self.prefixes.shared_tokens

    def add(self, request: ModelRequest) -> None:
        """Take in a request; a ValueError if it can never fit the engine's KV."""
        total = request.input_tokens + request.output_tokens
        if self._in_blocks(total) > self.profile.kv_tokens:
            raise ValueError(f"{total} tokens do not fit the engine's KV of {self.profile.kv_tokens}")
        if request.kv_ready_s is not None:
            self.deferred.append(request)
        else:
            self.waiting.append(request)
            self.queued_prefill_tokens += request.input_tokens

    def abort(self, request: ModelRequest) -> None:
        """Remove a request that has not ended, whether it runs, waits or is deferred."""
        if request in self.running:
            self._remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.queued_prefill_tokens -= request.prompt_left
        elif request in self.deferred:
            self.deferred.remove(request)

    def release(self, request: ModelRequest) -> None:
        """Free the KV that a request reserves before it decodes, or keeps after its end."""
        self._unreserve(request)
        self._release_blocks(request)

    def next_ready_s(self) -> float | None:
        """When the next KV arrives from another engine; ``None``: no request waits for KV."""
        return min((r.kv_ready_s for r in self.deferred if r.kv_ready_s is not None), default=None)

    def produced(self, request: ModelRequest) -> int:
        """Output tokens of a request so far."""
        return request.produced_tokens + (self._step if request.ends_at_step is not None else 0)

    def plan(self, now_s: float, most_steps: int = 1) -> Step | None:
        """The next work, at most ``most_steps`` steps; ``None``: there is nothing to compute.

        Requests may be preempted and admitted here; ``apply`` lets them compute.
        """
        # If the next step takes more KV than is free, preempt the requests that were admitted last.
        while self._due_tokens() > self.profile.kv_tokens - self._occupied_tokens:
            self._preempt(next(reversed(self.running)))
        if self.deferred:
            self._admit_deferred(now_s)
        chunks = self._chunks() if self._prefilling or self.waiting else ()
        if not chunks:
            return self._decode_steps(most_steps) if self._decoding else None
        prefill = self.profile.prefill
        duration_s = self._decode_line(is_beside_prompts=True)[0] if self._decoding else prefill.step_s
        factor = self.profile.mixed_prefill_frac if self._decoding else 1.0
        for request, tokens in chunks:
            duration_s += factor * prefill.chunk_s(request.computed_tokens, request.computed_tokens + tokens)
        return Step(first_s=duration_s, chunks=tuple(chunks))

    def apply(self, step: Step, steps: int | None = None) -> tuple[list[ModelRequest], list[ModelRequest]]:
        """Let a plan's steps pass: all of them, or the first ``steps`` of decode-only steps.

        Returns two lists: requests that get their first token at the end of the first step, and requests that get their
        last token at the end of the last step. The latter have left the engine.
        """
        done = step.steps if steps is None else steps
        counters = self.counters
        counters.busy_s += step.time_s(done)
        counters.steps += done
        decoding, context_tokens, prompt_tokens = self._decoding, self._context_tokens, 0
        counters.output_tokens += decoding * done
        if not step.chunks:
            counters.decode_steps += done
            counters.decode_steps_s += step.time_s(done)
            counters.decode_steps_requests += decoding * done
            # Each request gains a token in each step.
            counters.decode_steps_kv_tokens += done * context_tokens + decoding * (done * (done - 1) // 2)
        first, self._without_token = self._without_token, []
        for request in first:
            self._cache(request, len(request.block_hashes))
        self._grow(done)
        ended = self._pop_ended()
        # The chunks come last: a request whose prompt ends in this step decodes from the next step on.
        if step.chunks:
            prompt_tokens = self._apply_chunks(step.chunks, first, ended)
        counters.sm_active_s += self.profile.roofline_s(
            decoding + prompt_tokens, context_tokens, more_tokens=decoding, steps=done
        )
        return first, ended

    def _apply_chunks(
        self, chunks: Sequence[tuple[ModelRequest, int]], first: list[ModelRequest], ended: list[ModelRequest]
    ) -> int:
        """Compute the chunks, and return their prompt tokens.

        Adds to the lists of requests with their first and with their last token.
        """
        counters, total = self.counters, 0
        for request, tokens in chunks:
            if request not in self._prefilling:
                continue  # aborted in the meantime
            total += tokens
            counters.prefill_tokens += tokens
            self.queued_prefill_tokens -= tokens
            request.computed_tokens += tokens
            self._cache(request, request.computed_tokens // self.prefixes.block_tokens)
            if request.prompt_left:
                continue
            del self._prefilling[request]
            request.produced_tokens += 1
            counters.output_tokens += 1
            if request.produced_tokens == 1:
                first.append(request)
            if request.produced_tokens < request.output_tokens:
                self._start_decoding(request)
                continue
            del self.running[request]
            if not request.keeps_kv:
                self.release(request)
            ended.append(request)
        return total

    def _decode_line(self, *, is_beside_prompts: bool = False) -> tuple[float, float, float]:
        """``DecodeSurface.line`` of the present batch."""
        beside = self.profile.decode_beside_prompts if is_beside_prompts else None
        return (beside or self.profile.decode).line(self._decoding, self._context_tokens / self._decoding)

    def _decode_steps(self, most_steps: int) -> Step:
        """Steps until a request ends, KV runs out, or the mean context reaches the line's knot."""
        first_s, more_s, knot_tokens = self._decode_line()
        if most_steps > 1:
            ends = self._ends
            while ends[0][2].ends_at_step != ends[0][0]:
                heappop(ends)  # preempted or aborted
            most_steps = min(most_steps, ends[0][0] - self._step)
            # The mean context grows by one token in each step. A step that begins before the knot is on the line.
            steps_to_knot = knot_tokens - self._context_tokens / self._decoding
            if steps_to_knot < most_steps:
                most_steps = int(steps_to_knot) + 1
            most_steps = self._steps_with_room(most_steps)
        return Step(first_s=first_s, more_s=more_s, steps=most_steps)

    def _chunks(self) -> list[tuple[ModelRequest, int]]:
        """Prompt tokens of the next step, by request; admits waiting requests in their order."""
        # Tokens of the step that are left for prompts: each request that decodes takes one.
        budget = self.profile.max_batch_tokens - self._decoding
        chunks: list[tuple[ModelRequest, int]] = []
        for request in self._prefilling:
            if budget <= 0:
                break
            chunks.append((request, min(request.prompt_left, budget)))
            budget -= chunks[-1][1]
        while self.waiting and budget > 0 and len(self.running) < self.profile.max_running:
            request = self.waiting[0]
            needed = self._in_blocks(request.input_tokens + request.produced_tokens + 1)
            if not self._has_room(needed - self.prefixes.leading_held_tokens(request.block_hashes)):
                break
            # The last prompt token is always computed: its logits give the first output token.
            cached = min(self._hold_cached(request), request.input_tokens - 1)
            self.waiting.popleft()
            request.cached_tokens = request.computed_tokens = cached
            self.counters.cached_tokens += cached
            self.queued_prefill_tokens -= cached
            request.reserved_tokens = needed
            self._used_tokens += needed
            self._evict()
            self.running[request] = self._prefilling[request] = None
            chunks.append((request, min(request.prompt_left, budget)))
            budget -= chunks[-1][1]
        return chunks

    def _admit_deferred(self, now_s: float) -> None:
        """Admit requests whose KV has arrived, in the order in which it arrived."""
        ready = [r for r in self.deferred if r.kv_ready_s is not None and r.kv_ready_s <= now_s + EPSILON]
        ready.sort(key=lambda r: r.kv_ready_s or 0.0)
        for request in ready:
            needed = self._in_blocks(request.input_tokens + 1)
            held_tokens = self.prefixes.leading_held_tokens(request.block_hashes)
            if len(self.running) >= self.profile.max_running or not self._has_room(needed - held_tokens):
                return
            self.deferred.remove(request)
            self._hold_cached(request)
            self.running[request] = None
            # The last prompt token is computed again, as in a decode step, for its logits.
            request.cached_tokens = request.computed_tokens = request.input_tokens - 1
            self.counters.prefill_tokens += 1
            self._without_token.append(request)
            self._start_decoding(request)

    def _start_decoding(self, request: ModelRequest) -> None:
        """Let a request decode from the next step on."""
        computed = request.computed_tokens
        self._unreserve(request)
        self._used_tokens += self._in_blocks(computed)
        self._evict()
        # While the request decodes, both are stored as their value at step 0: see ``ModelRequest.ends_at_step``.
        request.computed_tokens -= self._step
        request.produced_tokens -= self._step
        request.ends_at_step = request.output_tokens - request.produced_tokens
        self._decoding += 1
        self._context_tokens += computed
        self._by_phase[request.computed_tokens % self.profile.block_tokens] += 1
        self._last_number += 1
        heappush(self._ends, (request.ends_at_step, self._last_number, request))
        if len(self._ends) > 2 * self._decoding + _STALE_ENDS:
            self._ends = [entry for entry in self._ends if entry[2].ends_at_step == entry[0]]
            heapify(self._ends)

    def _stop_decoding(self, request: ModelRequest) -> None:
        """Take a request, with its KV, out of the sums over requests that decode."""
        self._by_phase[request.computed_tokens % self.profile.block_tokens] -= 1
        request.computed_tokens += self._step
        request.produced_tokens += self._step
        request.ends_at_step = None
        self._decoding -= 1
        self._context_tokens -= request.computed_tokens
        self._used_tokens -= self._in_blocks(request.computed_tokens)

    def _pop_ended(self) -> list[ModelRequest]:
        """Remove and return the decoding requests that have their last token."""
        ended, ends = [], self._ends
        while ends and ends[0][0] <= self._step:
            last_step, _, request = heappop(ends)
            if request.ends_at_step == last_step:
                self._stop_decoding(request)
                self._release_blocks(request)
                del self.running[request]
                ended.append(request)
        return ended

    def _has_room(self, tokens: int) -> bool:
        """Whether ``tokens`` of KV are free, besides the most that decoding requests take in any one step.

        Without this reserve, admission would depend on the number of steps that are planned at once.
        """
        most_in_a_step = max(self._by_phase) * self.profile.block_tokens
        return tokens + most_in_a_step <= self.profile.kv_tokens - self._occupied_tokens

    def _due_tokens(self, after_steps: int = 0) -> int:
        """KV tokens that the step ``after_steps`` from now takes: each request with full blocks gets another block."""
        block = self.profile.block_tokens
        phase_at_start = -(self._step + after_steps) % block  # it is phase 0 in that step
        return self._by_phase[phase_at_start] * block

    def _steps_with_room(self, most_steps: int) -> int:
        """Number of steps for which the free KV suffices, at most ``most_steps``."""
        block = self.profile.block_tokens
        free = self.profile.kv_tokens - self._occupied_tokens
        # In a cycle of ``block`` steps each request takes one block: whole cycles first, then single steps.
        cycle_tokens = self._decoding * block
        if (most_steps // block + 1) * cycle_tokens <= free:
            return most_steps
        cycles = min(most_steps // block, free // cycle_tokens)
        free -= cycles * cycle_tokens
        steps = cycles * block
        while steps < most_steps and (due := self._due_tokens(steps)) <= free:
            free -= due
            steps += 1
        return steps

    def _grow(self, steps: int) -> None:
        """Let every decoding request gain a token in each of some steps."""
        if not self._decoding:
            return
        block = self.profile.block_tokens
        # In a cycle of ``block`` steps each request takes one block. In each of the ``rest`` steps, the requests of one
        # entry of _by_phase take a block each (see ``_due_tokens``). The first entry is the one before ``end``. The
        # index falls by one with each step, and after 0 it continues at the end of the list.
        cycles, rest = divmod(steps, block)
        end = -self._step % block + 1
        blocks = sum(self._by_phase[max(0, end - rest) : end])
        if rest > end:
            blocks += sum(self._by_phase[block + end - rest :])
        taken = (cycles * self._decoding + blocks) * block
        self._used_tokens += taken
        self._context_tokens += self._decoding * steps
        self._step += steps
        if taken:
            self._evict()

    def _cache(self, request: ModelRequest, blocks: int) -> None:
        """Put the first blocks of a prompt, which are computed, into the prefix cache; its request holds them."""
        held = len(request.held_hashes)
        if blocks > held:
            self.prefixes.hold(request.block_hashes[held:blocks])
            request.held_hashes = request.block_hashes[:blocks]
            self._evict()

    def _hold_cached(self, request: ModelRequest) -> int:
        """Let a request hold the blocks of its prompt that are cached; returns their tokens."""
        tokens = self.prefixes.leading_tokens(request.block_hashes)
        request.held_hashes = request.block_hashes[: tokens // self.prefixes.block_tokens]
        self.prefixes.hold(request.held_hashes)
        return tokens

    def _unreserve(self, request: ModelRequest) -> None:
        """Free the KV that a request reserves, without the blocks that it holds in the prefix cache."""
        self._used_tokens -= request.reserved_tokens
        request.reserved_tokens = 0

    def _release_blocks(self, request: ModelRequest) -> None:
        """Let a request hold no blocks in the prefix cache; they stay there while there is room."""
        self.prefixes.release(request.held_hashes)
        request.held_hashes = ()
        self._evict()

    def _evict(self) -> None:
        """Shrink the prefix cache to the KV that no request occupies."""
        self.prefixes.shrink_to(self.profile.kv_tokens - self._occupied_tokens)

    def _in_blocks(self, tokens: int) -> int:
        """Tokens rounded up to whole blocks."""
        block = self.profile.block_tokens
        return (tokens + block - 1) // block * block

    def _preempt(self, request: ModelRequest) -> None:
        """Free the KV of a running request, which waits again and is computed from the start."""
        self.counters.preemptions += 1
        self._remove(request)
        request.computed_tokens = 0
        request.kv_ready_s = None  # this engine computes its prompt, even if the KV came from another engine
        self.waiting.appendleft(request)
        self.queued_prefill_tokens += request.prompt_left

    def _remove(self, request: ModelRequest) -> None:
        """Take a running request out of the engine, and free its KV."""
        del self.running[request]
        if request.ends_at_step is not None:
            self._stop_decoding(request)
            self._release_blocks(request)
            if request in self._without_token:
                self._without_token.remove(request)
            return
        del self._prefilling[request]
        self.queued_prefill_tokens -= request.prompt_left
        self.release(request)
