"""What a set of engines can take, learned from what it gives (pure).

Nobody has to state a capacity, and each replica of the endpoint learns its own share of it: what it counts and what it
compares that with are both its share.
"""

_ROUND_S = 1.0
# Of a round in the estimate; rounds of a second hold few long prompts.
_ROUND_WEIGHT = 0.3
_MOST_STEP = 1.25
_LEAST_STEP = 0.7
# Pace is aimed below its objective, of which a part of the streams is always beyond the mean.
_PACE_FRAC = 0.92
# Of what went before, in a round's pace.
_PACE_KEPT = 0.5


class Capacity:
    """Prompt tokens per second that get their first output token, and how many streams keep their pace.

    Holding so many prompt tokens on their way as get their first token in ``window_s`` makes them take ``window_s``
    (Little's law): while they take less, more come through each round than the rate says, and the rate rises.

    Attributes:
        tokens_s: prompt tokens per second; ``None`` before the first.
        most_streams: streams at a time that keep ``tpot_s``; ``None`` while none was too slow.
    """

    def __init__(self, tpot_s: float | None, now_s: float) -> None:
        self.tokens_s: float | None = None
        self.most_streams: float | None = None
        self._pace_s = None if tpot_s is None else tpot_s * _PACE_FRAC
        self._streams = self._seen = 0
        self._at_s = now_s
        self._pace = (0.0, 0.0)  # seconds of streams, and their tokens
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._prompt_tokens = self._output_tokens = 0
        self._stream_s = self._seen_s = 0.0
        self._was_full = True

    def first(self, prompt_tokens: int) -> None:
        """A prompt has got its first output token."""
        self._prompt_tokens += prompt_tokens

    def streams(self, change: int, now_s: float, *, is_seen: bool) -> None:
        """So many more answers are on their way from now on, or fewer; ``is_seen``: their tokens show as they come."""
        self._pass(now_s)
        self._streams += change
        self._seen += change * is_seen

    def output(self, tokens: int, unseen_s: float = 0.0) -> None:
        """Output tokens have come; those of an answer in one piece took ``unseen_s``."""
        self._output_tokens += tokens
        self._seen_s += unseen_s

    def _pass(self, now_s: float) -> None:
        self._stream_s += self._streams * (now_s - self._at_s)
        self._seen_s += self._seen * (now_s - self._at_s)
        self._at_s = now_s

    def idle(self) -> None:
        """Nobody is held back: what comes through says no more than what came in."""
        self._was_full = False

    def learn(self, now_s: float) -> None:
        """Take a round's figures, if one is over."""
        round_s = now_s - self._since_s
        if round_s < _ROUND_S:
            return
        self._pass(now_s)
        rate = self._prompt_tokens / round_s
        if self.tokens_s is None:
            self.tokens_s = rate or None
        elif rate > self.tokens_s or self._was_full:
            self.tokens_s += _ROUND_WEIGHT * (rate - self.tokens_s)
        seconds, tokens = self._pace
        self._pace = (_PACE_KEPT * seconds + self._seen_s, _PACE_KEPT * tokens + self._output_tokens)
        if self._pace_s is not None and self._output_tokens:
            self._learn_streams(self._stream_s / round_s, self._pace[0] / self._pace[1] / self._pace_s)
        self._begin(now_s)

    def _learn_streams(self, streams: float, slowness: float) -> None:
        # A step takes a + b x streams: n / slowness lies between n and the right count, from either side.
        if slowness > 1.0:
            least = streams * max(_LEAST_STEP, 1.0 / slowness)
            self.most_streams = max(1.0, least if self.most_streams is None else min(self.most_streams, least))
        elif self.most_streams is not None and self._was_full:
            self.most_streams = max(self.most_streams, streams * min(_MOST_STEP, 1.0 / max(slowness, 1e-9)))
