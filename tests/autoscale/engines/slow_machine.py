"""An engine of known speed on a machine that is slow for seconds at a time, with a clock of its own.

Two shared cores with the tiny model (2026-11-29): spells of 1 to 5 s in which all takes 1.3 to 3 times as long, a third
of the time, and 5 % of jitter on each measurement.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

_QUIET_S = 6.0  # mean time between two spells
_SPELL_S = (1.0, 5.0)
_SPELL_FACTOR = (1.3, 3.0)
_JITTER_FRAC = 0.05  # mean share by which a measurement is too long
_DECODE_STEPS = 48  # of one measurement


@dataclass(slots=True)
class SlowMachine:
    """Measures prompts and decode steps; ``now_s`` tells how long all measurements took.

    ``prompt_s``: true seconds by tokens. ``step_s``: true seconds by batch and context.
    """

    prompt_s: Callable[[int], float]
    step_s: Callable[[int, int], float]
    rng: random.Random
    now_s: float = 0.0
    _cached: set[tuple[int, int]] = field(default_factory=set)
    _spell: tuple[float, float, float] = (0.0, 0.0, 1.0)  # begin, end, factor

    def measure_prompt_s(self, tokens: int) -> float:
        """The time of one prompt."""
        return self._run(self.prompt_s(tokens)) * self._jitter()

    def measure_step_s(self, batch: int, context_tokens: int) -> float:
        """The median step. Before, the prompts are computed, but for those that the prefix cache has."""
        self._run(batch * self.prompt_s(context_tokens if (batch, context_tokens) not in self._cached else 16))
        self._cached.add((batch, context_tokens))
        steps = sorted(self._run(self.step_s(batch, context_tokens)) for _ in range(_DECODE_STEPS))
        return steps[_DECODE_STEPS // 2] * self._jitter()

    def wait(self, until_s: float) -> None:
        """Let time pass."""
        self.now_s = max(self.now_s, until_s)

    def _jitter(self) -> float:
        return 1.0 + self.rng.expovariate(1.0 / _JITTER_FRAC)

    def _run(self, work_s: float) -> float:
        """Seconds until work is done that takes ``work_s`` on a quiet machine."""
        began_s, left_s = self.now_s, work_s
        while left_s > 0.0:
            factor, until_s = self._pace()
            done_s = min(left_s, (until_s - self.now_s) / factor)
            left_s -= done_s
            self.now_s = until_s if left_s > 0.0 else self.now_s + done_s * factor
        return self.now_s - began_s

    def _pace(self) -> tuple[float, float]:
        """How many times as long work takes now, and until when."""
        while self._spell[1] <= self.now_s:
            begin_s = self._spell[1] + self.rng.expovariate(1.0 / _QUIET_S)
            self._spell = (begin_s, begin_s + self.rng.uniform(*_SPELL_S), self.rng.uniform(*_SPELL_FACTOR))
        begin_s, end_s, factor = self._spell
        return (1.0, begin_s) if self.now_s < begin_s else (factor, end_s)
