"""What a decode replica believes waits on its prefill pool (pure)."""

# A prefill replica's report of its queue says nothing any more after this long without another.
_REPORT_FRESH_S = 1.0
_REPLICA_SEEN_S = 60.0


class PrefillBacklog:
    """Tokens that wait on prefill, from what this replica has sent there and what the answers said."""

    def __init__(self) -> None:
        self.in_flight_tokens = 0
        self._reports: dict[str, tuple[float, int]] = {}

    def sent(self, tokens: int) -> None:
        """A prompt was sent to prefill."""
        self.in_flight_tokens += tokens

    def failed(self, tokens: int) -> None:
        """Its call ended without an answer."""
        self.in_flight_tokens -= tokens

    def answered(self, tokens: int, replica_id: str, backlog_tokens: int, now_s: float) -> None:
        """Its call ended; so many tokens waited there behind it."""
        self.in_flight_tokens -= tokens
        self._reports[replica_id] = (now_s, backlog_tokens)

    def tokens(self, now_s: float) -> int:
        """Own prompts in flight, spread over the replicas seen lately, or the shortest fresh report if longer."""
        self._reports = {k: v for k, v in self._reports.items() if now_s - v[0] < _REPLICA_SEEN_S}
        own = self.in_flight_tokens // max(1, len(self._reports))
        fresh = [tokens for at, tokens in self._reports.values() if now_s - at < _REPORT_FRESH_S]
        return max(own, min(fresh, default=0))
