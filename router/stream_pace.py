"""What a stream takes per token, by the time for which its caller waited for it (pure)."""


class StreamPace:
    """One stream from its first token on; what comes in one piece has no pace.

    Time in which the caller does something else, such as waiting until its client reads, does not count: who reads
    slowly speaks against nobody. Where that is most of the time the replica's own pace cannot be seen.
    """

    # Fewer say little; at so many a stream is judged, though it goes on for long.
    _LEAST_TOKENS = 8
    _ENOUGH_TOKENS = 64
    _LEAST_WAITED_FRAC = 0.5

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._waited_s = 0.0
        self._tokens = 0
        self._is_judged = False

    def frame(self, tokens: int, waited_s: float, now_s: float) -> float | None:
        """A frame with so many tokens has come, for which the caller waited so long.

        Returns:
            Seconds per token, once per stream: as soon as enough have come.
        """
        if self._first_s is None:
            if tokens:
                self._first_s = now_s
            return None
        self._waited_s += waited_s
        self._tokens += tokens
        return self._judged_s(self._ENOUGH_TOKENS, now_s)

    def ended(self, waited_s: float, now_s: float) -> float | None:
        """It has ended, in whatever way, after so long a wait for what has not come.

        Returns:
            Seconds per token, unless they have been told.
        """
        self._waited_s += waited_s
        return self._judged_s(self._LEAST_TOKENS, now_s)

    def _judged_s(self, least_tokens: int, now_s: float) -> float | None:
        if self._first_s is None or self._is_judged or self._tokens < least_tokens:
            return None
        if self._waited_s < self._LEAST_WAITED_FRAC * (now_s - self._first_s):
            return None
        self._is_judged = True
        return self._waited_s / self._tokens
