"""Requests, steps and counters of an engine model (pure)."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

# Tolerance for rounding errors: of a number of steps, and of a time in seconds.
EPSILON = 1e-9


@dataclass(slots=True, eq=False)
class ModelRequest:
    """A request in an engine.

    Attributes:
        input_tokens: length of its prompt.
        output_tokens: length of its answer, at least 1.
        block_hashes: one for each full block of the prompt, over the block and all before it, for the prefix cache.
        kv_ready_s: time at which its KV arrives from another engine; ``None``: this engine computes it.
        keeps_kv: whether it keeps its KV after its end, until ``EngineModel.release``, so that another engine pulls it.
        cached_tokens: tokens of the prompt that were in the prefix cache.
        computed_tokens: tokens whose KV is in this engine. While the request decodes, see ``ends_at_step``.
        produced_tokens: output tokens so far. While the request decodes, see ``ends_at_step``.
        reserved_tokens: tokens of KV that it occupies before it decodes, or keeps after its end.
        held_hashes: blocks of its prompt that it holds in the prefix cache.
        ends_at_step: number of the engine's step that gives it its last token; ``None``: it does not decode. While it
            decodes, the engine's present step number is subtracted from ``computed_tokens`` and ``produced_tokens``.
            Both grow by one with each step, so the differences stay constant, and a step changes no request.
    """

    request_id: str
    input_tokens: int
    output_tokens: int
    block_hashes: Sequence[int] = ()
    kv_ready_s: float | None = None
    keeps_kv: bool = False
    cached_tokens: int = 0
    computed_tokens: int = 0
    produced_tokens: int = 0
    reserved_tokens: int = 0
    held_hashes: Sequence[int] = ()
    ends_at_step: int | None = None

    @property
    def prompt_left(self) -> int:
        """Tokens that prefill must still compute: of the prompt and, after a preemption, of the output so far."""
        return self.input_tokens + self.produced_tokens - self.computed_tokens


class Step(NamedTuple):
    """The engine's next work: one step with prompt chunks, or several steps in which all running requests decode.

    ``first_s``: seconds of the first step; each later step takes ``more_s`` longer than the step before it.
    ``chunks``: (request, its prompt tokens in this step); empty: decode only.
    """

    first_s: float
    more_s: float = 0.0
    steps: int = 1
    chunks: tuple[tuple[ModelRequest, int], ...] = ()

    @property
    def duration_s(self) -> float:
        """Time of all steps."""
        return self.time_s(self.steps)

    def time_s(self, steps: int) -> float:
        """Time of the first ``steps`` steps."""
        return steps * (self.first_s + self.more_s * (steps - 1) / 2)

    def ended_by(self, elapsed_s: float) -> int:
        """Number of steps that have ended ``elapsed_s`` after the start of the first one."""
        if elapsed_s <= 0.0:
            return 0
        # The number k solves time_s(k) = elapsed_s, that is more_s / 2 * k^2 + (first_s - more_s / 2) * k = elapsed_s.
        # This form of the solution holds for more_s = 0 too.
        linear = self.first_s - self.more_s / 2
        root = math.sqrt(max(0.0, linear * linear + 2 * self.more_s * elapsed_s))
        return min(self.steps, int(2 * elapsed_s / (linear + root) + EPSILON))

    def begun_by(self, elapsed_s: float) -> int:
        """Number of steps that have begun by ``elapsed_s``, at least 1; a step that has begun cannot be stopped."""
        ended = self.ended_by(elapsed_s)
        is_in_step = self.time_s(ended) < elapsed_s - EPSILON
        begun = ended + 1 if is_in_step else ended
        return min(self.steps, max(1, begun))

    def until(self, steps: int) -> "Step":
        """The first ``steps`` steps."""
        return self._replace(steps=steps)

    def after(self, steps: int) -> "Step":
        """The steps after the first ``steps`` ones."""
        return self._replace(first_s=self.first_s + self.more_s * steps, steps=self.steps - steps)


@dataclass(slots=True)
class ModelCounters:
    """The work of an engine since its start; ``prefill_tokens`` are computed ones.

    ``cached_tokens``: prompt tokens that were in the prefix cache. ``busy_s``: time of its steps. ``sm_active_s``: time
    for which its SMs had work, by the roofline of each step: the longer of arithmetic and memory traffic.
    ``decode_steps``: steps without prompts; the three below are sums over them, of durations, batches and KV.
    """

    output_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    sm_active_s: float = 0.0
    steps: int = 0
    decode_steps: int = 0
    decode_steps_s: float = 0.0
    decode_steps_requests: int = 0
    decode_steps_kv_tokens: int = 0

    def since(self, before: "ModelCounters") -> "ModelCounters":
        """The work since an earlier state of the same counters."""
        return ModelCounters(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))
