"""The pace of a stream: the time per token for which its caller waited for the replica (pure)."""


class StreamPace:
    """The pace of one stream from its first token on; an answer in one piece has no pace.

    Only time in which the caller waits for the replica counts, and not, for example, time in which its client reads. If
    the caller waits for less than half of the time, most frames have come before the caller takes them. Such frames do
    not show the pace.
    """

    # Least tokens of a stream that has ended; with fewer it is not judged, since they show little.
    _LEAST_TOKENS = 8
    # Tokens at which a stream is judged before its end, which may come much later.
    _ENOUGH_TOKENS = 64
    # Least share of the time since the first token in which the caller waited for the replica; below it the stream is
    # not judged.
    _LEAST_WAITED_FRAC = 0.5

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._waited_s = 0.0
        self._tokens = 0
        self._is_judged = False

    def frame(self, tokens: int, waited_s: float, now_s: float) -> float | None:
        """Count a frame, which is one piece of the stream, and the wait for it, seconds.

        The frame with the first token does not count, since the wait for it is prefill. Returns the pace once, when
        enough tokens have come; else ``None``.
        """
        if self._first_s is None:
            if tokens:
                self._first_s = now_s
            return None
        self._waited_s += waited_s
        self._tokens += tokens
        return self._pace_s(self._ENOUGH_TOKENS, now_s)

    def ended(self, waited_s: float, now_s: float) -> float | None:
        """Count the last wait, for a frame that did not come. Returns the pace, unless ``frame`` has returned it."""
        self._waited_s += waited_s
        return self._pace_s(self._LEAST_TOKENS, now_s)

    def _pace_s(self, least_tokens: int, now_s: float) -> float | None:
        """Seconds per token, once; ``None``: it has been returned, or it cannot be seen."""
        if self._first_s is None or self._is_judged or self._tokens < least_tokens:
            return None
        if self._waited_s < self._LEAST_WAITED_FRAC * (now_s - self._first_s):
            return None
        self._is_judged = True
        return self._waited_s / self._tokens
