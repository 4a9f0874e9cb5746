"""Capacity of a set of engines, learned from the tokens that they produce (pure).

No user states a capacity. Each replica of the endpoint learns its own share of it, from its own requests alone. It
learns two numbers, each after every *round* of a second:

- The rate: prompt tokens per second. In a *full* round, requests waited all the time, so its tokens show the capacity.
- The answer limit: the answers at a time that keep the TPOT objective. It follows from the *pace*, the time per output
  token. *Observed* answers are streams whose tokens are seen as they come. An answer in one piece shows its pace when
  it ends. The *slowness* of a round is its pace divided by the pace that it should have. A round is slow if its
  slowness is above 1. The *good answers* are the number of answers at a time in rounds that were not slow.
"""

from typing import NamedTuple

# Least length of a round, seconds. Where no source is named here and below, the reason of the value is not recorded. A
# longer round learns a change later; a shorter one has too few prompts to count.
_ROUND_S = 1.0
# Weight of a round in the learned rate: a round of a second holds few long prompts. A larger weight follows single
# prompts; a smaller one learns a change of the engines later.
_ROUND_WEIGHT = 0.3
# Least share of a round that its prompts count as having taken, if the round was not full. A smaller share believes
# higher rates, such as those of prompts that a cache held; a larger one learns too low a rate from a light load.
_LEAST_BUSY_FRAC = 0.2
# Highest factor by which the rate rises in one round: a higher rise is mostly prompts that a cache held
# (docs/decisions/request-path.md 122).
_MOST_RISE = 2.0
# Share of a round's time in which the prefill replicas must have had prompts to count as full. Such a round shows the
# rate of full engines even if no request waited. A smaller share takes engines at rest for full ones; a larger one
# misses rounds with a short gap.
_FULL_ROUND_FRAC = 0.95
# Age of a round with full engines after which it says nothing about the engines that run now, seconds. A larger age
# refuses by the rate of engines that have changed; a smaller one forgets the rate between two overloads.
_FULL_ROUND_AGE_S = 60.0
# Highest multiple of a round's mean number of answers at a time to which the answer limit rises in that round, if the
# limit was reached. A larger one recovers faster and overshoots further.
_MOST_GROWTH = 1.25
# Lowest multiple of a round's mean number of answers at a time to which the answer limit falls in that round. A smaller
# one loses more answers to one hiccup.
_LEAST_CUT = 0.5
# Power of the slowness by which the answers are divided in a slow round. If a step's time is linear in the answers, the
# power 1 fits. This one is higher, since running answers take long to end. An even higher one loses more answers to one
# hiccup.
_CUT_POWER = 1.5
# Factor by which the good answers fall in each slow round, so that a hiccup lowers the answer limit by a fifth a round
# (docs/decisions/request-path.md 122). A larger factor takes longer to learn that engines have become slower.
_DOUBT_FACTOR = 0.8
# Factor by which the answer limit rises at least, and by which the good answers fall at most, in each round that is not
# slow. A larger factor tries higher limits sooner and makes answers too slow more often.
_GROWTH_FACTOR = 1.02
# Share of the TPOT objective that the mean pace aims at, since some answers are always slower than the mean
# (docs/decisions/request-path.md 122). A larger share lets more answers miss the objective.
_PACE_FRAC = 0.92
# Weight of the earlier rounds in a round's pace. A larger weight learns a change of pace later.
_PACE_WEIGHT = 0.5


class Mark(NamedTuple):
    """A time, and the sum of the durations of all answers until then, seconds."""

    at_s: float
    answer_s: float


