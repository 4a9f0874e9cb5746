"""What a replica reports to the autoscaler: replicas and simulated ones write it, ``signals`` reads it by its names."""

from dataclasses import asdict, dataclass

from autoscale.observe.request_stats import RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """Gauges, and counters since the replica's start; ``None``: not observed, and left out."""

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
    handoff_s: float | None = None  # total duration of all handoffs

    def values(self, requests: RequestStats | None = None) -> dict[str, float]:
        """As Serve carries it, with the counts of requests; a test holds that no two figures have one name."""
        figures = {name: float(value) for name, value in asdict(self).items() if value is not None}
        return figures if requests is None else {**figures, **requests.report()}
