"""Curves of an engine, measured where they bend, and how far they are off at points that were left out."""

import math
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate

import numpy as np
from vllm import AsyncLLMEngine

from autoscale.engines.profile import DecodeSurface, Handoff, PrefillCurve
from autoscale.engines.sampling import next_point
from deployments.profiler.engines import DECODE_STEPS, added_s, handoff_s, prefill_s, step_s
from deployments.profiler.points import Points

# Distance between a curve and the lines between its points that is near enough, as a share of the value: half of what
# points left out may be off, since times vary by some percent from one measurement to the next.
_TOLERANCE_FRAC = 0.05
# Most points of each axis.
_MOST_LENGTHS, _MOST_BATCHES, _MOST_CONTEXTS = 16, 12, 5
_SHORTEST_TOKENS = 16  # the shortest prompt, tokens
_SHORTEST_CONTEXT_TOKENS = 64  # the shortest context of decode steps, tokens: longer than half of ``DECODE_STEPS``
_LARGEST_BATCH = 256
_MOST_REPEATS = 6  # of each measurement; then the median counts
_AGREEMENT_FRAC = 0.04  # two times agree within this share
_WARM_UPS = 3  # runs before the first measurement of an engine
# Each point is measured in two rounds, and the lower time counts: a slow machine may be slow for seconds.
_ROUNDS = (1, 2)
_SEED = 1  # of the points that are left out
_LEFT_OUT = 5  # points of each curve that only test it
_LEAST_MIXED_FRAC = 0.01  # a prompt beside streams adds at least this share: 0 would make prompts free
_HANDOFF_LENGTHS = (128, 512, 1024, 2048, 4000)  # prompts of the measured handoffs, tokens
_BESIDE_LENGTHS = (128, 512)  # prompts that are computed beside decoding requests, tokens

OnProgress = Callable[[str], None]