class Capacity:
    """The learned rate and answer limit of one replica of the endpoint.

    Admission keeps as many prompt tokens on their way as the rate computes in the window's time. By Little's law they
    take that time. If they take less, more tokens than the rate says get through in each round, and the rate rises.
    """

    def __init__(self, tpot_s: float | None, now_s: float) -> None:
        self.prompt_tokens_per_s: float | None = None  # the rate; ``None``: no prompt has been computed
        # The answer limit, which counts answers before their first token too; ``None``: no round was too slow.
        self.most_answers: float | None = None
        self._target_pace_s = None if tpot_s is None else tpot_s * _PACE_FRAC
        self._answers = self._observed = 0  # answers on their way, and the observed ones of them
        self._busy_frac = 0.0  # share of the prefill replicas that have a prompt now
        self._advanced_s = now_s  # time up to which the sums below have grown
        self._answer_s = 0.0  # sum of the durations of all answers
        # Sums over all rounds, in which earlier rounds fade by _PACE_WEIGHT: _observed_s, _observed_answers_s and
        # _output_tokens.
        self._pace_sums = (0.0, 0.0, 0.0)
        self._good_answers = 0.0  # answers at a time in good rounds: those that were not too slow
        self._full_round_s: float | None = None  # end of the last round that showed the rate of full engines
        self._begin_rate_round(now_s)
        self._begin_pace_round(now_s)

    def _begin_rate_round(self, now_s: float) -> None:
        self._rate_round_s = now_s  # its begin
        self._prompt_tokens = 0
        self._busy_s = 0.0  # mean time for which a prefill replica had prompts
        self._was_full = True  # until ``note_idle``

    def _begin_pace_round(self, now_s: float) -> None:
        self._pace_round_s = now_s  # its begin
        self._output_tokens = 0
        self._observed_s = 0.0  # sum of the durations of observed answers
        # The same, each second times the number of all answers then. Divided by _observed_s, it is their mean number.
        self._observed_answers_s = 0.0
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

    def change_observed(self, change: int, now_s: float) -> None:
        """The number of observed answers changes by ``change``."""
        self._advance(now_s)
        self._observed += change

    def count_output(self, tokens: int) -> None:
        """Output tokens of observed answers have come. Leave out first tokens: their time is not the pace."""
        self._output_tokens += tokens

    def mark(self, now_s: float) -> Mark:
        """The mark of a first token, for ``count_whole``."""
        self._advance(now_s)
        return Mark(now_s, self._answer_s)

    def count_whole(self, tokens: int, answers: int, first: Mark, now_s: float) -> None:
        """All tokens of a request's answers have come in one piece; ``first``: the mark of the first token.

        Only now is it known how long they took, so their whole time counts in this round.
        """
        self._advance(now_s)
        self._output_tokens += tokens
        self._observed_s += answers * (now_s - first.at_s)
        self._observed_answers_s += answers * (self._answer_s - first.answer_s)

    def _advance(self, now_s: float) -> None:
        """Add the time since the last call to all sums over time."""
        passed_s = now_s - self._advanced_s
        self._busy_s += self._busy_frac * passed_s
        self._answer_s += self._answers * passed_s
        self._observed_s += self._observed * passed_s
        self._observed_answers_s += self._observed * self._answers * passed_s
        self._advanced_s = now_s

    def note_idle(self) -> None:
        """No request waits, so this round is not full: its tokens show the load and not the capacity."""
        self._was_full = False

    def note_limit_reached(self) -> None:
        """A request waits because ``most_answers`` answers are on their way."""
        self._is_limit_reached = True

    def is_known(self, now_s: float) -> bool:
        """Whether the rate was lately learned from full engines. A rate of engines at rest is too low."""
        return self._full_round_s is not None and now_s - self._full_round_s < _FULL_ROUND_AGE_S

    def learn(self, now_s: float) -> None:
        """Learn from each round that has ended."""
        self._learn_rate(now_s)
        if now_s - self._pace_round_s >= _ROUND_S:
            self._advance(now_s)
            self._learn_answer_limit()
            self._begin_pace_round(now_s)

    def _learn_rate(self, now_s: float) -> None:
        round_s = now_s - self._rate_round_s
        # Requests waited, no prompt was computed: engines stand still or compute a long prompt. The round goes on.
        if round_s < _ROUND_S or (self._was_full and not self._prompt_tokens):
            return
        self._advance(now_s)
        busy_s = round_s if self._was_full else max(self._busy_s, _LEAST_BUSY_FRAC * round_s)
        rate = self._prompt_tokens / busy_s
        if self.prompt_tokens_per_s is None:
            self.prompt_tokens_per_s = rate or None
        elif rate > self.prompt_tokens_per_s or self._was_full:  # a lower rate at rest shows a low load
            weight = _ROUND_WEIGHT * busy_s / round_s
            learned = self.prompt_tokens_per_s + weight * (rate - self.prompt_tokens_per_s)
            self.prompt_tokens_per_s = min(learned, _MOST_RISE * self.prompt_tokens_per_s)
        if self._was_full or self._busy_s >= _FULL_ROUND_FRAC * round_s:
            self._full_round_s = now_s
        self._begin_rate_round(now_s)

    def _learn_answer_limit(self) -> None:
        round_sums = (self._observed_s, self._observed_answers_s, self._output_tokens)
        observed_s, observed_answers_s, tokens = (
            _PACE_WEIGHT * earlier + new for earlier, new in zip(self._pace_sums, round_sums, strict=True)
        )
        self._pace_sums = observed_s, observed_answers_s, tokens
        if self._target_pace_s is None or not self._output_tokens or not observed_s:
            return
        # Mean number of answers at a time while these tokens came; the present number may differ.
        answers = observed_answers_s / observed_s
        slowness = observed_s / tokens / self._target_pace_s
        # A step takes a + b x answers. So answers / slowness lies between ``answers`` and the number that keeps the
        # pace, and the limit comes closer to that number from either side.
        if slowness > 1.0:
            self._good_answers *= _DOUBT_FACTOR
            lower = max(1.0, self._good_answers, answers * max(_LEAST_CUT, slowness**-_CUT_POWER))
            self.most_answers = lower if self.most_answers is None else min(self.most_answers, lower)
            return
        self._good_answers = max(self._good_answers / _GROWTH_FACTOR, answers)
        if self.most_answers is not None:
            # Only answers that reach the limit show that it is too low.
            shown = answers * min(_MOST_GROWTH, 1.0 / slowness) if self._is_limit_reached else 0.0
            self.most_answers = max(self.most_answers * _GROWTH_FACTOR, shown)
