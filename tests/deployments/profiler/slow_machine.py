"""An engine of known speed on a machine that is slow for seconds at a time, with a clock of its own.

So were two shared cores with the tiny model (2026-11-29): spells of 1 to 5 s, a third of the time, in which all work
takes 1.3 to 3 times as long, and each measurement is a few percent too long.
"""

import math
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

_QUIET_S = 6.0  # mean time between two spells
_SPELL_S = (1.0, 5.0)
_SPELL_FACTOR = (1.3, 3.0)
_SLOWER_FACTOR = 1.4
_JITTER_FRAC = 0.05  # mean share by which a measurement is too long
_APART_S = 5.0  # between two measurements of one place
_DECODE_STEPS = 48  # of one measurement
_REPEATS = 3  # prompts of one measurement
_PACE_TOKENS = 128  # the reference prompt


@dataclass
class SlowMachine:
    """Measures prompts and decode steps; ``now_s`` tells how long all measurements took.

    ``prompt_s``: true seconds by tokens. ``step_s``: true seconds by batch and context. ``kv_tokens``: its KV.
    ``slower_from_s``: from then on all work takes ``_SLOWER_FACTOR`` times as long, as in a run of 2026-11-30.
    """

    prompt_s: Callable[[int], float]
    step_s: Callable[[int, int], float]
    kv_tokens: int
    rng: random.Random
    now_s: float = 0.0
    slower_from_s: float = math.inf
    _spell: tuple[float, float, float] = (0.0, 0.0, 1.0)  # begin, end, factor
    _cached_tokens: dict[int, int] = field(default_factory=dict)  # by number of the request
    _measured_s: dict[Hashable, float] = field(default_factory=dict)  # by place

    async def measure_prompt(self, place: tuple[int, int]) -> float:
        """The least time of some prompts."""
        self._wait(place)
        return min(self._run(self.prompt_s(place[0])) * self._jitter() for _ in range(_REPEATS))

    async def measure_step(self, place: tuple[int, int]) -> float:
        """The median step. Before, the parts of the prompts are computed that the prefix cache lacks."""
        batch, context_tokens = place
        self._wait(place)
        for request in range(batch):
            cached_tokens = min(context_tokens - 1, self._cached_tokens.get(request, 0))
            self._run(self.prompt_s(context_tokens) - self.prompt_s(cached_tokens))
            self._cached_tokens[request] = max(context_tokens, self._cached_tokens.get(request, 0))
        if sum(self._cached_tokens.values()) > self.kv_tokens:
            self._cached_tokens = dict.fromkeys(range(batch), context_tokens)
        steps = sorted(self._run(self.step_s(batch, context_tokens)) for _ in range(_DECODE_STEPS))
        return steps[_DECODE_STEPS // 2] * self._jitter()

    async def measure_pace(self) -> float:
        """The least time of some reference prompts."""
        return min(self._run(self.prompt_s(_PACE_TOKENS)) * self._jitter() for _ in range(_REPEATS))

    def _wait(self, place: tuple[int, int]) -> None:
        self.now_s = max(self.now_s, self._measured_s.get(place, -_APART_S) + _APART_S)
        self._measured_s[place] = self.now_s

    def _jitter(self) -> float:
        return 1.0 + self.rng.expovariate(1.0 / _JITTER_FRAC)

    def _run(self, work_s: float) -> float:
        """Seconds until work is done that takes ``work_s`` on a quiet machine."""
        began_s, left_s = self.now_s, work_s
        while left_s > 0.0:
            factor, until_s = self._spell_now()
            if self.now_s >= self.slower_from_s:
                factor *= _SLOWER_FACTOR
            done_s = min(left_s, (until_s - self.now_s) / factor)
            left_s -= done_s
            self.now_s = until_s if left_s > 0.0 else self.now_s + done_s * factor
        return self.now_s - began_s

    def _spell_now(self) -> tuple[float, float]:
        """How many times as long work takes now, and until when."""
        while self._spell[1] <= self.now_s:
            begin_s = self._spell[1] + self.rng.expovariate(1.0 / _QUIET_S)
            self._spell = (begin_s, begin_s + self.rng.uniform(*_SPELL_S), self.rng.uniform(*_SPELL_FACTOR))
        begin_s, end_s, factor = self._spell
        return (1.0, begin_s) if self.now_s < begin_s else (factor, end_s)
