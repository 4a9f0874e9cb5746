"""Start-time fair queueing of keys within one priority (Goyal, Vin and Cheng, SIGCOMM 1996; pure)."""


class FairShares:
    """Virtual time of a queue, and the virtual start of each key's next request."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str | None, float] = {}

    def start(self, key: str | None) -> float:
        """Virtual start of a key's next request; the lowest goes first."""
        return max(self._now, self._next.get(key, 0.0))

    def charge(self, key: str | None, start: float, cost: float) -> None:
        """Charge a key for its request that begins at ``start``; ``cost`` in tokens per share."""
        self._next[key] = start + cost

    def correct(self, key: str | None, cost: float) -> None:
        """Correct a charge by a difference, which may be negative."""
        if key in self._next:  # else it has been forgotten
            self._next[key] += cost

    def begin(self, start: float) -> None:
        """Set the virtual time to the virtual start of the request that goes on now."""
        self._now = start

    def forget(self) -> None:
        """No request waits: no key has a debt from before."""
        self._next.clear()
