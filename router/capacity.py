"""What a set of engines can take, learned from what it gives (pure).

Nobody has to state a capacity, and each replica of the endpoint learns its own share of it: what it counts and what it
compares that with are both its share.
"""

from typing import NamedTuple

_ROUND_S = 1.0
# Of a round in the estimate; rounds of a second hold few long prompts.
_ROUND_WEIGHT = 0.3
# Of a round in which nobody was held back, the least time in which its prompts are taken to have been computed.
_LEAST_BUSY_FRAC = 0.2
# More than this in one round is mostly prompts that need not be computed.
_MOST_RISE = 2.0
# Engines that have had prompts for so much of a round could give no more than they gave; what was learned of them so
# long ago says nothing of those that are there now.
_REACHED_FRAC, _REACHED_S = 0.95, 60.0
_MOST_STEP = 1.25
# Too many answers are as many for long, so fewer are taken at once than would be right if a lone one took no time.
_LEAST_STEP, _STEP_POWER = 0.5, 1.5
# Of the streams, each round: what was good shortly before a slow round is doubted so slowly, and what was too many is
# tried again so slowly where nobody is held back.
_DOUBTED_FRAC = 0.8
_TRIED_FRAC = 1.02
# Pace is aimed below its objective, of which a part of the streams is always beyond the mean.
_PACE_FRAC = 0.92
# Of what went before, in a round's pace.
_PACE_KEPT = 0.5


class Mark(NamedTuple):
    """A time, and the seconds of all answers together until then."""

    at_s: float
    answer_s: float


class Capacity:
    """Prompt tokens per second that get their first output token, and how many answers at a time keep their pace.

    Holding so many prompt tokens on their way as get their first token in ``window_s`` makes them take ``window_s``
    (Little's law): while they take less, more come through each round than the rate says, and the rate rises.

    Attributes:
        tokens_s: prompt tokens per second; ``None`` before the first.
        most_streams: answers on their way at a time, those that wait for their first token too, that keep ``tpot_s``;
            ``None`` while none was too slow.
    """

    def __init__(self, tpot_s: float | None, now_s: float) -> None:
        self.tokens_s: float | None = None
        self.most_streams: float | None = None
        self._pace_s = None if tpot_s is None else tpot_s * _PACE_FRAC
        self._answers = self._seen = 0
        self._busy_frac = 0.0
        self._at_s = now_s
        self._answer_s = 0.0
        self._pace = (0.0, 0.0, 0.0)  # seconds of answers, times how many there were meanwhile, and their tokens
        self._good_streams = 0.0
        self._reached_s: float | None = None
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
        self._seen_s = self._seen_answers_s = 0.0
        self._held_back = False

    def first(self, prompt_tokens: int) -> None:
        """A prompt has got its first output token."""
        self._prompt_tokens += prompt_tokens

    def busy(self, frac: float, now_s: float) -> None:
        """Of the engines that compute prompts, this part has one from now on."""
        self._pass(now_s)
        self._busy_frac = min(1.0, frac)

    def answers(self, change: int, now_s: float) -> None:
        """So many more answers are on their way from now on, or fewer."""
        self._pass(now_s)
        self._answers += change

    def streams(self, change: int, now_s: float) -> None:
        """So many more of them give tokens that are seen as they come, or fewer."""
        self._pass(now_s)
        self._seen += change

    def output(self, tokens: int) -> None:
        """Output tokens of such have come, other than the first, whose time is not their pace."""
        self._output_tokens += tokens

    def mark(self, now_s: float) -> Mark:
        """What ``whole`` wants to know of the time at which the first token came."""
        self._pass(now_s)
        return Mark(now_s, self._answer_s)

    def whole(self, tokens: int, answers: int, first: Mark, now_s: float) -> None:
        """All tokens of a request's answers have come, in one piece."""
        self._pass(now_s)
        self._output_tokens += tokens
        self._seen_s += answers * (now_s - first.at_s)
        self._seen_answers_s += answers * (self._answer_s - first.answer_s)

    def _pass(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        self._busy_s += self._busy_frac * passed_s
        self._answer_s += self._answers * passed_s
        self._seen_s += self._seen * passed_s
        self._seen_answers_s += self._seen * self._answers * passed_s
        self._at_s = now_s

    def idle(self) -> None:
        """Nobody is held back: what comes through says no more than what came in."""
        self._was_full = False

    def hold_back(self) -> None:
        """Somebody is held back by ``most_streams``."""
        self._held_back = True

    def is_known(self, now_s: float) -> bool:
        """Whether engines that gave ``tokens_s`` could give no more: what was learned at rest is too low."""
        return self._reached_s is not None and now_s - self._reached_s < _REACHED_S

    def learn(self, now_s: float) -> None:
        """Take a round's figures, if one is over."""
        self._learn_rate(now_s)
        if now_s - self._streams_since_s >= _ROUND_S:
            self._pass(now_s)
            self._learn_streams()
            self._begin_streams(now_s)

    def _learn_rate(self, now_s: float) -> None:
        round_s = now_s - self._prompts_since_s
        # Engines that are full and give nothing stand still, or compute a prompt that takes longer: no rate yet.
        if round_s < _ROUND_S or (self._was_full and not self._prompt_tokens):
            return
        self._pass(now_s)
        is_reached = self._was_full or self._busy_s >= _REACHED_FRAC * round_s
        busy_s = round_s if self._was_full else max(self._busy_s, _LEAST_BUSY_FRAC * round_s)
        rate = self._prompt_tokens / busy_s
        if self.tokens_s is None:
            self.tokens_s = rate or None
        elif rate > self.tokens_s or self._was_full:
            learned = self.tokens_s + _ROUND_WEIGHT * busy_s / round_s * (rate - self.tokens_s)
            self.tokens_s = min(learned, _MOST_RISE * self.tokens_s)
        if is_reached:
            self._reached_s = now_s
        self._begin_prompts(now_s)

    def _learn_streams(self) -> None:
        seconds, answers_s, tokens = self._pace
        seconds = _PACE_KEPT * seconds + self._seen_s
        answers_s = _PACE_KEPT * answers_s + self._seen_answers_s
        tokens = _PACE_KEPT * tokens + self._output_tokens
        self._pace = seconds, answers_s, tokens
        if self._pace_s is None or not self._output_tokens or not seconds:
            return
        # Pace beside the answers that were there when it was kept: those in one piece tell of it when they end.
        answers, slowness = answers_s / seconds, seconds / tokens / self._pace_s
        # A step takes a + b x streams: n / slowness lies between n and the right count, from either side.
        if slowness > 1.0:
            self._good_streams *= _DOUBTED_FRAC
            least = max(1.0, self._good_streams, answers * max(_LEAST_STEP, slowness**-_STEP_POWER))
            self.most_streams = least if self.most_streams is None else min(self.most_streams, least)
            return
        self._good_streams = max(self._good_streams / _TRIED_FRAC, answers)
        if self.most_streams is not None:
            step = min(_MOST_STEP, 1.0 / slowness) if self._held_back else 0.0
            self.most_streams = max(self.most_streams * _TRIED_FRAC, answers * step)
