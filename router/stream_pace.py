"""The time per token of a stream, by how long its caller waited for it (pure)."""


class StreamPace:
    """One stream from its first token on; an answer in one piece has no pace.

    Time in which the caller does not wait for the replica, for example while its client reads, does not count. Where
    that is most of the time, the pace of the replica cannot be seen.
    """

    _LEAST_TOKENS = 8  # of a stream that has ended; fewer are no evidence
    _ENOUGH_TOKENS = 64  # a stream that goes on is judged at these
    _LEAST_WAITED_FRAC = 0.5  # of the time since the first token, spent waiting for the replica

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._waited_s = 0.0
        self._tokens = 0
        self._is_judged = False

    def frame(self, tokens: int, waited_s: float, now_s: float) -> float | None:
        """Count a frame that the caller waited for; seconds per token, once, as soon as enough tokens have come."""
        if self._first_s is None:
            if tokens:
                self._first_s = now_s
            return None
        self._waited_s += waited_s
        self._tokens += tokens
        return self._judged_s(self._ENOUGH_TOKENS, now_s)

    def ended(self, waited_s: float, now_s: float) -> float | None:
        """Count the wait for a frame that did not come; seconds per token, unless ``frame`` has returned them."""
        self._waited_s += waited_s
        return self._judged_s(self._LEAST_TOKENS, now_s)

    def _judged_s(self, least_tokens: int, now_s: float) -> float | None:
        if self._first_s is None or self._is_judged or self._tokens < least_tokens:
            return None
        if self._waited_s < self._LEAST_WAITED_FRAC * (now_s - self._first_s):
            return None
        self._is_judged = True
        return self._waited_s / self._tokens
