"""Start-time fair queueing of keys within one priority (Goyal, Vin and Cheng, SIGCOMM 1996; pure)."""


class FairShares:
    """The virtual time of those who wait, and of each key when its next request begins."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str | None, float] = {}

    def start(self, key: str | None) -> float:
        """When a key's next request begins; the least goes first."""
        return max(self._now, self._next.get(key, 0.0))

    def charge(self, key: str | None, start: float, cost: float) -> None:
        """A request that begins at ``start`` costs its key so much of its share."""
        self._next[key] = start + cost

    def correct(self, key: str | None, cost: float) -> None:
        """It cost so much more than it was charged, or less."""
        if key in self._next:  # else it has been forgotten
            self._next[key] += cost

    def begin(self, start: float) -> None:
        """Its turn has come."""
        self._now = start

    def forget(self) -> None:
        """Nobody waits: what anybody had so far is no debt."""
        self._next.clear()
