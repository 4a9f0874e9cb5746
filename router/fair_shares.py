"""Start-time fair queueing of API keys within one priority (Goyal, Vin and Cheng, SIGCOMM 1996; pure).

Virtual time is counted in tokens per share: a key with share 2 that sends 100 tokens moves its next request 50 further
back. A key that sends nothing saves up nothing: its next request starts at the virtual time of the queue.
"""


class FairShares:
    """Virtual time of a queue, and the virtual start of each key's next request."""

    def __init__(self) -> None:
        self._now = 0.0  # virtual time
        self._next: dict[str | None, float] = {}  # end of each key's last request, in virtual time

    def start(self, key: str | None) -> float:
        """Virtual start of a key's next request; the lowest goes first."""
        return max(self._now, self._next.get(key, 0.0))

    def charge(self, key: str | None, start: float, cost: float) -> None:
        """Charge a key for its request with the virtual start ``start``; ``cost``: tokens per share."""
        self._next[key] = start + cost

    def correct(self, key: str | None, cost: float) -> None:
        """Add ``cost`` to an earlier charge of a key, tokens per share; it may be negative."""
        if key in self._next:  # else it has been forgotten
            self._next[key] += cost

    def begin(self, start: float) -> None:
        """Set the virtual time to the virtual start of the request that goes on now."""
        self._now = start

    def forget(self) -> None:
        """No request waits, so forget what keys have taken until now."""
        self._next.clear()
