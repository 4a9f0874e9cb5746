"""An engine to be measured: which places of its curves, and how each is measured."""

import math
import random

from vllm import AsyncLLMEngine

from autoscale.engines.form import Place, ladder, prompt_terms, step_terms
from autoscale.engines.repeats import between
from autoscale.engines.sampling import Survey
from deployments.profiler.engines import DECODE_STEPS, added_s, prefill_s, step_s
from deployments.profiler.pace import Pace
from deployments.profiler.rounds import Track, places_track, survey_track

_SHORTEST_TOKENS = 16  # the shortest prompt, tokens
_SHORTEST_CONTEXT_TOKENS = 64  # the shortest context of decode steps, tokens: longer than half of ``DECODE_STEPS``
_LARGEST_BATCH = 256
# Ratio of two lengths, or batches, of the first rounds. At 2 all batches would be sizes of CUDA graphs, which need no
# padding.
_AXIS_RATIO = 1.7
_REPEATS = 3  # prompts of one measurement, whose least time counts
_PACE_TOKENS = 128  # the reference prompt: short enough to cost little, long enough to keep an engine's cores busy
_WARM_UPS = 3  # runs before the first measurement of an engine
_SEED = 1  # of the places that are left out
_LEFT_OUT = 8  # places of each curve that only test it
_BESIDE_LENGTHS = (128, 512)  # prompts that are computed beside decoding requests, tokens


class Bench:
    """An engine to be measured."""

    def __init__(self, client: AsyncLLMEngine, name: str, rng: random.Random) -> None:
        """``name``: of the engine, in stored places and messages."""
        self.client, self.name, self._rng = client, name, rng
        config = client.vllm_config
        self._vocabulary = range(config.model_config.get_vocab_size())
        self._salt = rng.random()
        self.kv_tokens = int(config.cache_config.num_gpu_blocks) * int(config.cache_config.block_size)
        self.longest = int(config.model_config.max_model_len)
        self._largest = min(_LARGEST_BATCH, int(config.scheduler_config.max_num_seqs))
        self._medium = max(1, round(self._largest**0.5))  # batch of a middling load
        self.max_batch_tokens = int(config.scheduler_config.max_num_batched_tokens)
        reference = (min(_PACE_TOKENS, self.longest - 1), 0)
        self._pace = Pace(lambda: self._prefill_s(reference))

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that no prefix cache has."""
        return self._rng.choices(self._vocabulary, k=tokens)

    async def warm_up(self) -> None:
        """Compute some prompts that do not count."""
        for _ in range(_WARM_UPS):
            await prefill_s(self.client, self.prompt(min(self.longest - 1, 1024)))

    def prompts(self) -> Track:
        """Seconds of a prompt by its length, also on both sides of the longest one that fits one step."""
        least, most = self._prompt_range()
        edges = {edge for edge in (self.max_batch_tokens, self.max_batch_tokens + 1) if least < edge < most}
        axis = tuple(sorted({*ladder(least, most, _AXIS_RATIO), *edges}))
        survey = Survey(terms=prompt_terms(self.max_batch_tokens), axis=axis, contexts=lambda tokens: (0,))
        return survey_track(self.name, "prefill", survey, self._prefill_s, self._pace)

    def steps(self) -> Track:
        """Seconds of a decode step by batch and context."""
        axis = ladder(1, self._largest, _AXIS_RATIO)
        survey = Survey(terms=step_terms, axis=axis, contexts=self._contexts)
        return survey_track(self.name, "decode", survey, self._step_s, self._pace)

    def prompts_left_out(self) -> Track:
        """Prompts of random lengths."""
        rng = random.Random(_SEED)  # the same places in a run that goes on
        places = [(_drawn(*self._prompt_range(), rng), 0) for _ in range(_LEFT_OUT)]
        return places_track(self.name, "prefill_left_out", places, self._prefill_s, self._pace)

    def steps_left_out(self) -> Track:
        """Steps of random batches and contexts."""
        rng = random.Random(_SEED)
        places = []
        for _ in range(_LEFT_OUT):
            batch = _drawn(1, self._largest, rng)
            places.append((batch, _drawn(_SHORTEST_CONTEXT_TOKENS, self._contexts(batch)[-1], rng)))
        return places_track(self.name, "decode_left_out", places, self._step_s, self._pace)

    def prompts_beside(self) -> Track:
        """Seconds that a prompt adds to the streams of a middling batch beside it; places: its tokens, and 0."""
        lengths = sorted({min(tokens, self.longest - 1) for tokens in _BESIDE_LENGTHS})

        async def measure(place: Place) -> float:
            streams = self._prompts(self._medium, self._contexts(self._medium)[1])
            return await added_s(self.client, streams, self.prompt(place[0]))

        return places_track(self.name, "beside", [(tokens, 0) for tokens in lengths], measure, self._pace)

    def _prompt_range(self) -> tuple[int, int]:
        most = self.longest - 1  # the context has to hold the output token too
        return min(_SHORTEST_TOKENS, most - 1), most

    def _contexts(self, batch: int) -> tuple[int, ...]:
        """The shortest context, one in the middle, and the longest at which this and a middling batch fit the KV."""
        # The requests need room for the steps of a measurement.
        fitting = min(self.longest, self.kv_tokens // max(batch, self._medium)) - 2 * DECODE_STEPS
        longest = max(_SHORTEST_CONTEXT_TOKENS + 2, fitting)
        middle = between(_SHORTEST_CONTEXT_TOKENS, longest) or longest
        return _SHORTEST_CONTEXT_TOKENS, middle, longest

    async def _prefill_s(self, place: Place) -> float:
        return min([await prefill_s(self.client, self.prompt(place[0])) for _ in range(_REPEATS)])

    async def _step_s(self, place: Place) -> float:
        return await step_s(self.client, self._prompts(*place))

    def _prompts(self, batch: int, context: int) -> list[list[int]]:
        """Prompts of requests whose context is this long in the middle of a measurement.

        A longer prompt begins as a shorter one of the same request: what the prefix cache has is not computed again.
        """
        tokens = max(1, context - DECODE_STEPS // 2)
        return [random.Random(f"{self._salt} {each}").choices(self._vocabulary, k=tokens) for each in range(batch)]


def _drawn(least: int, most: int, rng: random.Random) -> int:
    """A number between two others, as likely in each range of equal ratio."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))
