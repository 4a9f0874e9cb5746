"""Estimate, by one decode replica, of the prompt tokens in the shortest queue of its prefill pool (pure)."""

# Age at which a prefill replica's report of its queue no longer counts, seconds.
_REPORT_FRESH_S = 1.0
# Age of its last report at which a prefill replica counts as gone, seconds.
_REPLICA_GONE_S = 60.0


class PrefillBacklog:
    """The shortest queue on prefill, by the prompts that this replica has sent and by the reports in their answers."""

    def __init__(self) -> None:
        self.in_flight_tokens = 0
        self._reports: dict[str, tuple[float, int]] = {}  # time and queued tokens of each replica's last report

    def sent(self, tokens: int) -> None:
        """A prompt was sent to prefill."""
        self.in_flight_tokens += tokens

    def failed(self, tokens: int) -> None:
        """The call of a prompt ended without an answer."""
        self.in_flight_tokens -= tokens

    def answered(self, tokens: int, replica_id: str, backlog_tokens: int, now_s: float) -> None:
        """The call of a prompt was answered; ``backlog_tokens``: prompt tokens that then waited on the replica."""
        self.in_flight_tokens -= tokens
        self._reports[replica_id] = (now_s, backlog_tokens)

    def tokens(self, now_s: float) -> int:
        """Tokens that wait on the prefill replica with the shortest queue.

        They are this replica's own tokens in flight, divided by the number of prefill replicas that have reported in
        the last minute; or the shortest queue of the fresh reports, if that is longer.
        """
        self._reports = {k: v for k, v in self._reports.items() if now_s - v[0] < _REPLICA_GONE_S}
        own_tokens = self.in_flight_tokens // max(1, len(self._reports))
        fresh_reports = [tokens for at_s, tokens in self._reports.values() if now_s - at_s < _REPORT_FRESH_S]
        return max(own_tokens, min(fresh_reports, default=0))
