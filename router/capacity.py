"""Capacity of a set of engines, learned from the tokens that they produce (pure).

No user states a capacity. Each replica of the endpoint learns its own share of it, from its own requests alone.
"""

from typing import NamedTuple

# Length of a round, seconds. Where no source is named here and below, the reason of the value is not recorded. A longer
# round learns a change later; a shorter one has too few prompts to count.
_ROUND_S = 1.0
# Weight of a round in the learned rate: a round of a second holds few long prompts. A larger weight follows single
# prompts; a smaller one learns a change of the engines later.
_ROUND_WEIGHT = 0.3
# Least share of a round in which its prompts are taken to have been computed, if no prompt waited. A smaller share
# believes higher rates, as of prompts that a cache had; a larger one learns too low a rate from a light load.
_LEAST_BUSY_FRAC = 0.2
# Highest factor by which the rate rises in one round: a higher rise is mostly prompts that a cache had
# (docs/decisions/request-path.md 122).
_MOST_RISE = 2.0
# Share of the prefill replicas' time in a round in which they have prompts, from which the round shows the rate of full
# engines. A smaller share takes engines at rest for full ones; a larger one misses rounds with a short gap.
_FULL_ROUND_FRAC = 0.95
# Age of a round with full engines after which it says nothing about the engines that run now, seconds. A larger age
# refuses by the rate of engines that have changed; a smaller one forgets the rate between two overloads.
_FULL_ROUND_AGE_S = 60.0
# Highest multiple of a round's answers to which the stream limit rises in that round. A larger one recovers faster and
# overshoots further.
_MOST_GROWTH = 1.25
# Lowest multiple of a round's answers to which the stream limit falls in that round. A smaller one loses more answers
# to one hiccup.
_LEAST_CUT = 0.5
# Power of the slowness by which the stream limit is cut: more than the linear model's 1, since running answers take
# long to drain. A larger power loses more answers to one hiccup.
_CUT_POWER = 1.5
# Factor of the last good limit in each slow round, so that a hiccup lowers the stream limit by a fifth a round
# (docs/decisions/request-path.md 122). A larger factor takes longer to learn that engines have become slower.
_DOUBT_FACTOR = 0.8
# Factor by which the stream limit rises at least, and by which the last good limit falls at most, in each round that is
# not slow. A larger factor tries higher limits sooner and makes answers too slow more often.
_GROWTH_FACTOR = 1.02
# Share of the TPOT objective that the mean pace aims at, since some streams are always slower than the mean
# (docs/decisions/request-path.md 122). A larger share lets more streams miss the objective.
_PACE_FRAC = 0.92
# Weight of the earlier rounds in a round's pace. A larger weight learns a change of pace later.
_PACE_WEIGHT = 0.5


class Mark(NamedTuple):
    """A time, and the sum of the durations of all answers until then, seconds."""

    at_s: float
    answer_s: float


