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
        self._waits_since_s: float | None = None
        self._waited_s = 0.0
        self._tokens = 0
        self._is_judged = False

    def wait(self, now_s: float) -> None:
        """The caller waits for the next frame from now on."""
        self._waits_since_s = now_s

    def frame(self, tokens: int, now_s: float) -> None:
        """A frame with so many tokens has come."""
        if self._first_s is not None:
            self._waited_s = self._waited_so_far_s(now_s)
            self._tokens += tokens
        elif tokens:
            self._first_s = now_s
        self._waits_since_s = None

    def judged_s(self, now_s: float, *, has_ended: bool) -> float | None:
        """Seconds per token, once per stream: as soon as enough have come, or where it ends in whatever way."""
        if self._first_s is None or self._is_judged:
            return None
        if self._tokens < (self._LEAST_TOKENS if has_ended else self._ENOUGH_TOKENS):
            return None
        waited_s = self._waited_so_far_s(now_s)
        if waited_s < self._LEAST_WAITED_FRAC * (now_s - self._first_s):
            return None
        self._is_judged = True
        return waited_s / self._tokens

    def _waited_so_far_s(self, now_s: float) -> float:
        return self._waited_s + (0.0 if self._waits_since_s is None else now_s - self._waits_since_s)
