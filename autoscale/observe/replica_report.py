"""A replica's report to the autoscaler: real and simulated replicas write it, ``signals`` reads its fields by name."""

from dataclasses import asdict, dataclass

from autoscale.observe.request_stats import RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """Gauges, and counters since the replica's start; ``None``: not observed, so the report leaves it out."""

    running_requests: int  # in the engine's batch
    waiting_requests: int  # in the engine's queue
    deferred_requests: int  # waiting for KV from another engine
    kv_usage_frac: float
    decode_tokens: int
    prefill_tokens: int
    cached_prefill_tokens: int
    queued_prefill_tokens: int
    gpu_utilization_frac: float | None = None
    sm_activity_frac: float | None = None
    unread_kv_requests: int | None = None  # prompts whose KV decode has not pulled
    handoffs: int | None = None
    handoff_s: float | None = None  # sum of the durations of these handoffs
    pulled_bytes: float | None = None  # KV that the engine has pulled
    pull_s: float | None = None  # sum of the times of these transfers, without what goes before and after each
    # Steps in which no prompt was computed: their number, and the sums of durations, batches and tokens of KV.
    decode_steps: int | None = None
    decode_steps_s: float | None = None
    decode_steps_requests: int | None = None
    decode_steps_kv_tokens: float | None = None

    def values(self, requests: RequestStats | None = None) -> dict[str, float]:
        """Figures by name, as Serve carries them; a test checks that ``requests`` uses none of the names here."""
        figures = {name: float(value) for name, value in asdict(self).items() if value is not None}
        return figures if requests is None else {**figures, **requests.report()}