class Capacity:
    """Prompt tokens per second that get their first output token, and how many answers at a time keep their pace.

    If as many prompt tokens are on their way as get their first token in ``window_s``, they take ``window_s`` (Little's
    law). While they take less, more get through in each round than the rate says, and the rate rises.
    """

    def __init__(self, tpot_s: float | None, now_s: float) -> None:
        self.tokens_s: float | None = None  # prompt tokens per second; ``None`` before the first
        # Answers at a time that keep tpot_s, those before their first token included; ``None``: none was too slow.
        self.most_streams: float | None = None
        self._pace_s = None if tpot_s is None else tpot_s * _PACE_FRAC
        self._answers = self._observed = 0
        self._busy_frac = 0.0
        self._at_s = now_s
        self._answer_s = 0.0
        # Sums over observed answers: seconds, seconds times the answers at the same time, output tokens.
        self._pace = (0.0, 0.0, 0.0)
        self._good_streams = 0.0
        self._full_round_s: float | None = None
        self._begin_prompts(now_s)
        self._begin_streams(now_s)

    def _begin_prompts(self, now_s: float) -> None:
        self._prompts_since_s = now_s
        self._prompt_tokens = 0
        self._busy_s = 0.0
        self._was_full = True

    def _begin_streams(self, now_s: float) -> None:
        self._streams_since_s = now_s
        self._output_tokens = 0
        self._observed_s = self._observed_answers_s = 0.0
        self._is_limit_reached = False

    def count_prompt(self, prompt_tokens: int) -> None:
        """A prompt has got its first output token."""
        self._prompt_tokens += prompt_tokens

    def set_busy(self, frac: float, now_s: float) -> None:
        """From now on this share of the prefill replicas has a prompt."""
        self._advance(now_s)
        self._busy_frac = min(1.0, frac)

    def change_answers(self, change: int, now_s: float) -> None:
        """The number of answers on their way changes by ``change``."""
        self._advance(now_s)
        self._answers += change

    def change_streams(self, change: int, now_s: float) -> None:
        """The number of answers whose tokens are observed as they come changes by ``change``."""
        self._advance(now_s)
        self._observed += change

    def count_output(self, tokens: int) -> None:
        """Output tokens of observed answers have come; the first token is no pace and does not count."""
        self._output_tokens += tokens

    def mark(self, now_s: float) -> Mark:
        """The mark of a first token, for ``count_whole``."""
        self._advance(now_s)
        return Mark(now_s, self._answer_s)

    def count_whole(self, tokens: int, answers: int, first: Mark, now_s: float) -> None:
        """All tokens of a request's answers have come in one piece."""
        self._advance(now_s)
        self._output_tokens += tokens
        self._observed_s += answers * (now_s - first.at_s)
        self._observed_answers_s += answers * (self._answer_s - first.answer_s)

    def _advance(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        self._busy_s += self._busy_frac * passed_s
        self._answer_s += self._answers * passed_s
        self._observed_s += self._observed * passed_s
        self._observed_answers_s += self._observed * self._answers * passed_s
        self._at_s = now_s

    def note_idle(self) -> None:
        """No request waits, so the tokens of this round show the load and not the capacity."""
        self._was_full = False

    def note_limit_reached(self) -> None:
        """A request waits because ``most_streams`` answers are on their way."""
        self._is_limit_reached = True

    def is_known(self, now_s: float) -> bool:
        """Whether ``tokens_s`` was lately learned from full engines; a rate learned at rest is too low."""
        return self._full_round_s is not None and now_s - self._full_round_s < _FULL_ROUND_AGE_S

    def learn(self, now_s: float) -> None:
        """Learn from a round that has ended."""
        self._learn_rate(now_s)
        if now_s - self._streams_since_s >= _ROUND_S:
            self._advance(now_s)
            self._learn_streams()
            self._begin_streams(now_s)

    def _learn_rate(self, now_s: float) -> None:
        round_s = now_s - self._prompts_since_s
        # Full engines without output stand still, or compute a prompt that takes longer: no rate yet.
        if round_s < _ROUND_S or (self._was_full and not self._prompt_tokens):
            return
        self._advance(now_s)
        busy_s = round_s if self._was_full else max(self._busy_s, _LEAST_BUSY_FRAC * round_s)
        rate = self._prompt_tokens / busy_s
        if self.tokens_s is None:
            self.tokens_s = rate or None
        elif rate > self.tokens_s or self._was_full:
            learned = self.tokens_s + _ROUND_WEIGHT * busy_s / round_s * (rate - self.tokens_s)
            self.tokens_s = min(learned, _MOST_RISE * self.tokens_s)
        if self._was_full or self._busy_s >= _FULL_ROUND_FRAC * round_s:
            self._full_round_s = now_s
        self._begin_prompts(now_s)

    def _learn_streams(self) -> None:
        seconds, answers_s, tokens = self._pace
        seconds = _PACE_WEIGHT * seconds + self._observed_s
        answers_s = _PACE_WEIGHT * answers_s + self._observed_answers_s
        tokens = _PACE_WEIGHT * tokens + self._output_tokens
        self._pace = seconds, answers_s, tokens
        if self._pace_s is None or not self._output_tokens or not seconds:
            return
        # The pace is compared with the answers at that time: an answer in one piece shows its pace when it ends.
        answers, slowness = answers_s / seconds, seconds / tokens / self._pace_s
        # A step takes a + b x streams: n / slowness lies between n and the right count, from either side.
        if slowness > 1.0:
            self._good_streams *= _DOUBT_FACTOR
            least = max(1.0, self._good_streams, answers * max(_LEAST_CUT, slowness**-_CUT_POWER))
            self.most_streams = least if self.most_streams is None else min(self.most_streams, least)
            return
        self._good_streams = max(self._good_streams / _GROWTH_FACTOR, answers)
        if self.most_streams is not None:
            step = min(_MOST_GROWTH, 1.0 / slowness) if self._is_limit_reached else 0.0
            self.most_streams = max(self.most_streams * _GROWTH_FACTOR, answers * step)
