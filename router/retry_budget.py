"""Budget of retries: a share of the requests, so that a failing pool gets no storm of retries (pure)."""


class RetryBudget:
    """A bucket into which each request puts a share of a retry, and from which each retry takes one.

    Source: Finagle's retry budget, "retryBudget" of https://twitter.github.io/finagle/guide/Clients.html (percentage of
    requests, and a reserve for few of them).
    """

    def __init__(self, *, share_frac: float = 0.2, most: float = 10.0) -> None:
        """``share_frac``: retries per request; ``most``: retries that the bucket holds, with which it begins."""
        self._share_frac = share_frac
        self._most = most
        self._retries = most

    def request(self) -> None:
        """Count a request."""
        self._retries = min(self._most, self._retries + self._share_frac)

    def take(self) -> bool:
        """Take one retry; ``False``: the budget is empty."""
        if self._retries < 1.0:
            return False
        self._retries -= 1.0
        return True
