"""Estimate, by one decode replica, of the tokens that wait on its prefill pool (pure)."""

# Age at which a prefill replica's report of its queue no longer counts.
_REPORT_FRESH_S = 1.0
# Age of the last report at which a prefill replica counts as gone.
_REPLICA_GONE_S = 60.0


class PrefillBacklog:
    """Tokens that wait on prefill, from the prompts that this replica sent and the reports in the answers."""

    def __init__(self) -> None:
        self.in_flight_tokens = 0
        self._reports: dict[str, tuple[float, int]] = {}

    def sent(self, tokens: int) -> None:
        """A prompt was sent to prefill."""
        self.in_flight_tokens += tokens

    def failed(self, tokens: int) -> None:
        """The call of a prompt ended without an answer."""
        self.in_flight_tokens -= tokens

    def answered(self, tokens: int, replica_id: str, backlog_tokens: int, now_s: float) -> None:
        """The call of a prompt was answered; ``backlog_tokens`` waited behind it."""
        self.in_flight_tokens -= tokens
        self._reports[replica_id] = (now_s, backlog_tokens)

    def tokens(self, now_s: float) -> int:
        """Own tokens in flight per prefill replica of the last minute, or the shortest fresh report if that is more."""
        self._reports = {k: v for k, v in self._reports.items() if now_s - v[0] < _REPLICA_GONE_S}
        own = self.in_flight_tokens // max(1, len(self._reports))
        fresh = [tokens for at, tokens in self._reports.values() if now_s - at < _REPORT_FRESH_S]
        return max(own, min(fresh, default=0))
