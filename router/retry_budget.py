"""Budget of retries: a share of the requests, so that a failing pool gets no storm of retries (pure)."""


class RetryBudget:
    """A bucket into which each request puts a share of a retry, and from which each retry takes one.

    Source: Finagle's retry budget, "retryBudget" of https://twitter.github.io/finagle/guide/Clients.html (percentage of
    requests, and a reserve for few of them).
    """

    def __init__(self, *, share_frac: float = 0.2, most: float = 10.0) -> None:
        self._share_frac = share_frac
        self._most = most
        self._left = most

    def request(self) -> None:
        """Count a request."""
        self._left = min(self._most, self._left + self._share_frac)

    def take(self) -> bool:
        """Take one retry; ``False``: the budget is empty."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