class Bench:
    """An engine to be measured, with the points that are known."""

    def __init__(
        self, client: AsyncLLMEngine, name: str, points: Points, rng: random.Random, on_progress: OnProgress
    ) -> None:
        """``name``: of the engine, in places and messages."""
        self.client, self._name, self._points, self._rng, self._on_progress = client, name, points, rng, on_progress
        config = client.vllm_config
        self._vocabulary = range(config.model_config.get_vocab_size())
        self.kv_tokens = int(config.cache_config.num_gpu_blocks) * int(config.cache_config.block_size)
        self._longest = int(config.model_config.max_model_len)
        self._largest = min(_LARGEST_BATCH, int(config.scheduler_config.max_num_seqs))

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that no prefix cache has."""
        return self._rng.choices(self._vocabulary, k=tokens)

    async def prefill_curve(self) -> PrefillCurve:
        """Seconds of a prompt by its length."""
        most = self._longest - 1  # the context has to hold the output token too
        for _ in range(_WARM_UPS):
            await prefill_s(self.client, self.prompt(min(most, 1024)))
        measured: dict[int, float] = {}
        while len(measured) < _MOST_LENGTHS:
            tokens = next_point(measured, min(_SHORTEST_TOKENS, most - 1), most, _TOLERANCE_FRAC)
            if tokens is None:
                break
            measured[tokens] = await self._prefill_s(tokens)
        lengths = sorted(measured)
        for tokens in lengths:
            measured[tokens] = min(measured[tokens], await self._prefill_s(tokens, round_number=2))
        # Due to noise a longer prompt may take less time. The curve must not fall: each point is the largest so far.
        return PrefillCurve(
            tokens=tuple(lengths), seconds=tuple(accumulate((measured[tokens] for tokens in lengths), max))
        )

    async def decode_surface(self) -> DecodeSurface:
        """Seconds of a step by batch and context.

        The contexts are chosen for a medium batch, and the batches for the shortest context. A context that does not
        fit a batch is on the line through the two longest that do: a step reads the KV of each token once.
        """
        medium = max(1, round(self._largest**0.5))
        short = _SHORTEST_CONTEXT_TOKENS
        contexts: dict[int, float] = {}
        while len(contexts) < _MOST_CONTEXTS:
            context = next_point(contexts, short, self._longest_context(medium), _TOLERANCE_FRAC)
            if context is None:
                break
            contexts[context] = await self._step_s(medium, context)
        batches: dict[int, float] = {}
        while self._largest > 1 and len(batches) < _MOST_BATCHES:
            batch = next_point(batches, 1, self._largest, _TOLERANCE_FRAC)
            if batch is None:
                break
            batches[batch] = await self._step_s(batch, short)
        axis = sorted(contexts)
        rows = [await self._row(batch, axis) for batch in sorted(batches)]
        return DecodeSurface(
            batch=tuple(sorted(batches)), context_tokens=tuple(axis), step_s=tuple(tuple(row) for row in rows)
        )

    async def _row(self, batch: int, contexts: Sequence[int]) -> list[float]:
        """Seconds of a step of this batch at each context."""
        fitting = [context for context in contexts if context <= self._longest_context(batch)]
        if len(fitting) < 2 and (longest := self._longest_context(batch)) > contexts[0]:
            fitting = [contexts[0], longest]
        row = {
            context: min(await self._step_s(batch, context), await self._step_s(batch, context, round_number=2))
            for context in fitting
        }
        *_, before, last = [0, *sorted(row)]
        slope = (row[last] - row[before]) / (last - before) if before else 0.0
        return [
            round(row[context] if context in row else row[last] + max(0.0, slope) * (context - last), 7)
            for context in contexts
        ]

    async def mixed_prefill_frac(self, curve: PrefillCurve, medium_context: int) -> float:
        """What a prompt adds to the streams beside it, as a share of the time that it adds to an idle engine."""
        batch = max(1, round(self._largest**0.5))
        context = min(medium_context, self._longest_context(batch))
        shares = []
        for tokens in sorted({min(tokens, self._longest - 1) for tokens in _BESIDE_LENGTHS}):
            self._on_progress(f"{self._name}: a prompt of {tokens} tokens beside {batch} streams")

            async def measure(tokens: int = tokens) -> float:
                return await added_s(self.client, self._prompts(batch, context), self.prompt(tokens))

            seconds = await self._points.measured((self._name, "mixed", batch, tokens), lambda: _undisturbed(measure))
            if alone_s := curve.chunk_s(0, tokens):
                shares.append(seconds / alone_s)
        return round(max(_LEAST_MIXED_FRAC, statistics.fmean(shares)), 3) if shares else 1.0

    async def left_out_prefill(self, curve: PrefillCurve) -> list[float]:
        """Relative errors of the curve at lengths between its points, which are drawn at random."""
        rng = random.Random(_SEED)  # the same points in a run that goes on
        lengths = [_between(curve.tokens[0], curve.tokens[-1], rng) for _ in range(_LEFT_OUT)]
        rounds = [[await self._prefill_s(tokens, number) for tokens in lengths] for number in _ROUNDS]
        return [curve.seconds_for(tokens) / min(times) - 1.0 for tokens, *times in zip(lengths, *rounds, strict=True)]

    async def left_out_decode(self, surface: DecodeSurface) -> list[float]:
        """Relative errors of the surface at points between its own, which are drawn at random."""
        rng = random.Random(_SEED)
        places = []
        for _ in range(_LEFT_OUT):
            batch = _between(surface.batch[0], surface.batch[-1], rng)
            longest = min(surface.context_tokens[-1], self._longest_context(batch))
            places.append((batch, _between(surface.context_tokens[0], max(surface.context_tokens[0], longest), rng)))
        rounds = [[await self._step_s(*place, number) for place in places] for number in _ROUNDS]
        return [surface.seconds_for(*place) / min(times) - 1.0 for place, *times in zip(places, *rounds, strict=True)]

    async def _prefill_s(self, tokens: int, round_number: int = 1) -> float:
        self._on_progress(f"{self._name}: prefilling {tokens} tokens")
        return await self._points.measured(
            (self._name, "prefill", tokens, round_number),
            lambda: _undisturbed(lambda: prefill_s(self.client, self.prompt(tokens))),
        )

    async def _step_s(self, batch: int, context: int, round_number: int = 1) -> float:
        self._on_progress(f"{self._name}: decoding {batch} requests at {context} tokens")
        return await self._points.measured(
            (self._name, "decode", batch, context, round_number),
            lambda: _undisturbed(lambda: step_s(self.client, self._prompts(batch, context))),
        )

    def _prompts(self, batch: int, context: int) -> list[list[int]]:
        """Prompts of requests whose context is this long in the middle of a measurement."""
        return [self.prompt(max(1, context - DECODE_STEPS // 2)) for _ in range(batch)]

    def _longest_context(self, batch: int) -> int:
        """The longest context at which a batch fits the KV, with room for the measured steps."""
        longest = min(self._longest, self.kv_tokens // batch) - 2 * DECODE_STEPS
        return max(_SHORTEST_CONTEXT_TOKENS + 1, longest)


async def handoff(prefill: Bench, decode: Bench, points: Points, kv_bytes_per_token: float) -> Handoff:
    """A line through the times of handoffs of several lengths."""
    longest = decode.client.model_config.max_model_len - 8  # leaves room for the output tokens
    lengths = sorted({min(tokens, longest) for tokens in _HANDOFF_LENGTHS})
    for _ in range(_WARM_UPS):  # with the handshake of the engines
        await handoff_s(prefill.client, decode.client, prefill.prompt(lengths[-1]))
    medians = []
    for tokens in lengths:

        async def measure(tokens: int = tokens) -> float:
            return await handoff_s(prefill.client, decode.client, prefill.prompt(tokens))

        medians.append(await points.measured(("handoff", tokens), lambda: _undisturbed(measure)))
    slope, base_s = np.polyfit(lengths, medians, 1)
    # If noise hides the slope, the longest handoff counts as transfer alone: a lower bound of the bandwidth.
    token_s = float(slope) if slope > 0 else medians[-1] / lengths[-1]
    return Handoff(
        base_s=round(max(0.0, float(base_s)), 6),
        kv_bytes_per_token=kv_bytes_per_token,
        bytes_per_s=round(kv_bytes_per_token / token_s),
    )


async def _undisturbed(measure: Callable[[], Awaitable[float]]) -> float:
    """The time of a machine that does nothing else: other work only adds to a time, so the two least must agree."""
    times = [await measure()]
    while len(times) < _MOST_REPEATS:
        times = sorted([*times, await measure()])
        if times[1] <= (1.0 + _AGREEMENT_FRAC) * times[0]:
            return statistics.fmean(times[:2])
    return statistics.median(times)


def _between(least: int, most: int, rng: random.Random) -> int:
    """A number between two others, as likely in each range of equal ratio."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))
